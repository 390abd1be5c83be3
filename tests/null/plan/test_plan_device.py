"""Which device runs what, refusals, and the memory plan of a GPU."""

from dataclasses import replace

import pytest

from longread.plan.device_memory import choose_device, device_plan, native_bytes, step_bytes
from longread.plan.machine import Gpu, Machine, probe_gpu
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.errors import ConfigError
from longread.spec.reduced import random_spec
from longread.spec.releases import release
from longread.spec.state import state_groups

GIB = 2**30
H200 = Gpu("NVIDIA H200", 143771 * 2**20, 139 * GIB, (9, 0))
HOST = Machine(128 * GIB, 100 * GIB, "the machine")
FLASH = random_spec("DeepSeek-V4-Flash", "32")
DRAWN = EngineOptions("DeepSeek-V4-Flash", random_weights=True, layers="32")


def test_auto_takes_the_gpu_and_says_so() -> None:
    config = resolve(DRAWN, FLASH, HOST, H200)
    chosen = {c.option: c for c in config.choices}
    assert (config.device, config.kv_cache, config.dtype) == ("cuda", "fp8", "bfloat16")
    assert "NVIDIA H200" in chosen["device"].reason
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 8192)
    assert all(choice.reason for choice in config.choices)


@pytest.mark.parametrize(
    ("gpu", "options", "why"),
    [
        ("no driver", {}, "no driver"),
        (replace(H200, capability=(8, 0)), {}, "8.0"),
        (replace(H200, capability=(10, 0)), {}, "10.0"),
        (H200, {"dtype": "float32"}, "float32"),
    ],
)
def test_auto_takes_the_cpu_where_it_must_and_says_why(gpu: Gpu | str, options: dict[str, str], why: str) -> None:
    asked = replace(EngineOptions("m"), **options)  # type: ignore[arg-type]
    placed = choose_device(asked, FLASH, gpu)
    assert placed.device == "cpu"
    assert placed.reason is not None and why in placed.reason
    with pytest.raises(ConfigError, match="device=cuda"):
        choose_device(replace(asked, device="cuda"), FLASH, gpu)


def test_a_model_without_native_weights_stays_on_the_cpu() -> None:
    other = release("DeepSeek-V3.2")
    assert choose_device(EngineOptions("m"), other, H200).device == "cpu"
    with pytest.raises(ConfigError, match="deepseek_v32"):
        choose_device(EngineOptions("m", device="cuda"), other, H200)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"device": "cpu", "kv_cache_dtype": "bfloat16"}, "dtype=bfloat16"),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"layers": "4", "random_weights": False}, "random_weights"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_seqs=16"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization=0.5"),
        ({"num_gpu_blocks_override": 10**6}, "with the cache asked for"),
        ({"num_gpu_blocks_override": 64, "kv_cache_memory_bytes": GIB}, "not both"),
        ({"kv_cache_memory_bytes": 2**20}, "rings"),
        ({"host_cache_size": 200 * GIB}, "main memory"),
        ({"max_model_len": 2**21}, "max_model_len"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(replace(DRAWN, **options), FLASH, HOST, H200)  # type: ignore[arg-type]


def test_memory_in_use_by_others_is_not_planned_with() -> None:
    busy = replace(H200, free_bytes=60 * GIB)
    with pytest.raises(ConfigError, match="are free"):
        resolve(DRAWN, FLASH, HOST, busy)
    small = resolve(replace(DRAWN, layers="8"), random_spec("DeepSeek-V4-Flash", "8"), HOST, busy)
    assert small.memory.on_device <= 60 * GIB


@pytest.mark.parametrize(
    ("free", "share", "cure"),
    [
        (139, 0.1, "raise gpu_memory_utilization"),
        (20, None, "end those"),
        (20, 0.1, "end those"),
        (139, 0.85, "lower max_num_batched_tokens, max_num_seqs or the cache, or raise gpu_memory_utilization"),
    ],
)
def test_the_advice_names_what_stands_in_the_way(free: int, share: float | None, cure: str) -> None:
    """A larger GPU helps nobody whose own share, or another process, is too large for this one."""
    asked = replace(DRAWN, gpu_memory_utilization=share, num_gpu_blocks_override=100_000)
    with pytest.raises(ConfigError, match=cure) as refused:
        resolve(asked, FLASH, HOST, replace(H200, free_bytes=free * GIB))
    assert "larger GPU" not in str(refused.value)


def test_a_model_that_caches_nothing_is_refused() -> None:
    """Its pages would be of no bytes."""
    assert FLASH.compressed is not None
    ring = replace(FLASH, compressed=replace(FLASH.compressed, ratios=(0,) * FLASH.layers))
    for device, gpu in (("cuda", H200), ("cpu", "no driver")):
        with pytest.raises(ConfigError, match="compress_ratios"):
            resolve(replace(DRAWN, device=device), ring, HOST, gpu)  # type: ignore[arg-type]


def test_the_cache_takes_what_is_left() -> None:
    config = resolve(DRAWN, FLASH, HOST, H200)
    page = sum(group.bytes_per_page(2) for group in state_groups(FLASH, "fp8"))
    limit = 0.92 * H200.total_bytes
    assert limit - 2 * page < config.memory.on_device + config.memory.on_device % 1 <= limit
    # 15 CSA layers of 64 rows of 584 and 132 bytes, 15 HCA layers of 2 of 584.
    assert page == 15 * 64 * (584 + 132) + 15 * 2 * 584
    half = resolve(replace(DRAWN, kv_cache_dtype="bfloat16"), FLASH, HOST, H200)
    assert half.kv_cache == "model"
    assert 0.5 < half.num_pages / config.num_pages < 0.65


def test_native_bytes_are_the_checkpoints() -> None:
    """V4-Flash's safetensors without MTP, scales as kernels take them: between 1 and 1.01 times the stored bytes."""
    whole = random_spec("DeepSeek-V4-Flash")
    assert 145 * GIB < native_bytes(whole) < 147 * GIB


def test_a_step_grows_with_tokens_and_context() -> None:
    at = {(t, n): step_bytes(FLASH, t, n, "fp8") for t in (512, 8192) for n in (2048, 1 << 20)}
    assert at[512, 2048] < at[512, 1 << 20] < at[8192, 1 << 20]
    assert at[8192, 2048] < at[8192, 1 << 20]
    pools = {"num_pages": 10, "num_slots": 4, "num_snapshots": 2, "max_num_batched_tokens": 512, "max_model_len": 4096}
    plan = device_plan(FLASH, cache="fp8", **pools)  # type: ignore[arg-type]
    assert plan.on_device == plan.total
    assert plan.device_peak == plan.total - plan.runtime


@pytest.mark.parametrize(
    ("layers", "pages", "allocated", "peak", "reserved"),
    [
        ("8", 33792, 35_798_788_096, 37_547_546_624, 40_154_169_344),
        ("32", 24474, 134_568_647_680, 136_317_406_208, 139_290_738_688),
    ],
)
def test_the_plan_is_what_torch_counted_on_an_h200(
    layers: str, pages: int, allocated: int, peak: int, reserved: int
) -> None:
    """results/hopper-v4-flash-*.json: what was there at the start, the peak, and what the allocator held in the end."""
    spec = random_spec("DeepSeek-V4-Flash", layers)
    pools = {"num_slots": 8, "num_snapshots": 48, "max_num_batched_tokens": 8192, "max_model_len": 540672}
    plan = device_plan(spec, cache="fp8", num_pages=pages, **pools)  # type: ignore[arg-type]
    assert abs(plan.allocated / allocated - 1) < 0.01
    assert 0 <= plan.device_peak / peak - 1 < 0.03
    assert 0 <= plan.on_device / reserved - 1 < 0.03  # on_device also holds CUDA's context, which torch does not see


def test_hidden_gpus_are_no_gpus() -> None:
    assert probe_gpu("") == "CUDA_VISIBLE_DEVICES hides all GPUs"
    assert probe_gpu("-1") == "CUDA_VISIBLE_DEVICES hides all GPUs"
