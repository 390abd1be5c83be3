"""Sizes of V4 models that a GPU's kernels do not take are refused before anything is loaded."""

import re
from dataclasses import replace

import pytest

from longread.plan.device_memory import choose_device
from longread.plan.machine import Gpu, Machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError
from longread.spec.model import ModelSpec
from longread.spec.reduced import random_spec
from longread.spec.release_configs import CONFIGS

GIB = 2**30
H200 = Gpu("NVIDIA H200", 143771 * 2**20, 139 * GIB, (9, 0))
HOST = Machine(128 * GIB, 100 * GIB, "the machine")
DRAWN = EngineOptions("DeepSeek-V4-Flash", device="cuda", random_weights=True, layers="8")


def flash(**changed: object) -> ModelSpec:
    return spec_from_config(CONFIGS["DeepSeek-V4-Flash"] | changed, label="odd")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("DeepSeek-V4-")])
def test_public_models_are_taken(name: str) -> None:
    assert choose_device(EngineOptions(name, device="cuda"), random_spec(name), H200).device == "cuda"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sliding_window": 32}, "sliding_window 32 is not 128"),
        ({"sliding_window": 256}, "sliding_window 256 is not 128"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"qk_rope_head_dim": 48}, "qk_rope_head_dim 48"),
        ({"hc_mult": 3}, "hc_mult 3"),
        ({"hidden_size": 4000}, "hidden_size 4000 is no multiple of 128"),
        ({"moe_intermediate_size": 2016}, "moe_intermediate_size 2016 is no multiple of 128"),
        ({"q_lora_rank": 1000}, "q_lora_rank 1000 is no multiple of 128"),
        ({"o_lora_rank": 1000}, "o_lora_rank 1000 is no multiple of 128"),
        ({"n_routed_experts": 2048}, "n_routed_experts 2048 are more than 1024"),
        ({"index_n_heads": 48}, "index_n_heads 48"),
        ({"index_head_dim": 96}, "index_head_dim 96"),
        ({"index_topk": 2048}, "index_topk 2048 of 1048576 tokens"),
    ],
)
def test_other_sizes_are_refused(changed: dict[str, object], words: str) -> None:
    odd = flash(**changed)
    with pytest.raises(ConfigError, match=words):
        resolve(DRAWN, odd, HOST, H200)
    placed = choose_device(replace(DRAWN, device="auto"), odd, H200)
    assert placed.device == "cpu" and re.search(words, str(placed.reason))


@pytest.mark.parametrize(("top_k", "takes"), [(2048, 32768), (1024, 1048576), (512, 2097152), (20000, 80000)])
def test_a_choice_of_rows_bounds_the_context(top_k: int, takes: int) -> None:
    odd = flash(index_topk=top_k, max_position_embeddings=1 << 24)
    given = replace(DRAWN, max_model_len=takes // 256 * 256)
    assert choose_device(given, odd, H200).device == "cuda"
    with pytest.raises(ConfigError, match=f"max_model_len={takes}"):
        choose_device(replace(given, max_model_len=takes + 256), odd, H200)
