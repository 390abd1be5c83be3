"""Times from single kernels and links, before an engine's own losses: the part of a prediction that is physics.

Joins ``ops``, ``efficiency`` and ``communication``; ``calibrate`` compares its results with runs and ``timing`` scales
them by what it found. All results are seconds by part.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from longread.plan.communication import decode_communication, hand_over, prefill_communication
from longread.plan.deployment import Deployment
from longread.plan.efficiency import (
    ISSUE_ONCE,
    ISSUE_SECONDS,
    OWN_ISSUE_SHARE,
    STEP_SECONDS,
    seconds,
)
from longread.plan.ops import decode_ops, head_op, prefill_ops
from longread.spec.model import ModelSpec

Parts = dict[str, float]
_SAMPLES = 10  # chunks that are computed one by one; between them the time is linear in the prefix


def prefill_step(d: Deployment, chunk: int, prefix: int, *, sequences: int = 1, groups: int = 1) -> Parts:
    """One chunk through all layers, as if they lay behind each other on the cards of one pipeline stage."""
    card = d.hardware.card
    parts = {op.name: seconds(op, card) for op in prefill_ops(d, chunk, prefix, sequences=sequences, groups=groups)}
    parts |= prefill_communication(d, chunk, groups)
    waited = issue_seconds(d) - sum(parts.values())
    if waited > 0:
        parts["issue of kernels"] = waited
    return parts


def decode_step(d: Deployment, batch: int, context: int) -> Parts:
    """One token for each of ``batch`` sequences, all kernels in one graph.

    Pipeline stages work on different sequences: a step is a ``pp``-th of them passing all layers.
    """
    together = -(-batch // d.strategy.pp)
    parts = {op.name: seconds(op, d.hardware.card) for op in decode_ops(d, together, context)}
    return parts | decode_communication(d, together)


def issue_seconds(d: Deployment) -> float:
    """Least host time to issue the kernels of a step that no graph covers."""
    if d.hardware.card.architecture == "cpu":
        return 0.0
    share = OWN_ISSUE_SHARE if d.engine == "longread" else 1.0
    return (ISSUE_ONCE + _layers(d.spec) * ISSUE_SECONDS["mla" if d.spec.mla is not None else "v4"]) * share


def _layers(spec: ModelSpec) -> int:
    return spec.shared_kv.kv_sources[-1] if spec.shared_kv is not None else spec.layers


def prefill(d: Deployment, tokens: int, prefix: int = 0, *, groups: int = 1) -> Parts:
    """``tokens`` new tokens behind ``prefix`` cached ones, chunk by chunk, and the logits of the last.

    Pipeline stages work on different chunks: the sum over chunks divides by the stages, and the last chunk has to pass
    the other stages alone (chunks get slower with their prefix, so that path is the longest).
    """
    chunk, stages = min(d.chunk, tokens), d.strategy.pp
    full, rest = divmod(tokens, chunk)
    parts: Parts = defaultdict(float)
    for index, weight in _sampled(full):
        _add(parts, prefill_step(d, chunk, prefix + index * chunk, groups=groups), weight / stages)
    last_size, last_start = (rest, prefix + full * chunk) if rest else (chunk, prefix + (full - 1) * chunk)
    last = prefill_step(d, last_size, last_start, groups=groups)
    if rest:
        _add(parts, last, 1 / stages)
    if stages > 1:
        parts["pipeline fill"] = (stages - 1) * (sum(last.values()) / stages + hand_over(d, last_size))
    parts["head"] = seconds(head_op(d, 1), d.hardware.card)
    parts["step overhead"] = STEP_SECONDS * (full + (1 if rest else 0))
    return dict(parts)


def _sampled(count: int) -> list[tuple[int, float]]:
    """Indices of ``count`` chunks with weights that sum to ``count``: exact for times linear between the indices."""
    if count <= _SAMPLES:
        return [(i, 1.0) for i in range(count)]
    # Dense at the start, where top-k limits are reached; then even.
    marks = sorted({0, 1, *(1 + round(i * (count - 2) / (_SAMPLES - 2)) for i in range(1, _SAMPLES - 1))})
    weights = dict.fromkeys(marks, 1.0)
    for left, right in pairwise(marks):
        between = right - left - 1  # each inner chunk is interpolated, and their mean lies in the middle
        weights[left] += between / 2
        weights[right] += between / 2
    return sorted(weights.items())


def _add(parts: Parts, more: Mapping[str, float], weight: float) -> None:
    for name, value in more.items():
        parts[name] = parts.get(name, 0.0) + value * weight


def prefill_rate(d: Deployment, isl: int) -> float:
    """Input tokens/s of a machine that does nothing but full chunks of ``isl``-token prompts."""
    if isl >= d.chunk:
        return isl * d.strategy.dp / sum(prefill(d, isl, groups=d.strategy.dp).values())
    sequences = max(d.chunk // isl, 1)
    step = prefill_step(d, sequences * isl, 0, sequences=sequences, groups=d.strategy.dp)
    return sequences * isl * d.strategy.dp / (sum(step.values()) / d.strategy.pp + STEP_SECONDS)


def request_seconds(d: Deployment, isl: int, cached: int, osl: int, concurrency: int) -> tuple[float, float]:
    """Seconds of the whole replica that one request costs, in prefill and in decode, at a steady ``concurrency``.

    Chunks and decode steps share the cards in turn: a request costs its prefill once, and its share of the decode
    steps that it takes part in. Data-parallel groups prefill beside each other. Prompts that arrive while another is
    read share a chunk with their like, as many as the share of time spent reading makes likely.
    """
    step = sum(decode_step(d, concurrency, isl + osl // 2).values())
    decoding = step * max(osl - 1, 0) / concurrency
    alone = reading_seconds(d, isl, cached, concurrency, 1)
    together = 1 + (concurrency - 1) * alone / (alone + decoding)
    return reading_seconds(d, isl, cached, concurrency, int(together)), decoding


def reading_seconds(d: Deployment, isl: int, cached: int, concurrency: int, together: int) -> float:
    """Prefill seconds of one request where up to ``together`` prompts are read in one chunk."""
    new, groups = max(isl - cached, 1), min(d.strategy.dp, concurrency)
    sequences = max(min(together // groups, d.chunk // new), 1)
    if sequences == 1:
        return sum(prefill(d, new, cached, groups=groups).values()) / groups
    parts = prefill_step(d, sequences * new, cached, sequences=sequences, groups=groups)
    return (sum(parts.values()) / d.strategy.pp + STEP_SECONDS) / sequences / groups
