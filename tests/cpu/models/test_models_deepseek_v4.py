"""DeepSeek-V4 against transformers in float32: every way to cut a prompt must give the oracle's logits."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from oracle_v4 import Driver, load_oracle, prompt, tiny
from torch import Tensor

from longread.models import v4_attention
from longread.models.deepseek_v4 import DeepseekV4
from longread.spec.model import ModelSpec

LENGTH = 700  # five HCA windows, 175 CSA windows (top-k is 16), three pages
TOLERANCE = 2e-5


@dataclass
class Case:
    spec: ModelSpec
    weights: dict[str, Tensor]
    model: DeepseekV4
    oracle: torch.nn.Module
    ids: list[int]
    logits: Tensor

    def driver(self, **options: object) -> Driver:
        return Driver(self.spec, self.model, **options)  # type: ignore[arg-type]

    def full(self, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=["v4-flash", "v4-pro"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config, spec, weights = tiny(request.param)
    oracle = load_oracle(tmp_path_factory.mktemp("oracle") / "model", config, weights)
    made = Case(spec, weights, DeepseekV4(spec, weights, torch.float32), oracle, prompt(LENGTH, spec.vocab), Tensor())
    made.logits = made.full(made.ids)
    yield made
    torch.set_num_threads(threads)


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def test_the_fixture_is_lively(case: Case) -> None:
    assert 0.5 < case.logits.std() < 2
    assert case.spec.indexer is not None
    assert 4 * case.spec.indexer.top_k < LENGTH // 4


@pytest.mark.parametrize("chunk", [LENGTH, 1, 3, 7, 16, 33, 256])
def test_chunks_of_any_size(case: Case, chunk: int) -> None:
    driver = case.driver(shuffle=True)
    parts = [driver.step([(2, case.ids[i : i + chunk])])[0] for i in range(0, LENGTH, chunk)]
    close(torch.cat(parts), case.logits)


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_beside_other_sequences(case: Case, seed: int) -> None:
    """Sequences of different lengths advance by random amounts in one step; each sees only itself."""
    rng = random.Random(seed)
    driver = case.driver(shuffle=True)
    offsets, lengths = [0, 0, 0, 0], [LENGTH, 333, 130, 2]
    got: list[list[Tensor]] = [[], [], [], []]
    while any(o < n for o, n in zip(offsets, lengths, strict=True)):
        work = []
        for slot in rng.sample(range(4), 4):
            size = min(lengths[slot] - offsets[slot], rng.choice([0, 1, 1, 2, 5, 31, 64, 127, 129, 200]))
            if size:
                work.append((slot, case.ids[offsets[slot] : offsets[slot] + size]))
                offsets[slot] += size
        if work:
            for (slot, _), part in zip(work, driver.step(work), strict=True):
                got[slot].append(part)
    for slot, n in enumerate(lengths):
        close(torch.cat(got[slot]), case.logits[:n])


def test_greedy_decode_is_the_oracles(case: Case) -> None:
    ids = torch.tensor([case.ids[:150]])
    with torch.inference_mode():
        out = case.oracle.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=2)
    expected = out[0, 150:].tolist()
    driver, token, got = case.driver(), case.ids[:150], []
    for _ in range(64):
        token = [int(driver.step([(0, token)], all_rows=False)[0].argmax())]
        got += token
    assert got == expected


def test_batched_decode_equals_the_oracle(case: Case) -> None:
    """One-token rows of unequal lengths: below and beyond top-k, before and after the window is full."""
    driver = case.driver(shuffle=True)
    starts = [601, 2, 63, 255]
    driver.step([(slot, case.ids[:n]) for slot, n in enumerate(starts)])
    order = [2, 0, 3, 1]
    for i in range(10):
        shuffled = driver.step([(slot, [case.ids[starts[slot] + i]]) for slot in order])
        parts = [shuffled[order.index(slot)] for slot in range(4)]
        for n, part in zip(starts, parts, strict=True):
            close(part, case.logits[n + i : n + i + 1])


def test_decode_of_neighbouring_slots(case: Case) -> None:
    driver = case.driver()
    starts = [300, 2, 63]
    driver.step([(slot + 1, case.ids[:n]) for slot, n in enumerate(starts)])
    for i in range(5):
        parts = driver.step([(slot + 1, [case.ids[n + i]]) for slot, n in enumerate(starts)])
        for n, part in zip(starts, parts, strict=True):
            close(part, case.logits[n + i : n + i + 1])


def test_batched_decode_of_short_contexts(case: Case) -> None:
    """No row sees more than top-k windows: rows are gathered whole, padded where lengths differ."""
    driver = case.driver(shuffle=True)
    starts = [40, 1, 7]
    driver.step([(slot, case.ids[:n]) for slot, n in enumerate(starts)])
    for i in range(9):
        parts = driver.step([(slot, [case.ids[n + i]]) for slot, n in enumerate(starts)])
        for n, part in zip(starts, parts, strict=True):
            close(part, case.logits[n + i : n + i + 1])


@pytest.mark.parametrize("dense", [True, False])
def test_masked_and_gathered_selection_agree(case: Case, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4_attention.V4Attention, "_dense", lambda self, count: dense)
    driver = case.driver(shuffle=True)
    close(torch.cat([driver.step([(0, case.ids[i : i + 350])])[0] for i in range(0, LENGTH, 350)]), case.logits)


def test_small_scratch_gives_the_same_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCORE_FLOATS", "INDEX_FLOATS", "GATHER_FLOATS"):
        monkeypatch.setattr(v4_attention, name, 1 << 9)
    close(case.driver(shuffle=True).step([(0, case.ids)])[0], case.logits)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_short_prompt_in_a_used_slot(case: Case, length: int) -> None:
    """Old overlap rows and open windows must not leak into the next request."""
    driver = case.driver()
    driver.step([(1, case.ids[: 300 + length])])
    driver.reset(1)
    close(driver.step([(1, case.ids[:length])])[0], case.logits[:length])
    for i in range(length, length + 6):
        close(driver.step([(1, case.ids[i : i + 1])])[0], case.logits[i : i + 1])


def test_long_contexts_read_in_place(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the batching limit a decode row is a chunk of one token."""
    from longread.models import v4_step

    monkeypatch.setattr(v4_step, "MAX_BATCHED_TOKENS", 100)
    driver = case.driver(shuffle=True)
    driver.step([(0, case.ids[:600]), (1, case.ids[:20])])
    for i in range(5):
        parts = driver.step([(0, [case.ids[600 + i]]), (1, [case.ids[20 + i]])])
        close(parts[0], case.logits[600 + i : 601 + i])
        close(parts[1], case.logits[20 + i : 21 + i])


def test_a_sequence_does_not_depend_on_its_neighbours(case: Case) -> None:
    """A neighbour that is NaN throughout changes nothing (a mask that multiplies by zero would)."""
    driver = case.driver(shuffle=True)
    driver.step([(0, case.ids[:500]), (1, case.ids[:90])])
    for tensor in driver.state.values():
        tensor[:, 1 if tensor.shape[1] == driver.slots else driver.tables[1]] = float("nan")
    parts = driver.step([(1, [5]), (0, [case.ids[500]])])
    close(parts[1], case.logits[500:501])
    assert parts[0].isnan().all()


def test_only_wanted_rows_get_logits(case: Case) -> None:
    driver = case.driver()
    close(driver.step([(0, case.ids[:40])], all_rows=False)[0], case.logits[39:40])
    inputs_rows = driver.step([(0, case.ids[40:41])], all_rows=True)[0]
    assert inputs_rows.shape == (1, case.spec.vocab)


def test_bfloat16_follows_float32(case: Case) -> None:
    model = DeepseekV4(case.spec, case.weights, torch.bfloat16)
    driver = Driver(case.spec, model, dtype=torch.bfloat16, shuffle=True)
    parts = [driver.step([(0, case.ids[i : i + 33])])[0] for i in range(0, 264, 33)]
    parts += [driver.step([(0, [case.ids[264 + i]])])[0] for i in range(8)]
    got, expected = torch.cat(parts), case.logits[:272]
    assert not got.isnan().any()
    # Near-ties in routing and selection may flip a token; the bulk must follow.
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).median() > 0.99
