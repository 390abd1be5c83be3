"""Parameters, bytes and FLOPs against published totals (see each model's card and checkpoint index)."""

from functools import cache

import pytest

from longread.spec.config_json import spec_from_config
from longread.spec.count import (
    active_parameters,
    checkpoint_bytes,
    fixed_bytes_per_request,
    flops_by_part,
    flops_per_token,
    kv_bytes_per_token,
    parameters,
    parameters_by_part,
    prompt_parameters,
    row_groups,
    tensor_count,
)
from longread.spec.errors import ConfigError
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.loaded import is_drafter, loaded_bytes
from longread.spec.release_configs import V4_FLASH
from longread.spec.releases import release
from longread.spec.state import PAGE_TOKENS, state_groups


@pytest.mark.parametrize(
    ("name", "payload", "tensors"),
    [
        ("DeepSeek-V3", 688_574_839_360, 91_991),
        ("DeepSeek-V3.1", 688_574_839_360, 91_991),
        ("DeepSeek-V4-Flash", 159_609_485_896, 69_187),
        ("DeepSeek-V4-Flash-0731", 166_878_536_440, 72_317),
        ("DeepSeek-V4-Pro", 864_704_792_696, 145_116),
        ("DeepSeek-V4-Pro-0813", 892_727_580_904, 149_782),
        ("DeepSeek-V4.1-Flash", 510_286_023_000, 96_085),
    ],
)
def test_checkpoints_to_the_byte(name: str, payload: int, tensors: int) -> None:
    spec = release(name)
    assert checkpoint_bytes(spec) == payload
    assert tensor_count(spec) == tensors


@pytest.mark.parametrize(
    ("name", "gigabytes", "digits"),
    [("DeepSeek-V2-Lite", 31.4, 1), ("DeepSeek-V2", 471, 0), ("DeepSeek-V3.2", 689.47, 2)],
)
def test_checkpoints_known_in_gigabytes(name: str, gigabytes: float, digits: int) -> None:
    assert round(checkpoint_bytes(release(name)) / 1e9, digits) == gigabytes


def test_v32_adds_seven_tensors_a_block() -> None:
    assert tensor_count(release("DeepSeek-V3.2")) == 92_425


def test_base_models_have_fp8_experts_and_float32_scales() -> None:
    quant = {k: v for k, v in V4_FLASH["quantization_config"].items() if k != "scale_fmt"}
    spec = spec_from_config(V4_FLASH | {"expert_dtype": "fp8", "quantization_config": quant})
    assert checkpoint_bytes(spec) / 1e9 == pytest.approx(292.6, abs=0.05)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepSeek-V2-Lite", 15.71),
        ("DeepSeek-V2", 235.74),
        ("DeepSeek-V3", 671.03),
        ("DeepSeek-V3.2", 671.88),
        ("DeepSeek-V4-Flash", 284.33),
        ("DeepSeek-V4-Pro", 1573.00),
        ("DeepSeek-V4.1-Flash", 551.88),
    ],
)
def test_parameters(name: str, billions: float) -> None:
    assert round(parameters(release(name)) / 1e9, 2) == billions


def test_parameters_outside_the_backbone() -> None:
    parts = parameters_by_part(release("DeepSeek-V4.1-Flash"))
    assert round(parts["engram_table"] / 1e9, 2) == 196.61
    pro = release("DeepSeek-V4-Pro")
    assert round((parameters(pro) + parameters_by_part(pro)["mtp"]) / 1e9, 1) == 1598.8
    flash = parameters_by_part(release("DeepSeek-V4-Flash"))
    assert sum(v for k, v in flash.items() if k != "mtp") == parameters(release("DeepSeek-V4-Flash"))


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        ("DeepSeek-V2-Lite", 2.45, 2),
        ("DeepSeek-V2", 20.9, 1),
        ("DeepSeek-V3", 36.6, 1),
        ("DeepSeek-V3.2", 37.5, 1),
        ("DeepSeek-V4-Flash", 13.27, 2),
        ("DeepSeek-V4-Pro", 48.85, 2),
        ("DeepSeek-V4.1-Flash", 16.13, 2),
    ],
)
def test_active_parameters(name: str, billions: float, digits: int) -> None:
    assert round(active_parameters(release(name)) / 1e9, digits) == billions


def test_a_v41_prompt_token_meets_half_the_model() -> None:
    v41, v3 = release("DeepSeek-V4.1-Flash"), release("DeepSeek-V3")
    assert round(prompt_parameters(v41) / 1e9, 1) == 7.9
    assert prompt_parameters(v3) == active_parameters(v3) - v3.vocab * v3.hidden


@pytest.mark.parametrize(
    ("name", "context", "gflops", "digits"),
    [
        ("DeepSeek-V2-Lite", 0, 4.9, 1),
        ("DeepSeek-V2-Lite", 8192, 12.6, 1),
        ("DeepSeek-V2-Lite", 131072, 128, 0),
        ("DeepSeek-V2", 0, 41.7, 1),
        ("DeepSeek-V2", 8192, 179, 0),
        ("DeepSeek-V2", 131072, 2232, 0),
        ("DeepSeek-V3", 0, 73.2, 1),
        ("DeepSeek-V3", 8192, 212, 0),
        ("DeepSeek-V3", 131072, 2300, 0),
        ("DeepSeek-V3", 1048576, 17889, 0),
        ("DeepSeek-V3.2", 0, 75.0, 1),
        ("DeepSeek-V3.2", 8192, 118, 0),
        ("DeepSeek-V3.2", 131072, 241, 0),
        ("DeepSeek-V3.2", 1048576, 1158, 0),
        ("DeepSeek-V4-Flash", 0, 26.5, 1),
        ("DeepSeek-V4-Flash", 8192, 29.5, 1),
        ("DeepSeek-V4-Flash", 131072, 42.6, 1),
        ("DeepSeek-V4-Flash", 1048576, 140, 0),
        ("DeepSeek-V4-Pro", 0, 97.7, 1),
        ("DeepSeek-V4-Pro", 8192, 109, 0),
        ("DeepSeek-V4-Pro", 131072, 132, 0),
        ("DeepSeek-V4-Pro", 1048576, 303, 0),
        ("DeepSeek-V4.1-Flash", 0, 32.3, 1),
    ],
)
def test_flops_table(name: str, context: int, gflops: float, digits: int) -> None:
    assert round(flops_per_token(release(name), context) / 1e9, digits) == gflops


@pytest.mark.parametrize(("name", "index", "hca"), [("DeepSeek-V4-Flash", 90, 21), ("DeepSeek-V4-Pro", 129, 67)])
def test_what_a_million_tokens_cost_v4(name: str, index: int, hca: int) -> None:
    parts = flops_by_part(release(name), 2**20)
    assert (round(parts["index"] / 1e9), round(parts["hca"] / 1e9)) == (index, hca)


@pytest.mark.parametrize(
    ("name", "packing", "per_token"),
    [
        ("DeepSeek-V2-Lite", "bfloat16", 31_104),
        ("DeepSeek-V2", "bfloat16", 69_120),
        ("DeepSeek-V3", "bfloat16", 70_272),
        ("DeepSeek-V3", "fp8", 35_136),
        ("DeepSeek-V3", "fp8_ds_mla", 40_016),
        ("DeepSeek-V3.2", "bfloat16", 85_888),
        ("DeepSeek-V3.2", "fp8_ds_mla", 48_068),
        ("DeepSeek-V4-Flash", "bfloat16", 6_880),
        ("DeepSeek-V4-Flash", "fp8_ds_mla", 3_850.25),
        ("DeepSeek-V4-Flash", "fp8_ds_mla_mxfp4", 3_514.25),
        ("DeepSeek-V4-Pro", "bfloat16", 9_848),
        ("DeepSeek-V4-Pro", "fp8_ds_mla", 5_511.4375),
        ("DeepSeek-V4-Pro", "fp8_ds_mla_mxfp4", 5_031.4375),
        ("DeepSeek-V4.1-Flash", "bfloat16", 3_200),
        ("DeepSeek-V4.1-Flash", "nvfp4", 890),
        ("DeepSeek-V4.1-Flash", "fp8_ds_mla", 1_790),
    ],
)
def test_cache_bytes_per_token(name: str, packing: str, per_token: float) -> None:
    assert sum(kv_bytes_per_token(release(name), packing).values()) == per_token


def test_cache_bytes_by_group() -> None:
    assert kv_bytes_per_token(release("DeepSeek-V4-Flash")) == {"csa": 5376, "index": 1344, "hca": 160}


@pytest.mark.parametrize(
    ("name", "packing", "window"),
    [
        ("DeepSeek-V4-Flash", "fp8_ds_mla", 43 * 128 * 584),
        ("DeepSeek-V4-Pro", "fp8_ds_mla", 61 * 128 * 584),
        ("DeepSeek-V4.1-Flash", "nvfp4", 40 * 128 * 528),
    ],
)
def test_window_bytes_per_request(name: str, packing: str, window: int) -> None:
    assert fixed_bytes_per_request(release(name), packing)["window"] == window


@pytest.mark.parametrize(("name", "megabytes"), [("DeepSeek-V4-Flash", 1.8), ("DeepSeek-V4-Pro", 2.6)])
def test_compressor_state_with_online_hca(name: str, megabytes: float) -> None:
    fixed = fixed_bytes_per_request(release(name))
    assert int((sum(fixed.values()) - fixed["window"]) / 1e5) / 10 == megabytes


def test_mla_keeps_nothing_fixed_and_unknown_packings_are_refused() -> None:
    v3 = release("DeepSeek-V3")
    assert fixed_bytes_per_request(v3) == {}
    with pytest.raises(ConfigError, match="fp8_ds_mla"):
        kv_bytes_per_token(v3, "int4")
    with pytest.raises(ConfigError, match="latent"):
        kv_bytes_per_token(v3, "nvfp4")


@pytest.mark.parametrize(
    "name", ["DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"]
)
def test_state_groups_hold_what_is_counted(name: str) -> None:
    spec = release(name)
    counted, fixed = kv_bytes_per_token(spec, "bfloat16"), fixed_bytes_per_request(spec, "bfloat16")
    assert [g.name for g in row_groups(spec)] == [g.name for g in state_groups(spec) if g.kind == "rows"]
    for group in state_groups(spec):
        if group.kind == "rows":
            assert group.bytes_per_page(2) == counted[group.name] * PAGE_TOKENS
        else:
            assert group.bytes_per_slot(2) == fixed[group.name]


# --- the list itself ---


@cache
def tensors(name: str) -> tuple[TensorSpec, ...]:
    """A release's whole list, made once: it takes half a second."""
    return tuple(inventory(release(name)))


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3.2", "DeepSeek-V4-Flash-0731", "DeepSeek-V4.1-Flash"])
def test_names_are_unique_and_scales_follow_their_weight(name: str) -> None:
    names: set[str] = set()
    previous = None
    for tensor in tensors(name):
        assert tensor.name not in names
        names.add(tensor.name)
        if tensor.scale_of is not None:
            assert previous is not None and tensor.scale_of == previous.name
            assert tensor.part in ("scale", "mtp")
            assert len(tensor.shape) == len(previous.shape) == 2
        previous = tensor


def test_drafter_tensors_are_those_behind_the_backbone() -> None:
    for name in ("DeepSeek-V3", "DeepSeek-V4-Flash-0731"):  # the latter with DSpark
        spec = release(name)
        assert all((t.part == "mtp") == is_drafter(t.name, spec) for t in tensors(name))


def test_an_unquantised_checkpoint_has_no_scales_and_loads_as_large_as_it_is() -> None:
    spec = release("DeepSeek-V2-Lite")
    assert all(t.scale_of is None and t.dtype == "bfloat16" for t in inventory(spec))
    assert loaded_bytes(spec, "bfloat16") == checkpoint_bytes(spec)


def test_some_names_and_shapes_as_deepseek_writes_them() -> None:
    v3 = {t.name: t for t in tensors("DeepSeek-V3")}
    assert v3["model.layers.3.mlp.experts.255.down_proj.weight"].shape == (7168, 2048)
    assert v3["model.layers.0.self_attn.q_b_proj.weight_scale_inv"].shape == (192, 12)
    assert v3["model.layers.61.eh_proj.weight"].shape == (7168, 14336)
    assert (
        "model.layers.2.mlp.gate.weight" not in v3
        and v3["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == "float32"
    )
    v4 = {t.name: t for t in tensors("DeepSeek-V4-Flash")}
    assert v4["layers.0.ffn.experts.0.w1.weight"].shape == (2048, 2048)  # int8, two columns a byte
    assert v4["layers.0.ffn.experts.0.w1.scale"].shape == (2048, 128)
    assert v4["layers.2.ffn.gate.tid2eid"].shape == (129280, 6) and "layers.3.ffn.gate.bias" in v4
    assert v4["layers.2.attn.compressor.ape"].shape == (4, 1024) and v4["layers.3.attn.compressor.ape"].shape == (
        128,
        512,
    )
    assert (
        v4["layers.2.attn.indexer.wq_b.weight"].shape == (8192, 1024) and "layers.3.attn.indexer.wq_b.weight" not in v4
    )
    assert sum(name.startswith("mtp.0.") for name in v4) == 1575
