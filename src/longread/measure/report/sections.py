"""Tables and texts of a report. Knows runs and HTML; whatever a file said is escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from longread.measure.report import charts_samples, plan_against
from longread.measure.report.compare import Comparison
from longread.measure.report.compare_table import cells, said
from longread.measure.report.definitions import LATENCIES, TOOLS, TRAPS, sheet
from longread.measure.report.files import Material
from longread.measure.report.numbers import amount, figure, items, mapping, percent, plain, span, words
from longread.measure.report.plan_against import Line
from longread.measure.report.run import Figure, Gate, Run, Sweep
from longread.plan.html import table

VERDICTS = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "warn"}
CLASSES = {"better": "good", "worse": "bad", "same": "same", "inconclusive": "warn", "not judged": "small"}
_FINDINGS = 60
_UNCHECKED = "quality not checked"


def short(name: str) -> str:
    return LATENCIES[name].title


def head(found: Material) -> str:
    """What was measured, what the gate says of it, and the figures that people look for first."""
    runs = found.all_runs
    parts = [f'<p class="load">{escape(text)}</p>' for text in _loads(runs)]
    parts.append(f'<div class="gates">{"".join(_badges(found))}</div>')
    if len(runs) == 1 and not found.sweeps:
        parts.append(_tiles(runs[0]))
    grave = [f"{run.label} is partial: it was stopped before its end." for run in runs if run.partial]
    grave += [f"{sweep.label} is partial: points are missing." for sweep in found.sweeps if sweep.partial]
    grave += [f"{run.label}: {text}" for run in runs for text in run.warnings]
    parts += [f'<p class="note word">{escape(text)}</p>' for text in grave[:8]]
    if len(grave) > 8:
        parts.append(f'<p class="small">{len(grave) - 8} more warnings are below.</p>')
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _loads(runs: Sequence[Run]) -> list[str]:
    """Each workload once, in words."""
    found = []
    for run in runs:
        name = words(run.part("provenance", "workload", "name"))
        seed = run.part("provenance", "workload", "seed")
        parts = [f"{TOOLS[run.tool]}"]
        if name:
            parts.append(f"workload {name}" + (f", seed {seed}" if isinstance(seed, int) else ""))
        context = run.load.get("context")
        if context is not None:
            parts.append(f"{plain(context)} prompt tokens on average")
        found.append(", ".join(parts))
    return list(dict.fromkeys(found))[:4]


def _badges(found: Material) -> list[str]:
    gates: list[Gate] = []
    for gate in (*(run.gate for run in found.all_runs if run.gate is not None), *found.gates):
        if gate not in gates:
            gates.append(gate)
    shown = [badge(gate) for gate in gates]
    without = [run.label for run in found.all_runs if run.gate is None]
    if without:
        who = "" if len(without) == len(found.all_runs) else f" of {len(without)} runs"
        shown.append(f'<span class="badge warn">{_UNCHECKED}{who}</span>')
    return shown


def badge(gate: Gate | None) -> str:
    if gate is None:
        return f'<span class="badge warn">{_UNCHECKED}</span>'
    return f'<span class="badge {VERDICTS[gate.verdict]}">gate {escape(gate.profile)}: {gate.verdict}</span>'


def struck(text: str, run: Run) -> str:
    """A speed's figure as HTML; struck out where the gate is red."""
    return f"<s>{escape(text)}</s>" if run.red else escape(text)


def _tiles(run: Run) -> str:
    tiles = []
    for name in ("ttft", "ttfc", "ttfat", "tpot", "tpot_chunk", "e2el"):
        told = run.figures.get(name)
        if told is None or told.mean is None or (name in ("ttfc", "ttfat") and "ttft" in run.figures):
            continue
        if name == "tpot_chunk" and "tpot" in run.figures:
            continue
        tail = told.percentiles.get(99.0)
        small = [f"mean; {_interval(told)}"] + (
            [] if tail is None else [f"p99 {figure(tail, 'ms')}{_open(told, 99.0)}"]
        )
        tiles.append(_tile(struck(figure(told.mean, "ms"), run), short(name), "; ".join(small)))
    rate = run.rates.get("output_throughput")
    tiles.append(_tile(struck(figure(rate), run), "output tokens/s", _paced(run)))
    good = run.rates.get("request_goodput")
    if good is not None:
        share = amount(run.part("goodput", "fraction"))
        tiles.append(
            _tile(struck(figure(good), run), "requests/s within SLOs", "" if share is None else percent(share))
        )
    total = run.answered + run.bad
    bad = f"{run.bad:,} refused, failed or timed out" if run.bad else "none failed"
    tiles.append(_tile(escape(f"{run.answered:,} of {total:,}"), "requests answered", bad))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(value: str, name: str, small: str) -> str:
    """``value`` is HTML."""
    return f'<div class="tile"><b>{value}</b><span>{escape(name)}</span><small>{escape(small)}</small></div>'


def _paced(run: Run) -> str:
    concurrency, rate = run.load.get("concurrency"), run.load.get("rate")
    parts = [f"{plain(concurrency)} at once"] if concurrency is not None else []
    parts += [f"{plain(rate)} requests/s asked for"] if rate is not None else []
    return ", ".join(parts) or "all at once"


def _interval(told: Figure) -> str:
    if told.interval is None or None in told.interval:
        return "no interval"
    return f"95 % {span(*told.interval)} ms"


def _open(told: Figure, percent_: float) -> str:
    """A percentile with too few samples to bound it says how many it needs."""
    needs = told.needs.get(percent_)
    return "" if needs is None else f" (not bounded: needs {needs:,} requests)"


def runs(loose: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    """A row a run, with its gate."""
    everything = [*loose, *(point.run for sweep in sweeps for point in sweep.points)]
    if not everything:
        return ""
    rows = []
    for run in everything:
        first = run.figures.get("ttft") or run.figures.get("ttfc")
        each = run.figures.get("tpot") or run.figures.get("tpot_chunk")
        rows.append(
            (
                f'<span class="word">{escape(run.label)}</span>',
                badge(run.gate),
                escape(_paced(run)),
                escape(f"{run.answered:,}" + (f" (+{run.bad:,} not)" if run.bad else "")),
                _latency(first, run),
                _tail(first, run),
                _latency(each, run),
                _tail(each, run),
                struck(figure(run.rates.get("output_throughput")), run),
                struck(_good(run), run),
                escape(TOOLS[run.tool]),
            )
        )
    names = ("run", "quality", "load", "answered", "TTFT mean", "p99", "TPOT mean", "p99", "tokens/s", "goodput", "by")
    caption = (
        f"{len(everything)} runs. Behind a red gate speed is struck out. TTFT and TPOT are what the row's tool means."
    )
    return f'<section class="wide" id="runs">\n<h2>Runs</h2>\n{table(names, rows, caption)}\n</section>'


def _latency(told: Figure | None, run: Run) -> str:
    if told is None or told.mean is None:
        return '<span class="small">missing</span>'
    return f"{struck(figure(told.mean, 'ms'), run)}<br><small>{escape(_interval(told))}</small>"


def _tail(told: Figure | None, run: Run) -> str:
    value = None if told is None else told.percentiles.get(99.0)
    if told is None or value is None:
        return '<span class="small">missing</span>'
    return f"{struck(figure(value, 'ms'), run)}<br><small>{escape(_open(told, 99.0).strip())}</small>"


def _good(run: Run) -> str:
    value = run.rates.get("request_goodput")
    return "no SLO" if value is None else f"{plain(value)}/s"


def comparison(found: Comparison) -> str:
    rows = []
    for row in found.rows:
        told = [cell if isinstance(cell, str) else cell.plain for cell in cells(row)]
        told[5] = f'<span class="{CLASSES[row.verdict]}">{escape(told[5])}</span>'
        rows.append(
            [*(escape(text) for text in told[:5]), told[5], *(escape(text) for text in told[6:]), escape(row.note)]
        )
    a, b = found.a[0].label, found.b[0].label
    notes = "".join(f'<p class="note word">{escape(each.what)}</p>' for each in found.differences)
    names = ("metric", "A", "B", "change", "interval", "verdict", "n", "needs", "note")
    verdict = f'<p>B is <strong class="{CLASSES[found.verdict]}">{escape(said(found))}</strong>.</p>'
    method = f'<p class="small">B / A; {escape(found.method)}; less than {percent(found.margin)} is the same.</p>'
    left = "".join(f'<p class="small">Not compared: {escape(text)}</p>' for text in found.left_out)
    caption = f"A: {a}; B: {b}"
    return (
        f'<section class="wide" id="compare">\n<h2>B against A</h2>\n{verdict}{notes}{table(names, rows, caption)}\n'
        f"{method}{left}</section>"
    )


def not_compared(why: str) -> str:
    first, *more = why.splitlines()
    points = "".join(f"<li>{escape(text.strip())}</li>" for text in more if not text.startswith("Give "))
    return (
        f'<section><h2>The two runs are not compared</h2><p>{escape(first)}</p><ul class="word">{points}</ul></section>'
    )


def plan(name: str, chosen: str, found: Sequence[Line], reasons: Sequence[str], plots: str) -> str:
    rows = [
        (
            f'<span class="word">{escape(each.run.label)}</span>',
            escape(f"{each.quantity}, {each.which}"),
            escape("missing" if each.floor is None else plan_against.show(each, each.floor)),
            escape(_planned(each)),
            struck(plan_against.show(each, each.measured), each.run),
            escape(f"{each.measured / each.plan:.2f} x the plan" if each.plan else ""),
            '<span class="good">inside</span>' if each.inside else '<span class="bad">outside</span>',
        )
        for each in found
    ]
    names = ("run", "quantity", "floor", "plan", "measured", "", "of the interval")
    shown = table(names, rows, f"{name}: {chosen}") if rows else f'<p class="word">{escape(name)}: {escape(chosen)}</p>'
    why = "".join(f'<p class="note word">{escape(text)}</p>' for text in reasons)
    figures = f'<div class="figures">{plots}</div>' if plots else ""
    return f'<section class="wide"><h2>Plan against measured against floor</h2>{shown}{why}</section>{figures}'


def _planned(line: Line) -> str:
    centre, low, high = (plan_against.show(line, value) for value in (line.plan, line.low, line.high))
    return f"{centre} ({low} to {high})"


def quality(found: Material) -> str:
    gates: list[Gate] = []
    for gate in (*(run.gate for run in found.all_runs if run.gate is not None), *found.gates):
        if gate not in gates:
            gates.append(gate)
    if not gates:
        text = (
            "No gate was run for these results: nothing says that the answers are right. `longread gate run -o` does."
        )
        return f'<section id="quality"><h2>Quality</h2><p class="note">{escape(text)}</p></section>'
    return '<section class="wide" id="quality"><h2>Quality</h2>' + "".join(map(_gate, gates)) + "</section>"


def _gate(gate: Gate) -> str:
    rows: list[Sequence[str]] = []
    levels = [mapping(each) for each in items(gate.document.get("levels"))]
    for level in levels:
        name = plain(amount(level.get("level")) or 0.0)
        if level.get("not_run") is not None:
            rows.append((name, f"not run: {escape(words(level.get('not_run')) or '')}", "", "", "", "", "", ""))
        for told in map(mapping, items(level.get("findings"))):
            verdict = words(told.get("verdict"))
            if verdict is None:
                continue
            low, high, limit = (amount(told.get(each)) for each in ("low", "high", "limit"))
            rows.append(
                (
                    name,
                    escape(words(told.get("name")) or "unnamed"),
                    f'<span class="{VERDICTS.get(verdict, "")}">{escape(verdict)}</span>',
                    escape(figure(amount(told.get("value")))),
                    escape("" if low is None and high is None else span(low, high)),
                    escape("" if limit is None else plain(limit)),
                    escape(figure(amount(told.get("samples")))),
                    escape(words(told.get("note")) or ""),
                )
            )
    date = f", {escape(gate.date)}" if gate.date else ""
    who = f"{escape(gate.model or 'model not told')}{date}"
    title = f'<h3 class="word">{badge(gate)} {who} <span class="small">({escape(gate.source)})</span></h3>'
    left = len(rows) - _FINDINGS
    more = f'<p class="small">{left} more findings are in the file.</p>' if left > 0 else ""
    names = ("level", "what", "verdict", "value", "95 % interval", "limit", "samples", "note")
    return title + table(names, rows[:_FINDINGS], f"Findings of {gate.source} that were judged") + more


def missing(found: Sequence[Run]) -> str:
    """What is not on the page, and why."""
    told: dict[str, None] = {}
    for run in found:
        name = "" if len(found) == 1 else f"{run.label}: "
        if run.no_requests is not None:
            told[f"{name}distribution, parts and course of TTFT: {run.no_requests}"] = None
        elif run.own and not any(each.timing for each in run.requests or ()):
            told[f"{name}parts of TTFT: the server tells no times of its own (Longread does, in Server-Timing)"] = None
        texts = [*run.missing, *(charts_samples.missing(run) if run.own else [])]
        texts += [f"server's {text}" for text in _server_missing(run)]
        told.update(dict.fromkeys(f"{name}{text}" for text in texts))
    if not told:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in told)
    count = f"{len(told)} things are missing from this page"
    opened = " open" if len(told) <= 12 else ""
    inner = f'<details{opened}><summary>{count}, and why</summary><ul class="word">{rows}</ul></details>'
    return f'<section class="missing"><h2>Missing</h2>{inner}</section>'


def _server_missing(run: Run) -> list[str]:
    return [text for text in (words(each) for each in items(run.part("server", "missing"))) if text]


def client(found: Sequence[Run]) -> str:
    """What the client itself cost, and the warnings."""
    rows = []
    for run in found:
        told = mapping(run.part("client"))
        if not told:
            continue
        share = amount(told.get("cpu_share"))
        cells_ = [
            _spread(told.get(name)) for name in ("loop_lag_ms", "lateness_ms", "added_ttft_ms", "added_ttft_loaded_ms")
        ]
        rows.append(
            (
                f'<span class="word">{escape(run.label)}</span>',
                *map(escape, cells_),
                escape("missing" if share is None else f"{share:.0%} of a core"),
                escape(figure(amount(told.get("new_connections")))),
            )
        )
    warned = [(run.label, text) for run in found for text in run.warnings]
    warnings = "".join(f'<li><span class="warn">{escape(label)}</span>: {escape(text)}</li>' for label, text in warned)
    shown = f'<ul class="word">{warnings}</ul>' if warned else '<p class="small">No run has a warning.</p>'
    if not rows:
        return f"<section><h2>Client</h2>{shown}</section>"
    names = ("run", "loop lag", "sent late", "adds to TTFT", "adds under load", "CPU", "connections opened")
    costs = table(names, rows, "What the client itself cost, p50 / p99 in ms")
    return f'<section class="wide"><h2>Client</h2>{costs}{shown}</section>'


def _spread(told: object) -> str:
    each = mapping(told)
    p50, p99 = amount(each.get("p50")), amount(each.get("p99"))
    return "not measured" if p50 is None or p99 is None else f"{plain(p50)} / {plain(p99)}"


def provenance(found: Material) -> str:
    """How to do it again."""
    parts = []
    for label, command, told in _made(found):
        facts = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in told)
        pre = f"<pre>{escape(command)}</pre>" if command else '<p class="small">its command is not in the file</p>'
        parts.append(f'<h3 class="word">{escape(label)}</h3>{pre}<ul class="small word">{facts}</ul>')
    shown = "".join(parts[:6])
    more = "".join(parts[6:])
    rest = f"<details><summary>{len(parts) - 6} more</summary>{more}</details>" if more else ""
    return f'<section id="again"><h2>How to do it again</h2>{shown}{rest}</section>'


def _made(found: Material) -> Iterable[tuple[str, str | None, list[tuple[str, str]]]]:
    for run in found.all_runs:
        told = mapping(run.part("provenance"))
        machine = mapping(told.get("machine"))
        packages = mapping(told.get("packages"))
        server = mapping(run.part("server"))
        facts = [
            ("file", run.source),
            ("date", run.date),
            ("model", run.model),
            ("server", " ".join(text for text in (words(server.get("engine")), words(server.get("version"))) if text)),
            ("address", words(server.get("url"))),
            ("commit", words(told.get("commit"))),
            ("client's machine", ", ".join(t for t in (words(machine.get(n)) for n in ("host", "cpu", "system")) if t)),
            (
                "versions",
                ", ".join(f"{n} {v}" for n, v in sorted((str(k), words(v)) for k, v in packages.items()) if v),
            ),
        ]
        yield run.label, words(told.get("command"), 2000), [(name, value) for name, value in facts if value]
    for gate in found.gates:
        told = mapping(gate.document.get("provenance"))
        yield gate.source, words(told.get("command"), 2000), [("date", gate.date)] if gate.date else []


def definitions(found: Sequence[Run]) -> str:
    """The definition sheet."""
    tools = {run.tool for run in found}
    rows = [tuple(map(escape, row)) for row in sheet()]
    names = ("quantity", "meaning", "longread", "vLLM", "aiperf")
    traps = "".join(f"<li>{escape(text)}</li>" for text in TRAPS) if len(tools) > 1 else ""
    told: Mapping[str, object] = next((mapping(run.part("definitions")) for run in found if run.own), {})
    other = [
        (str(name), words(text, 400)) for name, text in told.items() if name in ("intervals", "percentiles", "goodput")
    ]
    notes = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in other if text)
    words_ = table(names, rows, "Figures in one row are the same quantity")
    head_ = "<h2>What the words mean</h2><details><summary>Definitions, and what other tools call them</summary>"
    return f'<section class="wide">{head_}{words_}<ul>{traps}{notes}</ul></details></section>'
