"""Stored tensors as they are, and random ones in their formats."""

import time
from pathlib import Path

import pytest
import torch

from longread.kernels.quant import ref as quant
from longread.spec.config_json import spec_from_config
from longread.spec.errors import MissingTensorError, NonFiniteTensorError
from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter
from longread.weights.fixture import random_weights, tiny_config, write_fixture
from longread.weights.random import random_native
from longread.weights.reader import Checkpoint
from longread.weights.safetensors import TORCH_DTYPES

KINDS = ("v3", "v4-flash")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantised", [False, True])
def test_native_tensors_are_those_that_load_decodes(tmp_path: Path, kind: str, quantised: bool) -> None:
    write_fixture(tmp_path / "m", kind, quantised=quantised)
    checkpoint = Checkpoint.open(tmp_path / "m")
    spec = spec_from_config(checkpoint.config)
    native, loaded = checkpoint.native(spec), checkpoint.load(spec, torch.float32)
    scales = {t.scale_of: t.name for t in inventory(spec) if t.scale_of is not None}
    for entry in inventory(spec):
        if is_drafter(entry.name, spec):
            with pytest.raises(MissingTensorError, match=r"no tensor"):
                native(entry.name)
            continue
        tensor = native(entry.name)
        assert tensor.dtype == TORCH_DTYPES[entry.dtype]
        assert tuple(tensor.shape) == entry.shape
        if entry.scale_of is not None:
            continue
        if entry.name in scales:
            scale = native(scales[entry.name])
            if entry.dtype == "int8":
                tensor = quant.dequantise_fp4(tensor, scale, torch.float32)
            else:
                assert spec.quant is not None
                tensor = quant.dequantise_fp8(tensor, scale, spec.quant.block, torch.float32)
        assert torch.equal(tensor.to(loaded[entry.name].dtype), loaded[entry.name])


@pytest.mark.parametrize("name", ["layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.scale", "layers.1.attn_norm.weight"])
def test_what_is_no_number_is_refused(tmp_path: Path, name: str) -> None:
    write_fixture(tmp_path / "m", "v4-flash", quantised=True)
    entry = Checkpoint.open(tmp_path / "m").tensors[name]
    with (tmp_path / "m" / entry.file).open("r+b") as file:
        file.seek(entry.start)
        file.write(b"\xff\xff")  # NaN in E4M3, E8M0 and bfloat16
    checkpoint = Checkpoint.open(tmp_path / "m")
    native = checkpoint.native(spec_from_config(checkpoint.config))
    native("layers.0.attn.wq_a.weight")
    with pytest.raises(NonFiniteTensorError, match=name):
        native(name)


@pytest.mark.parametrize("kind", KINDS)
def test_random_tensors_are_the_inventory(kind: str) -> None:
    spec = spec_from_config(tiny_config(kind, quantised=True))
    native, other = random_native(spec, "cpu", seed=3), random_native(spec, "cpu", seed=4)
    for entry in inventory(spec):
        if is_drafter(entry.name, spec):
            continue
        tensor = native(entry.name)
        assert tensor.dtype == TORCH_DTYPES[entry.dtype]
        assert tuple(tensor.shape) == entry.shape
        same = torch.equal(tensor.view(torch.uint8), native(entry.name).view(torch.uint8))
        assert same, "made anew, it is the same"
        if entry.elements > 100:
            assert not torch.equal(tensor.view(torch.uint8), other(entry.name).view(torch.uint8))
        if entry.dtype == "int64":
            assert all(len(set(row)) == len(row) for row in tensor.tolist())
            assert 0 <= int(tensor.min()) <= int(tensor.max()) < spec.moe.routed
        elif entry.dtype in ("float8_e4m3", "float32", "bfloat16"):
            assert tensor.float().isfinite().all()


def test_random_quantised_matrices_have_the_spread_of_plain_ones() -> None:
    overrides = {"hidden_size": 1024, "moe_intermediate_size": 512, "q_lora_rank": 512, "vocab_size": 64}
    spec = spec_from_config(tiny_config("v4-flash", quantised=True, num_hidden_layers=6, **overrides))
    plain = random_weights(spec_from_config(tiny_config("v4-flash", **overrides)), 0)
    native = random_native(spec, "cpu")
    assert spec.quant is not None
    for name in ("layers.1.ffn.experts.3.w1", "layers.1.ffn.experts.3.w2", "layers.2.attn.wq_a", "layers.0.attn.wo_b"):
        weight, scale = native(name + ".weight"), native(name + ".scale")
        if weight.dtype == torch.int8:
            found = quant.dequantise_fp4(weight, scale, torch.float32)
            assert len(scale.view(torch.uint8).unique()) == 2
        else:
            found = quant.dequantise_fp8(weight, scale, spec.quant.block, torch.float32)
        # Few scales of two powers each: what a matrix has of each varies.
        assert 0.6 < found.std() / plain[name + ".weight"].std() < 1.6


def test_a_layer_of_experts_is_quick() -> None:
    """24,576 tensors of 32 real layers take as many calls, so a call must not cost milliseconds."""
    spec = spec_from_config(tiny_config("v4-flash", quantised=True, n_routed_experts=256))
    native = random_native(spec, "cpu")
    begin = time.process_time()
    for expert in range(256):
        for part in ("w1", "w2", "w3"):
            native(f"layers.3.ffn.experts.{expert}.{part}.weight")
            native(f"layers.3.ffn.experts.{expert}.{part}.scale")
    assert time.process_time() - begin < 1.5  # measured 0.1 s
