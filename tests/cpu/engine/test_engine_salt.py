"""``cache_salt``: requests share cached state with those of the same salt only, in every tier and at any pressure."""

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, toy_engine

from longread.engine.engine import LocalEngine
from longread.kv.disk.store import DiskStore
from longread.kv.records import Layout
from longread.kv.tensors import StateTensors
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import HashedTokens, hash_pages, salted_root

BOTH = pytest.mark.parametrize("groups", [RING_GROUPS, MLA_GROUPS], ids=["rings", "mla"])
SALTS = [None, "a", "b"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 97) for _ in range(length))


def ask(
    engine: LocalEngine, tokens: tuple[int, ...], salt: str | None, hashed: HashedTokens | None = None
) -> FinishEvent:
    engine.submit(GenerationRequest("r", tokens, GREEDY, hashed, salt))
    while True:
        for event in engine.step():
            if isinstance(event, FinishEvent):
                return event


@BOTH
@pytest.mark.parametrize("length", [100, 256, 700, 1500])
def test_on_the_device_a_salt_meets_itself_alone(groups, length: int) -> None:
    engine = toy_engine(groups, num_pages=60, num_snapshots=30)
    for salt in SALTS:
        first = ask(engine, prompt(length), salt)
        assert first.cached_tokens == 0
        assert first.reuse.reason == "never seen" and first.reuse.at in (None, 0) and first.reuse.excerpt is None
    for salt in SALTS:
        again = ask(engine, prompt(length), salt)
        assert again.cached_tokens > length - 260 or length < 256
        if length > 256:
            other = (*prompt(length)[: length - 10], *prompt(20, 9))
            assert ask(engine, other, salt).reuse.reason in ("differs", "no snapshot")
    engine._cache.check()
    assert len(engine._cache.index.salted) == (0 if length < 256 and engine._cache.has_rings else 2)
    engine.close()


@BOTH
def test_on_the_disk(groups, tmp_path: Path) -> None:
    """Written by one process, asked for by others, by another model, and with an index made anew."""

    def opened(root: bytes) -> LocalEngine:
        disk = DiskStore.open(tmp_path, Layout(root, root.decode(), "float32", *sizes), max_bytes=2**30)
        return toy_engine(groups, disk=disk, num_pages=40, root=root)

    state = StateTensors(groups, 1, 1, 1, torch.float32)
    sizes = (state.page_bytes, state.ring_bytes)
    first = opened(b"one model of all")
    ask(first, prompt(1500), "a")
    assert first.flush(10)
    first.close()
    for _ in range(2):
        for root, salt in ((b"one model of all", "b"), (b"one model of all", None), (b"another one here", None)):
            with closing(opened(root)) as second:
                second._tiers._persister.landed = lambda *_: None  # leaves the store as it is
                end = ask(second, prompt(1500), salt)
                assert end.cached_tokens == 0 and end.reuse.reason == "never seen"
        with closing(opened(b"one model of all")) as second:
            assert ask(second, prompt(1500), "a").reuse.disk_tokens > 1000
        store, entered = DiskStore.rebuild(tmp_path, max_bytes=2**30)
        assert entered and store.verify().sound and not store.verify().unreachable
        store.close()


@BOTH
def test_on_the_host(groups) -> None:
    """Evicted to the host and asked for again."""
    engine = toy_engine(groups, num_pages=6, num_snapshots=4, host_cache_size=400_000)
    ask(engine, prompt(1000), "a")
    ask(engine, prompt(1000, 2), "a")
    assert engine.stats().host_cache_used_bytes
    for salt in (None, "b"):
        end = ask(engine, prompt(1000), salt)
        assert end.cached_tokens == 0 and end.reuse.reason == "never seen"
    assert ask(engine, prompt(1000), "a").reuse.host_tokens > 0
    engine.close()


@BOTH
@pytest.mark.parametrize("end", [300, 700])
def test_nobody_waits_for_another_salts_prompt(groups, end: int) -> None:
    """That another salt is just reading the same text shows in no order of admission."""
    engine = toy_engine(groups, num_pages=60)
    for number, salt in enumerate(["a", "a", "b"]):
        engine.submit(GenerationRequest(f"{number}", prompt(end), GREEDY, None, salt))
    engine.step()
    assert engine.stats().num_requests_running == 2 and engine.stats().num_requests_waiting == 1
    engine.close()


@BOTH
def test_hashes_made_for_another_salt_are_not_believed(groups) -> None:
    engine = toy_engine(groups, num_pages=40, num_snapshots=30, root=bytes(16))
    tokens = prompt(600)
    data = engine._cache.chain(tokens).data
    roots = {salt: salted_root(bytes(16), salt) for salt in SALTS}
    assert len(set(roots.values())) == 3
    made = {
        salt: HashedTokens(root, data, hash_pages(root, data), min(tokens), max(tokens)) for salt, root in roots.items()
    }
    ask(engine, tokens, "a", made["a"])
    assert ask(engine, tokens, "b", made["a"]).cached_tokens == 0
    assert ask(engine, tokens, None, made["a"]).cached_tokens == 0
    assert ask(engine, tokens, "a", made["b"]).cached_tokens > 500
    engine.close()


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_reuses_no_token_that_its_own_salt_has_not_read(groups, seed: int) -> None:
    """Small pools, host and disk, several at once: eviction, loads and preemption in between."""
    rng = random.Random(seed)
    engine = toy_engine(groups, num_pages=14, num_snapshots=4, host_cache_size=200_000, disk=MemoryDisk())
    base, read, running, number = prompt(1100, seed), {salt: [] for salt in SALTS}, {}, 0
    reused = 0
    while number < 40 or running:
        while number < 40 and len(running) < 3:
            tokens = (*base[: rng.randrange(50, 1100)], *prompt(rng.randrange(1, 40), rng.randrange(3)))
            salt = rng.choice(SALTS)
            running[str(number)] = (list(tokens), salt)
            engine.submit(GenerationRequest(str(number), tokens, GREEDY, None, salt))
            number += 1
        for event in engine.step():
            if isinstance(event, TokenEvent):
                running[event.request_id][0].append(event.token_id)
            else:
                tokens, salt = running.pop(event.request_id)
                others = [*read[salt], *(each for each, other in running.values() if other == salt)]
                most = max((_common(tokens, each) for each in others), default=0)
                assert event.cached_tokens <= most
                reused += event.cached_tokens
                read[salt].append(tokens)
        engine._cache.check()
    assert reused > 1000
    engine.close()


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@BOTH
def test_a_thousand_salts_leave_no_more_behind_than_the_pool_holds(groups) -> None:
    engine = toy_engine(groups, num_pages=6, num_snapshots=4)
    for number in range(300):
        ask(engine, prompt(300, number % 3), f"salt {number}")
    engine._cache.check()
    assert len(engine._cache.index.salted) <= 6
    engine.close()
