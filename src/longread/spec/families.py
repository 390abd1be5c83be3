"""From the keys of a config.json to a ``ModelSpec``, one function a model family.

Knows DeepSeek's key names and which values are implemented; knows no files (``config_json`` reads them). Whatever
would change a result and is not implemented is refused by name.
"""

from collections.abc import Mapping
from typing import Literal, cast

from longread.spec.errors import UnsupportedModelError
from longread.spec.fields import Fields
from longread.spec.model import (
    CompressedSpec,
    DSparkSpec,
    EngramSpec,
    Family,
    HyperSpec,
    IndexerSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QuantSpec,
    RopeSpec,
    SharedKVSpec,
    VisionSpec,
)
from longread.spec.release_configs import CONFIGS

# Training-time or bookkeeping keys: no value of theirs changes what the model computes at inference.
HARMLESS = (
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "seq_aux",
    "transformers_version",
    "use_cache",
)
LAYERS_MAX = 1024  # bounds what a hostile file can make us enumerate
EXPERTS_MAX = 4096
FP4_BLOCK = 32

_DSPARK_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
_OWN: dict[Family, tuple[str, str]] = {
    "deepseek_v2": ("DeepSeek-V2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepSeek-V3", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepSeek-V3.2", "DeepseekV32ForCausalLM"),
    "deepseek_v4": ("DeepSeek-V4-Flash", "DeepseekV4ForCausalLM"),
    "deepseek_v41": ("DeepSeek-V4.1-Flash", "DeepseekV41ForCausalLM"),
}


def build(config: Mapping[str, object], label: str) -> ModelSpec:
    """The spec of a parsed config.json. Raises ``UnsupportedModelError`` naming the field, never anything else."""
    family = _family(config)
    name, architecture = _OWN[family]
    fields = Fields(config, CONFIGS[name], f"{name}'s own config.json")
    fields.value("model_type")
    if fields.has("architectures"):
        fields.exactly("architectures", [architecture])
    if family in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        return _mla_model(fields, family, label)
    if family == "deepseek_v4":
        return _v4_model(fields, label)
    return _v41_model(fields, label)


def _family(config: Mapping[str, object]) -> Family:
    known = ", ".join(_OWN)
    if "model_type" not in config:
        raise UnsupportedModelError("model_type", f"is missing; known: {known}")
    value = config["model_type"]
    if not isinstance(value, str) or value not in _OWN:
        shown = repr(value)[:80] if isinstance(value, str) else f"a {type(value).__name__}"
        raise UnsupportedModelError("model_type", f"{shown} is not a model that Longread knows; known: {known}")
    return value


def _mla_model(f: Fields, family: Family, label: str) -> ModelSpec:
    heads, vocab = f.integer("num_attention_heads"), f.integer("vocab_size")
    layers = f.integer("num_hidden_layers", high=LAYERS_MAX)
    f.exactly("num_key_value_heads", heads)
    _common_switches(f)
    f.exactly("moe_layer_freq", 1)
    f.exactly_if_there("ep_size", 1)
    f.exactly_if_there("mlp_bias", False)
    f.exactly_if_there("rope_interleave", True)
    mla = MLASpec(
        q_lora_rank=None if f.is_null("q_lora_rank") else f.integer("q_lora_rank"),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=f.integer("qk_nope_head_dim"),
        qk_rope_head_dim=_even(f, "qk_rope_head_dim"),
        v_head_dim=f.integer("v_head_dim"),
    )
    indexer = None
    if family == "deepseek_v32":
        if mla.q_lora_rank is None:
            raise f.refuse("q_lora_rank", "null is not possible here: the indexer reads the compressed query")
        indexer = _indexer(f, rotary=mla.qk_rope_head_dim)
    spec = ModelSpec(
        family=family,
        label=label,
        hidden=f.integer("hidden_size"),
        layers=layers,
        heads=heads,
        vocab=vocab,
        bos_id=_token(f, "bos_token_id", vocab),
        eos_id=_token(f, "eos_token_id", vocab),
        rms_eps=f.number("rms_norm_eps"),
        max_position=f.integer("max_position_embeddings"),
        rope=_rope(f, mscale=True),
        moe=_mla_moe(f, family, layers),
        mtp_layers=0 if family == "deepseek_v2" else f.integer("num_nextn_predict_layers", low=0, high=16),
        torch_dtype=_dtype(f),
        quant=_quant_fp8(f) if f.has("quantization_config") else None,
        mla=mla,
        indexer=indexer,
    )
    f.finish(HARMLESS)
    return spec


def _v4_model(f: Fields, label: str) -> ModelSpec:
    layers = f.integer("num_hidden_layers", high=LAYERS_MAX)
    heads, vocab = f.integer("num_attention_heads"), f.integer("vocab_size")
    f.exactly("num_key_value_heads", 1)
    _common_switches(f)
    f.exactly_if_there("mlp_bias", False)
    compressed, stages = _compressed(f, layers, heads, known_ratios=(0, 4, 128))
    dspark = _dspark(f, layers, stages, vocab) if any(f.has(key) for key in _DSPARK_KEYS) else None
    predicted = f.integer("num_nextn_predict_layers", low=0, high=16)
    # DeepSeek's DSpark files keep the 1 of the preview; the trailing ratios count the stages that are stored.
    if predicted != stages and not (dspark is not None and predicted == 1):
        raise f.refuse("num_nextn_predict_layers", f"is {predicted}, but compress_ratios has {stages} trailing entries")
    quant = None
    if f.has("quantization_config"):
        experts = f.choice("expert_dtype", ("fp4", "fp8"))
        quant = _quant_fp8(f, experts=cast(Literal["fp8", "fp4"], experts), stored_ue8m0=True)
    elif f.has("expert_dtype"):
        raise f.refuse("expert_dtype", "is set, but there is no quantization_config")
    rope, compress_rope = _two_ropes(f)
    hidden = f.integer("hidden_size")
    spec = ModelSpec(
        family="deepseek_v4",
        label=label,
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=vocab,
        bos_id=_token(f, "bos_token_id", vocab),
        eos_id=_token(f, "eos_token_id", vocab),
        rms_eps=f.number("rms_norm_eps"),
        max_position=f.integer("max_position_embeddings"),
        rope=rope,
        moe=_v4_moe(f, hash_layers=f.integer("num_hash_layers", low=0, high=layers), quant=quant, hidden=hidden),
        mtp_layers=stages,
        torch_dtype=_dtype(f),
        quant=quant,
        compressed=compressed,
        indexer=_indexer(f, rotary=compressed.rope_head_dim),
        compress_rope=compress_rope,
        hyper=_hyper(f),
        dspark=dspark,
    )
    f.finish(HARMLESS)
    return spec


def _v41_model(root: Fields, label: str) -> ModelSpec:
    f = root.section("text_config")
    f.exactly_if_there("model_type", "deepseek_v41_text")
    layers = f.integer("num_hidden_layers", high=LAYERS_MAX)
    heads, vocab = f.integer("num_attention_heads"), f.integer("vocab_size")
    f.exactly("num_key_value_heads", 1)
    _common_switches(f)
    compressed, stages = _compressed(f, layers, heads, known_ratios=(0, 1, 2))
    f.exactly("num_nextn_predict_layers", stages)
    experts = cast(Literal["fp8", "fp4"], root.section("quantization_config").choice("expert_dtype", ("fp4", "fp8")))
    quant = _quant_fp8(root, experts=experts, stored_ue8m0=True, nested_experts=True)
    rope, compress_rope = _two_ropes(f)
    hidden = f.integer("hidden_size")
    spec = ModelSpec(
        family="deepseek_v41",
        label=label,
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=vocab,
        bos_id=_token(root, "bos_token_id", vocab),
        eos_id=_token(root, "eos_token_id", vocab),
        rms_eps=f.number("rms_norm_eps"),
        max_position=f.integer("max_position_embeddings"),
        rope=rope,
        moe=_v4_moe(f, hash_layers=0, quant=quant, hidden=hidden),
        mtp_layers=stages,
        torch_dtype=_dtype(root, own="dtype"),
        quant=quant,
        compressed=compressed,
        indexer=_indexer(f, rotary=compressed.rope_head_dim),
        compress_rope=compress_rope,
        hyper=_hyper(f),
        dspark=_dspark(f, layers, stages, vocab, own_experts=True),
        shared_kv=_shared_kv(f, compressed.ratios),
        engram=_engram(f, layers, vocab),
        vision=_vision(root, vocab),
    )
    f.finish(HARMLESS)
    root.finish(HARMLESS)
    return spec


def _common_switches(f: Fields) -> None:
    f.exactly("hidden_act", "silu")
    f.exactly("attention_bias", False)
    f.exactly("tie_word_embeddings", False)


def _token(f: Fields, key: str, vocab: int) -> int:
    return f.integer(key, low=0, high=vocab - 1)


def _dtype(f: Fields, own: str = "torch_dtype") -> Literal["bfloat16", "float16", "float32"]:
    """``torch_dtype``, which newer transformers writes as ``dtype``; ``own`` is the one in DeepSeek's file."""
    known = ("bfloat16", "float16", "float32")
    key = next((name for name in ("torch_dtype", "dtype") if f.has(name)), own)
    value = f.choice(key, known)
    if key == "torch_dtype" and f.has("dtype"):
        f.exactly("dtype", value)
    return cast(Literal["bfloat16", "float16", "float32"], value)


def _even(f: Fields, key: str) -> int:
    value = f.integer(key)
    if value % 2:
        raise f.refuse(key, f"must be even (RoPE turns pairs of channels), not {value}")
    return value


def _rope(f: Fields, mscale: bool) -> RopeSpec:
    """RoPE of MLA (``mscale``: YaRN carries a softmax factor) or YaRN without any factor (V4)."""
    theta = f.number("rope_theta", low=1.0)
    if f.is_null("rope_scaling"):
        return RopeSpec(theta=theta)
    s = f.section("rope_scaling")
    s.exactly("rope_type" if s.has("rope_type") and not s.has("type") else "type", "yarn")
    s.exactly_if_there("rope_type", "yarn")
    fast, slow = s.number("beta_fast"), s.number("beta_slow")
    if fast <= slow:
        raise s.refuse("beta_fast", f"must be above beta_slow ({slow}), not {fast}")
    factors = (0.0, 0.0)
    if mscale:
        factors = (s.number("mscale", positive=False), s.number("mscale_all_dim", positive=False))
        if factors[0] != factors[1]:
            raise s.refuse("mscale", f"is {factors[0]}, but only mscale = mscale_all_dim ({factors[1]}) is implemented")
    rope = RopeSpec(
        theta=theta,
        factor=s.number("factor", low=1.0),
        original_max_position=s.integer("original_max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        mscale=factors[0],
        mscale_all_dim=factors[1],
    )
    s.finish()
    return rope


def _two_ropes(f: Fields) -> tuple[RopeSpec, RopeSpec]:
    """V4: plain RoPE at ``rope_theta`` for ratio 0, YaRN at ``compress_rope_theta`` for all compressed layers."""
    yarn = _rope(f, mscale=False)
    compressed = RopeSpec(
        theta=f.number("compress_rope_theta", low=1.0),
        factor=yarn.factor,
        original_max_position=yarn.original_max_position,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    return RopeSpec(theta=yarn.theta), compressed


def _mla_moe(f: Fields, family: Family, layers: int) -> MoESpec:
    """The three routings that exist: V2-Lite's, V2's and V3's. Any mix of theirs is refused."""
    routed, top_k = f.integer("n_routed_experts", high=EXPERTS_MAX), f.integer("num_experts_per_tok", high=EXPERTS_MAX)
    groups, kept = f.integer("n_group", high=routed), f.integer("topk_group", high=EXPERTS_MAX)
    if family == "deepseek_v2":
        f.exactly("scoring_func", "softmax")
        f.exactly("norm_topk_prob", False)
        method = f.choice("topk_method", ("greedy", "group_limited_greedy"))
    else:
        f.exactly("scoring_func", "sigmoid")
        f.exactly("norm_topk_prob", True)
        method = f.choice("topk_method", ("noaux_tc",))
    if method == "greedy":
        f.exactly("n_group", 1)
    if routed % groups:
        raise f.refuse("n_group", f"must divide n_routed_experts ({routed}), not {groups}")
    if kept > groups:
        raise f.refuse("topk_group", f"must be at most n_group ({groups}), not {kept}")
    if method == "noaux_tc" and routed // groups < 2:
        raise f.refuse("n_group", f"leaves {routed // groups} expert a group; the group score sums the best two")
    if top_k > kept * (routed // groups):
        raise f.refuse(
            "num_experts_per_tok", f"must be at most the {kept * (routed // groups)} experts kept, not {top_k}"
        )
    return MoESpec(
        routed=routed,
        top_k=top_k,
        shared=f.integer("n_shared_experts", high=EXPERTS_MAX),
        intermediate=f.integer("moe_intermediate_size"),
        scoring="softmax" if family == "deepseek_v2" else "sigmoid",
        method=cast(Literal["greedy", "group_limited_greedy", "noaux_tc"], method),
        groups=groups,
        kept_groups=kept,
        normalise=family != "deepseek_v2",
        scale=f.number("routed_scaling_factor"),
        first_dense=f.integer("first_k_dense_replace", low=0, high=layers),
        dense_intermediate=f.integer("intermediate_size"),
    )


def _v4_moe(f: Fields, hash_layers: int, quant: QuantSpec | None, hidden: int) -> MoESpec:
    f.exactly("scoring_func", "sqrtsoftplus")
    f.exactly("topk_method", "noaux_tc")
    f.exactly("norm_topk_prob", True)
    routed = f.integer("n_routed_experts", high=EXPERTS_MAX)
    intermediate = f.integer("moe_intermediate_size")
    if quant is not None and quant.experts == "fp4":
        for key, size in (("hidden_size", hidden), ("moe_intermediate_size", intermediate)):
            if size % FP4_BLOCK:
                raise f.refuse(key, f"must be a multiple of {FP4_BLOCK} for FP4 experts, not {size}")
    return MoESpec(
        routed=routed,
        top_k=f.integer("num_experts_per_tok", high=routed),
        shared=f.integer("n_shared_experts", high=EXPERTS_MAX),
        intermediate=intermediate,
        scoring="sqrtsoftplus",
        method="noaux_tc",
        groups=1,
        kept_groups=1,
        normalise=True,
        scale=f.number("routed_scaling_factor"),
        hash_layers=hash_layers,
        swiglu_limit=f.number("swiglu_limit"),
    )


def _compressed(f: Fields, layers: int, heads: int, known_ratios: tuple[int, ...]) -> tuple[CompressedSpec, int]:
    """V4 attention, and how many entries of compress_ratios stand behind the backbone's (MTP or DSpark blocks)."""
    ratios = f.integers("compress_ratios", most=LAYERS_MAX + 16)
    if not layers <= len(ratios) <= layers + 16:
        raise f.refuse(
            "compress_ratios", f"has {len(ratios)} entries for {layers} layers (and at most 16 drafter blocks)"
        )
    for i, ratio in enumerate(ratios):
        if ratio not in (known_ratios if i < layers else (0,)):
            wanted = known_ratios if i < layers else (0,)
            raise f.refuse(f"compress_ratios[{i}]", f"{ratio} is not implemented, only {wanted}")
    head_dim, rope_dim, groups = f.integer("head_dim"), _even(f, "qk_rope_head_dim"), f.integer("o_groups")
    if rope_dim >= head_dim:
        raise f.refuse("qk_rope_head_dim", f"must be below head_dim ({head_dim}), not {rope_dim}")
    if heads % groups:
        raise f.refuse("o_groups", f"must divide num_attention_heads ({heads}), not {groups}")
    compressed = CompressedSpec(
        head_dim=head_dim,
        rope_head_dim=rope_dim,
        q_lora_rank=f.integer("q_lora_rank"),
        o_groups=groups,
        o_lora_rank=f.integer("o_lora_rank"),
        window=f.integer("sliding_window"),
        ratios=ratios[:layers],
    )
    return compressed, len(ratios) - layers


def _indexer(f: Fields, rotary: int) -> IndexerSpec:
    dim = f.integer("index_head_dim")
    if dim < rotary:
        raise f.refuse("index_head_dim", f"must be at least qk_rope_head_dim ({rotary}), not {dim}")
    return IndexerSpec(heads=f.integer("index_n_heads"), head_dim=dim, top_k=f.integer("index_topk"))


def _hyper(f: Fields) -> HyperSpec:
    return HyperSpec(
        mult=f.integer("hc_mult", high=64),
        sinkhorn_iters=f.integer("hc_sinkhorn_iters", high=1000),
        eps=f.number("hc_eps"),
    )


def _quant_fp8(
    f: Fields,
    experts: Literal["fp8", "fp4"] = "fp8",
    stored_ue8m0: bool = False,
    nested_experts: bool = False,
) -> QuantSpec:
    """``stored_ue8m0``: whether scale_fmt ue8m0 means stored bytes (V4) or only power-of-two float32 values (V3.1)."""
    q = f.section("quantization_config")
    q.exactly("quant_method", "fp8")
    q.exactly("activation_scheme", "dynamic")
    if nested_experts:
        q.value("expert_dtype")
        q.exactly_if_there("fmt", "e4m3")
    else:
        q.exactly("fmt", "e4m3")
    ue8m0 = q.has("scale_fmt") and q.choice("scale_fmt", ("ue8m0",)) == "ue8m0"
    block = q.integers("weight_block_size", low=1, most=2)
    if len(block) != 2:
        raise q.refuse("weight_block_size", f"must be two sizes (rows, columns), not {len(block)}")
    q.finish()
    stored: Literal["float32", "ue8m0"] = "ue8m0" if ue8m0 and stored_ue8m0 else "float32"
    return QuantSpec(block=(block[0], block[1]), scale_format=stored, experts=experts, power_of_two=ue8m0)


def _dspark(f: Fields, layers: int, stages: int, vocab: int, own_experts: bool = False) -> DSparkSpec:
    targets = f.integers("dspark_target_layer_ids", high=layers - 1, most=16)
    if stages < 1 or not targets:
        raise f.refuse("dspark_target_layer_ids", f"{len(targets)} target layers and {stages} stored stages")
    routed = f.integer("dspark_n_routed_experts" if own_experts else "n_routed_experts", high=EXPERTS_MAX)
    return DSparkSpec(
        block=f.integer("dspark_block_size"),
        noise_id=_token(f, "dspark_noise_token_id", vocab),
        targets=targets,
        markov_rank=f.integer("dspark_markov_rank"),
        routed=routed,
        top_k=f.integer("dspark_num_experts_per_tok" if own_experts else "num_experts_per_tok", high=routed),
    )


def _shared_kv(f: Fields, ratios: tuple[int, ...]) -> SharedKVSpec:
    top = len(ratios) - 1
    kv, index = f.integers("kv_source_layer_ids", high=top), f.integers("index_source_layer_ids", high=top)
    for key, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if not ids or list(ids) != sorted(set(ids)) or any(ratios[i] == 0 for i in ids):
            raise f.refuse(key, "must list rising layers that compress (ratio above 0)")
    if not set(kv) <= set(index):
        raise f.refuse("index_source_layer_ids", "must contain every kv_source_layer_id")
    if any(ratios[i] for i in range(kv[0])):
        raise f.refuse("kv_source_layer_ids", f"starts at {kv[0]}, but an earlier layer compresses")
    candidate = f.integer("candidate_source_layer_id", low=0, high=top)
    if candidate not in kv:
        raise f.refuse("candidate_source_layer_id", f"must be a kv_source_layer_id, not {candidate}")
    return SharedKVSpec(
        kv_sources=kv,
        index_sources=index,
        candidate_source=candidate,
        candidate_blocks=f.integer("candidate_topk_blocks"),
        candidate_block=f.integer("candidate_block_size"),
    )


def _engram(f: Fields, layers: int, vocab: int) -> EngramSpec:
    ids, rows = f.integers("engram_layer_ids", high=layers - 1), f.integers("engram_num_embeddings", low=1)
    if len(ids) != len(rows) or list(ids) != sorted(set(ids)):
        raise f.refuse("engram_layer_ids", f"{len(ids)} layers (rising, distinct) for {len(rows)} tables")
    return EngramSpec(
        layers=ids,
        rows=rows,
        max_ngram=f.integer("engram_max_ngram_size", low=2, high=64),
        heads=f.integer("engram_n_heads"),
        head_dim=f.integer("engram_head_dim"),
        table_size=f.integer("engram_vocab_size"),
        pad_id=_token(f, "engram_pad_token_id", vocab),
        compressed_vocab=f.integer("engram_compressed_vocab_size"),
    )


def _vision(root: Fields, vocab: int) -> VisionSpec:
    v = root.section("vision_config")
    v.exactly_if_there("model_type", "deepseek_v41_vision")
    v.exactly("max_wh_ratio", None)
    vision = VisionSpec(
        layers=v.integer("num_hidden_layers", high=LAYERS_MAX),
        hidden=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        intermediate=v.integer("intermediate_size"),
        patch=v.integer("patch_size"),
        downsample=v.integer("downsample_ratio"),
        rope_theta=v.number("rope_theta", low=1.0),
        max_tokens=v.integer("max_image_tokens"),
        min_pixels=v.integer("min_pixels"),
        image_token_id=_token(root, "image_token_id", vocab),
    )
    v.finish()
    return vision
