"""An experiment's results as one JSON document, and as Markdown: before and after, each step alone and stacked.

Knows what was measured. No speed-up stands behind a red gate: it is struck out, with the reason.

``experiment.json``: ``kind`` ("longread-experiment"), ``schema``, ``name``, ``complete``, ``provenance``, ``method``;
``configurations``: ``label``, ``steps``, ``command``, ``environment``, ``quality`` (a result's block, None for the base
or without a gate), ``visits`` (``round``, ``status``, ``reason``, ``ready_s``, ``folder``, ``results`` by workload),
``answered`` by workload [ok, sent]; ``tables``: ``workload``, ``metric``, ``unit``, ``base`` and ``rows`` of ``step``,
``alone``, ``added`` (on top of the steps before), ``stacked`` (all up to this one against the base), each with
``speedup``, ``low``, ``high``, ``verdict``, ``before``, ``after``, ``visits``, ``asks``, ``why`` and ``struck``, and
``product`` (of the steps alone up to this one; ``product_struck``: a red one is among them).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longread.measure.experiment.file import Experiment
from longread.measure.experiment.plan import Configuration, Visit
from longread.measure.experiment.record import Done, Folder
from longread.measure.experiment.speedups import HIGHER, Speedup, speedup, spread
from longread.measure.experiment.visit import gate_of
from longread.measure.report.files import read_runs
from longread.measure.report.run import Run
from longread.measure.result import command_line, this_commit, this_machine
from longread.spec.errors import ConfigError

SCHEMA = 1
KIND = "longread-experiment"
PACKAGES = ("longread", "torch", "vllm", "sglang", "transformers")
TITLES = {
    "ttft": "TTFT, mean",
    "ttfat": "time to the first answer text, mean",
    "tpot": "TPOT, mean",
    "e2el": "E2E, mean",
    "output_throughput": "output tokens a second",
    "request_throughput": "requests a second",
}
METHOD = (
    "Each visit starts the server anew; visits go forth and back over the configurations, so that even drift cancels. "
    "A visit's figure is the mean over the asks that every visit of both sides answered. Speed-ups are ratios of "
    "geometric means of visits; intervals are 95 % each, t times the spread between visits of one configuration, "
    "pooled over all."
)


@dataclass(slots=True)
class Material:
    """``runs``: by configuration and workload, in the order of rounds, of visits that were made whole."""

    experiment: Experiment
    configurations: list[Configuration]
    visits: list[Visit]
    done: dict[str, Done]
    runs: dict[str, dict[str, list[Run]]]
    quality: dict[str, dict[str, Any] | None]
    folder: Folder


def gather(
    experiment: Experiment, configurations: list[Configuration], visits: list[Visit], folder: Folder
) -> Material:
    done: dict[str, Done] = {}
    runs: dict[str, dict[str, list[Run]]] = {each.label: {} for each in configurations}
    for visit in visits:
        found = folder.done(visit)
        if found is None:
            continue
        done[visit.identity] = found
        for work, name in found.results.items() if found.status == "ok" else ():
            try:
                run = read_runs(folder.of(visit) / name)[0]
            except ConfigError as error:
                found.status, found.reason = "failed", str(error)
                break
            runs[visit.configuration.label].setdefault(work, []).append(run)
    quality = {each.label: gate_of(experiment, folder, each) for each in configurations}
    return Material(experiment, configurations, visits, done, runs, quality, folder)


def document(material: Material) -> dict[str, Any]:
    experiment = material.experiment
    machine = this_machine(PACKAGES)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "name": experiment.name,
        "complete": all(_ok(material, visit) for visit in material.visits),
        "method": METHOD,
        "configurations": [_configuration(material, each) for each in material.configurations],
        "tables": [
            _table(material, work.name, metric) for work in experiment.workloads for metric in experiment.metrics
        ],
        "workloads": [{"name": each.name, "options": list(each.argv)} for each in experiment.workloads],
        "provenance": {
            "file": experiment.path.name,
            "toml": experiment.text,
            "command": command_line(),
            "commit": this_commit(),
            "machine": {"cpu": machine.cpu, "cores": machine.cores, "system": machine.system},
            "packages": machine.packages,
            "visits": experiment.visits,
        },
    }


def _ok(material: Material, visit: Visit) -> bool:
    done = material.done.get(visit.identity)
    return done is not None and done.status == "ok"


def _configuration(material: Material, each: Configuration) -> dict[str, Any]:
    visits = [visit for visit in material.visits if visit.configuration.label == each.label]
    return {
        "label": each.label,
        "steps": list(each.steps),
        "command": each.server.launch().shown(),
        "environment": dict(each.server.env),
        "quality": material.quality[each.label],
        "answered": {
            work: [sum(run.answered for run in runs), sum(sum(run.ends.values()) for run in runs)]
            for work, runs in material.runs[each.label].items()
        },
        "visits": [_visit(material, visit) for visit in visits],
    }


def _visit(material: Material, visit: Visit) -> dict[str, Any]:
    done = material.done.get(visit.identity)
    if done is None:
        return {"round": visit.round, "status": "not made", "reason": None, "folder": visit.folder}
    return {
        "round": visit.round,
        "status": done.status,
        "reason": done.reason,
        "folder": visit.folder,
        "ready_s": done.ready_s,
        "seconds": done.seconds,
        "date": done.date,
        "commit": done.commit,
        "results": done.results,
    }


def _table(material: Material, work: str, metric: str) -> dict[str, Any]:
    runs = {label: found.get(work, []) for label, found in material.runs.items()}
    pooled = spread(list(runs.values()), metric)
    by_steps = {each.steps: each.label for each in material.configurations}
    base = runs.get("base", [])
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    product, red = 1.0, False
    for step in material.experiment.steps:
        before = by_steps.get(tuple(names))
        names.append(step.name)
        alone, stack = by_steps.get((step.name,)), by_steps.get(tuple(names))
        if alone is None and stack is None:
            continue
        found = speedup(base, runs.get(alone or "", []), metric, pooled)
        product *= found.value or math.nan
        red = red or (alone is not None and _red(material, alone))
        added = speedup(runs.get(before or "", []), runs.get(stack or "", []), metric, pooled)
        rows.append(
            {
                "step": step.name,
                "alone": _cell(material, found, alone),
                "added": _cell(material, added, before, stack),
                "stacked": _cell(material, speedup(base, runs.get(stack or "", []), metric, pooled), stack),
                "product": product if math.isfinite(product) else None,
                "product_struck": red,
            }
        )
    itself = speedup(base, base, metric, pooled)
    return {
        "workload": work,
        "metric": metric,
        "unit": "1/s" if metric in HIGHER else "ms",
        "base": itself.before,
        "spread_between_visits": None if pooled is None else pooled.deviation,
        "rows": rows,
    }


def _red(material: Material, label: str) -> bool:
    told = material.quality.get(label)
    return told is not None and told["verdict"] == "FAIL"


def _cell(material: Material, found: Speedup, *labels: str | None) -> dict[str, Any]:
    """``struck``: why the figure counts for nothing."""
    reasons = [
        f"{label}: {'; '.join(told['failed'])}"
        for label in labels
        if label is not None and (told := material.quality.get(label)) is not None and told["verdict"] == "FAIL"
    ]
    return {
        "speedup": found.value,
        "low": found.low,
        "high": found.high,
        "verdict": found.verdict,
        "before": found.before,
        "after": found.after,
        "visits": found.visits,
        "asks": found.asks,
        "why": found.why or None,
        "struck": f"the quality gate failed: {' / '.join(reasons)}" if reasons else None,
    }


def markdown(told: Mapping[str, Any]) -> str:
    """Of ``document``."""
    where = told["provenance"]
    lines = [f"# {told['name']}", ""]
    machine = where["machine"]
    lines += [f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; commit {where['commit']}.", ""]
    if not told["complete"]:
        lines += ["**Not complete**: some visits failed or were not made; see below.", ""]
    lines += _configurations(told["configurations"])
    for table in told["tables"]:
        lines += _markdown_table(table)
    lines += _struck(told["tables"]) + _failed(told["configurations"])
    lines += ["## How", "", told["method"], ""]
    lines += _commands(told["configurations"])
    lines += ["| workload | options of `longread bench serve` |", "| --- | --- |"]
    lines += [f"| {_safe(each['name'])} | `{_safe(' '.join(each['options']))}` |" for each in told["workloads"]]
    return "\n".join(lines) + "\n"


def _configurations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["## What was started", "", "| configuration | ready, s | answered | gate |", "| --- | --- | --- | --- |"]
    for each in rows:
        ready = [v["ready_s"] for v in each["visits"] if v.get("ready_s") is not None]
        answered = ", ".join(f"{ok} of {sent}" for ok, sent in each["answered"].values()) or "none"
        time = f"{sum(ready) / len(ready):.2f}" if ready else "missing"
        lines.append(f"| {_safe(each['label'])} | {time} | {answered} | {_gate(each)} |")
    return [*lines, ""]


def _commands(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for each in rows:
        env = "".join(f"{name}={value} " for name, value in each["environment"].items())
        lines.append(f"- {_safe(each['label'])}: `{_safe(env + each['command'])}`")
    return [*lines, ""]


def _gate(each: Mapping[str, Any]) -> str:
    if each["label"] == "base":
        return "the base"
    told = each["quality"]
    if told is None:
        return "not checked"
    needed = told.get("needed") if told["verdict"] == "INCONCLUSIVE" else None
    more = "" if needed is None else f" ({needed:,} samples would decide)"
    return f"{told['profile']['name']}: {told['verdict'] or 'not run'}{more}"


def _markdown_table(table: Mapping[str, Any]) -> list[str]:
    title = TITLES[table["metric"]]
    base = "missing" if table["base"] is None else f"{table['base']:.4g} {table['unit']}"
    lines = [f"## {_safe(table['workload'])}: {title}", "", f"Base: {base}.", ""]
    lines += [
        "| step | alone | on top of those before | all so far | alone, multiplied | now |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table["rows"]:
        last = row["stacked"] if row["stacked"]["after"] is not None else row["alone"]
        now = (
            "missing" if last["after"] is None else _struck_out(f"{last['after']:.4g} {table['unit']}", last["struck"])
        )
        product = "" if row["product"] is None else _struck_out(f"{row['product']:.2f}x", row["product_struck"])
        cells = [shown(row[name]) for name in ("alone", "added", "stacked")]
        lines.append(f"| {_safe(row['step'])} | {' | '.join(cells)} | {product} | {now} |")
    return [*lines, ""]


def shown(cell: Mapping[str, Any]) -> str:
    """``1.80x (1.72 to 1.89) faster``; struck out behind a red gate."""
    if cell["speedup"] is None:
        return "missing"
    interval = "no interval" if cell["low"] is None else f"{cell['low']:.2f} to {cell['high']:.2f}"
    text = f"{cell['speedup']:.2f}x ({interval}) {cell['verdict']}"
    return _struck_out(text, cell["struck"])


def _struck_out(text: str, reason: object) -> str:
    return f"~~{text}~~" if reason else text


def _struck(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons = dict.fromkeys(
        row[name]["struck"]
        for table in tables
        for row in table["rows"]
        for name in ("alone", "added", "stacked")
        if row[name]["struck"]
    )
    return ["## Struck out", "", *(f"- {_safe(reason)}" for reason in reasons), ""] if reasons else []


def _failed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"- {_safe(each['label'])}, round {visit['round'] + 1}: {visit['status']}"
        + (f": {_safe(visit['reason'])}" if visit["reason"] else "")
        for each in rows
        for visit in each["visits"]
        if visit["status"] != "ok"
    ]
    lines += [
        f"- {_safe(each['label'])}: the gate was not run: {_safe(each['quality']['why'])}"
        for each in rows
        if each["quality"] is not None
        and each["quality"]["verdict"] is None
        and any(visit["status"] == "ok" for visit in each["visits"])
    ]
    return ["## What is missing", "", *lines, ""] if lines else []


def _safe(text: str) -> str:
    """On one line, and no mark of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")
