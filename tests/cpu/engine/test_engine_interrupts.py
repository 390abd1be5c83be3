"""An interrupt (Ctrl-C, exit) at any moment of a step leaves nothing wrong: not on the device, not on the disk."""

import random
from collections.abc import Callable, Mapping
from contextlib import suppress

import pytest
from memory_disk import MemoryDisk
from torch import Tensor
from toy_model import MLA_GROUPS, RING_GROUPS, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.models.inputs import StepInputs
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams

BOTH = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "rings"])
STEPS = 6  # of 256 tokens for the prompt
PROMPT = tuple(random.Random(3).randrange(2, 97) for _ in range(1400))
MORE = (*PROMPT, 5, 6, 7)


class Interrupted(ToyModel):
    """Raises ``error`` in the step ``at`` (from 0 on) when the step's rows and rings are written."""

    def __init__(self, groups, at: int, error: type[BaseException]):
        super().__init__(groups)
        self.left, self.error = at, error

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(inputs, state)
        self.left -= 1
        if self.left == -1:
            raise self.error
        return logits


def request(engine: LocalEngine) -> None:
    engine.submit(GenerationRequest("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    while engine.has_work():
        engine.step()


def session(engine: LocalEngine) -> None:
    with engine.session() as opened:
        opened.sync(PROMPT)
        for _ in range(3):
            opened.step(SamplingParams(temperature=0.0))


def logits(engine: LocalEngine) -> Tensor:
    with engine.session() as opened:
        opened.sync(MORE)
        return opened.logits


@BOTH
@pytest.mark.parametrize("use", [request, session])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", range(STEPS + 2))
def test_interrupted_in_any_step_it_goes_on_as_if_never_begun(
    groups, use: Callable[[LocalEngine], None], error: type[BaseException], at: int
) -> None:
    disk = MemoryDisk()
    engine = toy_engine(
        groups, model=Interrupted(groups, at, error), max_num_batched_tokens=256, interval=512, disk=disk
    )
    with pytest.raises(error):
        use(engine)
    engine.cancel("r")  # what a caller does that goes down in order
    ended = []
    while engine.has_work():
        ended += [event for event in engine.step() if isinstance(event, FinishEvent)]
    assert [event.reason for event in ended] == (["cancelled"] if use is request else [])
    assert engine.flush(10)
    expected = logits(toy_engine(groups))
    assert logits(engine).equal(expected)
    engine._cache.check()
    records = dict(disk.records)
    engine.close()
    fresh = toy_engine(groups, disk=MemoryDisk(records=records))
    assert logits(fresh).equal(expected)
    fresh.close()


@BOTH
def test_interrupted_while_the_step_is_booked(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed, but not committed: the ring is ahead of the tokens."""
    engine = toy_engine(groups, max_num_batched_tokens=256, disk=MemoryDisk())

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        engine.submit(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=1)))
        engine.step()
        engine.step()
        patched.setattr("longread.engine.sequence.Timeline.advance", interrupt)
        engine.step()
        raise AssertionError("not interrupted")
    engine.cancel("r")
    assert logits(engine).equal(logits(toy_engine(groups)))
    engine.close()


@BOTH
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("what", ["read_pages", "read_ring"])
@pytest.mark.parametrize("at", range(3))
def test_interrupted_while_copies_are_made_for_the_disk(
    groups, error: type[BaseException], what: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is not filled: nothing of it must reach the disk, where it would look whole."""
    disk = MemoryDisk()
    engine = toy_engine(groups, max_num_batched_tokens=256, interval=512, disk=disk)
    store, left = engine._cache._store, [at]
    plain = getattr(store, what)

    def interrupted(*given: object) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error
        plain(*given)

    monkeypatch.setattr(store, what, interrupted)
    for _ in range(2):
        with suppress(error):
            request(engine)
            assert engine.flush(10)
        engine.cancel("r")
    while engine.has_work():
        engine.step()
    assert engine.flush(10)
    expected = logits(toy_engine(groups))
    records = dict(disk.records)
    engine.close()
    fresh = toy_engine(groups, disk=MemoryDisk(records=records))
    assert logits(fresh).equal(expected)
    fresh.close()
