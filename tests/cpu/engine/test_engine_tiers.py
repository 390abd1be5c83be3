"""The engine over its tiers: loads disturb nobody, whatever the store does; what is reused is exact, and explained."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.kv.chain import encode
from longread.spec.documents import landing_key
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BOTH = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "rings"])


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(2, 97) for _ in range(length))


def submit(engine: LocalEngine, name: str, tokens: tuple[int, ...]) -> None:
    engine.submit(GenerationRequest(name, tokens, GREEDY))


def drain(engine: LocalEngine) -> tuple[dict[str, list[int]], dict[str, FinishEvent]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishEvent] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.token_id)
            else:
                ends[event.request_id] = event
    return tokens, ends


def ask(engine: LocalEngine, tokens: tuple[int, ...], name: str = "r") -> tuple[list[int], FinishEvent]:
    submit(engine, name, tokens)
    out, ends = drain(engine)
    return out.get(name, []), ends[name]


@contextmanager
def stored(groups, tokens: tuple[int, ...], **options) -> Iterator[tuple[LocalEngine, MemoryDisk, list[int]]]:
    """A fresh engine over a disk on which another one has left ``tokens``; and what that one answered."""
    first = toy_engine(groups, disk=MemoryDisk(), **options)
    answer, _ = ask(first, tokens)
    assert first.flush(10)
    disk = MemoryDisk(records=first._tiers.disk.records)
    first.close()
    engine = toy_engine(groups, disk=disk, **options)
    try:
        yield engine, disk, answer
    finally:
        disk.gate.set()
        engine.close()
        assert not engine._cache.loads
        engine._cache.check()


@BOTH
@pytest.mark.parametrize("suffix", [0, 1, 300], ids=lambda n: f"suffix-{n}")
@pytest.mark.parametrize("length", [300, 768, 1500])
def test_a_new_process_answers_the_same_from_the_disk(groups, length: int, suffix: int) -> None:
    tokens = prompt(length)
    with stored(groups, tokens) as (engine, _, _):
        cold, _ = ask(toy_engine(groups), tokens + prompt(suffix, 7))
        warm, end = ask(engine, tokens + prompt(suffix, 7))
        assert warm == cold
        assert end.reuse is not None and end.reuse.disk_tokens == end.cached_tokens > length - 600
        assert end.reuse.recomputed_tokens == length + suffix - end.cached_tokens
        assert end.reuse.reason == "complete" if not suffix else end.reuse.reason in ("complete", "differs", "new text")
        again, end = ask(engine, tokens + prompt(suffix, 7), "again")
        assert again == cold and end.reuse.device_tokens == end.cached_tokens
        parts = end.times.parts()
        assert sum(parts.values()) == pytest.approx(end.times.first_token - end.times.arrived)
        assert all(value >= 0 for value in parts.values())


@BOTH
def test_a_load_blocks_nobody_and_keeps_its_place(groups) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens, max_num_seqs=2) as (engine, disk, answer):
        disk.gate.clear()
        submit(engine, "loads", tokens)
        submit(engine, "short", prompt(40, 1))
        submit(engine, "later", prompt(50, 2))
        ended: list[str] = []
        while len(ended) < 2:  # both pass through the one other slot
            ended += [event.request_id for event in engine.step() if isinstance(event, FinishEvent)]
            engine._cache.check()
        assert ended == ["short", "later"]
        stats = engine.stats()
        assert (stats.num_requests_loading, stats.num_requests_waiting, stats.num_requests_running) == (1, 1, 0)
        disk.gate.set()
        out, ends = drain(engine)
        assert out["loads"] == answer and ends["loads"].reuse.disk_tokens > 1000
        assert ends["loads"].times.load_disk > 0


@BOTH
def test_the_same_document_is_loaded_once_for_two_requests(groups) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        disk.gate.clear()
        submit(engine, "a", tokens)
        submit(engine, "b", tokens)
        engine.step()
        disk.gate.set()
        out, _ = drain(engine)
        assert out == {"a": answer, "b": answer}
        assert disk.reads <= 8


@BOTH
@pytest.mark.parametrize("use", ["request", "session"])
def test_who_waited_for_a_shorter_load_goes_on_with_the_rest(groups, use: str) -> None:
    tokens = prompt(3000)
    short = tokens[:1100]
    first = toy_engine(groups, num_pages=40, disk=MemoryDisk())
    ask(first, short)
    answer, _ = ask(first, tokens)
    assert first.flush(10)
    disk = MemoryDisk(records=first._tiers.disk.records)
    first.close()
    engine = toy_engine(groups, num_pages=40, disk=disk)
    disk.gate.clear()
    submit(engine, "short", short)
    engine.step()
    assert engine.stats().num_requests_loading == 1
    if use == "request":
        submit(engine, "long", tokens)
        engine.step()
        disk.gate.set()
        out, ends = drain(engine)
        assert out["long"] == answer
        assert ends["long"].cached_tokens > 2990 and ends["long"].reuse.disk_tokens > 1800
    else:
        disk.gate.set()
        with engine.session() as session:
            assert session.sync(tokens) < 10
        drain(engine)
    engine.close()


@BOTH
def test_cancelled_while_it_loads(groups) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        disk.gate.clear()
        submit(engine, "gone", tokens)
        engine.step()
        engine.cancel("gone")
        (end,) = engine.step()
        assert end.reason == "cancelled" and end.reuse is None
        disk.gate.set()
        drain(engine)
        assert ask(engine, tokens)[0] == answer


@BOTH
def test_closed_while_it_loads(groups) -> None:
    with stored(groups, prompt(1500)) as (engine, disk, _):
        disk.gate.clear()
        submit(engine, "r", prompt(1500))
        engine.step()
        threading.Timer(0.05, disk.gate.set).start()
        engine.close()
        engine.close()
        assert disk.closed and not engine._cache.loads
        engine._cache.check()


@BOTH
@pytest.mark.parametrize("kind", ["page", "tail", "ring"])
def test_a_damaged_record_costs_what_it_held(groups, kind: str) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        bad = [ref for ref in disk.records if ref[0] == kind]
        if kind == "page":
            bad = bad[3:4]
        disk.damaged |= set(bad)
        warm, end = ask(engine, tokens)
        assert warm == answer
        if not bad:
            return
        assert end.reuse.reason == "corrupt record" and end.reuse.at is not None
        assert end.reuse.recomputed_tokens > 1 and engine.stats().store_corrupt_records
        assert engine.flush(10)
        healed = toy_engine(groups, disk=MemoryDisk(records=disk.records))
        warm, end = ask(healed, tokens)
        assert warm == answer and end.reuse.reason == "complete" and end.reuse.disk_tokens >= 1499
        healed.close()


@BOTH
@pytest.mark.parametrize("kind", ["page", "tail", "ring"])
@pytest.mark.parametrize("fault", ["absent", "error"])
def test_what_cannot_be_loaded_is_told_by_its_own_reason(groups, kind: str, fault: str) -> None:
    """Evicted after it was found, or the store fails: neither is damage."""
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        refs = [ref for ref in disk.records if ref[0] == kind]
        refs = refs[3:4] if kind == "page" else refs
        if not refs:
            return
        disk.gate.clear()
        submit(engine, "r", tokens)
        engine.step()
        if fault == "error":
            disk.fail.add("fetch")
        for ref in refs if fault == "absent" else ():
            del disk.records[ref]
        disk.gate.set()
        tokens_of, ends = drain(engine)
        end = ends["r"]
        assert tokens_of["r"] == answer
        assert end.reuse.reason == {"absent": "evicted", "error": "store failed"}[fault]
        assert not engine.stats().store_corrupt_records
        assert bool(engine.stats().store_errors) == (fault == "error")


@BOTH
@pytest.mark.parametrize("what", ["known", "nearest", "tails", "fetch", "write", "touch", "other_roots"])
def test_a_store_that_fails_costs_nothing_but_itself(groups, what: str) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        disk.fail.add(what)
        assert ask(engine, tokens)[0] == answer
        assert ask(engine, prompt(700, 9), "other")[1].reason == "length"
        assert engine.flush(10)
        assert engine.stats().store_errors or what in ("nearest", "tails", "other_roots", "fetch")


@BOTH
def test_what_is_evicted_comes_back_from_the_host(groups) -> None:
    first, second = prompt(1000, 1), prompt(1000, 2)
    engine = toy_engine(groups, num_pages=6, num_snapshots=4, host_cache_size=200_000)
    answer, _ = ask(engine, first)
    ask(engine, second, "second")
    warm, end = ask(engine, first, "again")
    assert warm == answer and end.reuse.host_tokens > 400 and end.times.load_host > 0
    stats = engine.stats()
    assert stats.host_cache_used_bytes and stats.reused_host_tokens == end.reuse.host_tokens
    engine.close()


@BOTH
def test_of_a_chain_that_was_loaded_the_deepest_falls_off_the_host_first(groups) -> None:
    first = prompt(1000, 1)
    engine = toy_engine(groups, num_pages=6, num_snapshots=4, host_cache_size=200_000)
    ask(engine, first)
    ask(engine, prompt(1000, 2), "second")
    submit(engine, "again", first)
    engine.step()
    assert engine.stats().num_requests_loading == 1
    (transfer,) = engine._tiers._transfers
    loaded = [(move.known.kind, move.known.key) for move in transfer.moves if move.known.kind != "ring"]
    order = list(engine._tiers.host._pages.used)
    assert len(loaded) > 1 and [ref for ref in order if ref in loaded] == loaded[::-1]
    drain(engine)
    engine.close()


@BOTH
def test_an_idle_engine_keeps_no_written_copies(groups) -> None:
    engine = toy_engine(groups, disk=MemoryDisk())
    ask(engine, prompt(1500))  # steps until nothing is left to do
    threads = engine._tiers._threads
    assert not threads.finished and threads.queued_bytes == 0 and not engine._tiers._persister._origin
    assert engine.stats().store_written_bytes == sum(len(each.payload) for each in engine._tiers.disk.records.values())
    engine.close()
    assert not engine.has_work()


@BOTH
def test_without_room_below_the_miss_says_evicted(groups) -> None:
    engine = toy_engine(groups, num_pages=6, num_snapshots=4)
    ask(engine, prompt(1000, 1))
    ask(engine, prompt(1000, 2), "second")
    _, end = ask(engine, prompt(1000, 1), "again")
    assert end.reuse.reason == "evicted"
    assert dict(engine.stats().misses) == {"never seen": 2, "evicted": 1}


@BOTH
def test_a_difference_is_shown_with_both_texts(groups) -> None:
    engine = toy_engine(groups)
    base = prompt(1000)
    ask(engine, base)
    other = (*base[:700], base[700] % 90 + 3, *base[701:])
    _, end = ask(engine, other, "other")
    reuse = end.reuse
    assert (reuse.reason, reuse.at) == ("differs", 700) and reuse.excerpt is not None
    shown = slice(reuse.excerpt.start, reuse.excerpt.start + len(reuse.excerpt.asked))
    assert reuse.excerpt.asked == other[shown]
    assert reuse.excerpt.known == base[reuse.excerpt.start : reuse.excerpt.start + len(reuse.excerpt.known)]
    assert ask(engine, prompt(600, 5), "new")[1].reuse.reason == "never seen"


@BOTH
def test_where_nearly_all_was_reused_the_reason_is_about_the_rest(groups) -> None:
    engine = toy_engine(groups)
    base = prompt(1500)
    answer, _ = ask(engine, base)
    _, end = ask(engine, (*base, *answer, *prompt(30, 9)), "next turn")
    reuse = end.reuse
    assert reuse.reused_tokens > 1400 and reuse.reason == "new text"
    assert reuse.note.startswith(f"the last {reuse.prompt_tokens - reuse.at} tokens are new: ")
    assert dict(engine.stats().misses) == {"never seen": 1, "new text": 1}


@BOTH
def test_a_prompt_that_is_known_to_its_end_differs_from_nothing(groups) -> None:
    engine = toy_engine(groups)
    ask(engine, prompt(1000))
    reuse = ask(engine, prompt(1000)[:700], "shorter")[1].reuse
    assert reuse.reason == ("no snapshot" if engine._cache.has_rings else "complete")
    assert reuse.excerpt is None


def test_the_first_token_brings_times_and_reuse_and_only_the_first() -> None:
    engine = toy_engine(RING_GROUPS)
    submit(engine, "r", prompt(600))
    events = [event for _ in range(20) for event in engine.step()]
    firsts = [event.first for event in events if isinstance(event, TokenEvent)]
    assert firsts[0] is not None and not any(firsts[1:])
    assert firsts[0].reuse.prompt_tokens == 600 and firsts[0].times.prefill_tokens == 600
    assert firsts[0].times.prefill_chunks >= 2 and firsts[0].times.finished == 0.0


@BOTH
def test_a_session_uses_and_fills_the_store(groups) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, _, _):
        with engine.session() as session:
            assert session.sync(tokens) == 1
            warm = session.logits
        cold = toy_engine(groups).session()
        cold.sync(tokens)
        assert cold.logits.equal(warm)


@BOTH
def test_a_session_without_room_for_a_load_preempts_and_computes(groups) -> None:
    tokens = prompt(1500)
    with stored(groups, tokens, num_pages=8) as (engine, _, _):
        submit(engine, "busy", prompt(900, 3))
        engine.step()
        with engine.session() as session:
            session.sync(tokens)
            cold = toy_engine(groups).session()
            cold.sync(tokens)
            assert session.logits.equal(cold.logits)
        assert drain(engine)[1]["busy"].reason == "length"


@BOTH
def test_running_out_of_pages_beside_a_load_fails_nobody(groups) -> None:
    """The load has all pages but two; the only running sequence needs a third, gives its own up and comes back."""
    tokens, long = prompt(1500), SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with stored(groups, tokens, num_pages=8) as (engine, disk, answer):
        alone = toy_engine(groups)
        alone.submit(GenerationRequest("runs", prompt(250, 3), long))
        expected = drain(alone)[0]["runs"]
        disk.gate.clear()
        engine.submit(GenerationRequest("runs", prompt(250, 3), long))
        out = [event.token_id for event in engine.step()]
        submit(engine, "loads", tokens)
        while not engine.stats().num_preemptions:
            out += [event.token_id for event in engine.step()]
            engine._cache.check()
        assert 250 < len(out) < 300 and engine.stats().num_requests_loading == 1
        disk.gate.set()
        more, ends = drain(engine)
        assert out + more["runs"] == expected and more["loads"] == answer
        assert {end.reason for end in ends.values()} == {"length"}


@BOTH
def test_random_traffic_over_small_pools_answers_as_alone(groups) -> None:
    """Preemption, eviction, loads and sessions all at once; every answer is the one of an engine of its own."""
    draw = random.Random(5)
    disk = MemoryDisk()
    engine = toy_engine(groups, num_pages=12, max_num_seqs=3, num_snapshots=6, host_cache_size=60_000, disk=disk)
    books = [prompt(900, i) for i in range(4)]
    asked: dict[str, tuple[int, ...]] = {}
    tokens: dict[str, list[int]] = {}
    for step in range(150):
        if draw.random() < 0.3 and len(asked) < 40:
            book = books[draw.randrange(4)]
            asked[f"r{step}"] = book[: draw.choice([250, 600, 900])] + prompt(draw.choice([0, 1, 30]), step)
            submit(engine, f"r{step}", asked[f"r{step}"])
        if draw.random() < 0.05:
            with engine.session() as session:
                session.sync(books[draw.randrange(4)])
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.token_id)
        engine._cache.check()
        engine._tiers.check()
    more, _ = drain(engine)
    for name, rest in more.items():
        tokens.setdefault(name, []).extend(rest)
    alone = toy_engine(groups, model=ToyModel(groups))
    for name, wanted in asked.items():
        assert tokens[name] == ask(alone, wanted, name)[0], name
    assert engine.stats().reused_host_tokens + engine.stats().reused_disk_tokens > 0
    engine.close()


@BOTH
def test_portions_that_wait_for_a_slow_disk_lose_nothing(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record a portion, and a queue of two: the disk's copy is whole all the same, in the order of the chain."""
    monkeypatch.setattr("longread.kv.persist.PORTION_BYTES", 1)
    monkeypatch.setattr("longread.kv.persist.QUEUE_BYTES", 10_000)
    tokens = prompt(1500)
    with stored(groups, tokens) as (engine, disk, answer):
        assert not disk.writes
        warm, end = ask(engine, tokens)
        assert warm == answer and end.reuse.reason == "complete" and end.reuse.disk_tokens >= 1499


@BOTH
@pytest.mark.parametrize("length", [700, 768])
def test_a_document_has_its_own_record_also_after_longer_texts(groups, length: int) -> None:
    """It is known by its last key, whatever else begins like it."""
    tokens = prompt(length)
    engine = toy_engine(groups, disk=MemoryDisk())
    ask(engine, tokens + prompt(100, 7), "question")
    engine.submit(GenerationRequest("document", tokens, SamplingParams(temperature=0.0, max_tokens=1)))
    drain(engine)
    assert engine.flush(10)
    key, records = landing_key(b"toy", tokens), engine._tiers.disk.records
    own = records["page" if length == 768 else "tail", key]
    assert own.run == encode(tokens[length // 256 * 256 :] or tokens[-256:])
    assert (("ring", key) in records) == (groups is RING_GROUPS)
    alone = toy_engine(groups, disk=MemoryDisk())
    alone.submit(GenerationRequest("document", tokens, SamplingParams(temperature=0.0, max_tokens=1)))
    drain(alone)
    assert alone.flush(10) and bytes(own.payload) == bytes(alone._tiers.disk.records[own.kind, key].payload)
    alone.close()
    engine.close()


@BOTH
@pytest.mark.parametrize("host_cache_size", [0, 400_000])
def test_what_is_evicted_before_its_turn_is_written_from_the_host_or_not_at_all(groups, host_cache_size: int) -> None:
    """No page on the disk hangs in the air."""
    tokens, disk = prompt(1200, 1), MemoryDisk()
    engine = toy_engine(
        groups, num_pages=6, max_num_batched_tokens=256, interval=256, host_cache_size=host_cache_size, disk=disk
    )
    engine._tiers.work = lambda: None  # the engine does not find the time
    submit(engine, "r", tokens)
    submit(engine, "other", prompt(1200, 2))
    ended = 0
    while ended < 2:
        ended += sum(isinstance(event, FinishEvent) for event in engine.step())
    del engine._tiers.work
    assert engine.flush(10)
    pages = [record for record in disk.records.values() if record.kind != "ring"]
    assert all(("page", record.parent) in disk.records or record.depth == 1 for record in pages)
    chain = engine._cache.chain(tokens)
    if host_cache_size:
        assert all(("page", chain.page_hash(page)) in disk.records for page in range(4))
    else:
        assert engine.stats().store_skipped_writes > 1
    engine.close()


@BOTH
def test_nothing_is_written_behind_a_gap(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, disk = prompt(1200, 1), MemoryDisk()
    engine = toy_engine(groups, max_num_batched_tokens=256, interval=256, disk=disk)
    persister, chain = engine._tiers._persister, engine._cache.chain(tokens)
    monkeypatch.setattr(engine._tiers, "work", lambda: None)
    submit(engine, "r", tokens)
    while not any(isinstance(event, FinishEvent) for event in engine.step()):
        pass
    full_page, gone = persister._full_page, chain.page_hash(1)
    with monkeypatch.context() as patched:
        patched.setattr(persister, "_full_page", lambda write, key: None if key == gone else full_page(write, key))
        assert engine.flush(10)
    assert {record.key for record in disk.records.values()} == {chain.page_hash(0)}
    assert engine.stats().store_skipped_writes >= 3
    engine.close()


def test_too_many_landing_points_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longread.kv.persist.QUEUE_LANDINGS", 1)
    engine = toy_engine(RING_GROUPS, disk=MemoryDisk(), max_num_batched_tokens=2048)
    engine._tiers.work = lambda: None  # the engine never finds the time
    ask_all = [prompt(700, i) for i in range(2)]
    for i, tokens in enumerate(ask_all):
        submit(engine, f"r{i}", tokens)
    for _ in range(12):
        engine.step()
    assert engine.stats().store_skipped_writes > 0
    del engine._tiers.work
    drain(engine)
    engine.close()
