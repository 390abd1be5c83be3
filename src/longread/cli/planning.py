"""``longread plan --hardware``: turns options into a load and what is fixed, calls the planner, prints or writes.

Knows: which of the planner's results an option asks for. Must not know: how they are found or look.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate, spec_of
from longread.cli.hardware_flags import TOP, refuse_here, size, tokens
from longread.plan.calibrate import Calibration, Factors, calibrate
from longread.plan.candidate import SearchResult
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, EngineName, Workload
from longread.plan.document import SCHEMA, Json, search_document, survey_document
from longread.plan.search import ENGINES, search
from longread.plan.space import Fixed
from longread.plan.survey import survey
from longread.spec.errors import CheckpointError, ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200
OSL = 512


def run_published(args: argparse.Namespace) -> int:
    from longread.plan import runs_report  # rich: only where something is drawn

    if args.json:
        _print_json({"schema": SCHEMA, "kind": "published", "runs": runs_report.published_rows()})
    else:
        runs_report.print_published(_console())
    return 0


def run_hardware(args: argparse.Namespace, spec: ModelSpec) -> int:
    """Exit 1 when nothing fits that runs there today. Raises ConfigError for a load or a split that cannot be."""
    refuse_here(args)
    hardware = parse_hardware(args.hardware)
    learnt = _calibration(args, spec, hardware)
    quiet = args.json or args.emit is not None
    if learnt is not None and not quiet:
        from longread.plan.runs_report import print_calibration

        print_calibration(_console(), learnt)
    if args.isl is None:
        return _survey(args, spec, hardware)
    return _search(args, spec, hardware, learnt)


def _search(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware, learnt: Calibration | None) -> int:
    load = workload(args)
    factors: Factors | None = learnt.factors if learnt is not None else None
    result = search(spec, hardware, load, engines=_engines(args), fixed=fixed(args), factors=factors)
    if args.html is not None:
        _write_page(args.html, result, factors)
    if args.emit is not None:
        print(_emitted(args.emit, result))
    elif args.json:
        document = search_document(result)
        _add_calibration(document, learnt)
        _print_json(document)
    else:
        from longread.plan.report import print_search

        print_search(_console(), result, args.top or TOP)
    return 0 if result.best is not None else 1


def _survey(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware) -> int:
    if args.html is not None:
        raise ConfigError("--html draws times against a load; give one: --isl 131072 --osl 512 --concurrency 8")
    found = survey(spec, hardware, engines=_engines(args), fixed=fixed(args))
    if args.emit is not None:
        print(_command(found.deployment, None, args.emit))
    elif args.json:
        _print_json(survey_document(found))
    else:
        from longread.plan.report import print_survey

        print_survey(_console(), found)
    return 0 if found.fits else 1


def _engines(args: argparse.Namespace) -> tuple[EngineName, ...]:
    chosen: tuple[EngineName, ...] | None = args.engine
    return chosen or ENGINES


def workload(args: argparse.Namespace) -> Workload:
    targets = args.slo or {}
    return Workload(
        args.isl,
        args.osl or OSL,
        args.prefix or 0.0,
        args.concurrency or 1,
        args.tier or "device",
        targets.get("ttft"),
        targets.get("tpot"),
    )


def fixed(args: argparse.Namespace) -> Fixed:
    return Fixed(
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        dp=args.dp,
        ep=args.ep,
        replicas=args.replicas,
        experts=args.experts,
        cache=args.kv_cache_dtype,
        chunk=tokens("max_num_batched_tokens", args.max_num_batched_tokens),
        memory_share=args.gpu_memory_utilization,
        context=tokens("max_model_len", args.max_model_len),
        host_cache=size("host_cache_size", args.host_cache_size),
    )


def _calibration(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware) -> Calibration | None:
    if args.calibrate is None:
        return None
    specs = {spec.label: spec}
    for name in BUNDLED:
        try:
            specs[name] = spec_of(locate(name))
        except CheckpointError:  # not installed: a result file that names it then says so
            continue
    measured_on = hardware if hardware.card.architecture == "cpu" else None
    return calibrate(args.calibrate, hardware=measured_on, specs=specs)


def _emitted(target: str, result: SearchResult) -> str:
    """For an engine its own best plan, for compose and systemd the best of those that run today."""
    for candidate in result.feasible:
        if target == candidate.deployment.engine or (target in ("compose", "systemd") and candidate.runs_today):
            return _command(candidate.deployment, candidate.workload, target)
    raise ConfigError(f"--emit {target}: no plan of it runs this load; without --emit the report says why")


def _command(d: Deployment, load: Workload | None, target: str) -> str:
    from longread.plan.launch import emit  # flags of other engines: only where they are written

    return emit(d, load, target)


def _write_page(path: Path, result: SearchResult, factors: Factors | None) -> None:
    from longread.plan.page import render  # drawing: only where a page is written

    path.write_text(render(result, factors), encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def _add_calibration(document: Json, learnt: Calibration | None) -> None:
    if learnt is not None:
        from longread.plan.runs_report import calibration_rows

        document["calibration"] = calibration_rows(learnt)


def _print_json(document: Json) -> None:
    print(json.dumps(document, indent=1, allow_nan=False))


def _console() -> "Console":
    from rich.console import Console  # start-up time: only where something is drawn

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=PIPE_WIDTH, highlight=False)
