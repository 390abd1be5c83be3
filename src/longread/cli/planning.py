"""``longread plan --hardware``: turns options into a load and what is fixed, calls the planner, prints or writes.

Knows: which of the planner's results an option asks for. Must not know: how they are found or look.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate, spec_of
from longread.cli.hardware_flags import TOP, refuse_here, refuse_pairs, size, tokens
from longread.plan.bench_file import other_kind
from longread.plan.calibrate import Calibration, Factors, calibrate
from longread.plan.candidate import Candidate, SearchResult
from longread.plan.cards import also_called, parse_hardware
from longread.plan.deployment import Deployment, EngineName, Workload
from longread.plan.document import SCHEMA, Json, search_document, survey_document
from longread.plan.figures import seconds, span, summary
from longread.plan.judging import targets
from longread.plan.search import ENGINES, search
from longread.plan.space import Fixed, other_checkpoint
from longread.plan.survey import survey
from longread.spec.errors import CheckpointError, ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release_name

if TYPE_CHECKING:
    from rich.console import Console

    from longread.plan.launch import Options

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
    refuse_pairs(args)
    if args.html is not None:
        _check_page(args.html)
    hardware = parse_hardware(args.hardware)
    note = also_called(args.hardware)
    if note is not None:
        print(f"longread: note: {note}", file=sys.stderr, flush=True)
    learnt = _calibration(args, spec, hardware)
    quiet = args.json or args.emit is not None
    if learnt is not None and not quiet:
        from longread.plan.runs_report import print_calibration

        print_calibration(_console(), learnt)
    if args.isl is None:
        return _survey(args, spec, hardware, learnt)
    return _search(args, spec, hardware, learnt)


def _search(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware, learnt: Calibration | None) -> int:
    load = workload(args)
    factors: Factors | None = learnt.factors if learnt is not None else None
    result = search(spec, hardware, load, engines=_engines(args), fixed=fixed(args), factors=factors)
    if args.html is not None:
        _write_page(args.html, result, factors)
    if args.emit is not None:
        print(_emitted(args, result, factors))
    elif args.json:
        document = search_document(result)
        _add_calibration(document, learnt)
        _print_json(document)
    else:
        from longread.plan.report import print_search

        print_search(_console(), result, TOP if args.top is None else args.top)
    return 0 if result.best is not None else 1


def _survey(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware, learnt: Calibration | None) -> int:
    if args.html is not None:
        raise ConfigError("--html draws times against a load; give one: --isl 131072 --osl 512 --concurrency 8")
    engines = (args.emit,) if args.emit in ENGINES else _engines(args)
    found = survey(spec, hardware, engines=engines, fixed=fixed(args))
    if args.emit is not None:
        if not found.fits:
            raise ConfigError(f"--emit {args.emit}: it does not fit; without --emit the report says by how much")
        print(_command(found.deployment, None, args.emit, _options(args)))
    elif args.json:
        document = survey_document(found)
        _add_calibration(document, learnt)
        _print_json(document)
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
        OSL if args.osl is None else args.osl,
        0.0 if args.prefix is None else args.prefix,
        1 if args.concurrency is None else args.concurrency,
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


def run_calibration(args: argparse.Namespace) -> int:
    """What own runs change, without a model to plan."""
    learnt = calibrate(_results(args.calibrate), specs=_bundled())
    if args.json:
        document: Json = {"schema": SCHEMA, "kind": "calibration"}
        _add_calibration(document, learnt)
        _print_json(document)
    else:
        from longread.plan.runs_report import print_calibration

        print_calibration(_console(), learnt)
    return 0


def _calibration(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware) -> Calibration | None:
    if args.calibrate is None:
        return None
    measured_on = hardware if hardware.card.architecture == "cpu" else None
    return calibrate(_results(args.calibrate), hardware=measured_on, specs={spec.label: spec, **_bundled()})


def _bundled() -> dict[str, ModelSpec]:
    specs = {}
    for name in BUNDLED:
        try:
            specs[name] = spec_of(locate(name))
        except CheckpointError:  # not installed: a result file that names it then says so
            continue
    return specs


def _results(files: Sequence[Path]) -> list[Path]:
    """Those that are results of `longread bench`; a line on stderr for each of another kind, which teaches nothing."""
    kinds = {file: other_kind(file) for file in files}
    found = [file for file, kind in kinds.items() if kind is None]
    if not found:
        raise ConfigError("; ".join(f"{file}: {kind}" for file, kind in list(kinds.items())[:3]))
    for file, kind in kinds.items():
        if kind is not None:
            print(f"longread: skipped {file}: {kind}", file=sys.stderr, flush=True)
    return found


def _emitted(args: argparse.Namespace, result: SearchResult, factors: Factors | None) -> str:
    """For an engine its own best plan, for compose and systemd the best of those that run today: of each, the first
    that the engine can be started with. The file says which it is, and what was passed over.
    """
    target, options = args.emit, _options(args, factors)
    passed: list[tuple[int, Candidate, str]] = []
    refused: list[str] = []  # by the engine's launch: says more than that a plan needs another checkpoint
    for rank, c in enumerate(result.feasible, 1):
        if target != c.deployment.engine and not (target in ("compose", "systemd") and c.runs_today):
            continue
        if other_checkpoint(c.deployment) and args.experts is None:
            why = f"{other_checkpoint(c.deployment)}; --experts {c.deployment.experts} and --model-path name it"
        else:
            try:
                notes = (_place_of(rank, result, passed), *_missed(c))
                return _command(c.deployment, c.workload, target, replace(options, notes=notes))
            except ConfigError as error:
                why = str(error)
                refused.append(why)
        passed.append((rank, c, why))
    if passed:
        raise ConfigError(f"--emit {target}: {refused[0] if refused else passed[0][2]}")
    raise ConfigError(f"--emit {target}: no plan of it runs this load; without --emit the report says why")


def _place_of(rank: int, result: SearchResult, passed: Sequence[tuple[int, Candidate, str]]) -> str:
    better = [f"{n} ({c.deployment.engine} {summary(c.deployment)}): {why}" for n, c, why in passed[:2]]
    more = f", and {len(passed) - 2} more" if len(passed) > 2 else ""
    return f"plan {rank} of {len(result.feasible)} of the ranking" + (
        f"; passed over: {'; '.join(better)}{more}" if better else ""
    )


def _missed(c: Candidate) -> list[str]:
    """A note for each target that is not sure to be met."""
    notes = []
    for name, (estimate, target) in targets(c.workload, c.times).items():
        verdict = c.meets[name.lower()]
        if verdict != "yes":
            notes.append(f"{name} target {seconds(target)}, predicted at load {span(estimate)}; met: {verdict}")
    if c.sessions < c.workload.concurrency:
        notes.append(f"{c.sessions:,} of {c.workload.concurrency:,} requests run at once, the rest waits for a seat")
    return notes


def _options(args: argparse.Namespace, factors: Factors | None = None) -> "Options":
    from longread.plan.launch import Options  # flags of other engines: only where they are written

    return Options(
        engine_version=args.engine_version,
        name=release_name(args.model) or (args.model if args.model in BUNDLED else None),
        model=_model_path(args),
        host="127.0.0.1" if args.host is None else args.host,
        port=8000 if args.port is None else args.port,
        nodes=tuple(args.nodes.split(",")) if args.nodes is not None else (),
        interface=args.interface,
        factors=factors,
        layers=args.layers,
    )


def _model_path(args: argparse.Namespace) -> str | None:
    """What the engine loads: as named, or the folder that was planned; a folder that is here by its whole path."""
    named: str | None = args.model_path
    if named is not None and not named.strip():
        raise ConfigError("--model-path is empty; name a folder or a model")
    if named is None:
        if args.model in BUNDLED or Path(args.model).is_dir():
            named = str(locate(args.model))
        elif Path(args.model).name == "config.json":
            named = str(Path(args.model).parent)
        else:
            return None
    return str(Path(named).resolve()) if Path(named).is_dir() else named


def _command(d: Deployment, load: Workload | None, target: str, options: "Options") -> str:
    from longread.plan.launch import emit  # as above

    return emit(d, load, target, options)


def _check_page(path: Path) -> None:
    """Before the search. Raises ConfigError."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--html {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"--html {path}: not writable")


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
    from longread.plan.tables import console  # rich, start-up time: only where something is drawn

    return console()
