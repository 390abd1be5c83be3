"""What a profiled step had to do at least: the planner's FLOPs and bytes for the same tokens, by group of ops.

Knows the planner and a step's shape; no torch, no clock. The engine computes in its own dtype whatever the checkpoint
is quantised to, so it is counted with plain weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.ops import Op, decode_ops, head_op, prefill_ops
from longread.spec.config import ComputeDtype
from longread.spec.model import ModelSpec

LINEARS, EXPERTS, ATTENTION = "linears", "routed experts", "attention"
INDEX, TOP_K, ELEMENTWISE = "indexer scores", "indexer top-k", "norms, rope, streams"
SAMPLER, BETWEEN, BOOKS = "sampler", "model, between ops", "schedule and books"
GROUPS: Final = (LINEARS, EXPERTS, ATTENTION, INDEX, TOP_K, ELEMENTWISE, SAMPLER, BETWEEN, BOOKS)
_OPS: Final = {
    **dict.fromkeys(("linear.linear", "moe.mlp", "router.router_logits", "fp8.linear", "fp8.grouped_linear"), LINEARS),
    **dict.fromkeys(("moe.experts", "experts.experts"), EXPERTS),
    **dict.fromkeys(("mla.attend", "sparse_attention.attend", "sparse_attention.decode"), ATTENTION),
    **dict.fromkeys((f"sparse_attention.{op}" for op in ("entries", "rows_turned", "chunk_turned")), ATTENTION),
    **dict.fromkeys(("indexer.scores", "indexer.choose_rows", "indexer.choose_chunk"), INDEX),  # the latter choose too
    **dict.fromkeys(("indexer.chosen", "indexer.chosen_rows"), TOP_K),
}
_NAMES: Final = {
    "linears": LINEARS,
    "head": LINEARS,
    "routed experts": EXPERTS,
    "indexer scores": INDEX,
    "indexer top-k": TOP_K,
    "norms, streams, quantisation": ELEMENTWISE,
}  # all others are attention


@dataclass(frozen=True, slots=True)
class Shape:
    """One step: (tokens behind, new tokens) of each sequence, and how many of them bring logits."""

    segments: tuple[tuple[int, int], ...]
    logit_rows: int


def group_of(op: str) -> str:
    """The group of a kernel of kernels/dispatch.py."""
    return _OPS.get(op, ELEMENTWISE)


def counts(spec: ModelSpec, dtype: ComputeDtype, shapes: Sequence[Shape]) -> dict[str, dict[str, Any]]:
    """By group ``flops``, ``bytes`` and the ``rate`` that bounds the FLOPs, summed over steps."""
    d = _deployment(spec, dtype)
    total: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        for name, (flops, moved, rate) in _step(d, shape).items():
            row = total.setdefault(name, {"flops": 0.0, "bytes": 0.0, "rate": rate})
            row["flops"] += flops
            row["bytes"] += moved
    return total


def _step(d: Deployment, shape: Shape) -> dict[str, tuple[float, float, str]]:
    """Weights are read once a step, whoever needs them; cache and activations by each sequence."""
    decodes = [before + 1 for before, new in shape.segments if new == 1]
    parts = [prefill_ops(d, new, before) for before, new in shape.segments if new > 1]
    if decodes:
        parts.append(decode_ops(d, len(decodes), round(sum(decodes) / len(decodes))))
    head = head_op(d, shape.logit_rows) if shape.logit_rows else None
    found: dict[str, tuple[float, float, str]] = {}
    weights: dict[str, float] = {}
    for part in parts:
        for op in part:
            if op.name == "head":
                continue  # counted once, for all rows
            name, shared = _NAMES.get(op.name, ATTENTION), op.name in ("linears", "routed experts")
            weights[op.name] = max(weights.get(op.name, 0.0), op.bytes)
            _add(found, name, op, 0.0 if shared else op.bytes)
    if head is not None:
        _add(found, LINEARS, head, head.bytes)
    for each in ("linears", "routed experts"):
        if each in weights:
            flops, moved, rate = found[_NAMES[each]]
            found[_NAMES[each]] = (flops, moved + weights[each], rate)
    return found


def _add(found: dict[str, tuple[float, float, str]], name: str, op: Op, moved: float) -> None:
    flops, before, _ = found.get(name, (0.0, 0.0, op.rate))
    found[name] = (flops + op.flops, before + moved, op.rate)


@lru_cache(maxsize=4)
def _deployment(spec: ModelSpec, dtype: ComputeDtype) -> Deployment:
    plain = replace(spec, quant=None, torch_dtype=dtype)
    return Deployment(plain, parse_hardware("cpu"), Strategy(), engine="longread", cache=dtype)
