"""Slices of chunks against layers whose times are known: a slice keeps to its time, whatever came before it."""

from collections.abc import Sequence

import pytest
import torch

from longread.engine import slices
from longread.engine.slices import FIRST_LAYERS, WHOLE, Pace, Part, Slices, Work

SLICE = 0.04
DEEP = [0.004, 0.004, *[0.027, 0.009] * 15]  # a V4 chunk's layers behind 512K: windows, then chosen and pooled entries
SHALLOW = [0.006, 0.006, *[0.009, 0.007] * 15]


class Clock:
    """Time that only layers spend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(slices.time, "perf_counter", lambda: self.now)

    def work(self, layers: Sequence[float], tokens: int) -> Work:
        for layer, seconds in enumerate(layers):
            yield Part(layer, tokens)
            self.now += seconds
        return torch.zeros(1, 4)

    def run(self, pace: Pace, layers: Sequence[float], tokens: int = 8192, seconds: float = SLICE) -> list[float]:
        """Seconds of each slice."""
        made, took = Slices(self.work(layers, tokens), set(), torch.device("cpu"), pace), []
        while made.logits is None:
            start = self.now
            made.advance(seconds)
            took.append(self.now - start)
        assert made.seconds() == pytest.approx(sum(layers))
        return took


@pytest.mark.parametrize("last", [0.027, 0.0001])
def test_slices_keep_to_their_time_though_layers_differ(last: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a chunk's last layer only keeps state: the next chunk must not take its layers for as fast."""
    clock, pace = Clock(monkeypatch), Pace()
    layers = [*DEEP[:-1], last]
    clock.run(pace, layers)
    for _ in range(3):
        took = clock.run(pace, layers)
        assert max(took) <= SLICE + 1e-9
        assert len(took) <= 1.5 * sum(layers) / SLICE + 1


def test_unknown_layers_come_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    took = Clock(monkeypatch).run(Pace(), [0.01] * 9)
    assert took == pytest.approx([0.01 * FIRST_LAYERS] * 4 + [0.01])


def test_a_longer_chunk_is_not_taken_for_as_fast_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    clock.run(pace, [0.001] * 32, tokens=640)
    assert max(clock.run(pace, [0.0128] * 32, tokens=8192)) <= SLICE
    assert pace.expected(Part(3, 640)) == pytest.approx(0.001)
    assert pace.expected(Part(WHOLE, 512)) is None


def test_behind_a_longer_context_only_the_first_slice_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    clock.run(pace, SHALLOW)
    took = clock.run(pace, [3 * each for each in SHALLOW])
    assert took[0] <= 3 * SLICE
    assert max(took[1:]) <= SLICE


def test_without_time_a_layer_at_once_and_with_none_given_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace()
    for _ in range(2):
        assert clock.run(pace, SHALLOW, seconds=0.0) == pytest.approx(SHALLOW)
    made = Slices(clock.work(SHALLOW, 8192), set(), torch.device("cpu"), pace)
    made.advance(SLICE)
    start = clock.now
    assert made.advance(None)
    assert clock.now - start > 0.1


def test_what_breaks_is_raised_and_work_of_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Work:
        yield Part(0, 640)
        raise RuntimeError("on purpose")

    clock = Clock(monkeypatch)
    with pytest.raises(RuntimeError, match="on purpose"):
        Slices(broken(), set(), torch.device("cpu"), Pace()).advance(SLICE)
    assert Slices(clock.work([], 640), set(), torch.device("cpu"), Pace()).advance(SLICE)


def test_work_that_was_interrupted_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Work:
        yield Part(0, 640)
        raise KeyboardInterrupt

    made = Slices(interrupted(), set(), torch.device("cpu"), Pace())
    with pytest.raises(KeyboardInterrupt):
        made.advance(SLICE)
    assert not made.advance(None)
    assert not made.advance(SLICE)


def test_layers_that_were_left_out_are_not_taken_for_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks the first one is dropped while its next layer was to come."""
    clock, pace, dropped = Clock(monkeypatch), Pace(), set[int]()

    def two() -> Work:
        for slot in (0, 1):
            for layer, seconds in enumerate(SHALLOW):
                if slot in dropped:
                    break
                yield Part(layer, 8192)
                if slot in dropped:
                    break
                clock.now += seconds
        return torch.zeros(1, 4)

    clock.run(pace, SHALLOW)
    before = dict(pace.measured)
    made = Slices(two(), dropped, torch.device("cpu"), pace)
    made.advance(SLICE)
    dropped.add(0)
    made.advance(0.0)
    made.seconds()
    assert pace.measured == pytest.approx(before)
    start = clock.now
    made.advance(None)
    assert clock.now - start == pytest.approx(sum(SHALLOW))
