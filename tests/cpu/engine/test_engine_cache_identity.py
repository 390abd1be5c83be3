"""Another cache format is another identity: nothing that was kept under the old one is found, in any tier."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, toy_engine

import longread.spec.state
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.records import Kind
from longread.spec.config import EngineOptions
from longread.spec.config_json import spec_from_config
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams
from longread.spec.state import CACHE_FORMAT, PAGE_TOKENS, HashedTokens, cache_root, hash_pages
from longread.weights.fixture import tiny_config, write_fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TEXT = tuple(i * 31 % 89 + 3 for i in range(1300))
OTHER = tuple(i * 17 % 83 + 5 for i in range(1300))
CONFIG = tiny_config("v4-flash")
Change = Callable[[pytest.MonkeyPatch], bytes]


def root(weights: str = "weights", dtype: str = "float32", **config: object) -> bytes:
    return cache_root(spec_from_config({**CONFIG, **config}, label=""), weights, dtype)


def next_format(patch: pytest.MonkeyPatch) -> bytes:
    patch.setattr(longread.spec.state, "CACHE_FORMAT", CACHE_FORMAT + 1)
    return root()


CHANGES: dict[str, Change] = {
    "format": next_format,
    "rope": lambda _: root(rope_theta=20000),
    "weights": lambda _: root(weights="other weights"),
    "dtype": lambda _: root(dtype="bfloat16"),
}


def ask(engine: LocalEngine, tokens: tuple[int, ...], hashed: HashedTokens | None = None) -> FinishEvent:
    engine.submit(GenerationRequest("r", tokens, GREEDY, hashed=hashed))
    ends = []
    while engine.has_work():
        ends += [event for event in engine.step() if isinstance(event, FinishEvent)]
    return ends[0]


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "rings"])
def test_what_another_root_left_is_found_in_no_tier(groups, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine after the other over the very same pool's index, arena and disk."""
    old, disk = root(), MemoryDisk()
    options = {"num_pages": 6, "num_snapshots": 8, "host_cache_size": 200_000}
    first = toy_engine(groups, root=old, disk=disk, **options)
    ask(first, TEXT)
    ask(first, OTHER)  # moves the text into the arena
    assert first.flush(10)
    new = CHANGES[change](monkeypatch)
    assert new != old
    second = toy_engine(groups, root=new, disk=MemoryDisk(records=disk.records), **options)
    second._tiers.host = first._tiers.host
    data = second._cache.chain(TEXT).data
    for tokens in (TEXT, OTHER):
        mine, its = first._cache.chain(tokens), second._cache.chain(tokens)
        for page in range(len(tokens) // PAGE_TOKENS):
            known, unknown = mine.page_hash(page), its.page_hash(page)
            assert ("page", known) in disk.records
            # One text is on the device, the other in the arena; under the new root neither is anywhere.
            assert (first._cache.index.get(known) is not None) == (tokens is OTHER)
            assert (first._tiers.host.get("page", known) is not None) == (tokens is TEXT)
            assert first._cache.index.get(unknown) is None
            for kind in get_args(Kind):
                assert first._tiers.host.get(kind, unknown) is None and (kind, unknown) not in disk.records
        assert second._tiers.find(its) is None
    stale = HashedTokens(old, data, hash_pages(old, data), min(TEXT), max(TEXT))
    for hashed in (None, stale):  # a prompt that was hashed under the old root does not bring the old keys along
        fresh = toy_engine(groups, root=new, disk=MemoryDisk(records=dict(disk.records)), **options)
        end = ask(fresh, TEXT, hashed)
        assert end.cached_tokens == 0 and end.reuse is not None
        fresh.close()
    first.close()


@pytest.mark.parametrize("kind", ["v3", "v4-flash"])
def test_a_store_of_another_format_is_a_miss_that_says_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fixture(tmp_path / "model", kind)
    options = EngineOptions(
        str(tmp_path / "model"),
        dtype="float32",
        num_gpu_blocks_override=16,
        max_model_len=2048,
        max_num_seqs=2,
        store=str(tmp_path / "store"),
    )
    first = load_engine(options)
    ask(first, TEXT)
    first.close()
    with monkeypatch.context() as patch:
        patch.setattr(longread.spec.state, "CACHE_FORMAT", CACHE_FORMAT + 1)
        changed = load_engine(options)
    end = ask(changed, TEXT)
    assert end.cached_tokens == 0 and end.reuse is not None and end.reuse.reason == "other model or format"
    changed.close()
    again = load_engine(options)
    assert ask(again, TEXT).cached_tokens == len(TEXT) - 1  # and the old one is as it was
    again.close()
