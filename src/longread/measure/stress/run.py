"""The pressure tests from start to end: one after the other, each with its share of the time, kept whatever happens.

Knows their order. Must not know how any of them is done; prints nothing and writes no file.
"""

import asyncio
import datetime
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longread.measure.load.outcome import Outcome
from longread.measure.load.target import Target
from longread.measure.result import command_line, this_commit, this_machine
from longread.measure.started import Launch
from longread.measure.stress import cold, context, mixed, reasoning, recovery
from longread.measure.stress.cold import Plan as ColdPlan
from longread.measure.stress.context import Plan as ContextPlan
from longread.measure.stress.host import Host
from longread.measure.stress.limits import COLD, CONTEXT, MIXED, REASONING, RECOVERY, TESTS
from longread.measure.stress.memory import Memory, open_nvml
from longread.measure.stress.mixed import Plan as MixedPlan
from longread.measure.stress.reasoning import Plan as ReasoningPlan
from longread.measure.stress.recovery import Plan as RecoveryPlan
from longread.measure.stress.subject import Control, Subject
from longread.measure.stress.verdict import PressureResult, all_together
from longread.spec.errors import ConfigError, LongreadError

SCHEMA = 1
KIND = "longread-stress"
PACKAGES = ("longread", "aiohttp", "httpx", "psutil")
MOST = {"requests": 1_000_000, "starts": 1000, "tokens": 2**20}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user set. ``target``: with an empty model the server's own is meant; its address does not count where
    ``launch`` starts the server. ``budget``: seconds for all tests. Raises ConfigError for what cannot be.
    """

    target: Target
    launch: Launch | None
    pid: int | None
    tests: tuple[str, ...]
    limits: Mapping[str, float]
    budget: float = 600.0
    timeout: float = 600.0
    tokenizer: str | None = None
    seed: int = 0
    style: Mapping[str, object] = field(default_factory=dict)
    ready_seconds: float = 1800.0
    cold: ColdPlan = field(default_factory=ColdPlan)
    context: ContextPlan = field(default_factory=ContextPlan)
    mixed: MixedPlan = field(default_factory=MixedPlan)
    reasoning: ReasoningPlan = field(default_factory=ReasoningPlan)
    recovery: RecoveryPlan = field(default_factory=RecoveryPlan)

    def __post_init__(self) -> None:
        for test in self.tests:
            if test not in TESTS:
                raise ConfigError(f"no pressure test is called {test[:60]!r} (all: {', '.join(TESTS)})")
        if not self.tests or len(set(self.tests)) < len(self.tests):
            raise ConfigError("name each test once, and at least one")
        if COLD in self.tests and self.launch is None:
            raise ConfigError("the cold start needs a server that is started here: give --serve or --start")
        if RECOVERY in self.tests and self.launch is None and self.pid is None:
            raise ConfigError(
                "failure recovery kills a process: only one that is started here (--serve, --start) or named (--pid)"
            )
        for name, value, low, high in (
            ("--budget", self.budget, 1, 7 * 86400),
            ("--starts", self.cold.starts, 1, MOST["starts"]),
            ("--context-requests", self.context.requests, 1, MOST["requests"]),
            ("--long-tokens", self.context.tokens, context.LENGTH_LEAST, MOST["tokens"]),
            ("--shorts", self.mixed.shorts, 2, MOST["requests"]),
            ("--reasoning-requests", self.reasoning.requests, 1, MOST["requests"]),
            ("--in-flight", self.recovery.in_flight, 1, 1024),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} {value:g} is not in {low:,}..{high:,}")


@dataclass(slots=True)
class Report:
    """``results`` in the order of the tests; ``interrupted``: by the user."""

    results: list[PressureResult]
    interrupted: bool
    provenance: dict[str, Any]
    limits: Mapping[str, float]

    @property
    def verdict(self) -> str:
        return all_together(self.results)

    def document(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "verdict": self.verdict,
            "interrupted": self.interrupted,
            "limits": dict(self.limits),
            "tests": [each.document() for each in self.results],
            "provenance": self.provenance,
        }


async def stress(
    settings: Settings,
    log: Path,
    tell: Callable[[str], None] = lambda words: None,
    kept: Callable[[Outcome, str], None] = lambda outcome, phase: None,
    control: Control | None = None,
) -> Report:
    """All tests. ``log``: what servers that are started say. Ctrl-C ends the measuring, and what was measured is
    judged.

    Raises LongreadError where there is no server at all before the first test.
    """
    control = control or Control(settings.budget)
    began = datetime.datetime.now(datetime.UTC)
    subject = Subject(
        settings.target,
        control,
        Memory(settings.pid, open_nvml()),
        settings.tokenizer,
        timeout=settings.timeout,
        seed=settings.seed,
        style=settings.style,
        tell=tell,
        kept=kept,
    )
    host = Host(subject, settings.launch, settings.pid, settings.target.model or None, log, settings.ready_seconds)
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: somebody else has signals
        loop.add_signal_handler(signal.SIGINT, control.interrupt)
    results = []
    try:
        if settings.launch is None:
            await host.begin()  # told before anything is measured
        for place, test in enumerate(settings.tests):
            control.share(1)  # a start takes what it takes of the whole, and not of one test
            results.append(await _one(test, host, settings, len(settings.tests) - place))
    finally:
        host.end()
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
    return Report(results, control.interrupted.is_set(), _provenance(settings, host, began), settings.limits)


async def _one(test: str, host: Host, settings: Settings, of: int) -> PressureResult:
    """One test, with one ``of``-th of the time that is left; what breaks it is its own end, not that of the others."""
    control, limits = host.subject.control, settings.limits
    began = control.clock()
    if control.interrupted.is_set():
        return PressureResult(test, not_run="interrupted before")
    try:
        if test != COLD:
            await host.begin()
        control.share(of)
        if test == COLD:
            result = await cold.run(host, settings.cold, limits)
        elif test == CONTEXT:
            result = await context.run(host.subject, settings.context, limits)
        elif test == MIXED:
            result = await mixed.run(host.subject, settings.mixed, limits)
        elif test == REASONING:
            result = await reasoning.run(host.subject, settings.reasoning, limits)
        else:
            result = await recovery.run(host, settings.recovery, limits)
    except LongreadError as error:
        result = PressureResult(test, not_run=str(error))
    result.seconds = control.clock() - began
    return result


def _provenance(settings: Settings, host: Host, began: datetime.datetime) -> dict[str, Any]:
    machine = this_machine(PACKAGES)
    seen = host.seen
    return {
        "date": began.isoformat(timespec="seconds"),
        "commit": this_commit(),
        "command": command_line(),
        "machine": {"cpu": machine.cpu, "cores": machine.cores, "system": machine.system},
        "python": machine.python,
        "packages": machine.packages,
        "server": {
            "url": host.subject.target.base_url,
            "model": host.subject.target.model,
            "version": None if seen is None else seen.version,
            "info": {} if seen is None else seen.info,
            "started_with": None if settings.launch is None else settings.launch.shown(),
            "environment": {} if settings.launch is None else dict(settings.launch.env),
            "max_model_len": host.subject.max_model_len,
        },
        "lengths_by": settings.tokenizer or "characters: estimated",
        "seed": settings.seed,
        "budget_s": settings.budget,
        "request_fields": dict(settings.style),
        "plans": {name: asdict(getattr(settings, name)) for name in settings.tests},
    }
