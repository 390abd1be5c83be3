"""The two readers as DeepSeek-native ``config.json`` contents: real architectures, small numbers.

Knows keys and sizes only. Together they take less than 30 MB on disk, in FP8 and FP4 where the real ones do.
"""

VOCAB = 4096

_COMMON: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "q_lora_rank": 128,
}
_FP8: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

READER_V3: dict[str, object] = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "kv_lora_rank": 128,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_group": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
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
    "quantization_config": _FP8,
}

READER_V4: dict[str, object] = _COMMON | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4],
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "index_topk": 128,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 128,
    "num_hash_layers": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "o_groups": 2,
    "o_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "quantization_config": _FP8 | {"scale_fmt": "ue8m0"},
}

CONFIGS: dict[str, dict[str, object]] = {"reader-v3": READER_V3, "reader-v4": READER_V4}
