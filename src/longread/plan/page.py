"""A search's result as one HTML page that stands alone: no script, no network, light and dark, readable on a phone.

Knows what is said and in which order; plots are ``page_charts``'. Whatever a user or a source wrote is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape

from longread.plan import page_charts as charts
from longread.plan.calibrate import Factors, Held, leave_one_out
from longread.plan.candidate import Candidate, Refusal, SearchResult
from longread.plan.deployment import Workload
from longread.plan.estimate import Estimate
from longread.plan.figures import gib, length, rate, seconds, span, summary
from longread.plan.gpu_memory import CONCURRENCIES, CONTEXTS, triangle
from longread.plan.html import document, figure, table
from longread.plan.published import left_out
from longread.plan.runs_report import published_summary
from longread.spec.hardware import Figure, Hardware

SHOWN = 12  # plans in the ranked table; the rest is counted
_BARS, _LINES = 4, 4
_GRADES = {"yes": "good", "likely": "good", "unlikely": "warn", "no": "bad"}


def render(result: SearchResult, factors: Factors | None = None) -> str:
    """The page. ``factors``: those that the search predicted with, where they were calibrated on own runs."""
    best = result.best or (result.feasible[0] if result.feasible else None)
    title = f"{result.spec.label} on {result.hardware.label}"
    sections = [_head(result, best)]
    if best is not None:
        top = _best_of_each(result.feasible)
        sections += [
            _ranking(result),
            '<div class="figures">',
            figure("Memory of each GPU", charts.memory_bars(_first(top, result.feasible, _BARS))),
            figure("Time to the first token", charts.first_token(best, factors)),
            figure("Latency and throughput", charts.frontier(top[:_LINES], factors)),
            figure("Roofline", charts.roofline(best)),
            "</div>",
            _capacity(best),
        ]
    held = leave_one_out()
    sections += [_refused(result.infeasible), _published(held), _provenance(result, best)]
    return document(title, sections)


def _best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first plan of each engine, then further ones whose split nobody before has."""
    found: list[Candidate] = []
    for c in candidates:
        if c.deployment.engine not in {f.deployment.engine for f in found}:
            found.append(c)
    for c in candidates:
        if c.deployment.strategy not in {f.deployment.strategy for f in found}:
            found.append(c)
    return found


def _first(top: Sequence[Candidate], others: Iterable[Candidate], count: int) -> list[Candidate]:
    found = list(top[:count])
    found += [c for c in others if c not in found][: count - len(found)]
    return found


def _head(r: SearchResult, best: Candidate | None) -> str:
    lines = [f'<p class="load">{escape(_load(r.workload))}</p>']
    if best is None:
        lines.append('<p class="bad"><strong>No plan fits.</strong> The table below says what each hits first.</p>')
    else:
        met = ", ".join(_met(name, grade) for name, grade in best.meets.items())
        lines.append(
            f"<p>Best plan: <strong>{escape(best.deployment.engine)} {escape(summary(best.deployment))}</strong>, "
            f"cache {escape(best.deployment.cache)}, chunk {best.deployment.chunk:,}. {met}.</p>"
        )
        lines.append(_tiles(best))
    lines += [f'<p class="note">{escape(note)}</p>' for note in r.notes]
    lines += [f'<p class="note">Best plan: {escape(note)}</p>' for note in (best.notes if best else ())]
    return "<section>\n" + "\n".join(lines) + "\n</section>"


def _load(w: Workload) -> str:
    parts = [f"{length(w.isl)} tokens in", f"{w.osl:,} out", f"{w.concurrency:,} at once"]
    if w.cached:
        parts.append(f"{w.cached:,} of the input read before ({w.tier})")
    parts += [f"target TTFT {seconds(w.ttft_target)}"] if w.ttft_target is not None else []
    parts += [f"target TPOT {seconds(w.tpot_target)}"] if w.tpot_target is not None else []
    return ", ".join(parts)


def _met(name: str, grade: str) -> str:
    words = {"concurrency": "all in memory", "ttft": "TTFT target", "tpot": "TPOT target"}.get(name, name)
    return f'{escape(words)}: <span class="{_GRADES.get(grade, "")}">{escape(grade)}</span>'


def _tiles(c: Candidate) -> str:
    """The figures that people look for first, each with interval and floor."""
    rows = [("First token, cold", c.ttft_cold), ("First token, this load alone", c.ttft_warm)]
    rows += [("First token at load", c.ttft_load), ("Per output token at load", c.tpot_load)]
    tiles = [
        _tile(name, seconds(e.centre), f"{seconds(e.low)} to {seconds(e.high)}", e) for name, e in rows if e is not None
    ]
    e = c.throughput
    tiles.append(_tile("Output tokens/s in all", f"{e.centre:,.0f}", f"{e.low:,.0f} to {e.high:,.0f}", e))
    sessions = f"{c.capacity.sessions:,.1f} by bytes; {c.workload.isl + c.workload.osl:,} tokens each"
    tiles.append(f'<div class="tile"><b>{c.sessions:,}</b><span>contexts at once</span><small>{sessions}</small></div>')
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(name: str, centre: str, ends: str, e: Estimate) -> str:
    floor = f"; floor {seconds(e.floor)}" if e.floor and "tokens/s" not in name else ""
    return (
        f'<div class="tile"><b>{escape(centre)}</b><span>{escape(name)}</span>'
        f"<small>{escape(ends)}{escape(floor)}; {escape(e.provenance)}</small></div>"
    )


def _ranking(r: SearchResult) -> str:
    rows = []
    for number, c in enumerate(r.feasible[:SHOWN], 1):
        today = "" if c.runs_today else ' <span class="warn">prediction: does not know the engine&#39;s kernels</span>'
        lossy = f' <span class="warn">{escape(", ".join(c.lossy))}</span>' if c.lossy else ""
        rows.append(
            (
                str(number),
                f"{escape(c.deployment.engine)} {escape(summary(c.deployment))}{today}{lossy}",
                f"{c.sessions:,}",
                escape(span(c.ttft_warm or c.ttft_cold)),
                escape(span(c.ttft_load)),
                escape(span(c.tpot_load)),
                escape(rate(c.throughput)),
                "<br>".join(f'<span class="line-up">{_met(name, grade)}</span>' for name, grade in c.meets.items()),
                f"{escape(c.binding.name)}: {escape(c.binding.why)}",
                escape(c.lost),
            )
        )
    head = (
        "",
        "plan",
        "contexts",
        "first token alone",
        "at load",
        "per token",
        "tokens/s",
        "targets",
        "binds",
        "loses",
    )
    more = f"; {len(r.feasible) - SHOWN} more are not shown" if len(r.feasible) > SHOWN else ""
    caption = f"{len(r.feasible)} plans that fit, of {r.considered:,} looked at{more}"
    rule = f'<p class="small">Ranked by: {escape(r.rule)}</p>'
    ranked = table(head, rows, caption)
    return f'<section class="ranked">\n<h2>Ranked plans</h2>\n{ranked}\n{rule}\n</section>'


def _capacity(c: Candidate) -> str:
    """The triangle: context x concurrency x bytes of the fullest GPU."""
    d = c.deployment
    own = {c.workload.isl + c.workload.osl} if c.workload.isl + c.workload.osl <= d.spec.max_position else set()
    contexts = sorted({n for n in CONTEXTS if n <= d.spec.max_position} | own)
    concurrencies = sorted({*CONCURRENCIES, c.workload.concurrency})
    cells = {(x.context, x.concurrency): x for x in triangle(d, contexts, concurrencies)}
    rows = []
    for n in concurrencies:
        row = [f"<b>{n:,}</b>"]
        for context in contexts:
            cell = cells[context, n]
            words = "fits" if cell.fits else "over"
            row.append(f'<span class="{"good" if cell.fits else "bad"}">{escape(gib(cell.size))} {words}</span>')
        rows.append(row)
    name = f"{d.engine} {summary(d)}"
    caption = f"{name}: bytes of the fullest GPU by context (across) and sequences at once (down)"
    usable = f'<p class="small">One GPU may take {escape(gib(c.memory.usable))}.</p>'
    head = ("at once", *(length(n) for n in contexts))
    return f"<section>\n<h2>Capacity</h2>\n{table(head, rows, caption)}\n{usable}\n</section>"


def _refused(refusals: Sequence[Refusal]) -> str:
    if not refusals:
        return ""
    rows = [
        (
            escape(f.kind),
            escape(", ".join(f.engines)),
            f"{f.count:,}",
            escape(f.what),
            escape(f.limit),
            escape(f.by),
            escape(f.cure),
        )
        for f in refusals
    ]
    head = ("limit", "engines", "plans", "which", "first limit hit", "over by", "what would help")
    caption = f"{sum(f.count for f in refusals):,} plans that do not run, by the first limit they hit"
    return f'<section class="ranked">\n<h2>What does not fit, and why</h2>\n{table(head, rows, caption)}\n</section>'


def _published(held: Sequence[Held]) -> str:
    rows = []
    for h in held:
        times = h.run.metric in ("ttft", "tpot")
        measured = seconds(h.run.value) if times else f"{h.run.value:,.0f} tokens/s"
        predicted = span(h.predicted) if times else rate(h.predicted)
        inside = (
            '<span class="good">inside</span>' if h.holds else f'<span class="bad">outside</span> {escape(h.reason)}'
        )
        d = h.run.deployment
        rows.append(
            (
                escape(h.run.label),
                escape(f"{d.engine} {d.strategy.label} {d.hardware.label}"),
                escape(measured),
                escape(predicted),
                inside,
                escape(h.run.source),
            )
        )
    said = "<br>".join(escape(line) for line in published_summary(tuple(held)).splitlines())
    head = ("run", "deployment", "measured", "predicted without it", "", "source")
    caption = "Published and own measured runs, each predicted from the others"
    others = "".join(f"<li>{escape(what)}: {escape(why)}</li>" for what, why in left_out())
    return (
        f"{figure('Published runs and predictions', charts.published(held)).removesuffix('</section>')}"
        f"<p>{said}</p>\n<details><summary>All runs</summary>\n{table(head, rows, caption)}\n"
        f"<p>Not in the table:</p><ul>{others}</ul></details>\n</section>"
    )


def _provenance(r: SearchResult, best: Candidate | None) -> str:
    parts = [table(("figure", "value", "mark", "source"), _hardware_rows(r.hardware), "The hardware's figures")]
    if best is not None:
        parts.append(table(("prediction", "value", "from", "source"), _estimate_rows(best), "The best plan's times"))
        memory = [
            *(
                (escape(name), escape(gib(size)), "exact: the checkpoint's tensors")
                for name, size in best.memory.weights.items()
            ),
            *((escape(name), escape(gib(p.size)), escape(p.source)) for name, p in best.memory.parts.items()),
            *(
                (f"cache: {escape(name)}", f"{size:,.1f} B a token", escape(best.memory.sharing.get(name, "")))
                for name, size in best.memory.kv_per_token.items()
            ),
        ]
        parts.append(table(("memory of the fullest GPU", "size", "source"), memory, "The best plan's memory"))
    floors = [(escape(name), escape(seconds(value))) for name, value in r.floors.items()]
    caption = "Physical floors: all cards at their peak, nothing lost or repeated"
    parts.append(table(("floor", "least time"), floors, caption))
    return "<section>\n<h2>Where every figure comes from</h2>\n" + "\n".join(parts) + "\n</section>"


def _hardware_rows(h: Hardware) -> list[tuple[str, str, str, str]]:
    card = h.card
    named: list[tuple[str, Figure | None, str]] = [
        ("memory of a card", card.memory, "GiB"),
        ("usable", card.usable, "GiB"),
        ("bandwidth", card.bandwidth, "TB/s"),
        *((f"{name.upper()} peak", figure, "TFLOP/s") for name, figure in card.flops.items()),
        ("bandwidth measured", card.measured_bandwidth, "TB/s"),
        *((f"{name.upper()} measured", figure, "TFLOP/s") for name, figure in card.measured_flops.items()),
        ("L2", card.l2, "MB"),
        ("NVLink, one way", card.nvlink, "GB/s"),
        ("PCIe, one way", card.pcie, "GB/s"),
        ("network of a machine", h.network, "GB/s"),
        ("host memory of a machine", h.host_memory, "GiB"),
        ("disk read", h.disk_read, "GB/s"),
    ]
    units = {"GiB": 2**30, "TB/s": 1e12, "TFLOP/s": 1e12, "MB": 1e6, "GB/s": 1e9}
    return [
        (escape(name), f"{f.value / units[unit]:,.4g} {unit}", escape(f.mark), escape(f.source))
        for name, f, unit in named
        if f is not None
    ]


def _estimate_rows(c: Candidate) -> list[tuple[str, str, str, str]]:
    t = c.times
    timed: list[tuple[str, Estimate]] = [("first token, cold", t.cold.total)]
    timed += [("first token, warm", t.warm.total)] if t.warm is not None else []
    timed += [(f"first token: {name}", e) for name, e in t.first.parts.items() if e.centre > 0]
    timed += [("first token at load", t.load), ("last of a burst", t.burst), ("per output token alone", t.alone.total)]
    timed += [(f"per output token: {name}", e) for name, e in t.alone.parts.items() if e.centre > 0]
    timed += [("per output token at load", t.steady), ("longest stall", t.stall)]
    rows = [(escape(name), escape(span(e)), escape(e.provenance), escape(e.source)) for name, e in timed]
    return [*rows, ("output tokens/s", escape(rate(t.rate)), escape(t.rate.provenance), escape(t.rate.source))]
