"""From options to a configuration with reasons, or a refusal with limit and value."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.kv.host import RING_SHARE, HostArena
from longread.kv.persist import QUEUE_BYTES
from longread.plan.machine import Machine
from longread.plan.memory import HOST_RING_SHARE, STORE_QUEUE_BYTES, host_cache_bytes, memory_plan
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, Slo
from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError, UnsupportedModelError
from longread.spec.loaded import loaded_bytes
from longread.spec.release_configs import V2_LITE, V4_FLASH
from longread.spec.releases import release
from longread.spec.state import PAGE_TOKENS, pages_for

GIB = 2**30
NOWHERE = memoryview(bytearray(2**22))
LAPTOP = Machine(total_bytes=32 * GIB, available_bytes=24 * GIB, limited_by="the machine")
TINY_V2 = spec_from_config(
    V2_LITE
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "vocab_size": 500,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 8192,
    }
)
TINY_V4 = spec_from_config(
    {k: v for k, v in V4_FLASH.items() if k not in ("quantization_config", "expert_dtype")}
    | {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "compress_ratios": [0, 4, 128, 4],
        "num_nextn_predict_layers": 0,
        "vocab_size": 500,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "num_hash_layers": 1,
        "max_position_embeddings": 8192,
    }
)


def test_a_small_model_takes_its_own_limits() -> None:
    config = resolve(EngineOptions(model="/models/tiny"), TINY_V2, LAPTOP)
    assert (config.dtype, config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (
        "float32",
        8192,
        16,
        2048,
    )
    assert config.num_pages == 2 * 16 * pages_for(8192)  # more would never be looked at
    assert config.num_snapshots == 0  # MLA has nothing to snapshot
    assert config.served_model_name == "tiny"
    reasons = {c.option: c.reason for c in config.choices}
    assert reasons["max_model_len"] == "the model's own limit"
    assert "correctness reference" in reasons["dtype"]


def test_every_open_value_has_a_reason_and_no_given_one() -> None:
    open_names = {"device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"}
    chosen = {c.option for c in resolve(EngineOptions(model="m"), TINY_V4, LAPTOP).choices}
    assert open_names | {"num_pages", "num_snapshots", "served_model_name"} == chosen
    given_ = EngineOptions("m", "n", "bfloat16", 1024, 2, 64, GIB, device="cpu")
    config = resolve(given_, TINY_V4, LAPTOP)
    assert {c.option for c in config.choices} == {"num_pages", "num_snapshots"}
    assert (config.dtype, config.max_model_len, config.num_slots) == ("bfloat16", 1024, 2)
    assert all(c.reason and c.value for c in config.choices)


def test_targets_bound_the_step_and_are_said_to() -> None:
    def told(**options: object) -> tuple[object, dict[str, str]]:
        config = resolve(EngineOptions("m", **options), TINY_V2, LAPTOP)  # type: ignore[arg-type]
        return config.step_target, {c.option: c.value for c in config.choices if "target" in c.option}

    assert told() == (None, {})
    assert told(step_target=0.1) == (0.1, {})
    assert told(step_target="auto") == ("auto", {"step_target": "auto"})
    assert told(step_target="auto", slo=Slo(tpot=0.05)) == (
        "auto",
        {"step_target": "auto", "decode_step_target": "50ms"},
    )
    assert told(step_target="auto", slo=Slo(ttft=1.0)) == (0.25, {"step_target": "250ms"})
    assert told(slo=Slo(ttft=1.0), step_target=0.4) == (0.25, {"step_target": "250ms"})
    assert told(slo=Slo(tpot=0.05), step_target=0.1) == (0.1, {"decode_step_target": "50ms"})
    assert told(slo=Slo(2.0, 0.05)) == (0.5, {"step_target": "500ms", "decode_step_target": "50ms"})


def test_the_cache_is_said_to_be_as_large_as_it_is() -> None:
    def said(machine: Machine, spec=TINY_V2) -> tuple[str, str]:
        (choice,) = [
            c for c in resolve(EngineOptions("m"), spec, machine).choices if c.option == "kv_cache_memory_bytes"
        ]
        return choice.value, choice.reason

    whole = resolve(EngineOptions("m"), TINY_V2, LAPTOP).memory.kv_cache
    value, reason = said(LAPTOP)
    assert value == f"{whole / 2**20:.3g} MiB"
    assert reason.startswith("twice 16 sequences of full length, more is never used; within the default of 4 GiB")
    value, reason = said(replace(LAPTOP, available_bytes=825 * 2**20))
    assert reason.startswith("what 90% of the 825 MiB available leaves")
    value, reason = said(replace(LAPTOP, total_bytes=256 * GIB, available_bytes=200 * GIB), release("DeepSeek-V2-Lite"))
    assert value == "3.99 GiB" and reason.startswith("the default of 4 GiB")  # whole pages


def test_v4_keeps_snapshots_unless_prefix_caching_is_off() -> None:
    assert resolve(EngineOptions("m"), TINY_V4, LAPTOP).num_snapshots == 96
    off = EngineOptions("m", enable_prefix_caching=False)
    assert resolve(off, TINY_V4, LAPTOP).num_snapshots == 0


def test_the_prediction_is_the_plan_of_what_was_resolved() -> None:
    config = resolve(EngineOptions("m"), TINY_V4, LAPTOP)
    plan = memory_plan(
        TINY_V4,
        dtype=config.dtype,
        weight_bytes=loaded_bytes(TINY_V4, config.dtype),
        num_pages=config.num_pages,
        num_slots=config.num_slots,
        num_snapshots=config.num_snapshots,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    assert plan == config.memory


def test_a_large_document_model_gets_what_the_cache_holds() -> None:
    big = replace(LAPTOP, total_bytes=256 * GIB, available_bytes=200 * GIB)
    config = resolve(EngineOptions("m"), release("DeepSeek-V2-Lite"), big)
    assert config.max_model_len == config.num_pages * PAGE_TOKENS < 163840
    more = EngineOptions("m", kv_cache_memory_bytes=20 * GIB)
    assert resolve(more, release("DeepSeek-V2-Lite"), big).max_model_len == 163840


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (EngineOptions("m", max_model_len=8193), ["8193", "8192", "lower it"]),
        (EngineOptions("m", max_num_seqs=64, max_num_batched_tokens=32), ["64", "32"]),
        (EngineOptions("m", kv_cache_memory_bytes=10_000), ["10000|9.77", "lower max_num_seqs"]),
        (EngineOptions("m", kv_cache_memory_bytes=100 * GIB, max_num_seqs=16384), ["GiB", "available"]),
        (
            EngineOptions("m", num_gpu_blocks_override=3, max_num_seqs=4),
            ["3 pages", "max_num_seqs=4", "raise num_gpu_blocks"],
        ),
        (
            EngineOptions("m", num_gpu_blocks_override=16, max_model_len=8192),
            ["8192", "32 pages", "16", "raise num_gpu_blocks"],
        ),
        (EngineOptions("m", num_gpu_blocks_override=16, kv_cache_memory_bytes=GIB), ["not both"]),
        (EngineOptions("m", num_gpu_blocks_override=10**9), ["TiB", "available"]),
        (EngineOptions("m", snapshot_interval=300), ["300", "256"]),
    ],
)
def test_what_does_not_fit_is_refused_with_limit_and_value(options: EngineOptions, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(options, TINY_V2, LAPTOP)
    for text in says:
        assert any(part in str(caught.value) for part in text.split("|")), str(caught.value)


def test_weights_larger_than_the_machine_are_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match=r"weights 2\.44 TiB.*24 GiB are available"):
        resolve(EngineOptions("m"), release("DeepSeek-V3"), LAPTOP)


def test_a_cache_without_room_for_one_snapshot_is_refused() -> None:
    options = EngineOptions("m", kv_cache_memory_bytes=4 * 2**20, max_num_seqs=1)
    with pytest.raises(ConfigError, match="enable_prefix_caching=false"):
        resolve(options, TINY_V4, LAPTOP)
    assert resolve(replace(options, enable_prefix_caching=False), TINY_V4, LAPTOP).num_pages > 0


def test_models_that_do_not_run_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="deepseek_v41"):
        resolve(EngineOptions("m"), release("DeepSeek-V4.1-Flash"), LAPTOP)


OPTIONAL = st.none() | st.integers(1, 2**40) | st.integers(1, 4096)


@given(
    st.sampled_from([TINY_V2, TINY_V4]),
    OPTIONAL,
    OPTIONAL,
    OPTIONAL,
    OPTIONAL,
    OPTIONAL,
    st.booleans(),
    st.integers(0, 64),
)
def test_a_resolved_configuration_fits_and_is_consistent(
    spec, length, seqs, batched, kv_bytes, blocks, caching, gib
) -> None:
    options = EngineOptions("m", None, "auto", length, seqs, batched, kv_bytes, blocks, caching)
    machine = Machine(64 * GIB, gib * GIB, "the machine")
    try:
        config = resolve(options, spec, machine)
    except ConfigError:
        return
    assert config.memory.total <= machine.available_bytes
    assert config.num_pages >= config.max_num_seqs == config.num_slots
    assert 1 <= config.max_model_len <= min(spec.max_position, config.num_pages * PAGE_TOKENS)
    assert config.max_num_batched_tokens >= config.max_num_seqs
    assert length in (None, config.max_model_len)
    if blocks is None and kv_bytes is not None:
        assert config.memory.kv_cache <= kv_bytes


def test_tiers_are_planned_and_refused_where_they_make_no_sense() -> None:
    options = EngineOptions(model="/models/tiny", host_cache_size=GIB, store="/data/store")
    config = resolve(options, TINY_V4, LAPTOP)
    assert (config.store, config.store_size, config.host_cache_size) == ("/data/store", 20 * GIB, GIB)
    assert "store_size" in {choice.option for choice in config.choices}
    without = resolve(EngineOptions(model="/models/tiny"), TINY_V4, LAPTOP)
    assert 0.99 * GIB < config.memory.host_cache <= GIB and config.memory.store_buffers > 256 * 2**20
    assert (without.memory.host_cache, without.memory.store_buffers, without.store_size) == (0, 0, 0)
    assert config.memory.allocated == without.memory.allocated + config.memory.host_cache
    for wrong, says in [
        ({"enable_prefix_caching": False}, "needs the prefix cache"),
        ({"store": None, "store_size": GIB}, "without a store"),
        ({"host_cache_size": 64 * GIB}, "are available"),
    ]:
        with pytest.raises(ConfigError, match=says):
            resolve(replace(options, **wrong), TINY_V4, LAPTOP)


@given(size=st.integers(0, 2**22), page=st.integers(1, 2**16), slot=st.integers(0, 2**16))
def test_the_host_cache_is_as_large_as_planned(size: int, page: int, slot: int) -> None:
    arena = HostArena(page, slot, size, lambda count: NOWHERE[:count])
    assert arena.nbytes == host_cache_bytes(page, slot, size)
    assert (STORE_QUEUE_BYTES, HOST_RING_SHARE) == (QUEUE_BYTES, RING_SHARE)
