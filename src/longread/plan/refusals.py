"""Deployments that do not run, gathered by the limit that they hit first, with what would make them fit.

Knows how to say it; which limit was hit the search finds.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from longread.plan.candidate import Refusal, RefusalKind
from longread.plan.deployment import Deployment, Workload
from longread.plan.figures import more_memory, place
from longread.plan.gpu_memory import GIB, GpuMemory, gpu_memory, max_context
from longread.plan.space import CHUNK, SHARE

_CUT = 0.9  # of the weights, at least, a wider replica splits: what every card holds whole is left out
_NAMED = 4  # labels that a group lists before it counts


@dataclass(frozen=True, slots=True)
class Refused:
    """One deployment and its first limit. ``value`` against ``bound``: bytes of memory, or sessions."""

    kind: RefusalKind
    deployment: Deployment
    limit: str
    value: float | None = None
    bound: float | None = None
    cure: str = ""


def memory_refusal(d: Deployment, memory: GpuMemory, w: Workload) -> Refused:
    """Weights, activations and one sequence of the load against what a card has."""
    one = memory.session_bytes(w.isl + w.osl)
    needed = memory.weight_total + memory.beside + one
    largest = max(memory.weights, key=lambda name: memory.weights[name])
    where = "the machine" if place(d.hardware) == "machine" else "a card"
    limit = (
        f"memory of {where}: weights {memory.weight_total / GIB:.1f} GiB (most of it {largest}), beside them "
        f"{memory.beside / GIB:.1f}, one sequence {one / GIB:.1f}"
    )
    return Refused("memory", d, limit, needed, memory.usable)


def session_refusal(d: Deployment, sessions: int, w: Workload) -> Refused:
    return Refused(
        "sessions",
        d,
        f"sequences of {w.isl + w.osl:,} tokens at once",
        w.concurrency,
        sessions,
        (f"at most {sessions:,} at once and the rest waiting, " if sessions else "")
        + f"{more_memory(d.hardware)}, or a shorter context",
    )


def grouped(refused: list[Refused], least: int) -> tuple[Refusal, ...]:
    """One line a limit: memory by cards a replica and expert format, the rest by the limit's words.

    ``least``: cards of the smallest replica that fits; smaller ones are one line together. 0: none fits.
    """
    groups: dict[tuple[object, ...], list[Refused]] = defaultdict(list)
    for r in refused:
        groups[_key(r, least)].append(r)
    rows = [_refusal(members, least) for members in groups.values()]
    order = {"memory": 0, "sessions": 1, "engine": 2, "strategy": 3}
    return tuple(sorted(rows, key=lambda row: (order[row.kind], -row.count)))


def _key(r: Refused, least: int) -> tuple[object, ...]:
    d = r.deployment
    if r.kind == "memory":
        if r.cure:  # of main memory, not of a card
            return r.kind, r.limit
        return r.kind, d.experts, max(d.strategy.gpus, least - 1)
    if r.kind == "sessions":
        return r.kind, d.engine
    return r.kind, _problem(r)


def _problem(r: Refused) -> str:
    """Without the deployment in front."""
    return r.limit.split(": ", 1)[1] if r.kind == "strategy" and ": " in r.limit else r.limit


def _refusal(members: list[Refused], least: int) -> Refusal:
    nearest = min(members, key=lambda r: (r.value or 0) / r.bound if r.bound else 0.0)
    d = nearest.deployment
    labels = list(dict.fromkeys(_label(r.deployment) for r in members))
    what = ", ".join(labels[:_NAMED]) + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")
    by, unit, cure = "", "", nearest.cure
    if nearest.kind == "memory" and nearest.value is not None and nearest.bound is not None:
        by, unit = f"{(nearest.value - nearest.bound) / GIB:.1f} GiB over", "bytes"
        if not cure and d.strategy.gpus < least:
            cure = f"a replica over {least} cards or more, as ranked"
        cure = cure or _room(d, nearest.value - nearest.bound)
    elif nearest.kind == "sessions" and nearest.value is not None:
        by, unit = f"{nearest.bound or 0:,.0f} of {nearest.value:,.0f} fit", "sessions"
    return Refusal(
        nearest.kind,
        tuple(dict.fromkeys(r.deployment.engine for r in members)),
        what,
        len(members),
        (f"{_label(d)} comes nearest; " if len(labels) > 1 and by else "") + _problem(nearest),
        cure,
        nearest.value,
        nearest.bound,
        unit,
        by,
    )


def _label(d: Deployment) -> str:
    return replace(d.strategy, replicas=1).label + (f" {d.experts}" if d.experts != "native" else "")


def _room(d: Deployment, over: float) -> str:
    """The cheapest changes that give ``over`` bytes a card."""
    cures = []
    if d.memory_share < SHARE and _fits(replace(d, memory_share=SHARE)):
        return f"gpu_memory_utilization of {SHARE:g}"
    chunk = max(CHUNK, d.max_num_seqs)
    if d.chunk > chunk and _fits(replace(d, chunk=chunk)):
        return f"max_num_batched_tokens of {chunk:,}"
    longest = max_context(d)
    if 0 < longest < d.max_model_len:
        cures.append(f"a context of at most {longest:,} tokens")
    cards = 0 if place(d.hardware) == "machine" else _cards(d, over)
    if cards:
        cures.append(f"a replica over {cards} cards of this kind")
    fp8 = d.spec.quant is not None and d.spec.quant.experts == "fp8"
    if d.experts != "int4" and fp8 and _fits(replace(d, experts="int4")):
        cures.append("int4 experts (another checkpoint, lossy)")
    if d.experts == "fp8" and _fits(replace(d, experts="native")):
        cures.append("the checkpoint's own experts")
    return ", or ".join(cures) or ("a machine" if place(d.hardware) == "machine" else "cards") + " with more memory"


def _fits(d: Deployment) -> bool:
    memory = gpu_memory(d)
    return memory.session_bytes(d.max_model_len) <= memory.free


def _cards(d: Deployment, over: float) -> int:
    """Cards a replica at which what is cut shrinks by ``over``, doubled until it fits; 0: not by 64."""
    weights = gpu_memory(d).weight_total
    size = d.strategy.gpus
    while size < 64:
        size *= 2
        if weights * (1 - d.strategy.gpus / size) * _CUT >= over:
            return size
    return 0
