"""What a DeepSeek model is: the frozen tables that everything else is derived from.

Knows names, sizes and switches; knows no tensors, files or devices. ``config_json`` builds a ``ModelSpec`` from a
checkpoint's ``config.json``; ``releases`` holds the known public models; ``count`` derives parameters, bytes and FLOPs;
``state`` derives what a sequence has to keep.
"""

from dataclasses import dataclass
from typing import Literal

Family = Literal["deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. ``factor`` None means plain RoPE, otherwise YaRN (arXiv 2309.00071).

    ``mscale`` values enter the softmax scale of MLA only (m = 0.1 * mscale_all_dim * ln(factor) + 1, squared).
    """

    theta: float
    factor: float | None = None
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (V2, V3, V3.2). ``q_lora_rank`` None: one full query projection (V2-Lite)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Lightning indexer: which rows a query attends to (DSA in V3.2, CSA in V4)."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """V4 attention. ``ratios[layer]`` is 0 (sliding window only), 4 (CSA) or 128 (HCA); one entry a layer, no MTP entry."""

    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratios: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Routed and shared experts. Layers below ``first_dense`` have a dense FFN of ``dense_intermediate`` instead;
    layers below ``hash_layers`` take their experts from a token-id table.
    """

    routed: int
    top_k: int
    shared: int
    intermediate: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    groups: int
    kept_groups: int
    normalise: bool
    scale: float
    first_dense: int = 0
    dense_intermediate: int = 0
    hash_layers: int = 0
    swiglu_limit: float | None = None


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Manifold-constrained hyper-connections (V4): ``mult`` residual streams mixed by a Sinkhorn-normalised matrix."""

    mult: int
    sinkhorn_iters: int
    eps: float


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How weights lie on disk. ``block`` is the FP8 scale block (rows, columns)."""

    block: tuple[int, int]
    scale_format: Literal["float32", "ue8m0"]
    experts: Literal["fp8", "fp4"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One DeepSeek model. Exactly one of ``mla`` and ``compressed`` is set.

    ``rope`` serves MLA, and V4 layers of ratio 0; ``compress_rope`` serves V4 layers of ratio > 0.
    ``mtp_layers`` blocks are stored behind the backbone and are not run. ``quant`` None: the weights are plain floats.
    ``torch_dtype`` is the checkpoint's plain float type.
    """

    family: Family
    label: str
    hidden: int
    layers: int
    heads: int
    vocab: int
    rms_eps: float
    max_position: int
    bos_id: int
    eos_id: int
    rope: RopeSpec
    moe: MoESpec
    mtp_layers: int
    torch_dtype: Literal["bfloat16", "float16", "float32"]
    quant: QuantSpec | None
    mla: MLASpec | None = None
    compressed: CompressedSpec | None = None
    indexer: IndexerSpec | None = None
    compress_rope: RopeSpec | None = None
    hyper: HyperSpec | None = None
    tie_embeddings: bool = False
