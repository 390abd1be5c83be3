"""NativeV3 on a CPU, by the reference of each kernel, against the CPU's own model: plain weights are the same sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import oracle_v3
import pytest
import torch
from torch import Tensor

from longread.cli.checkpoint import locate
from longread.kernels.places import Chunk, Rows
from longread.measure.reading import write
from longread.models import native_v3
from longread.models.deepseek_v3 import DeepseekV3
from longread.models.inputs import StepInputs
from longread.models.native_step import chunk_of
from longread.models.native_v3 import NativeV3
from longread.spec.batch import Segment
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.errors import UnsupportedModelError
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, state_groups
from longread.weights.fixture import tiny_config
from longread.weights.random import random_native
from longread.weights.reader import Checkpoint
from longread.wire.tokenizer import Tokenizer

LENGTH = 600  # three pages; longer than what is absorbed
TOLERANCE = 2e-5  # float32, sums in another order: up to 1.3e-5 by the CPU's own


@dataclass
class Case:
    spec: ModelSpec
    native: NativeV3
    ids: list[int]
    logits: Tensor

    def driver(self, model: Any = None) -> oracle_v3.Driver:
        return oracle_v3.Driver(self.spec, model or self.native)


@pytest.fixture(scope="module", params=list(oracle_v3.VARIANTS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, spec, weights = oracle_v3.tiny(request.param)
    made = Case(
        spec, NativeV3(spec, weights.__getitem__, torch.float32, "cpu"), oracle_v3.prompt(LENGTH, spec.vocab), Tensor()
    )
    made.logits = made.driver(DeepseekV3(spec, weights, torch.float32)).step([(0, made.ids)])[0]
    yield made
    torch.set_num_threads(threads)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("chunk", [LENGTH, 33, 256, 560])
def test_chunks_of_any_size(case: Case, chunk: int) -> None:
    driver = case.driver()
    parts = [driver.step([(2, case.ids[i : i + chunk])])[0] for i in range(0, LENGTH, chunk)]
    close(torch.cat(parts), case.logits)


@pytest.mark.parametrize("absorbed", [0, 1 << 30])
def test_both_forms_of_attention(case: Case, absorbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_v3, "ABSORBED", absorbed)
    driver = case.driver()
    close(torch.cat([driver.step([(0, case.ids[i : i + 250])])[0] for i in range(0, LENGTH, 250)]), case.logits)


def test_batched_decode_beside_chunks(case: Case) -> None:
    driver = case.driver()
    starts = [580, 2, 120, 250]
    driver.step([(slot, case.ids[:n]) for slot, n in enumerate(starts)])
    for i in range(8):
        work = [(slot, [case.ids[n + i]]) for slot, n in enumerate(starts)]
        work.insert(2, (4, case.ids[20 * i : 20 * i + 20]))
        parts = driver.step(work)
        close(parts.pop(2), case.logits[20 * i : 20 * i + 20])
        for n, part in zip(starts, parts, strict=True):
            close(part, case.logits[n + i : n + i + 1])


def test_last_logits_are_those_of_all_rows(case: Case) -> None:
    driver = case.driver()
    close(driver.step([(0, case.ids)], last_only=True)[0], case.logits[-1:])
    segment = Segment(1, 0, 40, 0, tuple(range(8, 16)))
    inputs = torch.tensor(case.ids[:40]), torch.arange(40), (segment,)
    rows = torch.tensor([39, 3, 17, 3])
    close(case.native.forward(StepInputs(*inputs, rows), driver.state), case.logits[rows])
    assert case.native.forward(StepInputs(*inputs, rows[:0]), driver.state).shape == (0, case.spec.vocab)


def test_padding_changes_nothing(case: Case) -> None:
    """Padded chunks of both forms and rows with long tables give the logits, and touch no page but their own."""
    driver, native, pages = case.driver(), case.native, [5, 9, 2]
    before = driver.state["latent"].clone()
    table = torch.tensor([*pages, 0, 0], dtype=torch.int32)
    for start, length, padded in ((0, 300, 384), (300, 1, 16), (301, 290, 600)):
        positions = torch.full((padded,), -1, dtype=torch.int32)
        positions[:length] = torch.arange(start, start + length)
        meta = torch.tensor([start, length, 3, 0], dtype=torch.int32)
        ids = torch.zeros(padded, dtype=torch.int64)
        ids[:length] = torch.tensor(case.ids[start : start + length])
        logits = native.chunk(ids, Chunk(meta, positions, table, 5 * PAGE_TOKENS), driver.state, last=True)
        assert logits is not None
        close(logits, case.logits[start + length - 1 : start + length])
    for position in range(591, 595):
        positions = torch.tensor([-1, position, -1, -1], dtype=torch.int32)
        where = Rows(positions, torch.zeros(4, dtype=torch.int32), table.expand(4, -1), 5 * PAGE_TOKENS)
        logits = native.rows(torch.tensor([0, case.ids[position], 0, 0]), where, driver.state)
        assert logits.isfinite().all()
        close(logits[1:2], case.logits[position : position + 1])
    others = [i for i in range(before.shape[1]) if i not in pages]
    assert torch.equal(driver.state["latent"][:, others].nan_to_num(7), before[:, others].nan_to_num(7))


def test_layers_leave_room_for_other_rows(case: Case) -> None:
    """Between two layers of a chunk another sequence decodes; a chunk without logits leaves the state that one has."""
    driver = case.driver()
    driver.step([(1, case.ids[:70])])
    segment = Segment(0, 0, 333, 0, tuple(driver.free[-2:]))
    where = chunk_of(segment, 0, 333, torch.device("cpu"))
    steps = case.native.chunk_layers(torch.tensor(case.ids[:333]), where, driver.state, last=False)
    for i, _ in enumerate(steps):
        close(driver.step([(1, [case.ids[70 + i]])])[0], case.logits[70 + i : 71 + i])
    assert i == case.spec.layers - 2
    row = Rows(where.positions[:1] + 333, where.positions[:1], where.table[None], 512)
    close(case.native.rows(torch.tensor(case.ids[333:334]), row, driver.state), case.logits[333:334])


def packed_state(spec: ModelSpec, pages: int) -> dict[str, Tensor]:
    (group,) = state_groups(spec, "fp8")
    shape = (len(group.layers), pages, group.rows_per_page, group.width)
    return {"latent": torch.full(shape, 255, dtype=torch.uint8)}  # NaN in FP8


@pytest.mark.parametrize("packed", [False, True])
def test_quantised_weights_are_near_the_dequantised_ones(packed: bool) -> None:
    """FP8 weights and activations, plain or packed rows, on a text of a kind that the reader knows.

    Measured: 0.008 nats (median 1e-6; one token is off by a nat, where experts tie), 96 % of the best tokens. A wrong
    scale or row is off by nats everywhere.
    """
    path = locate("reader-v3")
    spec, checkpoint = spec_from_config(read_config(path)), Checkpoint.open(path)
    tokenizer = Tokenizer.open(path, bos_id=0, eos_id=1)
    ids = list(tokenizer.encode(write(7, 60, "en", "contract").text))[:560]
    plain = DeepseekV3(spec, checkpoint.load(spec, torch.float32), torch.float32)
    expected = oracle_v3.Driver(spec, plain).step([(0, ids)])[0].log_softmax(-1)
    native = NativeV3(spec, checkpoint.native(spec), torch.bfloat16, "cpu")
    assert native.layers[0].quantised and native.layers[1].routed is not None
    assert native.layers[1].routed.weights.kind == "fp8"
    driver = oracle_v3.Driver(spec, native)
    if packed:
        driver.state = packed_state(spec, 16)
    parts = [driver.step([(0, part)])[0] for part in (ids[:520], ids[520:558], ids[558:559], ids[559:])]
    got = torch.cat(parts).log_softmax(-1)
    assert got.isfinite().all()
    apart = torch.nn.functional.kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    assert apart.mean() < 0.03 and apart.median() < 1e-4
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.93


def test_random_stored_weights_keep_activations_near_one() -> None:
    """Random codes in the stored formats; sizes that end inside scale blocks."""
    spec = spec_from_config(tiny_config("v3", quantised=True, kv_lora_rank=128))
    model = NativeV3(spec, random_native(spec, "cpu", seed=1), torch.bfloat16, "cpu")
    driver = oracle_v3.Driver(spec, model)
    driver.state = packed_state(spec, 16)
    logits = torch.cat([driver.step([(0, part)])[0] for part in (oracle_v3.prompt(300, spec.vocab), [5], [6])])
    assert 0.3 < logits.std() < 3


def test_other_families_are_refused() -> None:
    spec = spec_from_config(tiny_config("v4-flash"))
    with pytest.raises(UnsupportedModelError, match="deepseek_v4 is not one of"):
        NativeV3(spec, random_native(spec, "cpu"), torch.float32, "cpu")
