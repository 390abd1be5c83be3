"""Compressors against pooling the whole sequence at once, whatever the cuts; windows before the first token weigh 0."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.compressor import cpu, ref

D = 5


def series(n: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g), 3 * torch.randn(n, width, generator=g)


def overlap_whole(kv: Tensor, score: Tensor) -> Tensor:
    """Token by token from the formula: the first halves of window w-1 and the second halves of window w."""
    out = []
    for w in range(len(kv) // 4):
        now, before = slice(4 * w, 4 * w + 4), slice(max(0, 4 * w - 4), 4 * w)
        values = torch.cat((kv[before, :D], kv[now, D:]))
        p = torch.cat((score[before, :D], score[now, D:])).softmax(0)
        out.append((p * values).sum(0))
    return torch.stack(out) if out else torch.empty(0, D)


def online_whole(kv: Tensor, score: Tensor) -> Tensor:
    windows = len(kv) // 128
    p = score[: 128 * windows].view(windows, 128, D).softmax(1)
    return (p * kv[: 128 * windows].view(windows, 128, D)).sum(1)


def overlap_rings(slots: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(slots, 8, 2 * D), torch.full((slots, 8, 2 * D), float("-inf"))


def online_rings(slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((slots, D), float("-inf")), torch.zeros(slots, D), torch.zeros(slots, D)


@given(cuts=st.lists(st.integers(0, 40), max_size=12), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_overlap_chunks_of_any_size(cuts: list[int], seed: int) -> None:
    n = sum(cuts)
    kv, score = series(n, 2 * D, seed)
    ring_kv, ring_score = overlap_rings(1)
    pooled, at = [torch.empty(0, D)], 0
    for size in cuts:
        part = slice(at, at + size)
        pooled.append(ref.overlap_chunk(ring_kv[0], ring_score[0], kv[part], score[part], at))
        at += size
    torch.testing.assert_close(torch.cat(pooled), overlap_whole(kv, score))
    for p in range(max(0, n - 8), n):
        assert torch.equal(ring_kv[0, p % 8], kv[p])
        assert torch.equal(ring_score[0, p % 8], score[p])


@given(cuts=st.lists(st.sampled_from([0, 1, 2, 126, 127, 128, 129, 300]), max_size=6), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_online_chunks_of_any_size(cuts: list[int], seed: int) -> None:
    kv, score = series(sum(cuts), D, seed)
    rings = online_rings(1)
    pooled, at = [torch.empty(0, D)], 0
    for size in cuts:
        part = slice(at, at + size)
        pooled.append(ref.online_chunk(*(r[0] for r in rings), kv[part], score[part], at))
        at += size
    torch.testing.assert_close(torch.cat(pooled), online_whole(kv, score))
    if at % 128 == 0:
        for mine, fresh in zip(rings, online_rings(1), strict=True):
            assert torch.equal(mine, fresh)


@pytest.mark.parametrize("steps", [ref, cpu], ids=["ref", "cpu"])
@pytest.mark.parametrize("starts", [[0], [3, 0, 7, 130], [4, 5, 6, 7]])
def test_steps_of_a_batch(starts: list[int], steps: ModuleType) -> None:
    """B sequences at different phases, one token a step, in slots that are not in order."""
    total = max(starts) + 140
    data = [series(total, 2 * D, seed) for seed in range(len(starts))]
    slots = torch.tensor([5, 2, 0, 3][: len(starts)])
    overlap, online = overlap_rings(6), online_rings(6)
    want_overlap, want_online = [], []
    for b, start in enumerate(starts):
        kv, score = data[b]
        slot = int(slots[b])
        ref.overlap_chunk(overlap[0][slot], overlap[1][slot], kv[:start], score[:start], 0)
        ref.online_chunk(*(r[slot] for r in online), kv[:start, :D], score[:start, :D], 0)
        want_overlap.append(overlap_whole(kv, score))
        want_online.append(online_whole(kv[:, :D], score[:, :D]))
    untouched = overlap[0][1].clone()
    for i in range(130):
        at = torch.tensor([s + i for s in starts])
        kv = torch.stack([data[b][0][s + i] for b, s in enumerate(starts)])
        score = torch.stack([data[b][1][s + i] for b, s in enumerate(starts)])
        closing = [b for b, s in enumerate(starts) if (s + i) % 4 == 3]
        pooled = steps.overlap_step(*overlap, kv, score, slots, at % 8, closing)
        assert pooled.shape == (len(closing), D)
        for b, row in zip(closing, pooled, strict=True):
            torch.testing.assert_close(row, want_overlap[b][(starts[b] + i) // 4])
        closing = [b for b, s in enumerate(starts) if (s + i) % 128 == 127]
        pooled = steps.online_step(*online, kv[:, :D], score[:, :D], slots, closing)
        assert pooled.shape == (len(closing), D)
        for b, row in zip(closing, pooled, strict=True):
            torch.testing.assert_close(row, want_online[b][(starts[b] + i) // 128])
    assert torch.equal(overlap[0][1], untouched)


def test_scores_far_apart_do_not_overflow() -> None:
    kv, score = series(256, D, 0)
    rings = online_rings(1)
    score = score * 300
    first = ref.online_chunk(*(r[0] for r in rings), kv[:200], score[:200], 0)
    rest = ref.online_chunk(*(r[0] for r in rings), kv[200:], score[200:], 200)
    torch.testing.assert_close(torch.cat((first, rest)), online_whole(kv, score))


@pytest.mark.parametrize("gain", [1, 300])
@pytest.mark.parametrize("starts", [[0, 2, 3], [7, 4, 131]])
def test_compiled_steps_equal_the_reference(starts: list[int], gain: int) -> None:
    """Strided inputs, rings in a wider block, untouched slots NaN."""
    overlap, online = overlap_rings(6), online_rings(6)
    slots = torch.tensor([4, 0, 3])
    for ring in (*overlap, *online):
        ring[[1, 2, 5]] = float("nan")
    mine = [[r.clone() for r in rings] for rings in (overlap, online)]
    for i in range(140):
        kv, score = series(3, 6 * D, i)
        at = torch.tensor([s + i for s in starts])
        for width, name, rings, compiled in (
            (2 * D, "overlap_step", overlap, mine[0]),
            (D, "online_step", online, mine[1]),
        ):
            every, place = (4, (at % 8,)) if name == "overlap_step" else (128, ())
            closing = [b for b in range(3) if int(at[b]) % every == every - 1]
            inputs = kv[:, D : D + width], score[:, D : D + width] * gain, slots, *place, closing
            torch.testing.assert_close(getattr(cpu, name)(*compiled, *inputs), getattr(ref, name)(*rings, *inputs))
    for wanted, found in zip((*overlap, *online), (*mine[0], *mine[1]), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
