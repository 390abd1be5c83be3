"""config.json -> ModelSpec: public models parse, and everything else ends as a named refusal."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.spec.config_json import read_config, require_runnable, spec_from_config
from longread.spec.errors import CheckpointError, ConfigError, UnsupportedModelError
from longread.spec.release_configs import CONFIGS, V2_LITE, V3, V4_FLASH, V4_FLASH_0731, V41_FLASH
from longread.spec.releases import label_for, release, release_names


def refused(config: dict[str, Any]) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(config)
    return caught.value


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    result = copy.deepcopy(config)
    *sections, key = path.split(".")
    target = result
    for section in sections:
        target = target[section]
    target[key] = value
    return result


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    result = copy.deepcopy(config)
    *sections, key = path.split(".")
    target = result
    for section in sections:
        target = target[section]
    del target[key]
    return result


@pytest.mark.parametrize("name", list(CONFIGS))
def test_public_configs_parse_and_are_recognised(name: str) -> None:
    spec = spec_from_config(CONFIGS[name])
    assert spec.label == name
    assert spec == release(name)
    assert (spec.mla is None) != (spec.compressed is None)


def test_every_release_name_resolves_and_shares_its_architecture() -> None:
    assert len({release(name).label for name in release_names()}) == len(CONFIGS)
    assert release("DeepSeek-R1-0528") == release("DeepSeek-V3") != release("DeepSeek-V3.1")
    with pytest.raises(ConfigError, match="DeepSeek-V9"):
        release("DeepSeek-V9")


def test_label_of_a_custom_shape_names_the_family() -> None:
    config = V3 | {"num_hidden_layers": 5}
    assert spec_from_config(config).label == "custom deepseek_v3"
    assert spec_from_config(config, label="mine").label == "mine"
    assert label_for(replace(release("DeepSeek-V3"), label="renamed")) == "DeepSeek-V3"


def test_harmless_keys_change_nothing() -> None:
    extra = {"transformers_version": "4.39.3", "use_cache": True, "initializer_range": 0.02, "auto_map": {"a": "b"}}
    assert spec_from_config(V2_LITE | extra) == release("DeepSeek-V2-Lite")


def test_drafter_entries_of_compress_ratios_are_not_layers() -> None:
    preview, dspark = spec_from_config(V4_FLASH), spec_from_config(V4_FLASH_0731)
    assert preview.compressed is not None and dspark.compressed is not None
    assert len(preview.compressed.ratios) == preview.layers == 43
    assert preview.compressed.ratios == dspark.compressed.ratios
    assert (preview.mtp_layers, dspark.mtp_layers) == (1, 3)  # the 0731 file still says num_nextn_predict_layers 1
    assert preview.dspark is None and dspark.dspark is not None and dspark.dspark.targets == (40, 41, 42)


def test_scale_format_says_how_scales_are_stored() -> None:
    quants = [release(n).quant for n in ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-V4-Flash")]
    stored = [(q.scale_format, q.power_of_two, q.experts) for q in quants if q is not None]
    assert stored == [("float32", False, "fp8"), ("float32", True, "fp8"), ("ue8m0", True, "fp4")]
    assert release("DeepSeek-V2").quant is None


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4.1-Flash"])
def test_models_that_can_only_be_planned_are_refused_to_run(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="planned for but not run"):
        require_runnable(release(name))


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3.1", "DeepSeek-V4-Flash-0731"])
def test_runnable_models_pass(name: str) -> None:
    require_runnable(release(name))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_no_key_has_a_default(name: str) -> None:
    """Dropping any key of DeepSeek's own files is refused by that name, except those that only confirm something."""
    confirming = {"architectures", "ep_size", "scale_fmt", "pad_token_id"}  # scale_fmt: absent means float32 scales
    absent_means_plain = {"quantization_config"} if "V4.1" not in name else set()
    config = CONFIGS[name]
    paths = [*config, *(f"{s}.{k}" for s, v in config.items() if isinstance(v, dict) for k in v)]
    for path in paths:
        key = path.rsplit(".", 1)[-1]
        confirming_type = key == "model_type" and "." in path
        if key in confirming or path in absent_means_plain or confirming_type:
            continue
        field = refused(without(config, path)).field
        # Without quantization_config's own expert_dtype the root's is the one to name, and the other way round.
        assert field == path or field.startswith(path + ".") or key == "expert_dtype", (path, field)


@pytest.mark.parametrize(
    ("config", "field", "says"),
    [
        (V3 | {"topk_methood": "x"}, "topk_methood", "topk_method"),
        (without(V3, "topk_method"), "topk_method", "noaux_tc"),
        (V3 | {"hidden_act": "gelu"}, "hidden_act", "silu"),
        (V3 | {"attention_bias": True}, "attention_bias", "False"),
        (V3 | {"tie_word_embeddings": True}, "tie_word_embeddings", "False"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq", "only 1"),
        (V3 | {"ep_size": 8}, "ep_size", "only 1"),
        (V3 | {"norm_topk_prob": False}, "norm_topk_prob", "only True"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
        (V3 | {"topk_method": "greedy"}, "topk_method", "noaux_tc"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads", "only 128"),
        (V3 | {"architectures": ["LlamaForCausalLM"]}, "architectures", "DeepseekV3ForCausalLM"),
        (V3 | {"n_group": 7}, "n_group", "divide"),
        (V3 | {"topk_group": 9}, "topk_group", "at most n_group"),
        (V3 | {"n_group": 256}, "n_group", "best two"),
        (V3 | {"num_experts_per_tok": 129}, "num_experts_per_tok", "128 experts kept"),
        (V3 | {"eos_token_id": [1, 2]}, "eos_token_id", "integer"),
        (V3 | {"eos_token_id": 129280}, "eos_token_id", "129279"),
        (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim", "even"),
        (V3 | {"rope_interleave": False}, "rope_interleave", "only True"),
        (V3 | {"model_type": "kimi_k2"}, "model_type", "deepseek_v3"),
        (without(V3, "model_type"), "model_type", "missing"),
        (changed(V3, "rope_scaling.type", "linear"), "rope_scaling.type", "yarn"),
        (changed(V3, "rope_scaling.mscale", 0.5), "rope_scaling.mscale", "mscale_all_dim"),
        (changed(V3, "rope_scaling.attention_factor", 1.0), "rope_scaling.attention_factor", "not a known key"),
        (changed(V3, "quantization_config.quant_method", "awq"), "quantization_config.quant_method", "fp8"),
        (changed(V3, "quantization_config.weight_block_size", [128]), "quantization_config.weight_block_size", "two"),
        (changed(V3, "quantization_config", None), "quantization_config", "object"),
        (V2_LITE | {"n_group": 8, "topk_group": 3}, "n_group", "only 1"),
        (V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob", "only False"),
        (V2_LITE | {"topk_method": "noaux_tc"}, "topk_method", "greedy"),
        (V2_LITE | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers", "not a known key"),
        (V4_FLASH | {"compress_ratios": [0] * 42}, "compress_ratios", "42 entries for 43"),
        (V4_FLASH | {"compress_ratios": [0] * 43}, "num_nextn_predict_layers", "0 trailing"),
        (V4_FLASH | {"compress_ratios": [8] + [0] * 43}, "compress_ratios[0]", "(0, 4, 128)"),
        (V4_FLASH | {"compress_ratios": [0] * 43 + [4]}, "compress_ratios[43]", "(0,)"),
        (V4_FLASH | {"compress_ratios": "0,4"}, "compress_ratios", "list"),
        (V4_FLASH | {"compress_ratios": [0, True] + [0] * 42}, "compress_ratios[1]", "integer"),
        (V4_FLASH | {"num_key_value_heads": 64}, "num_key_value_heads", "only 1"),
        (V4_FLASH | {"n_group": 8}, "n_group", "not a known key"),
        (V4_FLASH | {"vision_layers": 32}, "vision_layers", "not a known key"),
        (V4_FLASH | {"expert_dtype": "int4"}, "expert_dtype", "fp4, fp8"),
        (without(V4_FLASH, "quantization_config"), "expert_dtype", "no quantization_config"),
        (V4_FLASH | {"hidden_size": 4090}, "hidden_size", "multiple of 32"),
        (V4_FLASH | {"o_groups": 7}, "o_groups", "divide"),
        (V4_FLASH | {"index_head_dim": 32}, "index_head_dim", "at least"),
        (V4_FLASH | {"num_hash_layers": 44}, "num_hash_layers", "between 0 and 43"),
        (V4_FLASH | {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers", "trailing"),
        (changed(V41_FLASH, "text_config.kv_source_layer_ids", [2, 8]), "text_config.candidate_source_layer_id", "20"),
        (changed(V41_FLASH, "text_config", []), "text_config", "object"),
        (V41_FLASH | {"hidden_size": 5120}, "hidden_size", "not a known key"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], field: str, says: str) -> None:
    error = refused(config)
    assert error.field == field
    assert says in str(error)
    assert f"config.json: {field}" in str(error)


@pytest.mark.parametrize(
    "value", [True, 1.0, -1, 0, 2**31, pytest.param(10**5000, id="huge"), "7168", None, [], {}, float("nan"), 1e400]
)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "n_routed_experts", "kv_lora_rank"])
def test_sizes_take_positive_integers_only(key: str, value: object) -> None:
    assert refused(V3 | {key: value}).field == key


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), -1.0, 0.0, "1e-6", None, 10**400, [1e-6]])
@pytest.mark.parametrize("key", ["rms_norm_eps", "routed_scaling_factor"])
def test_numbers_are_finite_and_positive(key: str, value: object) -> None:
    assert refused(V3 | {key: value}).field == key


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_only_an_object_is_a_config(value: Any) -> None:
    with pytest.raises(CheckpointError, match="not an object"):
        spec_from_config(value)


# --- reading the file ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "not an object"),
        ("3", "not an object"),
        ("", "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"a": ' + "[" * 200_000, "nested too deep"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_a_file_that_is_not_a_config_is_a_checkpoint_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_config(tmp_path)


def test_missing_binary_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint folder needs"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="UTF-8"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(CheckpointError, match="at most"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError):
        read_config(tmp_path / "config.json" / "config.json")


def test_folder_and_file_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == V3


# --- anything at all ---

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def paths_of(config: dict[str, Any]) -> list[str]:
    nested = [f"{s}.{k}" for s, v in config.items() if isinstance(v, dict) for k in v]
    return sorted([*config, *nested])


MUTATION = st.sampled_from(sorted(CONFIGS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(st.tuples(st.sampled_from(paths_of(CONFIGS[name])), JUNK), min_size=1, max_size=3),
        st.lists(st.sampled_from(paths_of(CONFIGS[name])), max_size=1),
    )
)


@given(MUTATION)
def test_a_mutated_config_is_a_spec_or_a_checkpoint_error(
    case: tuple[str, list[tuple[str, object]], list[str]],
) -> None:
    name, changes, drops = case
    config = copy.deepcopy(CONFIGS[name])
    for path, value in changes:
        *sections, key = path.split(".")
        target: Any = config
        for section in sections:
            target = target.get(section) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[key] = value
    for path in drops:
        if "." not in path:
            config.pop(path, None)
    try:
        spec = spec_from_config(config)
    except CheckpointError as error:
        assert len(str(error)) < 600
    else:
        assert spec.layers > 0


@given(
    st.dictionaries(st.text(max_size=8) | st.integers() | st.none(), JUNK, max_size=5), st.sampled_from(sorted(CONFIGS))
)
def test_junk_keys_are_checkpoint_errors(junk: dict[Any, object], name: str) -> None:
    for config in (junk, CONFIGS[name] | junk, {"model_type": CONFIGS[name]["model_type"]} | junk):
        if config == CONFIGS[name]:
            continue
        with pytest.raises(CheckpointError):
            spec_from_config(config)
