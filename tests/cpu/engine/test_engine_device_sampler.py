"""The device's sampler against sampler.py: the same greedy tokens, supports and errors; the same distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longread.engine.device_sampler import ROWS, DeviceSampler, key
from longread.engine.sampler import CANDIDATES, Sample, sample
from longread.engine.sampling_state import SamplingState
from longread.spec.engine import SamplingParams

CPU = torch.device("cpu")
EOS = 1


def state(index: int = 0, seed: int = 0, **params: object) -> SamplingState:
    row = SamplingState(SamplingParams(**params), (3, 4), EOS, seed, None)  # type: ignore[arg-type]
    row.output_length = index
    return row


def choose(logits: torch.Tensor, rows: list[SamplingState]) -> list[Sample]:
    before = logits.clone()
    chosen = DeviceSampler(CPU, len(rows), logits.shape[1]).begin(logits, rows).result()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return chosen


def noise(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.integers(2, 300), st.integers(0, 10**6))
def test_greedy_is_the_first_largest(rows: int, vocab: int, seed: int) -> None:
    logits = noise(rows, vocab, seed).round()  # ties
    states = [state(temperature=0.0) for _ in range(rows)]
    assert choose(logits, states) == sample(logits.clone(), states)


@given(st.integers(1, 40), st.data())
def test_a_row_does_not_see_its_batch(rows: int, data: st.DataObject) -> None:
    """Whatever the others are, and wherever the row stands."""
    logits = noise(rows, 1500, 5)
    ways = st.sampled_from(({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}))
    states = [state(i, 7 * i, **(data.draw(ways))) for i in range(rows)]
    together = choose(logits, states)
    at = data.draw(st.integers(0, rows - 1))
    assert choose(logits[at : at + 1], [states[at]]) == [together[at]]
    order = list(reversed(range(rows)))
    assert choose(logits[order], [states[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7}],
)
def test_what_may_be_chosen_is_what_the_sampler_may_choose(params: dict[str, float]) -> None:
    """Over many draws each sees the same tokens; border ties included (logits are rounded)."""
    logits = noise(1, 30, 3).round()
    draws = 3000
    rows = [state(i, 1, **params) for i in range(draws)]
    many = logits.expand(draws, -1)
    device = {one.token for one in choose(many, rows)}
    host = {one.token for one in sample(many.clone(), rows)}
    assert device == host


def test_draws_follow_the_probabilities() -> None:
    """Chi-square over 20,000 outputs of one seed, and over 20,000 seeds: below the 1e-6 quantile for 15 degrees."""
    logits = noise(1, 16, 9) / 3
    wanted = logits.softmax(-1)[0].tolist()
    draws = 20_000
    for rows in ([state(i, 42) for i in range(draws)], [state(0, i) for i in range(draws)]):
        found = Counter(one.token for one in choose(logits.expand(draws, -1), rows))
        square = sum((found[t] - draws * p) ** 2 / (draws * p) for t, p in enumerate(wanted))
        assert square < 57, square


def test_improbable_tokens_come_as_often_as_they_should() -> None:
    """A token of probability e^-8: noise that is coarse near its end would never give it, or too often."""
    logits = torch.zeros(1, 2)
    logits[0, 1] = -8.0
    draws = 200_000
    found = sum(one.token for one in choose(logits.expand(draws, -1), [state(i, 3) for i in range(draws)]))
    expected = draws / (1 + math.exp(8))
    assert abs(found - expected) < 6 * expected**0.5, (found, expected)


def test_rows_without_a_number_are_errors_of_their_own() -> None:
    logits = noise(4, 50, 1)
    logits[1, 7], logits[2, 3], logits[3] = float("nan"), float("inf"), -float("inf")
    states = [state(), state(temperature=0.0), state(), state()]
    chosen = choose(logits, states)
    assert chosen[0].error is None
    assert [one.error for one in chosen[1:]] == [one.error for one in sample(logits.clone(), states)[1:]]
    assert all(one.error is not None and one.token == -1 for one in chosen[1:])


def test_what_only_the_host_does_is_done_there() -> None:
    logits = noise(5, 60, 2)
    states = [
        state(logit_bias=((7, 100.0),)),
        state(temperature=0.0, logprobs=3),
        state(temperature=0.0, min_tokens=2, stop_token_ids=(int(logits[2].argmax()),)),
        state(temperature=0.0, frequency_penalty=1.0),
        state(temperature=0.0),
    ]
    assert choose(logits, states) == sample(logits.clone(), states)
    assert choose(logits, states)[0].token == 7


def test_a_nucleus_wider_than_the_candidates_is_the_hosts() -> None:
    """Nearly flat logits: half of the mass needs more than is looked at."""
    vocab = 3 * CANDIDATES
    logits = torch.linspace(0, 0.1, vocab)[None].contiguous()
    states = [state(i, i, top_p=0.5) for i in range(ROWS + 1)]
    many = logits.expand(len(states), -1).contiguous()
    assert choose(many, states) == sample(many.clone(), states)
    wide = [state(0, 5, top_k=2 * CANDIDATES)]
    assert choose(logits, wide) == sample(logits.clone(), wide)


def test_keys_differ() -> None:
    keys = {key(seed, index) for seed in (0, 1, 2**63, 2**64 - 1) for index in range(1000)}
    assert len(keys) == 4000
    assert all(-(2**63) <= k < 2**63 for k in keys)
