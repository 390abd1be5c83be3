"""Every tensor of a native checkpoint: name, shape, stored type, and which part of the model it is.

Generated from the spec alone; the same list drives the reader's checks, the exporter, and the counting of parameters
and bytes. A weight's scale follows it immediately. Names and types: facts of DeepSeek's files (V3's README_WEIGHTS;
V4's ``inference/convert.py``; V4.1's published index), reproduced to the byte by the tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from longread.spec.model import CompressedSpec, EngramSpec, HyperSpec, MLASpec, ModelSpec, VisionSpec

StoredType = Literal["bfloat16", "float16", "float32", "float8_e4m3", "float8_e8m0", "int8", "int64"]
ITEMSIZE: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e8m0": 1,
    "int8": 1,
    "int64": 8,
}
FP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor. int8 holds two FP4 numbers a byte (V4 experts).

    ``part``: embed, head, norm, attention, indexer, dense, router, experts, shared, hyper, engram, vision, mtp
    (everything of the blocks behind the backbone, their scales too) or scale. ``scale_of`` names a scale's weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredType
    part: str
    scale_of: str | None = None

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.elements * ITEMSIZE[self.dtype]


def inventory(spec: ModelSpec) -> Iterator[TensorSpec]:
    """All tensors of the checkpoint that ``spec`` describes, layer by layer, drafter blocks last."""
    if spec.mla is not None:
        return _mla_checkpoint(spec, spec.mla)
    assert spec.compressed is not None and spec.hyper is not None  # ModelSpec: one of mla and compressed is set
    return _v4_checkpoint(spec, spec.compressed, spec.hyper)


class _Writer:
    """Spells out tensors in the stored types of one spec; ``part`` overrides every part (the drafter's blocks)."""

    def __init__(self, spec: ModelSpec, scale_suffix: str, part: str | None = None):
        self._spec = spec
        self._suffix = scale_suffix
        self._part = part

    def plain(self, name: str, shape: tuple[int, ...], part: str, dtype: StoredType | None = None) -> TensorSpec:
        return TensorSpec(name, shape, dtype or self._spec.torch_dtype, self._part or part)

    def norm(self, name: str, size: int) -> TensorSpec:
        return self.plain(f"{name}.weight", (size,), "norm")

    def linear(self, name: str, rows: int, columns: int, part: str) -> Iterator[TensorSpec]:
        """FP8 with a scale a block where the checkpoint is quantised, else a plain float matrix."""
        quant, weight = self._spec.quant, f"{name}.weight"
        if quant is None:
            yield self.plain(weight, (rows, columns), part)
            return
        yield self.plain(weight, (rows, columns), part, "float8_e4m3")
        grid = (-(-rows // quant.block[0]), -(-columns // quant.block[1]))
        stored: StoredType = "float8_e8m0" if quant.scale_format == "ue8m0" else "float32"
        yield TensorSpec(f"{name}.{self._suffix}", grid, stored, self._part or "scale", weight)

    def expert(self, name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        quant, weight = self._spec.quant, f"{name}.weight"
        if quant is None or quant.experts == "fp8":
            yield from self.linear(name, rows, columns, "experts")
            return
        yield self.plain(weight, (rows, columns // 2), "experts", "int8")
        grid = (rows, columns // FP4_BLOCK)
        yield TensorSpec(f"{name}.{self._suffix}", grid, "float8_e8m0", self._part or "scale", weight)


def _mla_checkpoint(spec: ModelSpec, mla: MLASpec) -> Iterator[TensorSpec]:
    main = _Writer(spec, "weight_scale_inv")
    yield main.plain("model.embed_tokens.weight", (spec.vocab, spec.hidden), "embed")
    for layer in range(spec.layers):
        yield from _mla_block(spec, mla, main, layer)
    yield main.norm("model.norm", spec.hidden)
    yield main.plain("lm_head.weight", (spec.vocab, spec.hidden), "head")
    drafter = _Writer(spec, "weight_scale_inv", "mtp")
    for layer in range(spec.layers, spec.layers + spec.mtp_layers):
        # V3 stores each MTP block as a further layer, with copies of the shared embedding and head.
        prefix = f"model.layers.{layer}"
        yield drafter.plain(f"{prefix}.embed_tokens.weight", (spec.vocab, spec.hidden), "embed")
        yield drafter.norm(f"{prefix}.enorm", spec.hidden)
        yield drafter.norm(f"{prefix}.hnorm", spec.hidden)
        yield drafter.plain(f"{prefix}.eh_proj.weight", (spec.hidden, 2 * spec.hidden), "mtp")
        yield from _mla_block(spec, mla, drafter, layer)
        yield drafter.norm(f"{prefix}.shared_head.norm", spec.hidden)
        yield drafter.plain(f"{prefix}.shared_head.head.weight", (spec.vocab, spec.hidden), "head")


def _mla_block(spec: ModelSpec, mla: MLASpec, w: _Writer, layer: int) -> Iterator[TensorSpec]:
    prefix, attn, d = f"model.layers.{layer}", f"model.layers.{layer}.self_attn", spec.hidden
    yield w.norm(f"{prefix}.input_layernorm", d)
    query = spec.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield from w.linear(f"{attn}.q_proj", query, d, "attention")
    else:
        yield from w.linear(f"{attn}.q_a_proj", mla.q_lora_rank, d, "attention")
        yield w.norm(f"{attn}.q_a_layernorm", mla.q_lora_rank)
        yield from w.linear(f"{attn}.q_b_proj", query, mla.q_lora_rank, "attention")
    yield from w.linear(f"{attn}.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, d, "attention")
    yield w.norm(f"{attn}.kv_a_layernorm", mla.kv_lora_rank)
    expanded = spec.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from w.linear(f"{attn}.kv_b_proj", expanded, mla.kv_lora_rank, "attention")
    yield from w.linear(f"{attn}.o_proj", d, spec.heads * mla.v_head_dim, "attention")
    if spec.indexer is not None and mla.q_lora_rank is not None:
        ix = spec.indexer
        yield from w.linear(f"{attn}.indexer.wq_b", ix.heads * ix.head_dim, mla.q_lora_rank, "indexer")
        yield from w.linear(f"{attn}.indexer.wk", ix.head_dim, d, "indexer")
        yield w.plain(f"{attn}.indexer.k_norm.weight", (ix.head_dim,), "norm")
        yield w.plain(f"{attn}.indexer.k_norm.bias", (ix.head_dim,), "norm")
        yield w.plain(f"{attn}.indexer.weights_proj.weight", (ix.heads, d), "indexer")
    yield w.norm(f"{prefix}.post_attention_layernorm", d)
    if layer < spec.moe.first_dense:
        yield from _mla_mlp(w, f"{prefix}.mlp", d, spec.moe.dense_intermediate, "dense")
        return
    moe = spec.moe
    yield w.plain(f"{prefix}.mlp.gate.weight", (moe.routed, d), "router")
    if moe.method == "noaux_tc":
        yield w.plain(f"{prefix}.mlp.gate.e_score_correction_bias", (moe.routed,), "router", "float32")
    for expert in range(moe.routed):
        yield from _mla_mlp(w, f"{prefix}.mlp.experts.{expert}", d, moe.intermediate, "experts")
    yield from _mla_mlp(w, f"{prefix}.mlp.shared_experts", d, moe.intermediate * moe.shared, "shared")


def _mla_mlp(w: _Writer, prefix: str, d: int, width: int, part: str) -> Iterator[TensorSpec]:
    yield from w.linear(f"{prefix}.gate_proj", width, d, part)
    yield from w.linear(f"{prefix}.up_proj", width, d, part)
    yield from w.linear(f"{prefix}.down_proj", d, width, part)


def _v4_checkpoint(spec: ModelSpec, c: CompressedSpec, hyper: HyperSpec) -> Iterator[TensorSpec]:
    main = _Writer(spec, "scale")
    yield main.plain("embed.weight", (spec.vocab, spec.hidden), "embed")
    if spec.vision is not None:
        yield from _vision(main, spec.vision, spec.hidden)
    for layer in range(spec.layers):
        yield from _v4_block(spec, c, hyper, main, f"layers.{layer}", layer)
    yield main.norm("norm", spec.hidden)
    if spec.shared_kv is None:  # V4.1 collapses its streams with the last sublayer's mix instead
        yield from _hyper_head(main, hyper, "hc_head", spec.hidden)
    yield main.plain("head.weight", (spec.vocab, spec.hidden), "head")
    drafter = _Writer(spec, "scale", "mtp")
    for stage in range(spec.mtp_layers):
        yield from _v4_block(spec, c, hyper, drafter, f"mtp.{stage}", None)
        if spec.dspark is None:
            yield from _mtp_extras(spec, hyper, drafter, f"mtp.{stage}")
    if spec.dspark is not None:
        yield from _dspark_extras(spec, hyper, drafter)


def _v4_block(
    spec: ModelSpec, c: CompressedSpec, hyper: HyperSpec, w: _Writer, prefix: str, layer: int | None
) -> Iterator[TensorSpec]:
    """One block; ``layer`` None is a drafter's: window attention, router with a bias, its own number of experts."""
    d, attn = spec.hidden, f"{prefix}.attn"
    yield w.norm(f"{prefix}.attn_norm", d)
    yield w.plain(f"{attn}.attn_sink", (spec.heads,), "attention", "float32")
    yield from w.linear(f"{attn}.wq_a", c.q_lora_rank, d, "attention")
    yield w.norm(f"{attn}.q_norm", c.q_lora_rank)
    yield from w.linear(f"{attn}.wq_b", spec.heads * c.head_dim, c.q_lora_rank, "attention")
    yield from w.linear(f"{attn}.wkv", c.head_dim, d, "attention")
    yield w.norm(f"{attn}.kv_norm", c.head_dim)
    yield from w.linear(f"{attn}.wo_a", c.o_groups * c.o_lora_rank, spec.heads * c.head_dim // c.o_groups, "attention")
    yield from w.linear(f"{attn}.wo_b", d, c.o_groups * c.o_lora_rank, "attention")
    if layer is not None and spec.shared_kv is None:
        yield from _v4_compressors(spec, c, w, attn, c.ratios[layer])
    elif layer is not None:
        yield from _v41_sources(spec, c, w, attn, layer)
    if layer is not None and spec.engram is not None and layer in spec.engram.layers:
        yield from _engram(w, spec.engram, hyper, f"{prefix}.engram", d, layer, spec)
    yield w.norm(f"{prefix}.ffn_norm", d)
    yield from _v4_moe(spec, w, f"{prefix}.ffn", layer)
    for branch in ("attn", "ffn"):
        yield from _hyper_mix(w, hyper, f"{prefix}.hc_{branch}", d)


def _v4_compressors(spec: ModelSpec, c: CompressedSpec, w: _Writer, attn: str, ratio: int) -> Iterator[TensorSpec]:
    if ratio == 0:
        return
    yield from _compressor(w, f"{attn}.compressor", c.head_dim, ratio, spec.hidden, "attention")
    if ratio == 4 and spec.indexer is not None:
        ix = spec.indexer
        yield from w.linear(f"{attn}.indexer.wq_b", ix.heads * ix.head_dim, c.q_lora_rank, "indexer")
        yield w.plain(f"{attn}.indexer.weights_proj.weight", (ix.heads, spec.hidden), "indexer")
        yield from _compressor(w, f"{attn}.indexer.compressor", ix.head_dim, ratio, spec.hidden, "indexer")


def _compressor(w: _Writer, prefix: str, width: int, ratio: int, d: int, part: str) -> Iterator[TensorSpec]:
    """CSA (ratio 4) pools two overlapping windows, so its projections are twice as wide."""
    wide = 2 * width if ratio == 4 else width
    yield w.plain(f"{prefix}.ape", (ratio, wide), part, "float32")
    yield w.plain(f"{prefix}.wkv.weight", (wide, d), part)
    yield w.plain(f"{prefix}.wgate.weight", (wide, d), part)
    yield w.norm(f"{prefix}.norm", width)


def _v41_sources(spec: ModelSpec, c: CompressedSpec, w: _Writer, attn: str, layer: int) -> Iterator[TensorSpec]:
    shared, ix, d = spec.shared_kv, spec.indexer, spec.hidden
    assert shared is not None and ix is not None  # both belong to every V4.1 spec
    if layer in shared.kv_sources:
        yield w.plain(f"{attn}.compressor.wkv.weight", (c.head_dim, d), "attention")
        if c.ratios[layer] > 1:  # one token a group has nothing to pool
            yield w.plain(f"{attn}.compressor.wgate.weight", (c.head_dim, d), "attention")
        yield w.norm(f"{attn}.compressor.norm", c.head_dim)
        yield w.plain(f"{attn}.indexer.wk.weight", (ix.head_dim, c.head_dim), "indexer")
        yield w.norm(f"{attn}.indexer.k_norm", ix.head_dim)
    if layer in shared.index_sources:
        yield from w.linear(f"{attn}.indexer.wq_b", ix.heads * ix.head_dim, c.q_lora_rank, "indexer")
        yield w.plain(f"{attn}.indexer.weights_proj.weight", (ix.heads, d), "indexer")


def _v4_moe(spec: ModelSpec, w: _Writer, prefix: str, layer: int | None) -> Iterator[TensorSpec]:
    moe, d = spec.moe, spec.hidden
    routed = spec.dspark.routed if layer is None and spec.dspark is not None else moe.routed
    yield w.plain(f"{prefix}.gate.weight", (routed, d), "router")
    if layer is not None and layer < moe.hash_layers:
        yield w.plain(f"{prefix}.gate.tid2eid", (spec.vocab, moe.top_k), "router", "int64")
    else:
        yield w.plain(f"{prefix}.gate.bias", (routed,), "router", "float32")
        if spec.vision is not None:
            yield w.plain(f"{prefix}.gate.bias_vl", (routed,), "router", "float32")
    for expert in range(routed):
        yield from w.expert(f"{prefix}.experts.{expert}.w1", moe.intermediate, d)
        yield from w.expert(f"{prefix}.experts.{expert}.w2", d, moe.intermediate)
        yield from w.expert(f"{prefix}.experts.{expert}.w3", moe.intermediate, d)
    width = moe.intermediate * moe.shared
    yield from w.linear(f"{prefix}.shared_experts.w1", width, d, "shared")
    yield from w.linear(f"{prefix}.shared_experts.w2", d, width, "shared")
    yield from w.linear(f"{prefix}.shared_experts.w3", width, d, "shared")


def _hyper_mix(w: _Writer, hyper: HyperSpec, prefix: str, d: int) -> Iterator[TensorSpec]:
    """pre (mult), post (mult) and the mixing matrix (mult x mult): 24 numbers a token for mult 4."""
    outputs = hyper.mult * (2 + hyper.mult)
    yield w.plain(f"{prefix}_fn", (outputs, hyper.mult * d), "hyper", "float32")
    yield w.plain(f"{prefix}_base", (outputs,), "hyper", "float32")
    yield w.plain(f"{prefix}_scale", (3,), "hyper", "float32")


def _hyper_head(w: _Writer, hyper: HyperSpec, prefix: str, d: int) -> Iterator[TensorSpec]:
    yield w.plain(f"{prefix}_fn", (hyper.mult, hyper.mult * d), "hyper", "float32")
    yield w.plain(f"{prefix}_base", (hyper.mult,), "hyper", "float32")
    yield w.plain(f"{prefix}_scale", (1,), "hyper", "float32")


def _mtp_extras(spec: ModelSpec, hyper: HyperSpec, w: _Writer, prefix: str) -> Iterator[TensorSpec]:
    d = spec.hidden
    yield from w.linear(f"{prefix}.e_proj", d, d, "mtp")
    yield from w.linear(f"{prefix}.h_proj", d, d, "mtp")
    for name in ("enorm", "hnorm", "norm"):
        yield w.norm(f"{prefix}.{name}", d)
    yield from _hyper_head(w, hyper, f"{prefix}.hc_head", d)


def _dspark_extras(spec: ModelSpec, hyper: HyperSpec, w: _Writer) -> Iterator[TensorSpec]:
    """The first stage folds the target layers' states; the last one owns the norm and the two small heads."""
    dspark, d, last = spec.dspark, spec.hidden, f"mtp.{spec.mtp_layers - 1}"
    assert dspark is not None  # the caller's condition
    yield from w.linear("mtp.0.main_proj", d, d * len(dspark.targets), "mtp")
    yield w.norm("mtp.0.main_norm", d)
    yield w.norm(f"{last}.norm", d)
    names = ("markov_w1", "markov_w2")
    if spec.shared_kv is None:
        yield from _hyper_head(w, hyper, f"{last}.hc_head", d)
    else:
        names = ("embed", "head")
    for name in names:
        yield w.plain(f"{last}.markov_head.{name}.weight", (spec.vocab, dspark.markov_rank), "mtp")
    yield w.plain(f"{last}.confidence_head.proj.weight", (1, d + dspark.markov_rank), "mtp")


def _engram(
    w: _Writer, e: EngramSpec, hyper: HyperSpec, prefix: str, d: int, layer: int, spec: ModelSpec
) -> Iterator[TensorSpec]:
    rows = e.rows[e.layers.index(layer)]
    block = spec.quant.block[1] if spec.quant is not None else e.head_dim
    if spec.quant is None:
        yield w.plain(f"{prefix}.embed.weight", (rows, e.head_dim), "engram")
    else:
        yield w.plain(f"{prefix}.embed.weight", (rows, e.head_dim), "engram", "float8_e4m3")
        grid = (rows, -(-e.head_dim // block))
        yield TensorSpec(f"{prefix}.embed.scale", grid, "float8_e8m0", "scale", f"{prefix}.embed.weight")
    # One row for every n-gram order from 2 up and every head; one key a stream and one value come out.
    yield from w.linear(f"{prefix}.wkv", (hyper.mult + 1) * d, (e.max_ngram - 1) * e.heads * e.head_dim, "engram")
    yield w.plain(f"{prefix}.q_weight", (hyper.mult, d), "engram")
    yield w.plain(f"{prefix}.k_weight", (hyper.mult, d), "engram")


def _vision(w: _Writer, v: VisionSpec, d: int) -> Iterator[TensorSpec]:
    for name in ("image_start", "image_end", "image_newline"):
        yield w.plain(name, (d,), "vision")
    for name, columns in (("w1", v.hidden * v.downsample**2), ("w2", d)):
        yield w.plain(f"aligner.{name}.weight", (d, columns), "vision")
        yield w.plain(f"aligner.{name}.bias", (d,), "vision")
    yield w.plain("vision.patch_embed.proj.weight", (v.hidden, 3 * v.patch**2), "vision")
    yield w.plain("vision.patch_embed.proj.bias", (v.hidden,), "vision")
    yield w.plain("vision.norm.weight", (v.hidden,), "vision")
    for block in range(v.layers):
        prefix = f"vision.blocks.{block}"
        for name, rows in (("wqkv", 3 * v.hidden), ("wo", v.hidden)):
            yield w.plain(f"{prefix}.attn.{name}.weight", (rows, v.hidden), "vision")
            yield w.plain(f"{prefix}.attn.{name}.bias", (rows,), "vision")
        yield w.plain(f"{prefix}.mlp.w1.weight", (2 * v.intermediate, v.hidden), "vision")
        yield w.plain(f"{prefix}.mlp.w2.weight", (v.hidden, v.intermediate), "vision")
        yield w.plain(f"{prefix}.norm1.weight", (v.hidden,), "vision")
        yield w.plain(f"{prefix}.norm2.weight", (v.hidden,), "vision")
