"""The memory plan of V2 and V3 on a GPU."""

from dataclasses import replace

import pytest

from longread.plan.device_memory import native_bytes, step_bytes
from longread.plan.device_mla import mla_step_bytes
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
