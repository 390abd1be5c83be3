"""Tiny random checkpoints in DeepSeek's own formats, for tests and demonstrations.

Knows what a small but lively model needs (several experts, ties nowhere, selections that select); knows nothing of how
a model computes. The answers of such a model are gibberish.
"""

import json
import logging
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError
from longread.spec.inventory import inventory
from longread.spec.loaded import loaded_shape
from longread.spec.model import ModelSpec
from longread.weights.export import write_checkpoint, write_tokenizer

KINDS = ("v2-lite", "v3", "v4-flash", "v4-pro")
FIXTURE_VOCAB = 1536  # entries of fixture_tokenizer.json, added tokens included
_log = logging.getLogger(__name__)

_COMMON: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": FIXTURE_VOCAB,
}
_MLA: dict[str, object] = _COMMON | {
    "first_k_dense_replace": 1,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_V2_LITE: dict[str, object] = _MLA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
_V3: dict[str, object] = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
}
# 32 index heads: with few, the relu makes exact zeros, and top-k over ties depends on the layout of the scores.
_V4: dict[str, object] = _COMMON | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 64,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "index_topk": 16,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 32,
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
}
_V4_FLASH: dict[str, object] = _V4 | {
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 3,
    "num_hidden_layers": 6,
    "routed_scaling_factor": 1.5,
}
_V4_PRO: dict[str, object] = _V4 | {
    "compress_ratios": [128, 128, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "num_hidden_layers": 5,
    "routed_scaling_factor": 2.5,
}
_CONFIGS: dict[str, dict[str, object]] = {"v2-lite": _V2_LITE, "v3": _V3, "v4-flash": _V4_FLASH, "v4-pro": _V4_PRO}
_FP8: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def tiny_config(kind: str, *, quantised: bool = False, **overrides: object) -> dict[str, object]:
    """A small ``config.json`` of one of ``KINDS`` with DeepSeek's own keys; ``overrides`` replace or add keys.

    ``quantised`` adds the quantisation of the real model: V3 FP8 128x128 with float32 scales, V4 FP8 with ue8m0
    scales and FP4 experts. (V2-Lite is published as plain bfloat16; it gets V3's.) Raises ConfigError for another kind.
    """
    if kind not in _CONFIGS:
        raise ConfigError(f"fixture kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    config: dict[str, object] = json.loads(json.dumps(_CONFIGS[kind]))  # a deep copy of plain JSON
    if quantised:
        v4 = config["model_type"] == "deepseek_v4"
        config["quantization_config"] = _FP8 | ({"scale_fmt": "ue8m0"} if v4 else {})
        if v4:
            config["expert_dtype"] = "fp4"
    return config | overrides


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """float32 (``tid2eid``: int64) weights by native name, MTP included, without scales.

    Every tensor has its own generator, so a tensor depends on ``seed`` and its name only. Values that a checkpoint
    stores as bfloat16 or quantised are representable in bfloat16: a plain checkpoint holds them exactly.
    """
    shapes = {t.name: loaded_shape(t) for t in inventory(spec) if t.scale_of is None}
    keep_float32 = {t.name for t in inventory(spec) if t.dtype == "float32"}
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) * 1_000_003 + seed)
        if name.endswith("tid2eid"):
            order = torch.rand(shape[0], spec.moe.routed, generator=generator).argsort(dim=1)
            weights[name] = order[:, : shape[1]].contiguous()
            continue
        value = drawn(name, shape, torch.randn(shape, generator=generator))
        weights[name] = value if name in keep_float32 else value.bfloat16().float()
    return weights


def write_fixture(
    path: str | Path, kind: str, seed: int = 0, quantised: bool = False, shards: int = 1, **overrides: object
) -> None:
    """Write a tiny checkpoint with tokenizer into ``path``: a new or empty directory, otherwise ConfigError."""
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is not an empty directory; give a path that does not exist yet")
    config = tiny_config(kind, quantised=quantised, **overrides)
    spec = spec_from_config(config)
    write_checkpoint(target, config, random_weights(spec, seed), shards)
    source = resources.files("longread.weights").joinpath("fixture_tokenizer.json")
    write_tokenizer(target, source.read_bytes(), spec.max_position)
    _log.info("wrote a tiny random %s checkpoint to %s", kind, target)


def drawn(name: str, shape: tuple[int, ...], noise: Tensor) -> Tensor:
    """Scale standard normal ``noise`` so that logits have a spread near 1 and no mechanism is idle."""
    rules: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        ("embed_tokens.weight", lambda: noise),
        ("embed.weight", lambda: noise),
        ("norm.weight", lambda: 1 + 0.1 * noise),  # every RMSNorm's name ends so, V3's layernorms below
        ("norm.bias", lambda: 0.1 * noise),
        ("layernorm.weight", lambda: 1 + 0.1 * noise),
        ("e_score_correction_bias", lambda: 0.2 * noise),  # large enough to change which experts are chosen
        ("gate.bias", lambda: 0.2 * noise),
        ("attn_sink", lambda: noise),
        ("_scale", lambda: 1 + 0.2 * noise),  # hc_*: slopes of the mixing logits
        ("_base", lambda: 0.5 * noise),
        (".ape", lambda: 0.5 * noise),
    )
    for suffix, draw in rules:
        if name.endswith(suffix):
            return draw()
    return noise * spread(name, shape[-1])


def spread(name: str, inputs: int) -> float:
    """Standard deviation of a matrix's numbers that keeps the variance of what it is multiplied with."""
    # Averages over many keys are small; without a gain the attention would hardly reach the logits.
    return (2 if name.endswith(("o_proj.weight", "wo_b.weight")) else 1) * inputs**-0.5
