"""NativeV4 by its GPU kernels against the same model by their references: what one hands on fits the next.

Each kernel is held to its reference by a test of its own. Here bounds are wide: FP8 roundings differ (kernels round the
experts' hidden activations, references do not) and can move which experts or rows are chosen.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from interpreter_casts import exact_casts  # noqa: F401, an autouse fixture
from interpreter_gaps import filled_gaps  # noqa: F401, an autouse fixture
from oracle_v4 import Driver, prompt
from torch import Tensor
from torch.nn import functional

from longread.kernels import dispatch
from longread.kernels.fp8 import ref as fp8
from longread.models.native_v4 import NativeV4
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from longread.spec.releases import release
from longread.spec.state import CacheKind
from longread.weights.fixture import tiny_config
from longread.weights.random import random_native

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
SLOW = (fp8.linear, fp8.grouped_linear)  # minutes under the interpreter, which has them in test_gpu_fp8.py
SMALL = {
    "compress_ratios": [4, 128, 0],
    "head_dim": 128,
    "index_topk": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "sliding_window": 128,
    "vocab_size": 256,
}
Work = Sequence[tuple[int, Sequence[int]]]


def both(spec: ModelSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[NativeV4, NativeV4]:
    """The model by references and by kernels, of equal weights."""
    dispatch.force_reference(True)
    try:
        plain = made(spec, device)
    finally:
        dispatch.force_reference(False)
    if device == "cpu":  # the interpreter: what runs on a GPU runs here
        from longread.kernels.cuda_table import CUDA

        table = {ref: row if ref in SLOW else {"cpu": CUDA.get(ref, row["cpu"])} for ref, row in dispatch.TABLE.items()}
        monkeypatch.setattr(dispatch, "TABLE", table)
    return plain, made(spec, device)


def made(spec: ModelSpec, device: str) -> NativeV4:
    return NativeV4(spec, random_native(spec, device, seed=1), torch.bfloat16, device)


def agreement(models: Sequence[NativeV4], steps: Sequence[Work], cache: CacheKind, pages: int) -> Tensor:
    """Cosine of the two models' logits after each step and sequence."""
    options = {"pages": pages, "slots": 2, "cache": cache, "device": models[0].device.type}
    plain, kernels = (Driver(m.spec, m, dtype=torch.bfloat16, shuffle=True, **options) for m in models)  # type: ignore[arg-type]
    found = []
    for work in steps:
        expected, got = (torch.cat(driver.step(work, all_rows=False)) for driver in (plain, kernels))
        assert got.isfinite().all()
        found.append(functional.cosine_similarity(got, expected, dim=-1))
    return torch.cat(found)


@pytest.mark.parametrize("cache", ["fp8", "model"])
def test_a_small_model(device: str, cache: CacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decode rows on scattered pages, with and without windows that close. Measured: 0.9976 and more."""
    models = both(spec_from_config(tiny_config("v4-flash", quantised=True, **SMALL)), device, monkeypatch)
    ids = prompt(60, 256)
    steps: list[Work] = [[(0, ids[:27])], [(0, ids[27:28]), (1, ids[:3])], [(0, [3]), (1, [4])], [(0, ids[30:40])]]
    assert agreement(models, steps, cache, pages=4).min() > 0.99


def reduced() -> ModelSpec:
    """V4-Flash at its real widths with four layers: window, CSA twice, HCA; one of them takes experts by a table."""
    spec = release("DeepSeek-V4-Flash")
    assert spec.compressed is not None
    return replace(
        spec,
        layers=4,
        mtp_layers=0,
        compressed=replace(spec.compressed, ratios=(0, 4, 128, 4)),
        moe=replace(spec.moe, hash_layers=1),
    )


@on_a_gpu
def test_real_widths(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose queries select (750 rows, top-k 512), one more, and decode in batches of two."""
    models = both(reduced(), device, monkeypatch)
    ids = prompt(4000, models[0].spec.vocab)
    steps: list[Work] = [[(0, ids[:3000])], [(0, ids[3000:3001]), (1, ids[:130])], [(0, ids[3001:3600])]]
    steps += [[(0, [i]), (1, [i + 1])] for i in range(5, 9)]
    found = agreement(models, steps, "fp8", pages=24)
    assert found.min() > 0.95
    assert found.median() > 0.98


@on_a_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch says so of it once a process
def test_nothing_waits_for_the_device_and_graphs_are_the_launches(device: str) -> None:
    from longread.kernels.places import Chunk, Rows

    model = made(reduced(), device)
    driver = Driver(model.spec, model, dtype=torch.bfloat16, pages=16, slots=2, cache="fp8", device=device)
    int32 = {"dtype": torch.int32, "device": device}
    table = torch.arange(1, 13, **int32)  # type: ignore[call-overload]
    chunk = Chunk(torch.tensor([0, 2500, 1, 0], **int32), torch.arange(2560, **int32), table, 3072)  # type: ignore[call-overload]
    chunk.positions[2500:] = -1
    ids = torch.tensor(prompt(2560, model.spec.vocab), device=device)
    positions = torch.tensor([2500, -1], **int32)  # type: ignore[call-overload]
    rows = Rows(positions, torch.tensor([1, 0], **int32), table.repeat(2, 1), 3072)  # type: ignore[call-overload]
    for mode in ("default", "error"):  # the first run compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model.chunk(ids, chunk, driver.state, last=True, saves=[(1024, 0, 0), (2048, 0, 0)])
            eager = model.rows(ids[:2], rows, driver.state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.rows(ids[:2], rows, driver.state)
    graph.replay()
    assert captured.isfinite().all()
    assert functional.cosine_similarity(captured[0], eager[0], dim=0) > 0.99  # cut products are summed in any order
