"""DeepseekV3 against transformers: one-shot, chunked, cached decode, ragged batches, pruned last layer, bfloat16."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import oracle_v3
import pytest
import torch
from torch import Tensor

from longread.kernels.mla import ref as mla
from longread.models.deepseek_v3 import DeepseekV3
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.errors import MissingTensorError, UnsupportedModelError
from longread.spec.model import ModelSpec

TOLERANCE = 2e-5
LENGTH = 600  # three pages, the last one partly filled


class Case:
    """One variant with its oracle's logits over a fixed prompt."""

    def __init__(self, path_factory: pytest.TempPathFactory, variant: str):
        self.config, self.spec, self.weights = oracle_v3.tiny(variant)
        self.model = DeepseekV3(self.spec, self.weights, torch.float32)
        self.hf = oracle_v3.load_oracle(path_factory.mktemp("oracle") / "model", self.config, self.weights)
        self.tokens = oracle_v3.prompt(LENGTH, self.spec.vocab)
        self.logits = self.reference(self.tokens)

    def reference(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return self.hf(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=list(oracle_v3.VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(tmp_path_factory, request.param)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_one_shot_equals_oracle(case: Case) -> None:
    (logits,) = oracle_v3.Driver(case.spec, case.model).step([(0, case.tokens)])
    assert 0.3 < case.logits.std() < 3, "the tiny model is idle: agreement would mean little"
    close(logits, case.logits)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 33, 256])
def test_chunked_equals_oracle(case: Case, chunk: int) -> None:
    length = {1: 40, 3: 60, 7: 300}.get(chunk, LENGTH)
    driver = oracle_v3.Driver(case.spec, case.model)
    parts = [driver.step([(0, case.tokens[i : min(i + chunk, length)])])[0] for i in range(0, length, chunk)]
    close(torch.cat(parts), case.logits[:length])


@pytest.mark.parametrize("policy", [mla.Policy(1, 0), mla.Policy(1 << 30, 0)])
@pytest.mark.parametrize("chunk", [250, 600])
def test_both_forms_of_attention_equal_oracle(case: Case, policy: mla.Policy, chunk: int) -> None:
    model = DeepseekV3(case.spec, case.weights, torch.float32)
    model.policy = policy
    driver = oracle_v3.Driver(case.spec, model)
    close(torch.cat([driver.step([(0, case.tokens[i : i + chunk])])[0] for i in range(0, LENGTH, chunk)]), case.logits)


def test_greedy_decode_over_page_ends_equals_oracle(case: Case) -> None:
    driver = oracle_v3.Driver(case.spec, case.model)
    start, count = 230, 64
    tokens = case.tokens[:start]
    (logits,) = driver.step([(0, tokens)], last_only=True)
    steps = [logits]
    for _ in range(count - 1):
        tokens = [*tokens, int(logits.argmax())]
        (logits,) = driver.step([(0, tokens[-1:])], last_only=True)
        steps.append(logits)
    reference = case.reference(tokens)[start - 1 :]
    close(torch.cat(steps), reference)
    assert [int(s.argmax()) for s in steps] == reference.argmax(-1).tolist()


def test_ragged_batch_equals_oracle(case: Case) -> None:
    prompts = [oracle_v3.prompt(n, case.spec.vocab, seed=n) for n in (1, 257, 40, 513)]
    references = [case.reference(p) for p in prompts]
    driver = oracle_v3.Driver(case.spec, case.model)
    # Lengths before each step; a step mixes decode rows, short chunks and chunks long enough to be expanded.
    marks = [(0, 0, 0, 0), (0, 256, 0, 100), (1, 257, 3, 400), (1, 257, 39, 512), (1, 257, 40, 513)]
    for before, after in pairwise(marks):
        work = [(i, prompts[i][a:b]) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a < b]
        for (slot, _), logits in zip(work, driver.step(work), strict=True):
            close(logits, references[slot][before[slot] : after[slot]])


def test_pruned_last_layer_leaves_the_same_state(case: Case) -> None:
    """Steps without wanted logits must still write every latent of the last layer."""
    full, pruned = (oracle_v3.Driver(case.spec, case.model) for _ in range(2))
    full.step([(0, case.tokens[:300])])
    ids, table = torch.tensor(case.tokens[:300]), (pruned.free.pop(0), pruned.free.pop(0))
    nothing = torch.empty(0, dtype=torch.int64)
    inputs = StepInputs(ids, torch.arange(300), (Segment(0, 0, 300, 0, table),), nothing)
    assert case.model.forward(inputs, pruned.state).shape == (0, case.spec.vocab)
    torch.testing.assert_close(pruned.state["latent"], full.state["latent"], rtol=0, atol=0, equal_nan=True)


def test_logit_rows_in_any_order(case: Case) -> None:
    driver = oracle_v3.Driver(case.spec, case.model)
    table = tuple(driver.free[:2])
    rows = torch.tensor([299, 5, 6, 7, 7, 0])
    inputs = StepInputs(torch.tensor(case.tokens[:300]), torch.arange(300), (Segment(0, 0, 300, 0, table),), rows)
    close(case.model.forward(inputs, driver.state), case.logits[rows])


def test_bfloat16_follows_float32(case: Case) -> None:
    model = DeepseekV3(case.spec, case.weights, torch.bfloat16)
    driver = oracle_v3.Driver(case.spec, model)
    (first,) = driver.step([(0, case.tokens[:300])])
    (second,) = driver.step([(0, case.tokens[300:301])])
    assert driver.state["latent"].dtype == torch.bfloat16
    difference = torch.cat((first, second)) - case.logits[:301]
    # A rounding can flip an expert, so the bulk is judged, not the worst logit.
    assert difference.pow(2).mean().sqrt() < 0.15 * case.logits.std()


def test_only_valid_rows_are_touched(case: Case) -> None:
    driver = oracle_v3.Driver(case.spec, case.model)
    driver.step([(0, case.tokens[:270])])
    finite = driver.state["latent"].isfinite().all(-1).sum((1, 2))
    assert finite.tolist() == [270] * case.spec.layers


def test_experts_are_not_copied() -> None:
    _, spec, weights = oracle_v3.tiny("v3")
    model = DeepseekV3(spec, weights, torch.float32)
    layer = model.layers[-1].routed
    assert layer is not None
    name = f"model.layers.{spec.layers - 1}.mlp.experts.3.up_proj.weight"
    assert layer.up[3].data_ptr() == weights[name].data_ptr()


def test_a_missing_weight_is_named() -> None:
    _, spec, weights = oracle_v3.tiny("v3")
    del weights["model.layers.1.self_attn.kv_b_proj.weight"]
    with pytest.raises(MissingTensorError, match=r"layers\.1\.self_attn\.kv_b_proj"):
        DeepseekV3(spec, weights, torch.float32)


def test_another_family_is_refused() -> None:
    _, spec, weights = oracle_v3.tiny("v3")
    other: ModelSpec = replace(spec, family="deepseek_v32")
    with pytest.raises(UnsupportedModelError, match="deepseek_v32"):
        DeepseekV3(other, weights, torch.float32)
