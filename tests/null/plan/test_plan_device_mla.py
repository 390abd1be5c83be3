"""The memory plan of V2 and V3 on a GPU."""

import re
from dataclasses import replace

import pytest

from longread.plan.device_memory import choose_device, native_bytes, step_bytes
from longread.plan.device_mla import mla_step_bytes, unfit
from longread.plan.machine import Gpu, Machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.errors import ConfigError
from longread.spec.reduced import random_spec
from longread.spec.state import state_groups

GIB = 2**30
H200 = Gpu("NVIDIA H200", 143771 * 2**20, 139 * GIB, (9, 0))
HOST = Machine(128 * GIB, 100 * GIB, "the machine")
V3 = random_spec("DeepSeek-V3", "1+3")
DRAWN = EngineOptions("DeepSeek-V3", device="cuda", random_weights=True, layers="1+3")


def test_four_layers_fit_an_h200_and_all_do_not() -> None:
    config = resolve(DRAWN, V3, HOST, H200)
    assert (config.device, config.kv_cache, config.dtype) == ("cuda", "fp8", "bfloat16")
    assert (config.num_snapshots, config.max_model_len) == (0, 163840)
    assert config.memory.kv_pages == config.num_pages * 4 * 256 * 656
    with pytest.raises(ConfigError, match="weights alone"):
        resolve(replace(DRAWN, layers=None), random_spec("DeepSeek-V3"), HOST, H200)


def test_the_cache_is_packed_or_bfloat16() -> None:
    (packed,), (plain,) = state_groups(V3, "fp8"), state_groups(V3, "model")
    assert (packed.bytes_per_page(2), plain.bytes_per_page(2)) == (4 * 256 * 656, 4 * 256 * 2 * 576)
    given = replace(DRAWN, kv_cache_dtype="bfloat16", num_gpu_blocks_override=100)
    assert resolve(given, V3, HOST, H200).memory.kv_pages == 100 * plain.bytes_per_page(2)


def test_weights_are_near_the_stored_ones() -> None:
    """671 GB of FP8 and scales; W_kvb in bfloat16 adds a hundredth of a percent a layer."""
    whole = random_spec("DeepSeek-V3")
    assert 670e9 < native_bytes(whole) < 675e9
    assert native_bytes(replace(whole, mtp_layers=0)) == native_bytes(whole)


def test_a_long_chunks_scratch_does_not_grow_with_its_context() -> None:
    assert V3.mla is not None
    at = {(t, n): mla_step_bytes(V3, V3.mla, t, n) for t in (512, 8192) for n in (2048, 32768, 65536, 163840)}
    assert at[512, 2048] < at[512, 163840] < at[8192, 2048] < at[8192, 32768] < at[8192, 65536] == at[8192, 163840]
    # 16,384 keys and values of 128 heads at 192 + 128 numbers; queries of 8,192 tokens twice.
    assert at[8192, 163840] > 2 * (16384 * 128 * 320 + 2 * 8192 * 128 * 192)
    assert step_bytes(V3, 512, 2048, "fp8") == at[512, 2048]


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-V3.1"])
def test_public_models_sizes_are_the_kernels(name: str) -> None:
    spec = random_spec(name)
    assert spec.mla is not None
    assert unfit(spec, spec.mla, packed=True) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_lora_rank": 384}, "latents of 384"),
        ({"kv_lora_rank": 64}, "kv_cache_dtype=bfloat16 takes it"),
        ({"kv_lora_rank": 2048}, "kv_lora_rank 2048 of 128 heads is above 1024"),
        ({"qk_rope_head_dim": 8}, "64 and 8|512 and 8"),
        ({"v_head_dim": 96}, "values of 96"),
        ({"q_lora_rank": 200}, "q_lora_rank 200"),
        ({"qk_nope_head_dim": 100}, "keys of 164"),
        ({"qk_nope_head_dim": 256}, "keys of 320"),
    ],
)
def test_other_sizes_are_refused(changed: dict[str, int], words: str) -> None:
    assert V3.mla is not None
    odd = replace(V3, mla=replace(V3.mla, **changed))
    with pytest.raises(ConfigError, match=words):
        resolve(DRAWN, odd, HOST, H200)
    placed = choose_device(replace(DRAWN, device="auto"), odd, H200)
    assert placed.device == "cpu" and re.search(words, str(placed.reason))


def test_a_wide_latent_is_taken_packed() -> None:
    assert V3.mla is not None
    wide = replace(V3, mla=replace(V3.mla, kv_lora_rank=1024))
    assert resolve(DRAWN, wide, HOST, H200).device == "cuda"
    with pytest.raises(ConfigError, match="above 512; kv_cache_dtype=fp8 takes up to 1024"):
        resolve(replace(DRAWN, kv_cache_dtype="bfloat16"), wide, HOST, H200)


def test_more_experts_than_kernels_count_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_routed_experts 2048"):
        resolve(DRAWN, replace(V3, moe=replace(V3.moe, routed=2048)), HOST, H200)


def test_a_width_without_whole_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size 7100"):
        resolve(DRAWN, replace(V3, hidden=7100), HOST, H200)
    assert V3.mla is not None
    narrow = replace(V3, mla=replace(V3.mla, kv_lora_rank=64))
    assert resolve(replace(DRAWN, kv_cache_dtype="bfloat16"), narrow, HOST, H200).device == "cuda"
