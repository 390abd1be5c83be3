"""The indexer against its formula; the choice against sorting by (score, age)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.kernels.indexer import ref


@pytest.mark.parametrize("queries, heads, dim, lengths", [(1, 32, 8, [5]), (7, 3, 16, [1, 130, 0, 65]), (3, 4, 8, [])])
def test_scores_are_the_formula(
    queries: int, heads: int, dim: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ref, "SCRATCH_FLOATS", 1)  # many blocks
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(queries, heads, dim, generator=g), torch.randn(queries, heads, generator=g)
    keys = [torch.randn(n, dim, generator=g) for n in lengths]
    got = ref.scores(q, weights, keys)
    every = torch.cat(keys) if keys else torch.empty(0, dim)
    want = (torch.einsum("qhd,nd->qhn", q, every).relu() * weights[..., None]).sum(1)
    assert got.shape == (queries, sum(lengths))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@given(
    values=st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    top_k=st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_choice_prefers_high_scores_then_old_entries(
    values: list[list[int]], top_k: int, data: st.DataObject
) -> None:
    visible = [data.draw(st.integers(0, 9)) for _ in values]
    scores = torch.tensor(values, dtype=torch.float32)
    for q, seen in enumerate(visible):
        scores[q, seen:] = float("nan")  # entries that do not exist yet may score anything
    mask = ref.chosen(scores.clone(), torch.tensor(visible), top_k)
    rows, valid = ref.chosen_rows(scores.clone(), torch.tensor(visible), top_k)
    for q, seen in enumerate(visible):
        best = sorted(range(seen), key=lambda w: (-values[q][w], w))[:top_k]
        assert mask[q].nonzero().flatten().tolist() == sorted(best)
        assert rows[q][valid[q]].tolist() == sorted(best)
        assert rows[q][~valid[q]].eq(0).all()


def test_no_entries_at_all() -> None:
    rows, valid = ref.chosen_rows(torch.empty(3, 0), torch.zeros(3, dtype=torch.int64), 4)
    assert rows.shape == valid.shape == (3, 0)
