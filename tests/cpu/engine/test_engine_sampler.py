"""The sampler against per-row formulas in numpy, and what it must not depend on."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longread.engine import sampler as sampling
from longread.engine.sampler import sample
from longread.engine.sampling_state import Occurrences, SamplingState
from longread.spec.engine import SamplingParams

VOCAB, EOS = 50, 1


def state(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingState:
    row = SamplingState(params, prompt, EOS, params.seed or 0, None)
    for token in output:
        row.accept(token)
    return row


def reference(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits after all rules, one rule after the other, -inf where forbidden; float64 [vocab]."""
    x = logits.astype(np.float64).copy()
    if len(output) < params.min_tokens:
        x[[EOS, *params.stop_token_ids] if not params.ignore_eos else list(params.stop_token_ids)] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in range(VOCAB):
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        count = output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature < 1e-5:
        x[np.arange(VOCAB) != x.argmax()] = -np.inf
        return x
    x /= params.temperature
    x[x < x.max() + (math.log(params.min_p) if params.min_p else -np.inf)] = -np.inf
    if 0 < params.top_k < VOCAB:
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        order = np.argsort(-x, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        kept = order[before < params.top_p]
        x[x < x[kept].min()] = -np.inf
    return x


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 4, 49, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (7, -100.0)), ((0, 100.0),)]),
    stop_token_ids=st.sampled_from([(), (2, 9)]),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**40),
)
tokens_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(
    rows=st.lists(st.tuples(params_strategy, tokens_strategy, tokens_strategy), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    candidates=st.sampled_from([2, 1024]),
)
def test_a_batch_equals_the_formulas_row_by_row(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int, candidates: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [reference(logits[i].numpy(), *row) for i, row in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CANDIDATES", candidates)  # 2: the nucleus does not fit, a full sort follows
        chosen = sample(logits.clone(), [state(*row) for row in rows])
    for x, (params, _, output), choice in zip(expected, rows, chosen, strict=True):
        assert choice.error is None
        assert np.isfinite(x[choice.token]), "a forbidden token was chosen"
        stream = np.random.Generator(np.random.Philox(key=[params.seed, len(output)]))
        noise = -np.log(stream.standard_exponential(VOCAB, dtype=np.float32).astype(np.float64))
        scores = x + (noise if params.temperature > 1e-5 else 0)
        # float32 against float64: a tie within rounding may fall either way
        assert scores[choice.token] >= scores.max() - 1e-3


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    row = SamplingState(SamplingParams(), [0], EOS, 7, None)
    counts = np.zeros(4)
    for index in range(4000):
        row.output_length = index
        counts[sample(logits.clone(), [row])[0].token] += 1
    assert np.abs(counts / 4000 - logits.softmax(-1)[0].numpy()).max() < 0.03


def test_same_seed_same_token_whatever_the_batch() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [SamplingState(SamplingParams(temperature=0.5 + i, top_p=0.9, seed=i), [1], EOS, i, None) for i in range(6)]
    together = [s.token for s in sample(logits.clone(), rows)]
    assert together == [sample(logits[i : i + 1].clone(), [rows[i]])[0].token for i in range(6)]
    assert together[::-1] == [s.token for s in sample(logits.flip(0).clone(), rows[::-1])]


def test_raw_logprobs_ignore_every_rule() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    raw = logits.log_softmax(-1)
    params = SamplingParams(temperature=2.0, top_k=3, logit_bias=((4, 50.0),), presence_penalty=1.0, logprobs=5)
    rows = [
        state(params, [1], [2]),
        state(SamplingParams(temperature=0.0), [1], []),
        state(SamplingParams(temperature=0.0, logprobs=0), [1], []),
    ]
    biased, silent, alone = sample(logits.clone(), rows)
    assert biased.token == 4
    assert biased.logprob == pytest.approx(raw[0, 4].item(), abs=1e-5)
    assert [token for token, _ in biased.top] == raw[0].topk(5).indices.tolist()
    np.testing.assert_allclose([value for _, value in biased.top], raw[0].topk(5).values.numpy(), atol=1e-5)
    assert (silent.logprob, silent.top) == (None, ())
    assert alone.logprob == pytest.approx(raw[2].max().item(), abs=1e-5)
    assert alone.top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = bad
    logits[1, 4] = 1.0
    rows = [state(SamplingParams(temperature=t), [1], []) for t in (1.0, 0.0)]
    broken, good = sample(logits, rows)
    assert broken.error is not None
    assert "finite" in broken.error
    assert (good.token, good.error) == (4, None)


def test_nothing_left_to_choose_is_an_error() -> None:
    params = SamplingParams(stop_token_ids=tuple(i for i in range(VOCAB) if i != EOS), min_tokens=1)
    assert "no token is left" in (sample(torch.zeros(1, VOCAB), [state(params, [1], [])])[0].error or "")


def test_greedy_batch_needs_no_copy_and_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_draw", lambda *_: pytest.fail("greedy rows drew noise"))
    logits = torch.randn(4, VOCAB)
    kept = logits.clone()
    rows = [state(SamplingParams(temperature=0.0), [1], []) for _ in range(4)]
    assert [s.token for s in sample(logits, rows)] == kept.argmax(-1).tolist()
    assert torch.equal(logits, kept)


@given(prompt=tokens_strategy, output=st.lists(st.integers(0, 10_000), max_size=300))
def test_occurrences_count_incrementally(prompt: list[int], output: list[int]) -> None:
    seen = Occurrences(prompt)
    for token in output:
        seen.add(token)
    expected = {token: output.count(token) for token in {*prompt, *output}}
    assert dict(zip(seen.ids.tolist(), seen.counts.int().tolist(), strict=True)) == expected


def test_seed_is_folded_to_64_bits() -> None:
    rows = [SamplingState(dataclasses.replace(SamplingParams(), seed=s), [1], EOS, s, None) for s in (-1, 2**64 - 1)]
    first, second = (sample(torch.zeros(1, VOCAB), [row])[0].token for row in rows)
    assert first == second
