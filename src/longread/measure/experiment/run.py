"""``longread experiment``: all visits that are still to be made, then the report. Knows the order and the terminal."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from longread.measure.experiment import report
from longread.measure.experiment.file import Experiment
from longread.measure.experiment.plan import Configuration, Visit, chosen, configurations, visits
from longread.measure.experiment.record import Folder
from longread.measure.experiment.visit import make
from longread.spec.errors import ConfigError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Chosen:
    configurations: list[Configuration]
    visits: list[Visit]


def choose(experiment: Experiment, only: tuple[str, ...]) -> Chosen:
    """Raises ConfigError for a step that there is not."""
    names = [step.name for step in experiment.steps]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name[:60]!r}: no step is called so (all: {', '.join(names) or 'none'})")
    wanted = chosen(configurations(experiment), only)
    return Chosen(wanted, visits(experiment, wanted))


def run(experiment: Experiment, output: Path, resume: bool, only: tuple[str, ...]) -> int:
    """0: every visit was made; 1: some failed (the report says why); 130: interrupted (--resume goes on)."""
    wanted, folder = choose(experiment, only), Folder(output)
    folder.begin(resume, experiment.text)
    code = 0
    try:
        for number, visit in enumerate(wanted.visits, 1):
            done = folder.done(visit)
            if done is not None and done.status == "ok":
                continue
            if number > 1 and experiment.pause:
                time.sleep(experiment.pause)

            def tell(words: str, at: str = f"{number} of {len(wanted.visits)}") -> None:
                print(f"experiment: {at}: {words}", file=sys.stderr, flush=True)

            done = make(experiment, folder, visit, tell)
            if done.status != "ok":
                code = 1
                tell(f"{done.label}: failed: {(done.reason or '').splitlines()[0] if done.reason else ''}")
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("\nexperiment: interrupted; --resume goes on from here", file=sys.stderr)
    material = report.gather(experiment, wanted.configurations, wanted.visits, folder)
    document = report.document(material)
    text = report.markdown(document)
    paths = folder.write(document, text)
    Console(highlight=False).print(Markdown(text))
    print("written: " + " and ".join(str(path) for path in paths))
    return code


def dry_run(experiment: Experiment, output: Path, only: tuple[str, ...]) -> int:
    """What would be started and how long it may take, by visits of this folder that were made."""
    wanted, folder = choose(experiment, only), Folder(output)
    known = {visit.identity: done for visit in wanted.visits if (done := folder.done(visit)) is not None}
    took = [done.seconds for done in known.values() if done.status == "ok"]
    left = 0
    for visit in wanted.visits:
        done = known.get(visit.identity)
        state = "made" if done is not None and done.status == "ok" else "to be made"
        left += state != "made"
        server = visit.configuration.server
        env = "".join(f"{name}={value} " for name, value in server.env.items())
        print(f"round {visit.round + 1}, {visit.configuration.label} ({state}): {env}{server.launch().shown()}")
    for work in experiment.workloads:
        print(f"workload {work.name}: longread bench serve {' '.join(work.argv)}")
    gates = len(wanted.configurations) if experiment.gate is not None else 0
    print(f"{len(wanted.visits)} visits, {left} to be made; {gates} gates")
    print(f"predicted: {_predicted(experiment, took, left, gates)}")
    return 0


def _predicted(experiment: Experiment, took: list[float], left: int, gates: int) -> str:
    if not left:
        return "nothing is left to be made"
    if took:
        each = sum(took) / len(took)
        return f"about {_time(left * each)}, as {len(took)} visits took {_time(each)} each"
    longest = sum(work.job.limits.seconds for work in experiment.workloads)
    if not math.isfinite(longest):
        return (
            "not known before the first visit is made: a workload without `duration` takes as long as the server does"
        )
    gate = gates * experiment.gate.settings.seconds if experiment.gate is not None else 0.0
    starts = left * experiment.ready_seconds
    return f"at most {_time(left * longest + gate)} of measuring and {_time(starts)} of starting"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
