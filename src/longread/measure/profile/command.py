"""``longread bench profile``: two runs, one to time and one to profile, and one table of both.

Knows the order of things. Must not know how any of them is done. The profiler slows steps, so client and server are
timed in a run of its own, and the steps of a second run, of other prompts of the same kind, are profiled.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longread.measure.files import write_json
from longread.measure.load.bench import Job, Measured, client_provenance, measure
from longread.measure.load.target import Target
from longread.measure.profile import kernels
from longread.measure.profile.attribution import Attribution, attribute
from longread.spec.hardware import Hardware

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Profiled:
    """``kernels``: the server's profile with its groups; None, and ``why`` not. ``interrupted``: by Ctrl-C."""

    timed: Measured
    attribution: Attribution | None
    kernels: Mapping[str, Any] | None
    why: str | None
    document: dict[str, Any]
    interrupted: bool


def profile(timed: Job, profiled: Job, num_steps: int, hardware: Hardware | None, output: Path | None) -> Profiled:
    """Raises what ``measure`` raises. The result is written to ``output``, also where it is not whole."""
    first = measure(timed)
    told = None if first.document.get("longread") is None else first.document["longread"].get("server")
    attribution = attribute(first.summary.run.outcomes, told)
    found, why, interrupted = None, None, first.interrupted
    if interrupted:
        why = "interrupted before the steps were profiled"
    else:
        found, why, interrupted = _steps(profiled, num_steps, hardware)
    document = {
        "longread_profile": SCHEMA,
        "result": first.document,
        "attribution": None if attribution is None else attribution.as_json(),
        "kernels": found,
        "kernels_missing": why,
        "provenance": client_provenance(),
    }
    if output is not None:
        write_json(output, document)
    return Profiled(first, attribution, found, why, document, interrupted)


def _steps(job: Job, num_steps: int, hardware: Hardware | None) -> tuple[dict[str, Any] | None, str | None, bool]:
    """The profile of the second run; None and why, and whether it was interrupted. A profile that was begun is ended,
    whatever happens in between: the server would go on with it.
    """
    target = Target(job.base_url, job.model or "", headers=job.headers)
    try:
        kernels.start(target, num_steps)
    except kernels.NoProfileError as error:
        return None, str(error), False
    print(f"longread: profiling {num_steps} steps of the server", file=sys.stderr, flush=True)
    interrupted = False
    try:
        interrupted = measure(job).interrupted
    except KeyboardInterrupt:
        interrupted = True
    finally:
        try:
            told: dict[str, Any] | None = kernels.stop(target)
            why = None
        except kernels.NoProfileError as error:
            told, why = None, str(error)
    if told is None:
        return None, why, interrupted
    if not told.get("steps"):
        return None, "no step of the server computed anything while it was profiled", interrupted
    return kernels.document(told, hardware), None, interrupted
