"""One visit: start the server, wait, measure every workload, ask the gate's questions once, stop.

Knows the order. Whatever goes wrong is the visit's end, not the experiment's.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from longread.measure import quality
from longread.measure.experiment.file import SCRATCH, Experiment, Server
from longread.measure.experiment.plan import Configuration, Visit, gate_identity, slug
from longread.measure.experiment.record import Done, Folder, read_json
from longread.measure.files import write_json
from longread.measure.gate import record
from longread.measure.gate.errors import GateError
from longread.measure.load.bench import measure
from longread.measure.result import this_commit
from longread.measure.started import Launch, Started
from longread.spec.errors import LongreadError

Tell = Callable[[str], None]


def make(experiment: Experiment, folder: Folder, visit: Visit, tell: Tell) -> Done:
    """Make it and keep it. Raises KeyboardInterrupt, after the server is stopped; nothing is kept then."""
    began, place = time.monotonic(), folder.of(visit)
    place.mkdir(parents=True, exist_ok=True)
    label = visit.configuration.label
    done = Done(
        label, visit.round, visit.identity, "ok", date=time.strftime("%Y-%m-%dT%H:%M:%S%z"), commit=this_commit()
    )
    with tempfile.TemporaryDirectory(prefix="longread-experiment-") as scratch:
        launch = _launch(visit.configuration.server, scratch)
        done.command = launch.shown()
        try:
            _served(experiment, folder, visit, launch, done, tell)
        except (LongreadError, OSError) as error:
            done.status, done.reason = "failed", str(error)
    done.seconds = round(time.monotonic() - began, 3)
    folder.keep(visit, done)
    return done


def _launch(server: Server, scratch: str) -> Launch:
    launch = server.launch()
    return replace(launch, argv=tuple(word.replace(SCRATCH, scratch) for word in launch.argv))


def _served(experiment: Experiment, folder: Folder, visit: Visit, launch: Launch, done: Done, tell: Tell) -> None:
    place, label = folder.of(visit), visit.configuration.label
    log = place / "server.log"
    log.unlink(missing_ok=True)
    process = Started(launch, log)
    try:
        tell(f"{label}: starting")
        ready = asyncio.run(process.wait_ready(experiment.ready_seconds, experiment.headers, asyncio.Event()))
        done.ready_s = ready.answered
        for work in experiment.workloads:
            tell(f"{label}: {work.name}")
            path = place / f"bench-{slug(work.name)}.json"
            measured = measure(
                replace(
                    work.job,
                    base_url=process.base_url,
                    model=work.job.model or experiment.model,
                    headers={**work.job.headers, **experiment.headers},
                    output=path,
                    calibrated=False,
                    server_pid=process.pid,
                    metadata={**work.job.metadata, "experiment": experiment.name, "configuration": label},
                )
            )
            if measured.interrupted:
                raise KeyboardInterrupt
            if not measured.summary.completed:
                raise LongreadError(f"workload {work.name}: no request was answered")
            if not process.alive():
                raise LongreadError(f"workload {work.name}: the server ended; it said:\n{process.tail()}")
            done.results[work.name] = path.name
        if experiment.gate is not None:
            _gate(experiment, folder, visit.configuration, process.base_url, tell)
    finally:
        process.stop()


def _gate(experiment: Experiment, folder: Folder, configuration: Configuration, base_url: str, tell: Tell) -> None:
    """Once a configuration: the base is recorded, the others are judged against it. It comes after the measuring, so
    that all visits measure a server in the same state. What keeps it from running is written beside, and it is tried
    again at the next visit.
    """
    wanted, model = experiment.gate, experiment.model
    if wanted is None:
        return
    path = folder.gate(configuration.label, gate_identity(experiment, configuration))
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    why = path.with_suffix(".why.txt")
    tell(f"{configuration.label}: quality gate")
    try:
        if not configuration.steps:
            found = quality.record_base(wanted.settings, base_url, model, experiment.headers, path.with_suffix(".part"))
            if not found.complete:
                raise GateError(
                    f"the base was not recorded whole ({found.provenance.get('stopped')}): raise [gate] budget"
                )
            path.with_suffix(".part").replace(path)
        else:
            base_path = base_recording(experiment, folder)
            if not base_path.exists():
                raise GateError("the base was not recorded, so there is nothing to compare with")
            check = quality.Check(wanted.settings, wanted.profile, record.read(base_path), base_path)
            outcome = quality.check(check, base_url, model, experiment.headers)
            write_json(path, quality.block(outcome, base_path))
        why.unlink(missing_ok=True)
    except LongreadError as error:
        path.with_suffix(".part").unlink(missing_ok=True)
        why.write_text(str(error), encoding="utf-8")


def base_recording(experiment: Experiment, folder: Folder) -> Path:
    """What the base said."""
    return folder.gate("base", gate_identity(experiment, Configuration("base", (), experiment.base)))


def gate_of(experiment: Experiment, folder: Folder, configuration: Configuration) -> dict[str, Any] | None:
    """A result's ``quality`` block; with ``verdict`` None and ``why`` where there is none. None: no gate was wanted, or
    it is the base.
    """
    if experiment.gate is None or not configuration.steps:
        return None
    path = folder.gate(configuration.label, gate_identity(experiment, configuration))
    found = read_json(path)
    if found is not None:
        return found
    try:
        why = path.with_suffix(".why.txt").read_text(encoding="utf-8")
    except OSError:
        why = "it was not run yet"
    return {"verdict": None, "profile": {"name": experiment.gate.profile.name}, "why": why, "speed_counts": True}
