"""Tables and texts of a report. Knows runs and HTML; whatever a file said is escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from longread.measure.report import charts_samples, plan_against
from longread.measure.report.compare import Comparison
from longread.measure.report.compare_table import cells, said
from longread.measure.report.definitions import LATENCIES, TOOLS, TRAPS, sheet
from longread.measure.report.files import Material
from longread.measure.report.longread_result import figure_of
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
    contexts: dict[str, list[float]] = {}
    for run in runs:
        name = words(run.part("provenance", "workload", "name"))
        seed = run.part("provenance", "workload", "seed")
        told = TOOLS[run.tool]
        if name:
            told += f", workload {name}" + (f", seed {seed}" if isinstance(seed, int) else "")
        context = run.load.get("context")
        contexts.setdefault(told, []).extend([] if context is None else [context])
    found = []
    for told, lengths in contexts.items():
        ends = [plain(value) for value in (min(lengths), max(lengths))] if lengths else []
        size = "" if not ends else f", {ends[0] if ends[0] == ends[1] else ' to '.join(ends)} prompt tokens on average"
        found.append(told + size)
    return found[:4]


def _badges(found: Material) -> list[str]:
    shown = [badge(gate) for gate in _gates(found)]
    without = [run.label for run in found.all_runs if run.gate is None]
    if without:
        who = "" if len(without) == len(found.all_runs) else f" of {len(without)} runs"
        shown.append(f'<span class="badge warn">{_UNCHECKED}{who}</span>')
    return shown


def _gates(found: Material) -> list[Gate]:
    """Of the runs and beside them, each once."""
    gates: list[Gate] = []
    for gate in (*(run.gate for run in found.all_runs if run.gate is not None), *found.gates):
        if gate not in gates:
            gates.append(gate)
    return gates


def badge(gate: Gate | None) -> str:
    if gate is None:
        return f'<span class="badge warn">{_UNCHECKED}</span>'
    return f'<span class="badge {VERDICTS[gate.verdict]}">gate {escape(gate.profile)}: {gate.verdict}</span>'


def gated(runs: Sequence[Run]) -> str:
    """What the gates of ``runs`` said, in words for a caption."""
    told: dict[str, int] = {}
    for run in runs:
        what = _UNCHECKED if run.gate is None else f"gate {run.gate.profile} {run.gate.verdict}"
        told[what] = told.get(what, 0) + 1
    each = [what if len(told) == 1 else f"{what} ({count} runs)" for what, count in told.items()]
    return f"Quality: {', '.join(each).removeprefix('quality ')}."


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
    return f"95 %: {span(*told.interval)} ms"


def _open(told: Figure, percent_: float) -> str:
    """A percentile with too few samples to bound it says how many it needs."""
    needs = told.needs.get(percent_)
    return "" if needs is None else f", bounded from {needs:,} requests on"


def runs(loose: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    """A row a run, with its gate."""
    everything = [*loose, *(point.run for sweep in sweeps for point in sweep.points)]
    if not everything or (len(loose) == 1 and not sweeps):
        return ""  # one run's figures stand at the top
    tools = {run.tool for run in everything}
    slos = any(run.rates.get("request_goodput") is not None for run in everything)
    rows = [_row(run, len(tools) > 1, slos) for run in everything]
    names = [
        "run and its gate",
        "load",
        "answered",
        "TTFT mean, ms",
        "TTFT p99",
        "TPOT mean, ms",
        "TPOT p99",
        "tokens/s",
    ]
    names += (["within SLOs"] if slos else []) + (["measured by"] if len(tools) > 1 else [])
    needs = {
        each.needs[99.0]
        for run in everything
        for each in (_first(run, "ttft", "ttfc"), _first(run, "tpot", "tpot_chunk"))
        if each is not None and 99.0 in each.needs
    }
    star = f" * p99 of too few requests to bound it: {max(needs):,} would do." if needs else ""
    more = " TTFT and TPOT are what the row's tool means by them." if len(tools) > 1 else ""
    caption = (
        f"{len(everything)} runs; small: 95 % interval of the mean; behind a red gate speed is struck out.{star}{more}"
    )
    return f'<section class="wide lean" id="runs">\n<h2>Runs</h2>\n{table(names, rows, caption)}\n</section>'


def latencies(run: Run, several: bool) -> str:
    """Every latency of a run, and of each kind of request."""
    kinds = {name: mapping(mapping(each).get("metrics")) for name, each in mapping(run.part("kinds")).items()}
    rows = [_percentiles(LATENCIES[name].title, told, run) for name, told in run.figures.items() if name in LATENCIES]
    for kind, metrics in kinds.items():
        for name, each in metrics.items():
            told = figure_of(mapping(each))
            if name in LATENCIES and told.count:
                rows.append(_percentiles(f"{LATENCIES[name].title} of {words(kind, 60) or 'unnamed'}", told, run))
    if not rows:
        return ""
    names = ("ms", "mean", "95 % interval", "p50", "p90", "p95", "p99", "n")
    shown = table(names, rows, f"{run.label}: latencies in ms; * of too few samples to bound it with 95 %")
    inner = f"<details><summary>All latencies</summary>{shown}</details>" if several else f"<h2>Latencies</h2>{shown}"
    return f'<section class="lean">{inner}</section>'


def _percentiles(title: str, told: Figure, run: Run) -> list[str]:
    values = []
    for percent_ in (50.0, 90.0, 95.0, 99.0):
        value = told.percentiles.get(percent_)
        mark = "*" if percent_ in told.needs else ""
        values.append('<span class="small">missing</span>' if value is None else struck(plain(value) + mark, run))
    known = told.interval is not None and None not in told.interval
    interval = span(*told.interval) if told.interval is not None and known else "no interval"
    mean = '<span class="small">missing</span>' if told.mean is None else struck(plain(told.mean), run)
    count = "not told" if told.count is None else f"{told.count:,}"
    return [escape(title), mean, struck(interval, run), *values, escape(count)]


def _first(run: Run, name: str, other: str) -> Figure | None:
    return run.figures.get(name) or run.figures.get(other)


def _row(run: Run, tool: bool, slos: bool) -> list[str]:
    first, each = _first(run, "ttft", "ttfc"), _first(run, "tpot", "tpot_chunk")
    total = run.answered + run.bad
    cells_ = [
        f'<span class="name">{escape(run.label)}</span><br>{badge(run.gate)}',
        escape(_paced(run)),
        escape(f"{run.answered:,} of {total:,}") if run.bad else escape(f"all {total:,}"),
        _mean(first, run),
        _tail(first, run),
        _mean(each, run),
        _tail(each, run),
        struck(figure(run.rates.get("output_throughput")), run),
    ]
    cells_ += [struck(_good(run), run)] if slos else []
    return [*cells_, *([escape(TOOLS[run.tool])] if tool else [])]


def _mean(told: Figure | None, run: Run) -> str:
    if told is None or told.mean is None:
        return '<span class="small">missing</span>'
    known = told.interval is not None and None not in told.interval
    small = span(*told.interval) if told.interval is not None and known else "no interval"
    return f"{struck(plain(told.mean), run)}<br><small>{struck(small, run)}</small>"


def _tail(told: Figure | None, run: Run) -> str:
    value = None if told is None else told.percentiles.get(99.0)
    if told is None or value is None:
        return '<span class="small">missing</span>'
    return struck(plain(value) + ("*" if 99.0 in told.needs else ""), run)


def _good(run: Run) -> str:
    value = run.rates.get("request_goodput")
    return "no SLO" if value is None else f"{plain(value)}/s"


def comparison(found: Comparison) -> str:
    rows = []
    for row in found.rows:
        told = [cell if isinstance(cell, str) else cell.plain for cell in cells(row)]
        told[5] = f'<span class="{CLASSES[row.verdict]}">{escape(told[5])}</span>'
        note = f'<span class="name small">{escape(row.note)}</span>'
        rows.append([*(escape(text) for text in told[:5]), told[5], *(escape(text) for text in told[6:]), note])
    a, b = found.a[0].label, found.b[0].label
    notes = "".join(f'<p class="note word">{escape(each.what)}</p>' for each in found.differences)
    names = ("metric", "A", "B", "change", "interval", "verdict", "n", "needs", "note")
    verdict = f'<p>B is <strong class="{CLASSES[found.verdict]}">{escape(said(found))}</strong>.</p>'
    method = f'<p class="small">B / A; {escape(found.method)}; less than {percent(found.margin)} is the same.</p>'
    left = "".join(f'<p class="small">Not compared: {escape(text)}</p>' for text in found.left_out)
    caption = f"A: {a}; B: {b}"
    return (
        f'<section class="wide lean" id="compare">\n<h2>B against A</h2>\n{verdict}{notes}'
        f"{table(names, rows, caption)}\n{method}{left}</section>"
    )


def not_compared(why: str) -> str:
    first, *more = why.splitlines()
    points = "".join(f"<li>{escape(text.strip())}</li>" for text in more if not text.startswith("Give "))
    return (
        f'<section><h2>The two runs are not compared</h2><p>{escape(first)}</p><ul class="word">{points}</ul></section>'
    )


def plan(name: str, what: str, found: Sequence[Line], reasons: Sequence[str], plots: str) -> str:
    rows = [
        (
            f'<span class="word">{escape(each.run.label)}</span>',
            escape(f"{each.quantity}, {each.which}"),
            escape(each.engine),
            escape("missing" if each.floor is None else plan_against.show(each, each.floor)),
            escape(_planned(each)),
            struck(plan_against.show(each, each.measured), each.run),
            escape(f"{each.measured / each.plan:.2f} x the plan" if each.plan else ""),
            '<span class="good">inside</span>' if each.inside else '<span class="bad">outside</span>',
        )
        for each in found
    ]
    names = ("run", "quantity", "of which plan", "floor or ceiling", "plan", "measured", "", "of the interval")
    shown = table(names, rows, f"{name}: {what}") if rows else f'<p class="word">{escape(name)}: {escape(what)}</p>'
    why = "".join(f'<p class="note word">{escape(text)}</p>' for text in reasons)
    figures = f'<div class="figures">{plots}</div>' if plots else ""
    return f'<section class="wide"><h2>Plan against measured against floor</h2>{shown}{why}</section>{figures}'


def _planned(line: Line) -> str:
    centre, low, high = (plan_against.show(line, value) for value in (line.plan, line.low, line.high))
    return f"{centre} ({low} to {high})"


def quality(found: Material) -> str:
    gates = _gates(found)
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
        texts += [f"the server's /metrics: {text}" for text in _server_missing(run)]
        told.update(dict.fromkeys(f"{name}{text}" for text in texts))
    if not told:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in told)
    count = f"{len(told)} things are missing from this page" if len(told) > 1 else "1 thing is missing from this page"
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
