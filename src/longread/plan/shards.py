"""How a strategy cuts a model's weights: bytes a card by group, and which strategies cannot be.

Knows tensor names and the rules by which vLLM and SGLang cut them; knows no card and no cache. The inventory is walked
once a spec; a strategy is arithmetic over some hundred sums.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from longread.plan.deployment import Deployment, ExpertFormat, Strategy
from longread.plan.engine_limits import split_limit
from longread.spec.count import kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.inventory import FP4_BLOCK, TensorSpec, inventory
from longread.spec.model import ModelSpec

# heads: rows or columns by attention head (MLA q_b, kv_b, o; V4 wq_b, wo_a, wo_b, sinks). ffn: columns of dense and
# shared FFNs. vocabulary: rows of embedding and head. table: rows of Engram's tables. experts: routed ones. whole: on
# every card (q_a, kv_a, compressors, the whole indexer, router, norms, hyper-connections).
Cut = Literal["heads", "ffn", "vocabulary", "table", "experts", "whole"]

INT4_GROUP = 128  # weights that share one scale in the usual 4-bit conversions (GPTQ, AWQ), a 16-bit scale each
_HEADS = re.compile(r"(\.(q_proj|q_b_proj|kv_b_proj|o_proj)|\.attn\.(wq_b|wo_a|wo_b))\.weight$|\.attn_sink$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_GROUPS = {"embed": "embed+head", "head": "embed+head"} | dict.fromkeys(
    ("router", "norm", "hyper"), "router+norm+hyper"
)
_FIRST, _LAST = -1, 1 << 30  # places of what lies before the first layer and behind the last


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights that lie on one pipeline stage and are cut the same way. ``place``: the layer they belong to."""

    place: int
    group: str
    cut: Cut
    stored: int  # bytes as in the checkpoint, scales included
    numbers: int  # scales not counted


@lru_cache(maxsize=16)  # one pass over the inventory takes up to 0.4 s; a search asks for hundreds of strategies
def pieces(spec: ModelSpec) -> tuple[Piece, ...]:
    """All weights that a server loads. V3's drafter shares embedding and head, so its stored copies are left out."""
    stored: dict[tuple[int, str, Cut], int] = defaultdict(int)
    numbers: dict[tuple[int, str, Cut], int] = defaultdict(int)
    key: tuple[int, str, Cut] | None = None
    for tensor in inventory(spec):
        scale = tensor.scale_of is not None  # follows its weight immediately and lies where that lies
        key = key if scale else _key(spec, tensor)
        if key is None:
            continue
        stored[key] += tensor.nbytes
        if not scale:
            numbers[key] += tensor.elements * (2 if tensor.dtype == "int8" else 1)
    return tuple(Piece(*key, size, numbers[key]) for key, size in stored.items())


def _key(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, str, Cut] | None:
    name, part = tensor.name, tensor.part
    if part == "mtp":
        copy = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        return None if copy else (_LAST, "drafter", _cut(name, part))
    place = _LAYER.search(name)
    at = int(place[1]) if place else _FIRST if part in ("embed", "vision") else _LAST
    return at, _GROUPS.get(part, part), _cut(name, part)


def _cut(name: str, part: str) -> Cut:
    if ".experts." in name:
        return "experts"
    if ".shared_experts." in name or part == "dense":
        return "ffn"
    if part in ("embed", "head"):
        return "vocabulary"
    if name.endswith(".engram.embed.weight"):
        return "table"
    return "heads" if ".indexer." not in name and _HEADS.search(name) else "whole"


def weight_bytes(d: Deployment, drafter: bool = False) -> dict[str, int]:
    """Bytes on the fullest card by group; every group of the model is named, 0 where that card has none of it.

    ``drafter``: MTP or DSpark is loaded too. Its experts, and a shared or dense FFN, keep the checkpoint's type
    whatever ``d.experts`` says.
    """
    return max(stage_weights(d, drafter), key=lambda groups: sum(groups.values()))


def stage_weights(d: Deployment, drafter: bool = False) -> list[dict[str, int]]:
    """``weight_bytes`` of a card of each pipeline stage."""
    stages = stage_layers(d.spec.layers, d.strategy.pp)
    shares = degrees(d.strategy)
    result: list[dict[str, int]] = [defaultdict(int) for _ in stages]
    for piece in pieces(d.spec):
        if piece.group == "drafter" and not drafter:
            continue
        size = piece.stored
        if piece.cut == "experts" and piece.group != "drafter":
            size = expert_bytes(d.spec, d.experts, piece)
        for index, (start, end) in enumerate(stages):
            first, last = index == 0, index == len(stages) - 1
            here = start <= piece.place < end or (first and piece.place < 0) or (last and piece.place >= d.spec.layers)
            result[index][piece.group] += -(-size // shares[piece.cut]) if here else 0
    return [dict(groups) for groups in result]


def expert_bytes(spec: ModelSpec, form: ExpertFormat, piece: Piece) -> int:
    """A piece of routed experts in ``form``: FP8 keeps the checkpoint's block (128 x 128 without one), scales float32
    or ue8m0 as there; int4 has one 16-bit scale for each 128 weights, no zero points.
    """
    n = piece.numbers
    if form == "native":
        return piece.stored
    if form == "bf16":
        return 2 * n
    if form == "int4":
        return n // 2 + 2 * n // INT4_GROUP
    block = spec.quant.block if spec.quant is not None else (128, 128)
    scale = 1 if spec.quant is not None and spec.quant.scale_format == "ue8m0" else 4
    return n + scale * n // (block[0] * block[1])


def degrees(strategy: Strategy) -> dict[Cut, int]:
    """Into how many parts each kind is cut.

    Attention, dense and shared FFN and vocabulary: over the ``tp / dp`` cards of one attention group (vLLM's data
    parallel ranks are tensor parallel groups of their own); cp cuts all of these but attention further. Routed experts
    over all cards of a stage, by columns or whole (``ep``): the same bytes.
    """
    attention = strategy.tp // strategy.dp
    other, stage = attention * strategy.cp, strategy.tp * strategy.cp
    return {
        "heads": attention,
        "ffn": other,
        "vocabulary": other,
        "table": stage,
        "experts": stage,
        "whole": 1,
    }


def cache_share(d: Deployment) -> int:
    """Cards over which one sequence's cache is split within a stage: longread's cp splits it by tokens, SGLang's cp
    (prefill only) gathers it to every card. tp copies it: there is one key-value head.
    """
    return 1 if d.engine == "sglang" else d.strategy.cp


def stage_layers(layers: int, pp: int) -> list[tuple[int, int]]:
    """Layers [start, end) of each stage. As vLLM's ``get_pp_indices``: what is over goes to the stages before the last,
    from behind, since the last has the head.
    """
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra] += 1
    ends = [sum(sizes[: i + 1]) for i in range(pp)]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def check_strategy(d: Deployment) -> None:
    """Raises ``ConfigError`` where ``d`` cannot be run whatever memory there is: the first limit, its value, a cure."""
    for problem in _problems(d):
        raise ConfigError(f"{replace(d.strategy, replicas=1).label} for {d.spec.label}: {problem}")


def _problems(d: Deployment) -> Iterator[str]:
    yield from _size_problems(d)
    yield from _load_problems(d)
    yield from _cut_problems(d)
    yield from _engine_problems(d)


def _size_problems(d: Deployment) -> Iterator[str]:
    s = d.strategy
    for name in ("tp", "pp", "cp", "dp", "replicas"):
        if getattr(s, name) < 1:
            yield f"{name}={getattr(s, name)}; it must be at least 1"
    if d.hardware.gpus < 1 or d.hardware.nodes < 1:
        yield f"the hardware has {d.hardware.gpus} GPUs on {d.hardware.nodes} nodes; it takes at least one of each"
    if s.tp % s.dp:
        yield f"dp={s.dp} groups cannot share tp={s.tp} cards evenly; dp must divide tp"
    needed = s.gpus * s.replicas
    if needed > d.hardware.total_gpus:
        yield f"it needs {needed} GPUs, {d.hardware.label} has {d.hardware.total_gpus}; lower tp, pp, cp or replicas"
    if s.pp > d.spec.layers:
        yield f"pp={s.pp} is more than the {d.spec.layers} layers; lower it"


def _load_problems(d: Deployment) -> Iterator[str]:
    if not 0 < d.max_model_len <= d.spec.max_position:
        yield (
            f"max_model_len={d.max_model_len} is outside 1..{d.spec.max_position}, what the model was made for "
            "(max_position_embeddings)"
        )
    if not 0 < d.memory_share <= 1:
        yield f"memory_share={d.memory_share} is outside 0..1"
    if d.max_num_seqs < 1:
        yield f"max_num_seqs={d.max_num_seqs}; it must be at least 1"
    if d.chunk < d.max_num_seqs:
        yield f"chunk={d.chunk} is below max_num_seqs={d.max_num_seqs}: a step must hold one token a sequence"
    kv_bytes_per_token(d.spec, d.cache)  # raises ConfigError for a packing that the model has no record for


def _cut_problems(d: Deployment) -> Iterator[str]:
    spec, moe, shares = d.spec, d.spec.moe, degrees(d.strategy)
    heads, ffn, stage = shares["heads"], shares["ffn"], shares["experts"]
    if spec.heads % heads:
        yield f"{spec.heads} attention heads cannot be split over {heads} cards; use a divisor of {spec.heads}"
    if spec.compressed is not None and spec.compressed.o_groups % heads:
        groups = spec.compressed.o_groups
        yield (
            f"the output projection has {groups} groups (o_groups), which {heads} cards cannot share; at most "
            f"TP{groups} within an attention group: use dp, pp or cp beyond it"
        )
    if spec.vocab % shares["vocabulary"]:
        yield f"a vocabulary of {spec.vocab} cannot be split over {shares['vocabulary']} cards"
    block = spec.quant.block[0] if spec.quant is not None else 1
    for what, width in (("dense FFN", moe.dense_intermediate * (moe.first_dense > 0)), ("shared experts", _shared(d))):
        yield from _column_problems(what, width, ffn, block, "FP8 block")
    if d.strategy.ep:
        if moe.routed % stage:
            yield f"{moe.routed} experts cannot be spread over {stage} cards evenly; use a divisor of {moe.routed}"
    else:
        unit, kind = _expert_unit(d)
        yield from _column_problems("routed experts", moe.intermediate, stage, unit, kind)
    if spec.mla is not None:
        yield from _column_problems("attention output", spec.heads * spec.mla.v_head_dim, heads, block, "FP8 block")


def _shared(d: Deployment) -> int:
    return d.spec.moe.intermediate * d.spec.moe.shared


def _expert_unit(d: Deployment) -> tuple[int, str]:
    """What a card's share of an expert's columns must be a multiple of."""
    quant = d.spec.quant
    form: str = d.experts
    if form == "native":
        form = "bf16" if quant is None else quant.experts
    if form == "fp8":
        return (quant.block[0] if quant is not None else 128), "FP8 block"
    return {"int4": (INT4_GROUP, "int4 group"), "fp4": (FP4_BLOCK, "FP4 group")}.get(form, (1, ""))


def _column_problems(what: str, width: int, cards: int, unit: int, kind: str) -> Iterator[str]:
    if width % cards:
        yield f"{what} of width {width} cannot be split over {cards} cards"
    elif (width // cards) % unit:
        yield (
            f"{what} of width {width} over {cards} cards leaves {width // cards} columns, not a multiple of the {kind} "
            f"of {unit} (as in sglang#23602); use pp instead, or ep for routed experts"
        )


def _engine_problems(d: Deployment) -> Iterator[str]:
    problem = split_limit(d)
    if problem is not None:
        yield problem
