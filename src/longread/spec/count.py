"""What a model costs, from its spec alone: parameters, checkpoint bytes, cache bytes and FLOPs per token.

Formulas of one sequence on ideal hardware; batching, parallelism and workspace belong to ``plan``. The tests hold
every function to published totals.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from longread.spec.errors import ConfigError
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.model import ModelSpec, SharedKVSpec
from longread.spec.state import state_groups

_OUTSIDE = ("mtp", "vision")  # stored, but not part of what a text token meets
_TABLES = "engram_table"
_LAYER = re.compile(r"layers\.(\d+)\.")
_PLAIN = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKINGS = (*_PLAIN, "fp8", "fp8_ds_mla", "fp8_ds_mla_mxfp4", "nvfp4")


@dataclass(frozen=True, slots=True)
class Rows:
    """One growing group of a cache. ``kind``: latent (MLA), entry (V4's compressed key-value) or index (index key)."""

    name: str
    kind: str
    layers: int
    width: int
    tokens_per_row: int


@dataclass(frozen=True, slots=True)
class _Tally:
    """One pass over the inventory: numbers by part, numbers a token is multiplied with, bytes and tensors."""

    parts: dict[str, int]
    active: int
    prompt: int
    nbytes: int
    tensors: int


def parameters(spec: ModelSpec) -> int:
    """Numbers of the backbone: no scales, hash tables, drafter, vision tower or Engram tables."""
    return sum(numbers for part, numbers in _tally(spec).parts.items() if part not in (*_OUTSIDE, _TABLES))


def parameters_by_part(spec: ModelSpec) -> dict[str, int]:
    """Numbers of everything stored, by ``TensorSpec.part``; the drafter is "mtp", Engram's tables "engram_table"."""
    return dict(_tally(spec).parts)


def active_parameters(spec: ModelSpec) -> int:
    """Matrix numbers that one decoded token is multiplied with, the head included, embedding and norms not.

    Of the routed experts top_k / routed. MLA's W_kvb counts once: absorbed, it is applied to the one token.
    """
    return _tally(spec).active


def prompt_parameters(spec: ModelSpec) -> int:
    """The same for one prompt token whose logits are not wanted.

    V4.1 is a causal encoder-decoder: prompt tokens only run the layers below its last key-value source, and that
    source's compressor. Other models run all layers.
    """
    return _tally(spec).prompt


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Payload bytes of the native checkpoint: every tensor with its scales, without file headers."""
    return _tally(spec).nbytes


def tensor_count(spec: ModelSpec) -> int:
    """Tensors of the native checkpoint, scales included."""
    return _tally(spec).tensors


def kv_bytes_per_token(spec: ModelSpec, packing: str = "bfloat16") -> dict[str, float]:
    """Cache bytes that each token adds, by state group (a row of n tokens counts 1/n a token).

    ``packing``: float32, bfloat16, float16; "fp8" (one byte a number, MLA only); "fp8_ds_mla" (the records of FlashMLA
    and vLLM: FP8 with scales, RoPE channels in bfloat16, index keys FP8 with a float32 scale); "fp8_ds_mla_mxfp4" (the
    same with MXFP4 index keys); "nvfp4" (V4.1: FP4 entries with an FP8 scale per 16, MXFP4 index keys).
    Raises ``ConfigError`` for a packing that this model has no record for.
    """
    rotary = _rotary(spec)
    return {
        g.name: g.layers * _row_bytes(g.kind, g.width, rotary, packing) / g.tokens_per_row for g in row_groups(spec)
    }


def fixed_bytes_per_request(spec: ModelSpec, packing: str = "bfloat16") -> dict[str, int]:
    """Cache bytes of one sequence that do not grow: windows in ``packing``, compressor state in float32."""
    if spec.compressed is None:
        return {}
    c, rotary = spec.compressed, _rotary(spec)
    fixed = {"window": spec.layers * c.window * _row_bytes("window", c.head_dim, rotary, packing)}
    if spec.shared_kv is not None:
        pooled = sum(1 for layer in spec.shared_kv.kv_sources if c.ratios[layer] > 1)
        fixed["open_group"] = pooled * 2 * c.head_dim * 4  # one row of values and one of scores
        return fixed
    for group in state_groups(spec):
        if group.kind == "ring" and group.name != "window":
            fixed[group.name] = len(group.layers) * group.ring_rows * group.width * 4
    return fixed


def row_groups(spec: ModelSpec) -> tuple[Rows, ...]:
    """The growing groups: those of ``state.state_groups``, and V4.1's, which the engine cannot hold yet."""
    c, ix = spec.compressed, spec.indexer
    if spec.shared_kv is not None and c is not None and ix is not None:
        groups = []
        for layer in spec.shared_kv.kv_sources:
            groups.append(Rows(f"kv_{layer}", "entry", 1, c.head_dim, c.ratios[layer]))
            groups.append(Rows(f"index_{layer}", "index", 1, ix.head_dim, c.ratios[layer]))
        return tuple(groups)
    kinds = {"latent": "latent", "index": "index", "csa": "entry", "hca": "entry"}
    return tuple(
        Rows(g.name, kinds[g.name], len(g.layers), g.width, g.tokens_per_row)
        for g in state_groups(spec)
        if g.kind == "rows"
    )


def flops_per_token(spec: ModelSpec, context: int) -> float:
    """FLOPs of one decoded token that sees ``context`` tokens, a multiply-add counted as 2."""
    return sum(flops_by_part(spec, context).values())


def flops_by_part(spec: ModelSpec, context: int) -> dict[str, float]:
    """``flops_per_token`` as a sum: weights, and attention by what is attended to.

    weights: 2 * active parameters. MLA absorbed: 2 * layers * heads * (2 * kv_lora + rope) a key. V4: 4 * heads *
    head_dim a row (window, chosen CSA rows, all HCA rows). Index: 2 * index heads * index dim a scored row.
    """
    flops = {"weights": 2.0 * active_parameters(spec)}
    if spec.mla is not None:
        per_key = 2 * spec.layers * spec.heads * (2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
        keys = context if spec.indexer is None else min(context, spec.indexer.top_k)
        flops["attention"] = float(per_key * keys)
        if spec.indexer is not None:
            flops["index"] = float(spec.layers * context * 2 * spec.indexer.heads * spec.indexer.head_dim)
        return flops
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None  # ModelSpec: without mla both are set
    per_row, per_score = 4 * spec.heads * c.head_dim, 2 * ix.heads * ix.head_dim
    flops["window"] = float(per_row * spec.layers * min(c.window, context))
    if spec.shared_kv is not None:
        chosen, scored = _shared_rows(spec.shared_kv, c.ratios, ix.top_k, context)
        return flops | {"chosen": per_row * chosen, "index": per_score * scored}
    csa, hca = c.ratios.count(4), c.ratios.count(128)
    flops["csa"] = per_row * csa * min(ix.top_k, context / 4)
    flops["hca"] = per_row * hca * context / 128
    flops["index"] = per_score * csa * context / 4
    return flops


def _shared_rows(shared: SharedKVSpec, ratios: tuple[int, ...], top_k: int, context: int) -> tuple[float, float]:
    """V4.1: rows attended to over all layers, and rows scored over all index sources."""
    source = dict.fromkeys(range(len(ratios)), 0)
    for layer in source:
        source[layer] = max((s for s in shared.kv_sources if s <= layer), default=-1)
    chosen = sum(min(top_k, context / ratios[source[i]]) for i, ratio in enumerate(ratios) if ratio)
    scored = 0.0
    for layer in shared.index_sources:
        rows = context / ratios[source[layer]]
        if layer > shared.candidate_source:  # scores only the candidate blocks that the candidate source kept
            rows = min(rows, shared.candidate_blocks * shared.candidate_block)
        scored += rows
    return chosen, scored


def _row_bytes(kind: str, width: int, rotary: int, packing: str) -> int:
    """Bytes of one stored row of ``width`` numbers, the last ``rotary`` of an entry or latent being RoPE channels."""
    if packing in _PLAIN:
        return width * _PLAIN[packing]
    fp8_index, mxfp4_index = width + 4, width // 2 + width // 32
    entry = (width - rotary) + 2 * rotary + (width - rotary) // 64 + 1  # FP8, RoPE in bf16, scale per 64, one pad byte
    records = {
        "fp8": {"latent": width, "index": fp8_index},
        "fp8_ds_mla": {
            "latent": (width - rotary) + 2 * rotary + 4 * ((width - rotary) // 128),
            "entry": entry,
            "window": entry,
            "index": fp8_index,
        },
        "fp8_ds_mla_mxfp4": {"entry": entry, "window": entry, "index": mxfp4_index},
        "nvfp4": {"entry": width // 2 + width // 16, "window": width + width // 32, "index": mxfp4_index},
    }
    if packing not in records:
        raise ConfigError(f"cache packing {packing!r} is not known; known: {', '.join(PACKINGS)}")
    if kind not in records[packing]:
        raise ConfigError(f"cache packing {packing!r} has no record for this model's {kind} rows")
    return records[packing][kind]


def _rotary(spec: ModelSpec) -> int:
    if spec.mla is not None:
        return spec.mla.qk_rope_head_dim
    return spec.compressed.rope_head_dim if spec.compressed is not None else 0


@lru_cache(maxsize=32)  # a planner asks for many contexts of few models; a pass takes up to 0.3 s
def _tally(spec: ModelSpec) -> _Tally:
    parts: dict[str, int] = defaultdict(int)
    active = prompt = nbytes = tensors = 0
    end = spec.shared_kv.kv_sources[-1] if spec.shared_kv is not None else None
    for tensor in inventory(spec):
        nbytes, tensors = nbytes + tensor.nbytes, tensors + 1
        if tensor.scale_of is not None or tensor.dtype == "int64":
            continue  # a scale belongs to its weight, a hash table holds expert ids
        numbers = tensor.elements * 2 if tensor.dtype == "int8" else tensor.elements
        parts[_TABLES if _is_table(tensor) else tensor.part] += numbers
        if _is_multiplied(spec, tensor):
            active += numbers
            prompt += numbers if tensor.part != "head" and _meets_prompt(tensor, end) else 0
    return _Tally(parts, active, prompt, nbytes, tensors)


def _is_table(tensor: TensorSpec) -> bool:
    return tensor.name.endswith(".engram.embed.weight")


def _is_multiplied(spec: ModelSpec, tensor: TensorSpec) -> bool:
    """Whether a token is multiplied with this matrix: no look-ups, no element-wise vectors."""
    lookup = tensor.part in ("embed", *_OUTSIDE) or _is_table(tensor) or len(tensor.shape) < 2
    if lookup or tensor.name.endswith((".ape", ".engram.q_weight", ".engram.k_weight")):
        return False
    if tensor.part == "experts":  # all experts are alike, so counting the first top_k of a layer is exact
        return int(tensor.name.split(".experts.")[1].split(".")[0]) < spec.moe.top_k
    return True


def _meets_prompt(tensor: TensorSpec, end: int | None) -> bool:
    match = _LAYER.search(tensor.name)
    if end is None or match is None or int(match[1]) < end:
        return True
    own = (".attn.wkv.", ".attn.compressor.", ".attn.indexer.wk.")  # what fills the cache of layer ``end``
    return int(match[1]) == end and any(part in tensor.name for part in own)
