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
    """V4 attention. ``ratios[layer]`` is 0 (sliding window only), 4 (CSA) or 128 (HCA); one a layer, none for MTP.

    V4.1 has ratios 0, 1 and 2 instead, with ``SharedKVSpec``.
    """

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
    """How weights lie on disk. ``block`` is the FP8 scale block (rows, columns).

    ``scale_format`` is the stored type. ``power_of_two``: every scale is a power of two, also where it is stored as
    float32 (V3.1, V3.2).
    """

    block: tuple[int, int]
    scale_format: Literal["float32", "ue8m0"]
    experts: Literal["fp8", "fp4"]
    power_of_two: bool = False


@dataclass(frozen=True, slots=True)
class SharedKVSpec:
    """V4.1 (CSA2): only ``kv_sources`` compress and ``index_sources`` score; others use the nearest one below.

    ``candidate_source`` keeps the ``candidate_blocks`` best blocks of ``candidate_block`` rows for those above it.
    """

    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int
    candidate_blocks: int
    candidate_block: int


@dataclass(frozen=True, slots=True)
class DSparkSpec:
    """The drafter that replaces MTP since V4-Flash-0731. Its stages are counted by ``ModelSpec.mtp_layers``."""

    block: int
    noise_id: int
    targets: tuple[int, ...]
    markov_rank: int
    routed: int
    top_k: int


@dataclass(frozen=True, slots=True)
class EngramSpec:
    """V4.1's n-gram tables: ``rows[i]`` entries of ``head_dim`` at ``layers[i]``, for 2- to ``max_ngram``-grams."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    table_size: int
    pad_id: int
    compressed_vocab: int


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """V4.1's image tower: a ViT, an aligner over ``downsample`` squared patches, and its place-holder token."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    downsample: int
    rope_theta: float
    max_tokens: int
    min_pixels: int
    image_token_id: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One DeepSeek model. Exactly one of ``mla`` and ``compressed`` is set.

    ``rope`` serves MLA, and V4 layers of ratio 0; ``compress_rope`` serves V4 layers of ratio > 0.
    ``mtp_layers`` blocks are stored behind the backbone and are not run; with ``dspark`` they are the drafter's stages.
    ``quant`` None: the weights are plain floats. ``shared_kv``, ``engram`` and ``vision`` belong to V4.1.
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
    dspark: DSparkSpec | None = None
    shared_kv: SharedKVSpec | None = None
    engram: EngramSpec | None = None
    vision: VisionSpec | None = None
