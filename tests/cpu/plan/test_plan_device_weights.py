"""The plan's bytes of V2's and V3's weights on a device are those of the loaded tensors, to the byte."""

from pathlib import Path

import pytest
import torch

from longread.cli.checkpoint import locate
from longread.engine.load import _tensor_bytes
from longread.models.native_v3 import NativeV3
from longread.plan.device_memory import native_bytes
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.model import ModelSpec
from longread.weights.fixture import tiny_config
from longread.weights.random import random_native

SPECS = {
    "v2-lite": spec_from_config(tiny_config("v2-lite")),
    "v3": spec_from_config(tiny_config("v3")),
    "v3 in FP8": spec_from_config(tiny_config("v3", quantised=True)),
    "F beyond a block": spec_from_config(tiny_config("v3", quantised=True, moe_intermediate_size=160, q_lora_rank=200)),
    "F beyond a block, plain": spec_from_config(tiny_config("v3", moe_intermediate_size=160)),
    "reader": spec_from_config(read_config(Path(locate("reader-v3")))),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bytes(spec: ModelSpec) -> None:
    model = NativeV3(spec, random_native(spec, "cpu"), torch.bfloat16, "cpu")
    assert _tensor_bytes(model) == native_bytes(spec)
