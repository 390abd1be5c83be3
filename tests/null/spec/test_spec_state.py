"""Page identity and state groups."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.spec.releases import release
from longread.spec.state import (
    PAGE_TOKENS,
    HashedTokens,
    cache_root,
    hash_pages,
    page_hash,
    pages_for,
    state_groups,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(st.integers(0, 10**9))
def test_pages_for_is_the_least_that_holds(tokens: int) -> None:
    pages = pages_for(tokens)
    assert pages * PAGE_TOKENS >= tokens > (pages - 1) * PAGE_TOKENS or tokens == pages == 0


@given(TOKENS, TOKENS)
def test_page_hash_tells_different_token_runs_apart(a: list[int], b: list[int]) -> None:
    root = b"r" * 16
    assert (page_hash(root, a) == page_hash(root, b)) == (a == b)
    assert page_hash(root, a) == page_hash(root, tuple(a))
    assert len(page_hash(root, a)) == 16


@given(TOKENS, TOKENS)
def test_a_chain_depends_on_everything_before(a: list[int], b: list[int]) -> None:
    root = b"r" * 16
    same_end = page_hash(page_hash(root, a), [1, 2, 3]) == page_hash(page_hash(root, b), [1, 2, 3])
    assert same_end == (a == b)


def test_page_hash_is_pinned() -> None:
    """A silent change would turn every stored page into a miss; raise CACHE_FORMAT knowingly instead."""
    assert page_hash(b"\0" * 16, range(256)).hex() == "65d169dcbc055b777b60937838df07de"


def test_root_changes_with_model_weights_and_format() -> None:
    spec = release("DeepSeek-V4-Flash")
    assert spec.compress_rope is not None
    other_rope = replace(spec, compress_rope=replace(spec.compress_rope, factor=8.0))
    roots = {
        cache_root(spec, "a", "float32"),
        cache_root(spec, "b", "float32"),
        cache_root(spec, "a", "bfloat16"),
        cache_root(spec, "a", "bfloat16", "fp8"),
        cache_root(other_rope, "a", "float32"),
        cache_root(release("DeepSeek-V3"), "a", "float32"),
    }
    assert len(roots) == 6
    assert cache_root(spec, "a", "float32", "model") in roots


def test_groups_of_mla_are_rows_only() -> None:
    (group,) = state_groups(release("DeepSeek-V3"))
    assert (group.name, group.width, len(group.layers), group.rows_per_page) == ("latent", 576, 61, PAGE_TOKENS)


def test_groups_of_v4_follow_the_ratios() -> None:
    spec = release("DeepSeek-V4-Flash")
    groups = {g.name: g for g in state_groups(spec)}
    assert (groups["csa"].rows_per_page, groups["hca"].rows_per_page) == (64, 2)
    assert groups["csa"].layers[0] == 2 and groups["hca"].layers[0] == 3
    assert len(groups["window"].layers) == spec.layers
    assert groups["csa_score"].fill == -float("inf") and groups["hca_sum"].fill == 0.0
    assert all(PAGE_TOKENS % g.tokens_per_row == 0 for g in groups.values())


def test_packed_groups_are_bytes() -> None:
    """Widths of DeepSeek's own FP8 caches: 584 bytes a V4 latent, 656 a V3.2 latent, 132 an index key."""
    for name, widths in (
        ("DeepSeek-V4-Flash", {"csa": 584, "index": 132, "hca": 584, "window": 584}),
        ("DeepSeek-V3", {"latent": 656}),
        ("DeepSeek-V3.2", {"latent": 656, "index": 132}),
    ):
        packed, plain = (state_groups(release(name), cache) for cache in ("fp8", "model"))
        assert {g.name: g.width for g in packed if g.dtype == "uint8"} == widths
        for group, other in zip(packed, plain, strict=True):
            if group.dtype == "uint8":
                each = len(group.layers) * group.width
                assert group.bytes_per_page(2) == (each * group.rows_per_page if group.kind == "rows" else 0)
                assert group.bytes_per_slot(2) == (each * group.ring_rows if group.kind == "ring" else 0)
                assert replace(group, width=other.width, dtype="model") == other
            else:
                assert group == other


def test_v41_has_no_groups_yet() -> None:
    with pytest.raises(NotImplementedError, match="deepseek_v41"):
        state_groups(release("DeepSeek-V4.1-Flash"))


def hashed(root, ids):
    data = array("i", ids).tobytes()
    return HashedTokens(root, data, hash_pages(root, data), min(ids), max(ids))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 512, 700])
def test_hashed_tokens_are_the_chain_and_fit_their_own_tokens_and_longer_ones(count):
    root, ids = b"r" * 16, [i * 7 % 1000 for i in range(count)]
    made = hashed(root, ids)
    parent = root
    for page, known in enumerate(made.hashes):
        parent = page_hash(parent, ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
        assert parent == known
    assert len(made.hashes) == count // PAGE_TOKENS
    assert hash_pages(root, made.data, made.hashes[:1]) == made.hashes
    assert made.fits(root, ids) and made.fits(root, tuple(ids)) and made.fits(root, [*ids, 5])
    assert not made.fits(b"q" * 16, ids) and not made.fits(root, ids[:-1])
    assert not made.fits(root, [2**40, *ids[1:]]) and not made.fits(root, [*ids[:-1], ids[-1] + 1])
    assert not replace(made, data=made.data[:-1]).fits(root, ids)
    assert not replace(made, hashes=(*made.hashes, b"x" * 16)).fits(root, ids)
    if made.hashes:
        assert not replace(made, hashes=(*made.hashes[:-1], b"x" * 16)).fits(root, ids)


def test_nothing_hashed_fits_nothing():
    assert not HashedTokens(b"r", b"", (), 0, 0).fits(b"r", [])
