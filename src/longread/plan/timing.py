"""Predicted times of a deployment: first token cold and warm, time per output token, throughput.

Every result is an interval with its origin and the physical floor beside it. Parts are seconds by name and add up to
the total; the engine's own losses are spread over the parts that its cards and links do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from longread.plan.calibrate import Factors, Scale
from longread.plan.communication import host_peak
from longread.plan.deployment import Deployment, Tier, Workload
from longread.plan.estimate import Estimate, Provenance, exact, total
from longread.plan.floor import cold_floor, decode_floor, load_floor, suffix_floor
from longread.plan.frontend import RATES, front_end, load_seconds
from longread.plan.raw import decode_step, prefill, request_seconds
from longread.plan.scaling import reading_scale, scale_for
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware

Cost = tuple[Estimate, Estimate]  # seconds of one request in prefill and in decode
FIRST_BYTE = 1.0e-3  # from the sampled token to the first byte on the wire; 1-2 ms of Longread's server on two cores
# Ends of what no run scales, as multiples of its centre: all assumed, and said so beside each.
_FRONT, _LOAD, _BYTE = (0.5, 2.0), (0.8, 1.5), (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """One predicted time and its parts in the order of the request."""

    total: Estimate
    parts: dict[str, Estimate]


def ttft_cold(d: Deployment, isl: int, *, factors: Factors | None = None) -> Timing:
    """First token of ``isl`` tokens that nobody read before, alone on the replica. ``ConfigError``: isl < 1."""
    _positive(isl, "isl")
    floor = cold_floor(d.spec, replica(d), isl).seconds
    return _first_token(d, isl, 0, {}, _reading(d, isl, 0, factors), floor)


def ttft_warm(
    d: Deployment, isl: int, suffix: int, tier: Tier = "device", *, text: bool = True, factors: Factors | None = None
) -> Timing:
    """First token of ``isl`` tokens of which all but ``suffix`` were read before and lie in ``tier``.

    Parts as the server reports them: receive, parse, render, tokenise, hash and lookup, queue, load host or disk, the
    suffix's prefill, first sample and first byte. ``text``: False if token ids are given in process. Raises
    ``ConfigError`` where the tier's rate is not known.
    """
    _positive(suffix, "suffix")
    if suffix >= isl:
        return ttft_cold(d, isl, factors=factors)
    cached = isl - suffix
    loads = load_seconds(d, cached, tier)
    floor = suffix_floor(d.spec, replica(d), suffix, cached).seconds + _load_floor(d, cached, tier)
    return _first_token(d, suffix, cached, loads, _reading(d, suffix, cached, factors), floor, text=text)


def _first_token(
    d: Deployment,
    new: int,
    cached: int,
    loads: Mapping[str, float],
    scale: Scale,
    floor: float,
    *,
    text: bool = True,
) -> Timing:
    parts: dict[str, Estimate] = {}
    for name, value in front_end(d, new + cached, text=text).items():
        parts[name] = _about(value, _FRONT, "measured elsewhere", RATES[d.engine].source)
    parts["queue"] = exact(0.0, "one request on an idle replica")
    for name, value in loads.items():
        parts[name] = _about(value, _LOAD, "roofline", "link and disk rates of the hardware")
    for name, value in _folded(prefill(d, new, cached)).items():
        parts[name] = scale.apply(value)
    parts["first byte"] = _about(FIRST_BYTE, _BYTE, "measured elsewhere", "own server, CPU")
    return Timing(_bounded(total(parts.values()), floor, scale), parts)


def _about(value: float, ends: tuple[float, float], provenance: Provenance, source: str) -> Estimate:
    words = f"{source}; {ends[0]:g} to {ends[1]:g} times it is assumed"
    return Estimate(value * ends[0], value, value * ends[1], provenance, words)


def _folded(raw: dict[str, float]) -> dict[str, float]:
    """Prefill's parts: what takes less than 1 % is one part."""
    least = 0.01 * sum(raw.values())
    kept = {name: value for name, value in raw.items() if value >= least}
    rest = sum(value for value in raw.values() if value < least)
    return kept | ({"other": rest} if rest else {})


def tpot(d: Deployment, batch: int, context: int, *, factors: Factors | None = None) -> Timing:
    """Seconds between tokens of each of ``batch`` sequences that see ``context`` tokens, nothing being prefilled."""
    _positive(batch, "batch")
    _positive(context, "context")
    scale = scale_for(d, "decode", lambda o: sum(decode_step(o, batch, context).values()), factors)
    parts = {name: scale.apply(value) for name, value in _folded(decode_step(d, batch, context)).items()}
    return Timing(_bounded(total(parts.values()), decode_floor(d, batch, context), scale), parts)


def stalled_tpot(d: Deployment, batch: int, context: int, *, factors: Factors | None = None) -> Estimate:
    """Longest gap between tokens while a prompt is read behind ``context`` tokens: a decode step and a whole chunk."""
    chunk = min(d.chunk, max(context, 1))
    before = max(context - chunk, 0)
    reading = _reading(d, chunk, before, factors).apply(_read(d, chunk, before))
    return total([tpot(d, batch, context, factors=factors).total, reading])


def throughput(
    d: Deployment, workload: Workload, *, factors: Factors | None = None, cost: Cost | None = None
) -> Estimate:
    """Output tokens/s of all replicas at a steady concurrency, chunks and decode steps sharing the cards in turn.

    ``cost``: the workload's ``request_cost``, where it is known already.
    """
    reading, decoding = cost or request_cost(d, workload, factors=factors)
    seconds = total([reading, decoding])
    streams = max(-(-workload.concurrency // d.strategy.replicas), 1)
    tokens = workload.osl * workload.concurrency / streams  # replicas with nothing to do give nothing
    return Estimate(
        tokens / seconds.high,
        tokens / seconds.centre,
        tokens / seconds.low,
        seconds.provenance,
        seconds.source,
        tokens / seconds.floor if seconds.floor else 0.0,
    )


def request_cost(d: Deployment, workload: Workload, *, factors: Factors | None = None) -> Cost:
    """Seconds of one replica that one request costs, in prefill (with loads from its tier) and in decode.

    ``throughput`` is their inverse, and reading / (reading + decoding) is the share of time in which nobody decodes. A
    throughput's floor is the other way round: no deployment gives more.
    """
    _positive(workload.osl, "osl")
    streams = max(-(-workload.concurrency // d.strategy.replicas), 1)
    new = max(workload.isl - workload.cached, 1)
    warm = workload.cached > 0

    def raw(o: Deployment, new: int, cached: int) -> float:
        return request_seconds(o, new + cached, cached, workload.osl, streams)[0]

    scale = reading_scale(d, new, workload.isl - new, raw, factors)
    if warm:
        least = suffix_floor(d.spec, replica(d), new, workload.cached).compute
    else:
        least = cold_floor(d.spec, replica(d), new).compute
    reading = scale.apply(raw(d, new, workload.isl - new), least)
    if warm and (loads := sum(load_seconds(d, workload.cached, workload.tier).values())):
        reading = total([reading, _about(loads, _LOAD, "roofline", "link and disk rates of the hardware")])
    middle = workload.isl + workload.osl // 2
    step = tpot(d, streams, middle, factors=factors).total
    return reading, step.times(max(workload.osl - 1, 0) / streams)


def loaded_tpot(
    d: Deployment, workload: Workload, *, factors: Factors | None = None, cost: Cost | None = None
) -> Estimate:
    """Mean seconds per output token at a steady concurrency, waiting for others' prompts included; of an answer of one
    token, what a second one would take.
    """
    if workload.osl == 1:
        return loaded_tpot(d, replace(workload, osl=2), factors=factors)
    reading, decoding = cost or request_cost(d, workload, factors=factors)
    streams = max(-(-workload.concurrency // d.strategy.replicas), 1)
    # While it decodes, each of the others reads one prompt; its own was read before its first token.
    return total([reading.times(streams - 1), decoding.times(streams)]).times(1 / (workload.osl - 1))


def ttft_at_load(
    d: Deployment,
    workload: Workload,
    *,
    factors: Factors | None = None,
    cost: Cost | None = None,
    alone: Estimate | None = None,
) -> tuple[Estimate, Estimate]:
    """First token with all streams busy: the mean in a steady closed loop, and the last of a burst of all at once.

    Each stream reads, decodes and comes again; prompts are read one after the other (or in shared chunks where they are
    short). Exact mean-value analysis of one queue and a delay, for prompts whose lengths vary like an exponential.
    ``alone``: the first token without others, where it is known already.
    """
    reading, decoding = cost or request_cost(d, workload, factors=factors)
    streams = max(-(-workload.concurrency // d.strategy.replicas), 1)
    if alone is None and workload.cached:
        suffix = max(workload.isl - workload.cached, 1)
        alone = ttft_warm(d, workload.isl, suffix, workload.tier, factors=factors).total
    elif alone is None:
        alone = ttft_cold(d, workload.isl, factors=factors).total

    def waiting(read: float, decode: float) -> float:
        """Seconds behind others; ``decode``: of one request's whole answer, during which it does not queue."""
        queued = residence = 0.0
        for n in range(1, streams + 1):
            residence = read * (1 + queued)
            queued = n * residence / (residence + decode)
        return residence - read

    answer = decoding.times(streams)
    mean = Estimate(
        alone.low + waiting(reading.low, answer.high),
        alone.centre + waiting(reading.centre, answer.centre),
        alone.high + waiting(reading.high, answer.low),
        alone.provenance,
        alone.source,
        alone.floor,
    )
    return mean, total([alone, reading.times(streams - 1)])


def replica(d: Deployment) -> Hardware:
    """The cards of one replica as hardware: what a single request can use."""
    hardware, cards = d.hardware, d.strategy.gpus
    gpus = min(cards, hardware.gpus)
    return Hardware(
        hardware.card,
        gpus,
        -(-cards // gpus),
        hardware.network,
        hardware.host_memory,
        hardware.disk_read,
        hardware.disk_write,
    )


def _load_floor(d: Deployment, cached: int, tier: Tier) -> float:
    """Least seconds of a load: every link of the replica at its peak, nothing replicated."""
    card = d.hardware.card
    if tier == "device":
        return 0.0
    if tier == "disk" and d.hardware.disk_read is not None:
        return load_floor(d.spec, d.cache, cached, d.hardware.disk_read.value)
    one = host_peak(card)
    return load_floor(d.spec, d.cache, cached, card.bandwidth.value if one is None else one * d.strategy.gpus)


def _reading(d: Deployment, new: int, cached: int, factors: Factors | None) -> Scale:
    """The factor of one prompt alone."""
    return reading_scale(d, new, cached, _read, factors)


def _read(d: Deployment, new: int, cached: int) -> float:
    return sum(prefill(d, new, cached).values())


def _bounded(estimate: Estimate, floor: float, scale: Scale) -> Estimate:
    """The same with its floor: no end lies below it. The origin is that of the cards' part, which weighs most."""
    ends = [max(end, floor) for end in (estimate.low, estimate.centre, estimate.high)]
    return Estimate(ends[0], ends[1], ends[2], scale.provenance, scale.source, floor)


def _positive(value: int, name: str) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
