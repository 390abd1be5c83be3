"""Plans on a screen: a ranked table, the best plan's memory, first token and capacity, and why others do not run.

Knows rich and the results of ``search`` and ``survey``; decides nothing.
"""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from longread.plan.candidate import Candidate, Refusal, SearchResult
from longread.plan.deployment import Deployment, Workload
from longread.plan.estimate import Estimate, exact
from longread.plan.figures import GIB, gib, length, more_memory, place, rate, seconds, span, too_much
from longread.plan.gpu_memory import Capacity, Cell, GpuMemory
from longread.plan.peer_capacity import PeerCapacity
from longread.plan.space import Fixed, cache_formats
from longread.plan.survey import Survey
from longread.plan.tables import print_records
from longread.plan.timing import Timing
from longread.spec.hardware import Hardware

BAR = 72  # characters that stand for a card's memory
GRADE_STYLES = {"yes": "green", "likely": "green", "unlikely": "yellow", "no": "red"}
_COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "bright_blue", "bright_magenta", "bright_cyan")
RANKING_WIDTH = 150  # columns of the ranking with its intervals; a narrower terminal gets the centres alone
_REFUSED = 4  # of each kind, how many lines are shown; JSON has all


def print_search(console: Console, r: SearchResult, top: int) -> None:
    """The whole result of a search, ``top`` candidates of it."""
    console.print(f"[bold]{escape(r.spec.label)}[/] on [bold]{escape(r.hardware.label)}[/]: {_load(r.workload)}")
    console.print(hardware_line(r.hardware))
    for note in r.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    if r.feasible:
        _print_whole(console, _ranking(r, top, console.width >= RANKING_WIDTH))
        _lost(console, r, top)
        console.print(f"[dim]ranked by: {escape(r.rule)}[/]")
    best = r.best or (r.feasible[0] if r.feasible else None)
    if best is not None:
        _print_best(console, r, best)
    else:
        console.print("[red]nothing fits[/]")
    print_refusals(console, r.infeasible)


def _print_whole(console: Console, table: Table) -> None:
    """Not cut to a narrow terminal: a line that wraps there still has its rank and its figures."""
    width = console.width
    console.width = max(width, RANKING_WIDTH)
    console.print(table, crop=False)
    console.width = width


def hardware_line(h: Hardware) -> str:
    """A card's figures, each with its mark."""
    card = h.card
    shown = {name: figure for name, figure in card.flops.items() if name in ("fp4", "fp8", "bf16")} or card.flops
    rates = [f"{_tera(figure.value, 'FLOP/s')} {name} ({figure.mark})" for name, figure in shown.items()]
    parts = [
        f"{h.total_gpus} x {card.memory.value / GIB:.1f} GiB ({card.usable.value / GIB:.1f} usable)",
        f"{_tera(card.bandwidth.value, 'B/s')} ({card.bandwidth.mark})",
        *rates,
    ]
    for name, figure in (("NVLink", card.nvlink), ("PCIe", card.pcie), ("network a machine", h.network)):
        if figure is not None:
            parts.append(f"{name} {figure.value / 1e9:,.0f} GB/s one way ({figure.mark})")
    return "[dim]" + escape(", ".join(parts)) + "[/]"


def _tera(value: float, unit: str) -> str:
    return f"{value / 1e12:,.4g} T{unit}" if value >= 1e12 else f"{value / 1e9:,.4g} G{unit}"


def _load(w: Workload) -> str:
    read = f" ({w.prefix:.0%} = {w.cached:,} read before)" if w.cached else ""
    targets = [f"{n} <= {seconds(v)}" for n, v in (("TTFT", w.ttft_target), ("TPOT", w.tpot_target)) if v is not None]
    return f"{w.isl:,} tokens in{read}, {w.osl:,} out, {w.concurrency:,} at once" + (
        f"; {', '.join(targets)}" if targets else ""
    )


def _ranking(r: SearchResult, top: int, intervals: bool) -> Table:
    """``intervals``: their ends, the chunk and what binds as well, which the lines below the table say of the best."""
    time, tokens = (span, rate) if intervals else (_centre, _rate_centre)
    warm = r.workload.cached > 0
    table = Table(title=None, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    names = ["#", "engine", "split", "experts", *(["chunk"] if intervals else []), "fit at once", "TTFT cold"]
    names += ["TTFT warm"] if warm else []
    names += ["TTFT at load", "TPOT", "TPOT at load", "tokens/s", "targets", *(["binds"] if intervals else [])]
    for name in names:
        table.add_column(name, justify="left", no_wrap=True)
    for rank, c in _shown(r, top):
        d, t = c.deployment, c.times
        cells = [str(rank), d.engine + ("" if c.runs_today else "*"), d.strategy.label, _formats(d)]
        cells += [f"{d.chunk:,}"] if intervals else []
        cells += [f"{c.sessions:,}", time(t.cold.total)]
        cells += [time(t.warm.total)] if warm and t.warm is not None else []
        cells += [time(t.load), time(t.alone.total), time(t.steady), tokens(t.rate)]
        spare = "" if c.binding.name == "speed" else f" {c.binding.margin:.2g}x"
        table.add_row(*cells, _targets(c), *([f"{c.binding.name}{spare}"] if intervals else []))
    return table


def _centre(e: Estimate) -> str:
    return span(exact(e.centre))


def _rate_centre(e: Estimate) -> str:
    return f"{e.centre:,.3g}" if e.centre < 1000 else f"{e.centre:,.0f}"


def _formats(d: Deployment) -> str:
    """The experts' type, and the cache's where it is not the usual one of the model."""
    usual = cache_formats(d.spec, d.hardware, Fixed())[0]
    return d.experts + ("" if d.cache == usual else f", {d.cache} cache")


def _targets(c: Candidate) -> Text:
    text = Text()
    for name, grade in c.meets.items():
        if name == "concurrency" and grade == "yes":
            continue
        text.append(f"{'fits' if name == 'concurrency' else name.upper()} {grade} ", GRADE_STYLES[grade])
    if not text.plain:
        text.append("none given", "dim")
    return text


def _lost(console: Console, r: SearchResult, top: int) -> None:
    shown = _shown(r, top)
    if any(not c.runs_today for _, c in shown):
        console.print("[dim]* a prediction that does not know the engine's kernels[/]")
    for rank, c in shown[1:]:
        lossy = f" [yellow]({escape('; '.join(c.lossy))})[/]" if c.lossy else ""
        console.print(f"[dim]{rank} against 1: {escape(c.lost)}[/]{lossy}")


def _shown(r: SearchResult, top: int) -> list[tuple[int, Candidate]]:
    """The first ``top``, and behind them those that are best at one thing, with their ranks."""
    numbered = list(enumerate(r.feasible, 1))
    today = [pair for pair in numbered if pair[1].runs_today] or numbered
    extremes = [
        min(today, key=lambda pair: pair[1].times.first.total.centre),
        min(today, key=lambda pair: pair[1].times.alone.total.centre),
        max(today, key=lambda pair: pair[1].score),
        *[pair for pair in numbered if not pair[1].runs_today][:1],
    ]
    ranks = {rank for rank, _ in (*numbered[:top], *extremes)}
    return [pair for pair in numbered if pair[0] in ranks]


def _print_best(console: Console, r: SearchResult, c: Candidate) -> None:
    d, b = c.deployment, c.binding
    console.print()
    console.print(
        f"[bold]{d.engine} {d.strategy.label}[/], {_groups(d)}chunk {d.chunk:,}, max_num_seqs {d.max_num_seqs}, memory "
        f"share {d.memory_share:.2f}, experts {d.experts}, cache {d.cache}"
    )
    console.print(f"binds first: {escape(_binding(c))}")
    for text in (*c.lossy, *c.notes):
        console.print(f"[yellow]note[/] {escape(text)}")
    first = "TTFT warm" if c.times.warm is not None else "TTFT cold"
    print_timing(console, f"{first}, alone", c.times.first)
    print_timing(console, f"TPOT, {min(c.sessions, c.workload.concurrency):,} at once", c.times.alone)
    console.print(
        f"at load: TTFT {span(c.ttft_load)}, the last of a burst {span(c.times.burst)}; TPOT {span(c.tpot_load)}, the "
        f"longest gap {span(c.times.stall)}; {c.times.reading:.0%} of the time goes to prompts"
    )
    floors = "floors" if place(r.hardware) == "machine" else "floors on all cards"
    console.print(f"{floors}: " + ", ".join(f"{name} {seconds(v)}" for name, v in r.floors.items()))
    print_memory(console, d, c.memory)
    print_capacity(console, place(d.hardware), [c.capacity], [c.peer] if c.peer is not None else [])
    if b.margin < 1:
        console.print(f"[red]{b.name} is missed by {1 / max(b.margin, 1e-9):.1f}x[/]")


def _groups(d: Deployment) -> str:
    s = d.strategy
    parts = [f"{s.dp} attention groups of {s.tp // s.dp}"] if s.dp > 1 else []
    parts += [f"{s.replicas} copies of {s.gpus} cards"] if s.replicas > 1 else []
    return "".join(f"{part}, " for part in parts)


def _binding(c: Candidate) -> str:
    b = c.binding
    if b.name == "memory":
        return f"memory: {b.limit:,.0f} sequences fit, {b.value:,.0f} asked"
    if b.name == "speed":
        return f"speed, no target given: {b.why}"
    return f"{b.name} {seconds(b.value)} against {seconds(b.limit)}: {b.why}"


def print_timing(console: Console, title: str, timing: Timing) -> None:
    """A time with its parts, each an interval with its origin."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in (title, "", "low", "high", "origin"):
        table.add_column(name)
    whole = timing.total.centre or 1.0
    for name, e in timing.parts.items():
        if e.centre > 0:
            table.add_row(
                f"  {name}", seconds(e.centre), seconds(e.low), seconds(e.high), _origin(e.centre / whole, e.provenance)
            )
    e = timing.total
    table.add_row("  sum", seconds(e.centre), seconds(e.low), seconds(e.high), e.provenance, style="bold")
    console.print(table)
    cut = "low end cut at the floor; " if e.low > 1.001 * sum(part.low for part in timing.parts.values()) else ""
    floor = cut + f"physical floor {seconds(e.floor)} ({e.floor / whole:.0%}); " if e.floor else ""
    console.print(f"  [dim]{floor}{escape(e.source)}[/]")


def _origin(share: float, provenance: str) -> str:
    return f"{share:4.0%}  {provenance}"


def memory_rows(d: Deployment, memory: GpuMemory) -> dict[str, int]:
    """Bytes by part in the order of the bar: weights by group, everything else, what is left for the cache."""
    rows = {f"weights: {name}": size for name, size in memory.weights.items() if size}
    rows |= {name: part.size for name, part in memory.parts.items() if part.size}
    card = d.hardware.card
    rows["left for the cache" if memory.free >= 0 else "missing"] = abs(memory.free)
    unused = int(card.memory.value) - memory.usable
    if unused > 0:
        rows["outside the share"] = unused
    return rows


def print_memory(console: Console, d: Deployment, memory: GpuMemory) -> None:
    """A bar of one card's memory and its parts with sources."""
    stage = f", pipeline stage {memory.stage} of {d.strategy.pp}" if d.strategy.pp > 1 else ""
    alone = place(d.hardware) == "machine"
    where = "machine" if alone else "fullest card"
    console.print(f"[bold]memory of the {where}[/] ({gib(d.hardware.card.memory.value)} shown{stage})")
    rows = memory_rows(d, memory)
    whole = sum(rows.values())
    bar, table = Text("  "), Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, (name, size) in enumerate(rows.items()):
        missing = name == "missing"
        style = (
            "red"
            if missing
            else "white"
            if name == "left for the cache"
            else "dim"
            if name == "outside the share"
            else _COLOURS[index % len(_COLOURS)]
        )
        filled = "░" if name in ("left for the cache", "outside the share") else "█"
        bar.append(filled * max(round(BAR * size / whole), 1 if size / whole > 0.004 else 0), style)
        source = memory.parts[name].source if name in memory.parts else ""
        table.add_row(Text(f"  {filled} ", style), name, f"{gib(size):>12}", f"[dim]{escape(source)}[/]")
    console.print(bar)
    console.print(table)
    shared = [f"{name} {memory.kv_per_token[name]:,.0f} B a token" for name in memory.kv_per_token]
    fixed = sum(memory.kv_fixed.values())
    how = "; ".join(dict.fromkeys(memory.sharing.values()))
    console.print(
        f"  cache{'' if alone else ' on each card'}: {', '.join(shared)}"
        + (f"; {gib(fixed)} a sequence" if fixed else "")
        + f" ([dim]{escape(how)}[/])"
    )


def print_capacity(console: Console, where: str, capacities: Iterable[Capacity], peers: Iterable[PeerCapacity]) -> None:
    """Tokens and sessions at context lengths, and what vLLM and SGLang make of the same memory."""
    known = list(peers)
    engines = list(dict.fromkeys(p.engine for p in known))
    names = ["context", "sessions (rows alone)", "tokens", "a session" + ("" if where == "machine" else " on a card")]
    # What a log says is for the length that the engine was started for; several lengths are several starts.
    names += [*(f"{e}: hold" for e in engines), *(f"{e}: its log says" for e in engines)]
    rows = []
    for c in capacities:
        own = {p.engine: p for p in known if p.context == c.context}
        cells = [f"{c.context:,}", f"{c.sessions:,.1f}", f"{c.tokens:,}", gib(c.session_bytes)]
        cells += [f"{own[e].sessions:,.1f}" if e in own else "" for e in engines]
        cells += [f"{own[e].reported_tokens:,} tokens" if e in own else "" for e in engines]
        rows.append(cells)
    print_records(console, names, rows)
    for p in {p.engine: p for p in known}.values():
        console.print(f"  [dim]{p.engine}: {escape(p.why)}[/]")


def print_triangle(console: Console, where: str, cells: Iterable[Cell]) -> None:
    """Context by concurrency: GiB on the fullest card or the machine, red where it does not fit."""
    rows: dict[int, dict[int, Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.context, {})[cell.concurrency] = cell
    if not rows:
        return
    widths = list(next(iter(rows.values())))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GiB: context" if where == "machine" else "GiB a card: context")
    for width in widths:
        table.add_column(f"{width} at once", justify="right")
    for context, row in rows.items():
        shown = [_cell(row[width]) for width in widths]
        table.add_row(length(context), *shown)
    console.print(table)


def _cell(cell: Cell) -> Text:
    return Text(f"{cell.size / GIB:,.0f}" + ("" if cell.fits else " no"), "green" if cell.fits else "red")


def print_survey(console: Console, s: Survey) -> None:
    """Memory, capacity and the triangle of one deployment."""
    d, where = s.deployment, place(s.deployment.hardware)
    console.print(f"[bold]{escape(d.spec.label)}[/] on [bold]{escape(d.hardware.label)}[/]")
    console.print(hardware_line(d.hardware))
    console.print(
        f"[bold]{d.strategy.label}[/] ({s.chosen}), experts {d.experts}, cache {d.cache}, chunk {d.chunk:,}, "
        f"{d.max_num_seqs} sequences, memory share {d.memory_share:.2f}"
    )
    for engine, why in s.refused.items():
        console.print(f"[yellow]{engine} cannot run it:[/] {escape(why)}")
    print_memory(console, d, s.memory)
    for fact in s.published:
        console.print(f"  [yellow]{escape(fact.words)}[/]")
    if not s.fits:
        over, more = too_much(-s.memory.free, d.hardware), more_memory(d.hardware)
        console.print(f"[red]does not fit[/]: {over}; use {more} or smaller experts")
        return
    engines = "".join(f"; {name} holds {tokens:,}" for name, tokens in s.peer_longest.items())
    console.print(
        f"longest context whose rows fit: [bold]{s.longest:,}[/] of the model's {d.spec.max_position:,} tokens{engines}"
    )
    print_capacity(console, where, s.capacities, s.peers)
    print_triangle(console, where, s.triangle)
    console.print("[dim]for times, targets and a ranking give a load: --isl 131072 --osl 512 --concurrency 8[/]")


def print_refusals(console: Console, refusals: Iterable[Refusal]) -> None:
    kinds: Mapping[str, str] = {
        "memory": "do not fit",
        "sessions": "do not hold all requests at once",
        "engine": "the engine has not got it",
        "strategy": "cannot be split so",
    }
    found = list(refusals)
    for kind, head in kinds.items():
        rows = [f for f in found if f.kind == kind]
        if not rows:
            continue
        console.print(f"[bold]{head}[/]")
        for f in rows[:_REFUSED]:
            by = f" ([red]{escape(f.by)}[/])" if f.by else ""
            cure = f"; [green]fits with:[/] {escape(f.cure)}" if f.cure else ""
            engines = "" if len(f.engines) > 2 else f"{', '.join(f.engines)} "
            console.print(f"  {engines}{escape(f.what)}: {escape(f.limit)}{by}{cure}")
        if len(rows) > _REFUSED:
            more = sum(f.count for f in rows[_REFUSED:])
            console.print(f"  [dim]and {more} more in {len(rows) - _REFUSED} groups (--json has all)[/]")
