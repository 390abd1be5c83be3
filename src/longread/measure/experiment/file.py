"""An experiment's TOML file, checked before anything is started.

Knows the file's words. Options of workloads are those of ``longread bench serve``: ``Parse`` reads them.

    [base]
    command = "vllm serve /models/v3 --port {port}"     # or: checkpoint = "reader-v4", for `longread serve`
    options = {max-num-seqs = 4}                         # or a text, or a list of words
    env = {OMP_NUM_THREADS = "4"}

    [[step]]
    name = "fp8 cache"
    options = "--kv-cache-dtype fp8"                     # beside the base's; the same option again replaces it
    remove = ["--enforce-eager"]

    [[workload]]
    name = "long"
    dataset-name = "documents"
    num-prompts = 32
    isl = 16384
    max-concurrency = 2

    [gate]
    profile = "fp8-class"

    [run]
    visits = 3
"""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longread.measure.gate.profiles import Profile, profile_of
from longread.measure.gate.run import Settings
from longread.measure.load.bench import Job
from longread.measure.located_toml import LocatedToml, read
from longread.measure.started import PORT, Launch
from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

Parse = Callable[[Sequence[str]], Job]
METRICS = ("ttft", "ttfat", "tpot", "e2el", "output_throughput", "request_throughput")
DEFAULT_METRICS = ("ttft", "tpot", "e2el", "output_throughput")
MOST_STEPS, MOST_WORKLOADS, MOST_VISITS = 64, 32, 100
SCRATCH = "{scratch}"  # an empty folder for each start
_TIME = re.compile(r"(\d{1,7}(?:\.\d{1,3})?)\s*(s|m|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NAME = re.compile(r"[\w .+()/%-]{1,60}")
# Of `longread bench serve`, and not for an experiment's file: it says where and what for itself.
OWN = ("base-url", "host", "port", "output", "save-result", "result-dir", "result-filename")

TOP = ("name", "base", "step", "workload", "gate", "run")
BASE = ("command", "checkpoint", "options", "env", "base-url", "model", "headers")
STEP = ("name", "command", "checkpoint", "options", "remove", "env")
GATE = ("profile", "levels", "lengths", "documents", "budget", "concurrency", "timeout")
RUN = ("visits", "alone", "stacked", "metrics", "ready-timeout", "pause")


@dataclass(frozen=True, slots=True)
class Server:
    """What starts a server: ``argv`` without options, and the options by flag in their order, each with its values."""

    argv: tuple[str, ...]
    options: tuple[tuple[str, ...], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    base_url: str | None = None

    def launch(self) -> Launch:
        return Launch((*self.argv, *(word for option in self.options for word in option)), self.env, self.base_url)


@dataclass(frozen=True, slots=True)
class Step:
    """``argv`` None: the command that was there before."""

    name: str
    argv: tuple[str, ...] | None
    options: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...]
    env: Mapping[str, str]

    def on(self, server: Server) -> Server:
        """``server`` with this step: its options replace those of the same flag, in their place, or come last."""
        own = {option[0]: option for option in self.options}
        kept = [own.pop(o[0], o) for o in server.options if o[0] not in self.remove]
        return Server(self.argv or server.argv, (*kept, *own.values()), {**server.env, **self.env}, server.base_url)


@dataclass(frozen=True, slots=True)
class Work:
    """A workload. ``argv``: as for ``longread bench serve``, without the server; ``job``: what that means."""

    name: str
    argv: tuple[str, ...]
    job: Job


@dataclass(frozen=True, slots=True)
class GateWanted:
    settings: Settings
    profile: Profile


@dataclass(frozen=True, slots=True)
class Experiment:
    """``visits``: how often each configuration is started and measured; ``pause``: seconds between two servers."""

    path: Path
    name: str
    base: Server
    model: str | None
    headers: Mapping[str, str]
    steps: tuple[Step, ...]
    workloads: tuple[Work, ...]
    gate: GateWanted | None
    visits: int
    alone: bool
    stacked: bool
    metrics: tuple[str, ...]
    ready_seconds: float
    pause: float
    text: str


def read_experiment(path: Path, parse: Parse, locate: Callable[[str], Path]) -> Experiment:
    """``locate``: a checkpoint by path or bundled name. Raises ConfigError, with the line where one is known."""
    found = read(path)
    found.only((), found.data, TOP)
    base = _table(found, ("base",), found.data.get("base"), BASE)
    server = _server(found, ("base",), base, locate)
    run = _table(found, ("run",), found.data.get("run", {}), RUN)
    steps = tuple(
        _step(found, number, each, server, locate) for number, each in enumerate(_list(found, "step", MOST_STEPS))
    )
    works = tuple(
        _work(found, number, each, parse) for number, each in enumerate(_list(found, "workload", MOST_WORKLOADS))
    )
    for kind, names in (("step", [each.name for each in steps]), ("workload", [each.name for each in works])):
        twice = next((i for i, name in enumerate(names) if name in names[:i] or name == "base"), None)
        if twice is not None:
            raise found.error((kind, twice, "name"), f"two are called {names[twice]!r}, or it is the base's name")
    if not works:
        raise ConfigError(f"{path}: no [[workload]]: there is nothing to measure")
    gate = found.data.get("gate")
    return Experiment(
        path,
        _text(found, ("name",), found.data.get("name", path.stem)),
        server,
        None if "model" not in base else _text(found, ("base", "model"), base["model"]),
        _texts(found, ("base", "headers"), base.get("headers", {})),
        steps,
        works,
        None if gate is None else _gate(found, _table(found, ("gate",), gate, GATE)),
        _whole(found, ("run", "visits"), run.get("visits", 3), 1, MOST_VISITS),
        _yes(found, ("run", "alone"), run.get("alone", True)),
        _yes(found, ("run", "stacked"), run.get("stacked", True)),
        _metrics(found, run.get("metrics", list(DEFAULT_METRICS))),
        _seconds(found, ("run", "ready-timeout"), run.get("ready-timeout", "30m")),
        _seconds(found, ("run", "pause"), run.get("pause", "0s")),
        found.text,
    )


def _server(found: LocatedToml, place: tuple[str | int, ...], table: Mapping[str, Any], locate: Any) -> Server:
    argv, options = _command(found, place, table, locate)
    if argv is None:
        raise found.error(place, "[base] needs command = '… --port {port}', or checkpoint = 'DIR' for `longread serve`")
    own = _options(found, (*place, "options"), table.get("options", ()))
    url = table.get("base-url")
    server = Server(
        argv,
        (*options, *own),
        _texts(found, (*place, "env"), table.get("env", {})),
        None if url is None else _text(found, (*place, "base-url"), url),
    )
    try:
        server.launch()
    except ConfigError as error:
        raise found.error((*place, "command"), str(error)) from None
    return server


def _command(
    found: LocatedToml, place: tuple[str | int, ...], table: Mapping[str, Any], locate: Any
) -> tuple[tuple[str, ...] | None, tuple[tuple[str, ...], ...]]:
    """(the words before the first option, the options in the command itself)."""
    if "command" in table and "checkpoint" in table:
        raise found.error((*place, "checkpoint"), "command and checkpoint both say what is started; give one of them")
    if "checkpoint" in table:
        checkpoint = locate(_text(found, (*place, "checkpoint"), table["checkpoint"]))
        if not checkpoint.is_dir():
            raise found.error((*place, "checkpoint"), f"{checkpoint}: no such folder, and no bundled model")
        return (sys.executable, "-m", "longread.cli.main", "serve", str(checkpoint)), (("--port", PORT),)
    if "command" not in table:
        return None, ()
    where = (*place, "command")
    text = table["command"]
    words = _words(found, where, text)
    if not words:
        raise found.error(where, "the command is empty")
    # An interpreter's own flags (python -m …) are part of the command: options begin at the first --flag.
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return tuple(words[:first]), grouped(words[first:])


def grouped(words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Options with their values: a word that begins with - (and is no number) begins the next one; --a=b is --a b."""
    found: list[list[str]] = []
    for word in words:
        if re.match(r"-{1,2}[A-Za-z]", word):
            name, sign, value = word.partition("=")
            found.append([name, value] if sign else [name])
        elif found:
            found[-1].append(word)
        else:
            found.append([word])
    return tuple(tuple(each) for each in found)


def _options(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> tuple[tuple[str, ...], ...]:
    if isinstance(value, dict):
        return tuple(
            (f"--{name}", *_values(found, (*place, name), each)) for name, each in value.items() if each is not False
        )
    return grouped(_words(found, place, value))


def _values(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, list):
        return [word for each in value for word in _values(found, place, each)]
    if isinstance(value, str | int | float):
        return [str(value)]
    raise found.error(place, f"an option's value is a text, a number, true, or a list of them, not {value!r:.60}")


def _words(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise found.error(place, f"cannot be split into words: {error}") from None
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return list(value)
    raise found.error(place, f"it is a text or a list of texts, not {value!r:.60}")


def _step(found: LocatedToml, number: int, table: Mapping[str, Any], base: Server, locate: Any) -> Step:
    place = ("step", number)
    found.only(place, table, STEP)
    argv, inside = _command(found, place, table, locate)
    if argv is not None and not any(PORT in word for option in (*inside, argv) for word in option):
        raise found.error((*place, "command"), f"write {PORT} where the server's port belongs")
    options = (*inside, *_options(found, (*place, "options"), table.get("options", ())))
    remove = tuple(_words(found, (*place, "remove"), table.get("remove", ())))
    flags = {option[0] for option in base.options}
    for flag in remove:
        if flag not in flags:
            raise found.error(
                (*place, "remove"), f"the base has no {flag[:60]} (it has {', '.join(sorted(flags)) or 'no options'})"
            )
    env = _texts(found, (*place, "env"), table.get("env", {}))
    if argv is None and not options and not remove and not env:
        raise found.error(place, "the step changes nothing: give options, remove, env or command")
    return Step(_name(found, place, table, "step"), argv, options, remove, env)


def _work(found: LocatedToml, number: int, table: Mapping[str, Any], parse: Parse) -> Work:
    place = ("workload", number)
    name = _name(found, place, table, "workload")
    argv: list[str] = []
    for key, value in table.items():
        if key == "name":
            continue
        flag = key.replace("_", "-")
        if flag in OWN:
            raise found.error((*place, key), f"{flag} is the experiment's own; leave it out")
        if value is False:
            raise found.error((*place, key), "leave out a flag that is not wanted")
        if flag in ("header", "dataset-option"):  # given again for each
            argv += [word for each in _values(found, (*place, key), value) for word in (f"--{flag}", each)]
            continue
        argv += [f"--{flag}", *_values(found, (*place, key), value)]
    try:
        job = parse(argv)
    except ConfigError as error:
        named = next((key for key in table if f"--{key.replace('_', '-')}" in str(error)), None)
        raise found.error((*place, named) if named is not None else place, f"workload {name!r}: {error}") from None
    return Work(name, tuple(argv), job)


def _gate(found: LocatedToml, table: Mapping[str, Any]) -> GateWanted:
    def at(key: str) -> tuple[str | int, ...]:
        return ("gate", key)

    try:
        profile = profile_of(_text(found, at("profile"), table.get("profile", "lossless")))
    except ConfigError as error:
        raise found.error(at("profile"), str(error)) from None
    lengths = table.get("lengths", [1024])
    if not isinstance(lengths, list):
        raise found.error(at("lengths"), "it is a list of token counts, as ['1K', '16K']")
    try:
        settings = Settings(
            "http://127.0.0.1",
            lengths=tuple(parse_tokens("lengths", str(each)) for each in lengths),
            documents=_whole(found, at("documents"), table.get("documents", 8), 1, 1024),
            levels=tuple(table.get("levels", [1, 4])),
            seconds=_seconds(found, at("budget"), table.get("budget", "10m")),
            concurrency=_whole(found, at("concurrency"), table.get("concurrency", 4), 1, 256),
            timeout=_seconds(found, at("timeout"), table.get("timeout", "5m")),
        )
    except (ConfigError, TypeError) as error:
        if str(found.path) in str(error):
            raise
        raise found.error(("gate",), str(error)) from None
    return GateWanted(settings, profile)


def _table(found: LocatedToml, place: tuple[str | int, ...], value: Any, known: Sequence[str]) -> Mapping[str, Any]:
    if value is None:
        raise ConfigError(f"{found.path}: no [{place[0]}]: what is started?")
    if not isinstance(value, dict):
        raise found.error(place, f"[{place[0]}] is a table")
    found.only(place, value, known)
    return value


def _list(found: LocatedToml, name: str, most: int) -> list[Mapping[str, Any]]:
    value = found.data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise found.error((name,), f"it is written [[{name}]], once for each")
    if len(value) > most:
        raise found.error((name, most), f"{len(value)} of [[{name}]]; at most {most} are run")
    return value


def _name(found: LocatedToml, place: tuple[str | int, ...], table: Mapping[str, Any], kind: str) -> str:
    value = table.get("name")
    if not isinstance(value, str) or not _NAME.fullmatch(value) or not value.strip():
        raise found.error((*place, "name"), f"each [[{kind}]] has a name of 1 to 60 letters, digits and spaces")
    return value


def _text(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise found.error(place, f"it is a text that prints, not {value!r:.60}")
    return value


def _texts(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str | int | float) for each in value.values()):
        raise found.error(place, "it is a table of texts, as {NAME = 'value'}")
    return {name: str(each) for name, each in value.items()}


def _whole(found: LocatedToml, place: tuple[str | int, ...], value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise found.error(place, f"it is a whole number from {low} to {high:,}, not {value!r:.60}")
    return value


def _yes(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> bool:
    if not isinstance(value, bool):
        raise found.error(place, f"it is true or false, not {value!r:.60}")
    return value


def _seconds(found: LocatedToml, place: tuple[str | int, ...], value: Any) -> float:
    match = (
        _TIME.fullmatch(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    )
    if match is None:
        raise found.error(place, f"{value!r:.60} is no time; write '90s', '10m' or '2h'")
    return float(match[1]) * _UNITS[match[2]]


def _metrics(found: LocatedToml, value: Any) -> tuple[str, ...]:
    place = ("run", "metrics")
    if not isinstance(value, list) or not value:
        raise found.error(place, f"it is a list of some of {', '.join(METRICS)}")
    for each in value:
        if each not in METRICS:
            raise found.error(place, f"no metric {each!r:.60} is compared (all: {', '.join(METRICS)})")
    return tuple(dict.fromkeys(value))
