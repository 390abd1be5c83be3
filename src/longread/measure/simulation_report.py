"""A simulation as JSON (schema ``longread.simulation/1``) and as a table.

Knows results and a terminal; computes nothing but units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape

from longread.engine.virtual import Limits, Run
from longread.measure.simulate import Alone, ClassResult, Simulation, Spread
from longread.plan import figures
from longread.plan.calibrate import Scale
from longread.plan.deployment import Deployment
from longread.plan.tables import print_records
from longread.spec.state import PAGE_TOKENS

SCHEMA = "longread.simulation/1"
# What the numbers are not: said wherever they are shown.
LEFT_OUT = "the engine alone: no network, no tokenizing, no host or disk tier, no refusal of a long queue"
FORMULAS = {
    "ttft": "from arrival to the end of the step that gives the first token",
    "tpot": "(e2e - ttft) / (output tokens - 1)",
    "gap": "between two tokens of one request, those of a class together",
    "queue": "from arrival to the start of the first step with a part of the prompt",
    "slower": "ttft / ttft with the engine to itself, the same tokens reused",
    "stretched": "e2e / e2e with the engine to itself",
}
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Setting:
    """What was simulated. ``load``: in words; ``seed`` None: nothing was drawn; ``scales``: of the planner's times."""

    deployment: Deployment
    limits: Limits
    load: str
    seed: int | None
    scales: tuple[Scale, Scale]
    targets: dict[str, float]
    command: str
    commit: str


def document(simulation: Simulation, classes: Sequence[ClassResult], setting: Setting) -> Json:
    """Seconds and tokens everywhere; None where there is nothing. ``wall_seconds`` is all that differs from run to
    run.
    """
    d, totals = setting.deployment, simulation.totals
    return {
        "schema": SCHEMA,
        "command": setting.command,
        "commit": setting.commit,
        "model": d.spec.label,
        "hardware": d.hardware.label,
        "deployment": {
            "engine": d.engine,
            "strategy": d.strategy.label,
            "experts": d.experts,
            "kv_cache_dtype": d.cache,
            **asdict(setting.limits),
            "cache_tokens": setting.limits.pages * PAGE_TOKENS,
        },
        "cost": {
            name: {
                "low": scale.low,
                "centre": scale.centre,
                "high": scale.high,
                "provenance": scale.provenance,
                "source": scale.source,
            }
            for name, scale in zip(("prefill_scale", "decode_scale"), setting.scales, strict=True)
        },
        "load": {"what": setting.load, "requests": len(simulation.runs), "seed": setting.seed},
        "targets": setting.targets,
        "formulas": FORMULAS,
        "left_out": LEFT_OUT,
        "simulated_seconds": simulation.seconds,
        "busy_seconds": totals.busy,
        "steps": totals.steps,
        "decisions": totals.decisions,
        "longest_step": totals.longest_step,
        "prompt_tokens_computed": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "wall_seconds": simulation.wall,
        "classes": {each.kind: _class(each) for each in classes},
    }


def _class(each: ClassResult) -> Json:
    row: Json = {}
    for name, value in ((name, getattr(each, name)) for name in each.__dataclass_fields__ if name != "kind"):
        row[name] = _spread(value) if isinstance(value, Spread) else value
    return row


def _spread(value: Spread) -> Json:
    named = {f"p{p}": at for p, at in value.percentiles.items()}
    return {"count": value.count, "mean": value.mean, **named, "max": value.most}


def request_rows(simulation: Simulation) -> Iterator[Json]:
    """One row a request, for JSON lines."""
    for run, single in zip(simulation.runs, simulation.alone, strict=True):
        yield _row(run, single)


def _row(run: Run, single: Alone | None) -> Json:
    row: Json = {
        "id": run.key,
        "class": run.kind,
        "arrived": run.arrived,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.outputs,
    }
    if single is None:
        return row | {"error": run.error}
    return row | {
        "cached_tokens": run.cached,
        "computed_tokens": run.computed,
        "chunks": run.chunks,
        "preemptions": run.preemptions,
        "queue": run.queue,
        "ttft": run.ttft,
        "tpot": run.tpot,
        "longest_gap": run.longest_gap,
        "e2e": run.e2e,
        "ttft_alone": single.ttft,
        "e2e_alone": single.e2e,
    }


def print_simulation(
    console: Console, simulation: Simulation, classes: Sequence[ClassResult], setting: Setting
) -> None:
    d, limits, totals = setting.deployment, setting.limits, simulation.totals
    console.print(
        f"[bold]{escape(d.spec.label)}[/] on {escape(d.hardware.label)}, {d.strategy.label}: "
        f"{limits.pages * PAGE_TOKENS:,} tokens of cache, {limits.max_num_seqs} sequences, "
        f"{limits.max_num_batched_tokens:,} tokens a step"
    )
    console.print(f"load: {escape(setting.load)}")
    _print_classes(console, classes)
    share = totals.busy / simulation.seconds if simulation.seconds else 0.0
    rate = totals.output_tokens / simulation.seconds if simulation.seconds else 0.0
    console.print(
        f"{figures.seconds(simulation.seconds)} simulated in {figures.seconds(simulation.wall)} "
        f"({simulation.speed:,.0f} times real time); busy {share:.0%}; {totals.steps:,} steps, the longest "
        f"{figures.seconds(totals.longest_step)}; {rate:,.0f} output tokens/s"
    )
    for each in classes:
        for reason, count in each.refused.items():
            console.print(f"[red]{escape(each.kind)}: {count} not served[/]: {escape(reason)}")
    read, write = setting.scales
    console.print(
        f"[dim]times are the planner's, {read.provenance}: prefill could be {_ends(read)} of what is shown, decode "
        f"{_ends(write)}; {LEFT_OUT}[/]"
    )


def _ends(scale: Scale) -> str:
    return f"{scale.low / scale.centre:.1f}-{scale.high / scale.centre:.1f} times"


def _print_classes(console: Console, classes: Sequence[ClassResult]) -> None:
    refused = any(each.refused for each in classes)
    judged = any(each.good is not None for each in classes)
    names = [
        "class",
        "requests",
        "queue p50/p99",
        "TTFT p50/p99",
        "TTFT of alone p50/p99",
        "TPOT mean/p99",
        "gap p99/max",
    ]
    names += ["E2E p50/p99", "E2E of alone p50/p99", "reused", "preempted"]
    names += ["not served"] if refused else []
    names += ["meets targets"] if judged else []
    rows = []
    for each in classes:
        cells = [
            escape(each.kind),
            f"{each.requests:,}",
            _pair(each.queue),
            _pair(each.ttft),
            _ratio(each.slower),
            _mean(each.tpot),
            _worst(each.gaps),
            _pair(each.e2e),
            _ratio(each.stretched),
            f"{each.cached_tokens / each.prompt_tokens:.0%}" if each.prompt_tokens else "-",
            f"{each.preemptions:,}",
        ]
        cells += [f"{sum(each.refused.values()):,}"] if refused else []
        cells += ["-" if each.good is None else f"{each.good:.0%}"] if judged else []
        rows.append(cells)
    print_records(console, names, rows)


def _pair(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{figures.seconds(spread.percentiles[50])} / {figures.seconds(spread.percentiles[99])}"


def _mean(spread: Spread | None) -> str:
    return "-" if spread is None else f"{figures.seconds(spread.mean)} / {figures.seconds(spread.percentiles[99])}"


def _worst(spread: Spread | None) -> str:
    return "-" if spread is None else f"{figures.seconds(spread.percentiles[99])} / {figures.seconds(spread.most)}"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.percentiles[50]:.2f}x / {spread.percentiles[99]:.2f}x"
