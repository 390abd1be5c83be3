"""What is in use is not evicted: arena records that a load reads, pages and ring rows that sequences and loads have;
and what falls off leaves no page in the arena whose beginning is gone.
"""

import random

import pytest
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BOTH = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "rings"])


def text(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(2, 97) for _ in range(length))


def submit(engine: LocalEngine, name: str, tokens: tuple[int, ...]) -> None:
    engine.submit(GenerationRequest(name, tokens, GREEDY))


def drain(engine: LocalEngine) -> tuple[dict[str, list[int]], dict[str, FinishEvent]]:
    out: dict[str, list[int]] = {}
    ends: dict[str, FinishEvent] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                out.setdefault(event.request_id, []).append(event.token_id)
            else:
                ends[event.request_id] = event
    return out, ends


def ask(engine: LocalEngine, name: str, tokens: tuple[int, ...]) -> list[int]:
    submit(engine, name, tokens)
    return drain(engine)[0][name]


@BOTH
def test_what_a_load_reads_or_fills_is_not_evicted(groups) -> None:
    """The loader stands still before a record of the arena, while others push through pool, rows and arena."""
    first = toy_engine(groups, disk=MemoryDisk())
    on_disk, in_arena = text(500, 1), text(1000, 2)
    answers = {"disk": ask(first, "disk", on_disk)}
    assert first.flush(10)
    disk = MemoryDisk(records=first._tiers.disk.records)
    first.close()
    engine = toy_engine(groups, num_pages=12, num_snapshots=7, host_cache_size=60_000, disk=disk)
    disk.fail |= {"write"}  # so that the arena alone has it
    answers["arena"] = ask(engine, "arena", in_arena)
    ask(engine, "out", text(2900, 3))
    host, tiers = engine._tiers.host, engine._tiers
    disk.gate.clear()
    submit(engine, "disk", on_disk)
    submit(engine, "arena", in_arena)
    engine.step()
    assert engine.stats().num_requests_loading == 2
    held = {
        (move.known.kind, move.known.key): bytes(move.data)
        for each in tiers._transfers
        for move in each.moves
        if move.data
    }
    targets = {page for load in engine._cache.loads for page in load.pages}
    rows = {load.row for load in engine._cache.loads}
    assert held and len(targets) >= 5
    fallen: list[object] = []
    host.dropped = fallen.append
    evicted = engine.stats().pages_evicted
    for i in range(8):
        submit(engine, f"push{i}", text(700, 10 + i))
        while not any(isinstance(event, FinishEvent) for event in engine.step()):
            used = {page for lease in engine._cache.leases.values() for page in lease.pages}
            assert not used & targets and not targets & set(engine._cache.pool.cached)
            assert not rows & set(engine._cache.snapshots.owners)
    assert fallen and engine.stats().pages_evicted > evicted + 8
    assert engine.stats().num_requests_loading == 2
    for (kind, key), payload in held.items():
        assert host.hold(kind, key) == payload
        host.release(kind, key)
    disk.gate.set()
    out, ends = drain(engine)
    assert out == answers and ends["arena"].reuse.host_tokens == ends["arena"].cached_tokens > 900
    engine.close()


@BOTH
def test_the_arena_never_keeps_a_page_whose_beginning_is_gone(groups) -> None:
    """Chains of several branches, asked about in any order; without a disk that could have the beginning."""
    draw = random.Random(7)
    engine = toy_engine(groups, num_pages=12, max_num_seqs=3, num_snapshots=6, host_cache_size=40_000)
    books = [text(900, i) for i in range(4)]
    fallen: list[object] = []
    host, index = engine._tiers.host, engine._cache.index
    host.dropped = fallen.append
    asked: dict[str, tuple[int, ...]] = {}
    tokens: dict[str, list[int]] = {}
    for step in range(300):
        if draw.random() < 0.3:
            book = books[draw.randrange(4)]
            asked[f"r{step}"] = book[: draw.choice([256, 600, 900])] + text(draw.choice([0, 1, 300]), step)
            submit(engine, f"r{step}", asked[f"r{step}"])
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.token_id)
        engine._tiers.check()
        for known in [*host._known["page"].values(), *host._known["tail"].values()]:
            begins = known.parent == index.root.key or index.get(known.parent) is not None
            assert begins or host.get("page", known.parent) is not None, (step, known.kind, known.depth)
    for name, rest in drain(engine)[0].items():
        tokens.setdefault(name, []).extend(rest)
    assert len(fallen) > 20 and engine.stats().reused_host_tokens > 1000
    alone = toy_engine(groups, model=ToyModel(groups))
    for name, prompt in asked.items():
        assert tokens[name] == ask(alone, name, prompt), name
    engine.close()
