"""Who waits for what of pages that are on their way: everything for all of them, a chunk layer by layer, others not."""

from collections.abc import Generator

import pytest
from kv_contents import ROWS_ONLY, WITH_RINGS
from kv_layered_contents import LayeredContents
from late_link import LateLink

from longread.kv.arrivals import Arrivals
from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.tiers import Tiers
from longread.spec.state import PAGE_TOKENS

FIRSTS = (2, 4, 7)


class Bench:
    """A link with three marks."""

    def __init__(self) -> None:
        self.link = LateLink(len(FIRSTS))
        self.arrivals = Arrivals(self.link, FIRSTS)

    def load(self, pages: list[int]) -> None:
        ended = self.link.begin()
        for mark in range(len(FIRSTS)):
            self.link.run(lambda: None)
            self.link.mark(mark)
        self.arrivals.begun(ended(), pages)

    def chunk(self, layers: int, pages: list[int] | None) -> Generator[None, None, list[int]]:
        """Returns how much had arrived at each of its layers."""
        return self.arrivals.layers(self._steps(layers), pages)

    def _steps(self, layers: int) -> Generator[None, None, list[int]]:
        seen = []
        for layer in range(layers):
            seen.append(self.link.done)
            if layer + 1 < layers:
                yield
        return seen


def result(steps: Generator[None, None, list[int]]) -> list[int]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[int] = end.value
            return found


def test_a_chunk_waits_layer_by_layer_and_then_nobody_does() -> None:
    bench = Bench()
    bench.load([5, 6])
    assert result(bench.chunk(9, [1, 5])) == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert not bench.arrivals.meets([5, 6]) and bench.link.late == 3


def test_what_touches_none_of_the_pages_waits_for_nothing() -> None:
    bench = Bench()
    bench.load([5, 6])
    assert result(bench.chunk(9, [1, 2])) == [0] * 9
    bench.arrivals.touch([1, 2, 7])
    assert bench.link.done == 0 and bench.arrivals.meets([6])
    bench.arrivals.touch([6])
    assert bench.link.done == 3 and not bench.arrivals.meets([5])


def test_what_is_captured_for_any_chunk_waits_whatever_its_pages() -> None:
    bench = Bench()
    bench.load([5])
    assert result(bench.chunk(9, None)) == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    bench.load([6])
    bench.arrivals.replayed()
    assert not bench.arrivals.meets([6])


def test_a_load_that_is_over_keeps_nobody_waiting() -> None:
    bench = Bench()
    bench.load([5])
    bench.link.finish()
    bench.arrivals.touch([5])
    assert result(bench.chunk(9, [5])) == [3] * 9
    assert bench.link.late == 0


def test_what_is_published_beside_a_chunk_is_waited_for_by_itself() -> None:
    """The chunk's layers did not wait for the second load, so its end says nothing of that."""
    bench = Bench()
    bench.load([5])
    chunk = bench.chunk(9, [5])
    for _ in range(8):
        next(chunk)
    bench.load([6])
    result(chunk)
    assert not bench.arrivals.meets([5]) and bench.arrivals.meets([6])
    bench.arrivals.touch([6])
    assert bench.link.done == 6


def test_a_chunk_that_is_dropped_has_waited_for_nothing() -> None:
    bench = Bench()
    bench.load([5])
    chunk = bench.chunk(9, [5])
    for _ in range(6):
        next(chunk)
    chunk.close()
    assert bench.arrivals.meets([5])


def test_without_marks_nothing_is_on_its_way() -> None:
    arrivals = Arrivals()
    arrivals.touch([1])
    arrivals.replayed()
    assert not arrivals.meets([1])


class Engine:
    """Cache and tiers over a device on whose link nothing moves by itself; two books of 4 pages went to the arena."""

    def __init__(self, rings: bool, pages: int = 12, host: int = 40) -> None:
        groups = WITH_RINGS if rings else ROWS_ONLY
        self.store = LayeredContents(groups, pages, 3, 4)
        self.cache = KVCache(groups, bytes(16), pages, 3, 4, self.store)
        size = host * self.store.page_bytes
        self.arena = HostArena(self.store.page_bytes, self.store.ring_bytes, size, self.store.allocate_host)
        self.tiers = Tiers(self.cache, self.store, self.arena)
        self.books = [[book * 1000 + i for i in range(4 * PAGE_TOKENS)] for book in (1, 2)]
        for book in self.books:
            self.read([*book, 7])
        self.push_out()

    def read(self, prompt: list[int], chunk: int = 4096) -> None:
        lease = self.cache.open(prompt)
        while lease.position < len(prompt):
            step = prompt[lease.position : lease.position + chunk]
            self.cache.reserve(lease, lease.position + len(step))
            self.cache.prepare(lease, len(prompt), len(step))
            self.store.compute(
                lease.pages, lease.slot, prompt[: lease.position + len(step)], lease.position, lease.saves
            )
            self.cache.commit(lease, step)
        self.cache.close(lease)

    def push_out(self) -> None:
        lease = self.cache.open([1])
        self.cache.reserve(lease, self.cache.pool.count * PAGE_TOKENS)
        self.cache.close(lease)

    def load(self, prompt: list[int]) -> None:
        """Publish what the arena has of it; its pages are on their way then."""
        self.store.link.late = 0
        self.tiers.promote(self.cache.chain(prompt))
        assert self.cache.match(prompt).cached_tokens >= 4 * PAGE_TOKENS - 1
        assert self.store.link.pending()

    def close(self) -> None:
        self.tiers.close()
        self.cache.check()
        assert not self.arena._holds


BOTH = pytest.mark.parametrize("rings", [False, True])


@BOTH
@pytest.mark.parametrize("more", [1, 30])
def test_a_sequence_goes_on_from_pages_that_are_on_their_way(rings: bool, more: int) -> None:
    """A row, and a chunk: the model of the contents refuses to compute a layer whose pages are not there."""
    engine = Engine(rings)
    prompt = [*engine.books[0], *[9] * more]
    engine.load(prompt)
    engine.read(prompt)
    assert engine.store.link.late == (1 if more == 1 else len(engine.store.grains))
    engine.close()


@BOTH
def test_pages_that_are_evicted_while_they_come_are_not_written_behind_their_next_owner(rings: bool) -> None:
    engine = Engine(rings)
    engine.load([*engine.books[0], 9])
    engine.push_out()
    assert engine.store.link.late and not engine.store.link.pending()
    engine.load([*engine.books[1], 9])
    engine.read([*engine.books[1], 9])
    engine.close()


@BOTH
def test_the_arena_keeps_what_is_still_read(rings: bool) -> None:
    """Another book wants the records' room while they are on their way."""
    engine = Engine(rings, host=12 if rings else 9)
    engine.load([*engine.books[0], 9])
    held = set(engine.arena._holds)
    engine.tiers.collect()
    assert len(held) >= 4 and set(engine.arena._holds) == held and engine.tiers.busy
    engine.read([5000 + i for i in range(6 * PAGE_TOKENS)])
    engine.store.link.finish()  # the model of the contents compares each record with what it was
    engine.tiers.collect()
    assert not engine.arena._holds and not engine.tiers.busy
    engine.close()


@BOTH
def test_two_loads_in_flight(rings: bool) -> None:
    engine = Engine(rings, pages=16)
    for book in engine.books:
        engine.load([*book, 9])
    engine.read([*engine.books[1], *[9] * 30])
    engine.read([*engine.books[0], 9])
    engine.close()


@BOTH
def test_a_copy_of_a_page_that_is_on_its_way(rings: bool) -> None:
    """What is cut inside a page is copied; its last record came first and was waited for."""
    engine = Engine(rings)
    prompt = engine.books[0][: 4 * PAGE_TOKENS - 1] if not rings else [*engine.books[0], 7]
    engine.load([*prompt, 9] if rings else engine.books[0])
    lease = engine.cache.open([*prompt, 9, 9])
    assert lease.cached_tokens >= 4 * PAGE_TOKENS - 1
    engine.cache.close(lease)
    engine.close()


def test_a_load_that_breaks_while_it_begins_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(True)

    def broken(*given: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(engine.store, "_begin", broken)
    prompt = [*engine.books[0], 9]
    engine.tiers.promote(engine.cache.chain(prompt))
    assert engine.cache.match(prompt).cached_tokens == 0 and engine.tiers.errors
    engine.close()
