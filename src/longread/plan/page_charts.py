"""The plots of a plan's page: what is drawn, from a search's candidates; how it is drawn is ``drawing``'s.

Each function gives an SVG text and what its colours mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from longread.plan.calibrate import Factors, Held
from longread.plan.candidate import Candidate
from longread.plan.deployment import Deployment, Workload
from longread.plan.drawing import Axis, Bar, Picture, Series, bars, chart, log_range
from longread.plan.efficiency import seconds as op_seconds
from longread.plan.estimate import Estimate
from longread.plan.figures import gib, length, seconds, summary
from longread.plan.floor import peak
from longread.plan.ops import Op, decode_ops, prefill_ops
from longread.plan.timing import loaded_tpot, throughput, ttft_cold, ttft_warm
from longread.spec.errors import ConfigError

_SUFFIX = 512  # new tokens of the warm curve where the load has no read prefix
_LEAST_CONTEXT = 4096
MEMORY_PARTS = ("attention", "experts", "other weights", "activations", "graphs and reserve", "cache in use", "free")
_EXPERTS = ("experts", "shared")
_ATTENTION = ("attention", "indexer")
_WORK = ("residual", "attention", "experts", "workspace", "index scores", "vocabulary logits")


def memory_bars(candidates: Sequence[Candidate]) -> Picture:
    """One bar a plan: the fullest GPU, with the sequences that run at once."""
    card = candidates[0].deployment.hardware.card
    rows = tuple(Bar(_label(c), _memory_parts(c)) for c in candidates)
    usable = max(c.memory.usable for c in candidates)
    limits = [(f"engine may take {gib(usable)}", float(usable)), (f"card {gib(card.memory.value)}", card.memory.value)]
    values = tuple(f"{row.label}: " + ", ".join(f"{name} {gib(value)}" for name, value, _ in row.parts) for row in rows)
    svg = bars("memory", "Memory of the fullest GPU", "; ".join(values), rows, card.memory.value, gib, limits)
    legend = tuple(enumerate(MEMORY_PARTS))
    return Picture(svg, "Memory of the fullest GPU of each plan, with the load's sequences in it.", legend, values)


def _memory_parts(c: Candidate) -> tuple[tuple[str, float, int], ...]:
    m = c.memory
    groups = dict.fromkeys(MEMORY_PARTS, 0.0)
    for name, size in m.weights.items():
        key = "attention" if name in _ATTENTION else "experts" if name in _EXPERTS else "other weights"
        groups[key] += size
    for name, part in m.parts.items():
        groups["activations" if name in _WORK else "graphs and reserve"] += part.size
    running = min(c.sessions, c.workload.concurrency)
    here = -(-running // c.capacity.caches)
    groups["cache in use"] = float(min(here * c.capacity.session_bytes, max(m.free, 0)))
    groups["free"] = max(m.free - groups["cache in use"], 0.0)
    return tuple((name, value, style) for style, (name, value) in enumerate(groups.items()))


def _label(c: Candidate) -> str:
    return f"{c.deployment.engine} {summary(c.deployment)}"


def roofline(c: Candidate) -> Picture:
    """Operations of one full chunk in the middle of the prompt and of one decode step, under the card's roof."""
    d, w = c.deployment, c.workload
    card = d.hardware.card
    chunk = min(d.chunk, max(w.isl - w.cached, 1))
    prefix = w.cached + max(w.isl - w.cached - chunk, 0) // 2
    streams = max(-(-min(c.sessions, w.concurrency) // d.strategy.replicas), 1)
    steps = {
        f"prefill, {chunk:,} tokens behind {prefix:,}": prefill_ops(d, chunk, prefix),
        f"decode, {streams} at {w.isl + w.osl // 2:,}": decode_ops(d, streams, w.isl + w.osl // 2),
    }
    rates = [name for name in ("fp4", "fp8", "bf16", "fp32") if name in card.flops][:2] or list(card.flops)[:1]
    top = max(card.flops[name].value for name in rates)
    points = [p for ops in steps.values() for p in _placed(ops, d)]
    x_low, x_high = log_range([p[0] for p in points] + [top / card.bandwidth.value * 8, 1.0])
    y_low, y_high = log_range([p[1] for p in points] + [top])
    series = []
    for style, name in enumerate(rates):
        roof = peak(card, name)
        ridge = roof / card.bandwidth.value
        start = max(x_low, y_low / card.bandwidth.value)  # where the slope enters the picture
        line = ((start, start * card.bandwidth.value), (ridge, roof), (x_high, roof))
        series.append(Series(f"roof {name.upper()}", line, 6 if style else 7, dashed=bool(style), marks=False))
    for style, (name, ops) in enumerate(steps.items()):
        placed = _placed(ops, d)
        labels = tuple(f"{label}: {y / 1e12:,.3g} TFLOP/s at {x:,.3g} FLOP/byte" for x, y, label in placed)
        marks = tuple((x, y) for x, y, _ in placed)
        series.append(Series(name, marks, style, line=False, labels=labels))
    values = tuple(f"{one.name}: {label}" for one in series for label in one.labels)
    svg = chart(
        "roofline",
        "Roofline of the best plan",
        f"Operations on {card.name}: {'; '.join(values)}",
        Axis("FLOP a byte of memory", x_low, x_high, _plain),
        Axis("TFLOP/s of one GPU", y_low, y_high, lambda v: _plain(v / 1e12)),
        series,
    )
    caption = "What each kind of operation reaches on one GPU, under its peak rates and bandwidth."
    return Picture(svg, caption, tuple((one.style, one.name) for one in series), values)


def _placed(ops: Iterable[Op], d: Deployment) -> list[tuple[float, float, str]]:
    """Intensity and rate of the operations that multiply and that touch memory."""
    found = []
    for op in ops:
        if op.flops > 0 and op.bytes > 0:
            found.append((op.flops / op.bytes, op.flops / op_seconds(op, d.hardware.card), op.name))
    return found


def _plain(value: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def first_token(c: Candidate, factors: Factors | None) -> Picture:
    """Seconds to the first token over the prompt's length, cold and warm, with intervals and floors."""
    d, w = c.deployment, c.workload
    suffix = max(w.isl - w.cached, 1) if w.cached else _SUFFIX
    contexts = _contexts(d, w)
    cold = {n: ttft_cold(replace(d, max_model_len=n), n, factors=factors).total for n in contexts}
    warm: dict[int, Estimate] = {}
    for n in contexts:
        if n > suffix:
            try:
                warm[n] = ttft_warm(d, n, suffix, w.tier, factors=factors).total
            except ConfigError:  # the tier's rate is not known: then there is no warm curve to draw
                break
    where = {"device": "on the cards", "host": "in host memory", "disk": "on disk"}[w.tier]
    name = f"warm, {suffix:,} new, rest {where}"
    series = [*_curve("cold", cold, 0), *(_curve(name, warm, 1) if warm else [])]
    everything = [*cold.values(), *warm.values()]
    y_low, y_high = log_range([v for e in everything for v in (e.low, e.high, e.floor)])
    values = tuple(
        f"{kind} {length(n)}: {seconds(e.centre)} ({seconds(e.low)} to {seconds(e.high)}, floor {seconds(e.floor)})"
        for kind, curve in (("cold", cold), ("warm", warm))
        for n, e in curve.items()
    )
    svg = chart(
        "ttft",
        "First token against context",
        "; ".join(values),
        Axis("tokens of context", contexts[0], contexts[-1], lambda v: length(round(v)), ticks=_spread(contexts)),
        Axis("time to the first token", y_low, y_high, seconds),
        series,
    )
    caption = f"First token of one request on an idle {_label(c)}. Bands: intervals; dashed: what peak rates allow."
    return Picture(svg, caption, tuple((one.style, one.name) for one in series), values)


def _contexts(d: Deployment, w: Workload) -> tuple[int, ...]:
    """Powers of two up to the model's limit, and the load's own length."""
    longest = d.spec.max_position
    found = {_LEAST_CONTEXT << n for n in range(12) if _LEAST_CONTEXT << n <= longest} | {min(w.isl, longest), longest}
    return tuple(sorted(found)) if len(found) > 1 else (max(longest // 2, 1), longest)


def _spread(contexts: Sequence[int]) -> tuple[float, ...]:
    """At most seven ticks, powers of two apart."""
    powers = [n for n in contexts if n & (n - 1) == 0] or list(contexts)
    return tuple(float(n) for n in powers[:: -(-len(powers) // 7)])


def _curve(name: str, curve: Mapping[int, Estimate], style: int) -> list[Series]:
    points = tuple((float(n), e.centre) for n, e in curve.items())
    labels = tuple(f"{name} at {length(n)}: {seconds(e.low)} to {seconds(e.high)}" for n, e in curve.items())
    band = tuple((float(n), e.low, e.high) for n, e in curve.items())
    floor = tuple((float(n), e.floor) for n, e in curve.items())
    return [
        Series(name, points, style, band, labels=labels),
        Series(f"floor, {name.split(',')[0]}", floor, style + 2, dashed=True, marks=False),
    ]


def frontier(candidates: Sequence[Candidate], factors: Factors | None) -> Picture:
    """Tokens/s of each stream against tokens/s in all, one line a plan, one mark a number of streams."""
    series = []
    for style, c in enumerate(candidates):
        points, labels = [], []
        for streams in _streams(c):
            w = replace(c.workload, concurrency=streams)
            each = 1 / loaded_tpot(c.deployment, w, factors=factors).centre
            whole = throughput(c.deployment, w, factors=factors)
            points.append((each, whole.centre))
            labels.append(
                f"{streams} at once: {each:,.3g} tokens/s each, {whole.centre:,.0f} in all "
                f"({whole.low:,.0f} to {whole.high:,.0f})"
            )
        series.append(Series(_label(c), tuple(points), style, labels=tuple(labels)))
    x_low, x_high = log_range([x for one in series for x, _ in one.points])
    y_low, y_high = log_range([y for one in series for _, y in one.points])
    values = tuple(f"{one.name}: {label}" for one in series for label in one.labels)
    svg = chart(
        "frontier",
        "Latency against throughput",
        "; ".join(values),
        Axis("tokens/s of each stream, prompts read between", x_low, x_high, _plain),
        Axis("tokens/s in all", y_low, y_high, _plain),
        series,
    )
    w = candidates[0].workload
    load = f"{w.isl:,} tokens in ({w.cached:,} read before), {w.osl:,} out"
    caption = f"{load}; up and right is better. Marks: 1, 2, 4, ... streams, up to memory."
    return Picture(svg, caption, tuple((one.style, one.name) for one in series), values)


def _streams(c: Candidate) -> list[int]:
    """Powers of two up to what runs at once, with the load's own number."""
    limit = max(min(c.sessions, 1024), 1)
    found = {2**n for n in range(11) if 2**n <= limit} | {min(c.workload.concurrency, limit)}
    return sorted(n for n in found if n >= c.deployment.strategy.replicas) or [limit]


def published(held: Sequence[Held]) -> Picture:
    """Measured against predicted times of the published runs, each predicted without itself."""
    timed = [h for h in held if h.run.metric in ("ttft", "tpot")]
    low, high = log_range([v for h in timed for v in (h.run.value, h.predicted.centre)])
    series = [Series("equal", ((low, low), (high, high)), 7, dashed=True, marks=False)]
    for style, (metric, name) in enumerate((("ttft", "first token"), ("tpot", "per output token"))):
        rows = [h for h in timed if h.run.metric == metric]
        points = tuple((h.run.value, h.predicted.centre) for h in rows)
        labels = tuple(
            f"{h.run.label}: measured {seconds(h.run.value)}, predicted {seconds(h.predicted.centre)}" for h in rows
        )
        series.append(Series(name, points, style, line=False, labels=labels))
    svg = chart(
        "published",
        "Published runs: measured and predicted",
        f"{len(timed)} times; the table below has each",
        Axis("measured", low, high, seconds),
        Axis("predicted without that run", low, high, seconds),
        series,
    )
    return Picture(
        svg,
        "Times of published runs against what the planner predicts from the others.",
        tuple((one.style, one.name) for one in series),
    )
