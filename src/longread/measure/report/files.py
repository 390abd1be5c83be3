"""Files that a user named, as what they are: runs, sweeps, gates, plans. Knows their marks; others say what is in them.

Raises ConfigError for what is none of them, damaged or too large; nothing is guessed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from longread.measure.report import aiperf_result, longread_result, vllm_result
from longread.measure.report.gates import gate_for, gate_in, gate_of
from longread.measure.report.numbers import amount, items, mapping, real, words
from longread.measure.report.run import Gate, Point, Request, Run, Sweep
from longread.plan.figures import length
from longread.plan.given_file import read_given
from longread.spec.errors import ConfigError

FILE_BYTES = 512 * 2**20
LINES_BYTES = 4 * 2**30
MOST_REQUESTS = 2_000_000
MOST_FILES = 500
MOST_POINTS = 1000
KNOWN = (
    "results of `longread bench serve`, `vllm bench serve` or aiperf (profile_export_aiperf.json), of `longread gate "
    "run -o`, of `longread bench sweep`, or a plan of `longread plan --json`"
)
AXES = ("concurrency", "rate", "context")


@dataclass(slots=True)
class Material:
    """All that was given, in the order of the command line."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    plans: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    @property
    def all_runs(self) -> list[Run]:
        """Of sweeps, too."""
        return [*self.runs, *(point.run for sweep in self.sweeps for point in sweep.points)]


def read_all(paths: Sequence[Path]) -> Material:
    """A folder stands for the .json files in it that are known; a named file must be known itself."""
    found = Material()
    for path in paths:
        if path.is_dir():
            _folder(path, found)
        else:
            _take(path, _document(path), found)
    _name_apart(found)
    for run in found.all_runs:
        run.gate = run.gate or gate_for(run, found.gates)
    return found


def read_runs(path: Path) -> list[Run]:
    """One side of a comparison: a result, or a folder of repeated ones. Gates that lie in the folder count."""
    found = read_all([path])
    if found.sweeps:
        raise ConfigError(f"{path} is a sweep: compare two of its results, or see `longread bench report {path}`")
    if not found.runs:
        raise ConfigError(f"{path}: holds no result of a run; known are {KNOWN}")
    return found.runs


def _folder(path: Path, found: Material) -> None:
    files = sorted(each for each in path.iterdir() if each.suffix == ".json" and not each.name.startswith("."))
    if len(files) > MOST_FILES:
        raise ConfigError(f"{path}: {len(files):,} files, and at most {MOST_FILES} are read; name those that are meant")
    known = 0
    for each in files:
        document = _document(each)
        if kind_of(document) is not None:
            _take(each, document, found)
            known += 1
    if not known:
        raise ConfigError(f"{path}: no file in it is known; known are {KNOWN}")


def _document(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(read_given(path, FILE_BYTES, "a result"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({str(error)[:200]})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a JSON {type(found).__name__}, not an object; known are {KNOWN}")
    return found


def kind_of(document: Mapping[str, object]) -> str | None:
    """What it is: run, sweep, gate, plan; None: nothing that is known."""
    if "longread_sweep" in document:
        return "sweep"
    if document.get("kind") == "longread-gate":
        return "gate"
    if str(document.get("schema", "")).startswith("longread.plan/"):
        return "plan"
    own = mapping(document.get("longread"))
    if own.get("kind") == "bench serve" or aiperf_result.is_result(document) or vllm_result.is_result(document):
        return "run"
    return None


def _take(path: Path, document: Mapping[str, object], found: Material) -> None:
    kind = kind_of(document)
    if kind == "run":
        found.runs.append(run_of(document, path.stem, path))
    elif kind == "sweep":
        found.sweeps.append(_sweep(path, document))
    elif kind == "gate":
        found.gates.append(gate_of(document, path.name))
    elif kind == "plan":
        found.plans.append((path.name, document))
    elif document.get("kind") == "longread-gate-base":
        raise ConfigError(
            f"{path}: what one server said, without a verdict; one comes from `longread gate run --base {path.name} "
            "-o FILE`, or from `longread gate compare`"
        )
    else:
        raise ConfigError(f"{path}: it is not known what this is; known are {KNOWN}")


def run_of(document: Mapping[str, object], label: str, path: Path, folder: Path | None = None) -> Run:
    """The run in ``document``, which lies at ``path``; its requests lie in ``folder``, None: beside it."""
    folder = folder or path.parent
    own = mapping(document.get("longread"))
    if own.get("kind") == "bench serve":
        if own.get("schema") != longread_result.SCHEMA:
            raise ConfigError(f"{path}: schema {own.get('schema')!r}; this version reads {longread_result.SCHEMA}")
        requests, why = _requests(own.get("requests_file"), folder, longread_result.request_of)
        run = longread_result.run_of(document, label, path.name, requests, why)
        run.gate = gate_in(own, path.name)
        return run
    if aiperf_result.is_result(document):
        requests, why = _requests(aiperf_result.rows_name(path.name), folder, aiperf_result.request_of)
        return aiperf_result.run_of(document, label, path.name, requests, why)
    return vllm_result.run_of(document, label, path.name)


def _requests(
    name: object, folder: Path, make: Callable[[Mapping[str, object]], Request | None]
) -> tuple[list[Request] | None, str | None]:
    """What ``make`` makes of the lines of the file of that name in ``folder``, or why there are none. Only a plain
    file name is followed: a result names no path elsewhere.
    """
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        return None, "the result names no file of requests"
    place = folder / name
    if not place.is_file():
        return None, f"{words(name)} is not beside it"
    if place.stat().st_size > LINES_BYTES:
        return None, f"{words(name)} is larger than {LINES_BYTES // 2**30} GiB"
    found = []
    with place.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > MOST_REQUESTS:
                return None, f"{words(name)} has more than {MOST_REQUESTS:,} lines"
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ConfigError(f"{place}: line {number:,} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: line {number:,} is no object")
            request = make(row)
            if request is not None:
                found.append(request)
    return found, None


def _sweep(path: Path, document: Mapping[str, object]) -> Sweep:
    axis = document.get("axis")
    if document.get("longread_sweep") != 1 or axis not in AXES:
        raise ConfigError(
            f"{path}: sweep {words(str(document.get('longread_sweep')))} over {words(str(axis))}; this version reads "
            f"sweep 1 over {', '.join(AXES)}"
        )
    points, folder = [], path.with_name(path.name.removesuffix(".json") + ".points")  # as the sweep names it
    for number, each in enumerate(items(document.get("points"))[:MOST_POINTS], 1):
        point = mapping(each)
        value, result = amount(point.get("value")), mapping(point.get("result"))
        if value is None or kind_of(result) != "run":
            raise ConfigError(f"{path}: point {number} has no value or no result")
        run = run_of(result, _label(path.stem, str(axis), value), path, folder)
        points.append(Point(value, run, _frontier(mapping(point.get("frontier")))))
    if not points:
        raise ConfigError(f"{path}: a sweep without points")
    points.sort(key=lambda point: point.value)
    guides, said = _found(document, str(axis))
    return Sweep(path.stem, str(axis), tuple(points), guides, said, document.get("partial") is True)


def _label(stem: str, axis: str, value: float) -> str:
    """ "base, concurrency 8"; a file that has the axis in its name needs it once."""
    shown = length(round(value)) if axis == "context" else f"{value:g}"
    return f"{stem} {shown}" if axis in stem else f"{stem}, {axis} {shown}"


def _frontier(told: Mapping[str, object]) -> dict[str, float]:
    cold = mapping(told.get("cold_ttft_ms")).get("measured")
    found = {"newest": told.get("newest_ttft_ms"), "warm": told.get("warm_ttft_ms"), "cold": cold}
    return {name: value for name, value in ((name, amount(each)) for name, each in found.items()) if value}


def _found(document: Mapping[str, object], axis: str) -> tuple[tuple[tuple[str, float], ...], tuple[str, ...]]:
    """What a sweep found, as guides and in words."""
    knee, best = mapping(document.get("knee")), mapping(document.get("max_goodput"))
    guides: list[tuple[str, float]] = []
    said: list[str] = []
    at = amount(knee.get("value"))
    if at is not None:
        guides.append((f"knee {at:g}", at))
        said.append(
            f"Knee at {axis} {at:g}{_between(knee.get('interval'))}: {words(knee.get('method')) or 'no method told'}."
        )
    else:
        said += [f"No knee: {text}." for text in (words(document.get("knee_note"), 300),) if text]
    most, slos = amount(best.get("value")), mapping(best.get("slos"))
    if best:
        limits = " ".join(
            f"{words(name, 40)}:{value:g}" for name, each in slos.items() if (value := amount(each)) is not None
        )
        share, goodput = amount(best.get("share")), amount(best.get("goodput"))
        within = f"{share:.0%} of requests within {limits or 'the SLOs'} ms" if share is not None else limits
        if most is None:
            said.append(f"No load that was tried met the SLOs ({within}).")
        else:
            guides.append((f"most under SLO {most:g}", most))
            more = "" if goodput is None else f", goodput {goodput:.3g} requests/s"
            said.append(f"Most load under the SLOs: {axis} {most:g}{_between(best.get('interval'))} ({within}){more}.")
        said += [text for text in (words(best.get("note"), 300),) if text]
    return tuple(guides), tuple(said)


def _between(interval: object) -> str:
    ends = [real(each) for each in items(interval)]
    return f" (between {ends[0]:g} and {ends[1]:g})" if len(ends) == 2 and None not in ends else ""


def _name_apart(found: Material) -> None:
    """Labels of runs are file names; where two are the same, the folder or a number tells them apart."""
    seen: dict[str, int] = {}
    for run in found.all_runs:
        seen[run.label] = seen.get(run.label, 0) + 1
        if seen[run.label] > 1:
            run.label = f"{run.label} ({seen[run.label]})"
