"""``longread bench serve``: a workload against a server, from the first look at it to the files and the table.

Knows the order of things. Must not know how any of them is done.
"""

import asyncio
import math
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longread.measure import quality
from longread.measure.files import write_json
from longread.measure.load.calibrate import Calibration, calibrate, warnings
from longread.measure.load.metrics import Summary, Wanted, flat, summarise
from longread.measure.load.outcome import Outcome, Run
from longread.measure.load.result import Lines, block, lines_path
from longread.measure.load.run import Limits, Progress, Stop, run
from longread.measure.load.samples import EVERY, Sampler
from longread.measure.load.schedule import Schedule
from longread.measure.load.server import Look, facts, look, only_model
from longread.measure.load.target import ENDPOINTS, Backend, Target
from longread.measure.load.terminal import display, show
from longread.measure.load.tokens import count_outputs, count_prompts
from longread.measure.quality import Check
from longread.measure.result import command_line, this_commit, this_machine
from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.counting import Counter, counter

INTERRUPTED = 130
ESTIMATE = 0.1  # by how much an estimated length may miss before it is worth a warning
PACKAGES = ("longread", "aiohttp", "orjson", "tokenizers")
_HEADER_VALUE = re.compile(r"(--header[= ]\S+:) ?.*?(?= --|$)")  # a command line in a file is no place for keys
SECRET_HEADERS = ("authorization", "cookie", "x-api-key", "api-key", "proxy-authorization")


@dataclass(frozen=True, slots=True)
class Job:
    """What to do. ``workload`` makes it. ``backend`` None: what the workload is made of.
    ``model`` None: the one that is served. ``output``: of the result; None: nothing is written. ``detailed``: answers
    and gaps of every request are written too. ``sample_every``: seconds between looks at the server's gauges, memory
    and GPUs while it runs, 0: none; ``server_pid``: its process, where that is on this machine. ``gate``: the quality
    gate that is run first; behind a red one the speed is measured all the same, and marked.
    """

    base_url: str
    workload: Callable[[], Workload]
    schedule: Schedule
    limits: Limits = field(default_factory=Limits)
    wanted: Wanted = field(default_factory=Wanted)
    backend: Backend | None = None
    endpoint: str | None = None
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    tokenizer: Path | None = None
    output: Path | Callable[[Target, Schedule], Path] | None = None
    detailed: bool = False
    calibrated: bool = True
    sample_every: float = EVERY
    server_pid: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    gate: Check | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out. ``document``: the result file's content; ``path``: where it was written, if anywhere.
    ``interrupted``: by Ctrl-C.
    """

    summary: Summary
    document: dict[str, Any]
    warnings: list[str]
    calibration: Calibration | None
    path: Path | None
    interrupted: bool = False


def bench(job: Job) -> int:
    """Measure and show; returns the exit code: 0, 1 where nothing was answered or the quality gate failed, 130 where it
    was interrupted.

    Raises what ``measure`` raises.
    """
    done = measure(job)
    show(done.summary, done.calibration, done.warnings)
    if done.path is not None:
        print(f"written: {done.path} and {lines_path(done.path).name}")
    if done.summary.run.partial and job.limits.seconds == math.inf:
        return INTERRUPTED
    told = done.document["longread"]["quality"]
    red = told is not None and not told["speed_counts"]
    return 0 if done.summary.completed and not red else 1


def measure(job: Job) -> Measured:
    """Run it, count, and write the files.

    Raises ConfigError before any request is sent where something does not fit, LongreadError where the server does not
    answer at all.
    """
    count = counter(str(job.tokenizer)) if job.tokenizer is not None else None  # a wrong one is told before the work
    target = Target(job.base_url, job.model or "", job.backend or "openai-chat", job.endpoint, job.headers, job.extra)
    workload = job.workload()
    schedule = replace(job.schedule, trace=workload.asks[0].at is not None) if workload.asks else job.schedule
    target = replace(target, model=job.model or only_model(job.base_url, look(target)))
    target = replace(target, backend=job.backend or _backend(workload, job.endpoint))
    path = job.output(target, schedule) if callable(job.output) else job.output
    told = None if job.gate is None else quality.gated(job.gate, target.base_url, target.model, target.headers)
    sampler = Sampler(target, job.server_pid, job.sample_every) if job.sample_every > 0 else None
    ended, before, after, calibration, interrupted = _measured(job, target, schedule, workload, path, sampler)
    if count is not None:
        _count(ended.outcomes, workload.asks, count)
    summary = summarise(ended, job.wanted)
    said = (
        warnings(summary, calibration)
        + estimated(workload, ended.outcomes)
        + ([] if told is None else [quality.sentence(told)])
    )
    own = block(
        summary,
        provenance=_provenance(job, target, schedule, workload, ended),
        server=facts(job.base_url, before, after, ended.duration),
        calibration=calibration,
        warnings=said,
        requests_file=lines_path(path).name if path is not None else None,
    )
    own["quality"] = told
    if sampler is not None:
        own["samples"] = sampler.block(ended.started)
    document = {**_vllm(job, target, schedule, summary), **flat(summary), **_detail(job, ended), "longread": own}
    if path is not None:
        write_json(path, document)
    return Measured(summary, document, said, calibration, path, interrupted)


def estimated(workload: Workload, outcomes: Sequence[Outcome]) -> list[str]:
    """Without a tokenizer prompts are about as long as was asked for; where they are not, it is said."""
    wanted = str(workload.described.get("options", {}).get("isl", ""))
    counted = [each.prompt_tokens for each in outcomes if each.prompt_tokens is not None]
    if not wanted.isdecimal() or not counted or workload.asks[0].isl is not None:
        return []
    mean = sum(counted) / len(counted)
    if abs(mean - int(wanted)) <= ESTIMATE * int(wanted):
        return []
    told = f"prompts had {mean:,.0f} tokens on average, and {int(wanted):,} were asked for"
    return [f"{told}: without the server's tokenizer lengths are estimated by characters; --tokenizer makes them exact"]


def _backend(workload: Workload, endpoint: str | None) -> Backend:
    """By the route if one is named, else by the first ask."""
    for backend, route in ENDPOINTS.items():
        if endpoint is not None and endpoint.endswith(route.removeprefix("/v1")):
            return backend
    return "openai-chat" if workload.asks and workload.asks[0].messages is not None else "openai"


def _measured(
    job: Job, target: Target, schedule: Schedule, workload: Workload, path: Path | None, sampler: Sampler | None
) -> tuple[Run, Look, Look, Calibration | None, bool]:
    """The run, the server before and after it, the client against nothing, and whether it was interrupted."""

    ended, before, stop = asyncio.run(_loaded(job, target, schedule, workload, path, sampler))
    after, calibration, interrupted = Look(), None, bool(stop.asked)
    try:  # a Ctrl-C from here on costs what is asked for here, and not what was measured
        after = look(target)
        if job.calibrated and not interrupted:
            gaps = [each.tpot for each in ended.outcomes if each.tpot is not None]
            calibration = asyncio.run(calibrate(ended.peak, sum(gaps) / len(gaps) if gaps else 0.0))
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:
        print(f"longread: the client is not calibrated: {error}", file=sys.stderr)
    return ended, before, after, calibration, interrupted


async def _loaded(
    job: Job, target: Target, schedule: Schedule, workload: Workload, path: Path | None, sampler: Sampler | None
) -> tuple[Run, Look, Stop]:
    """The run, the server before it, and how often it was interrupted."""
    with ExitStack() as stack:
        lines = stack.enter_context(Lines(lines_path(path), job.detailed)) if path is not None else None
        told = _Hooks(target, stack.enter_context(display()), lines, sampler)
        if sampler is not None:
            stack.callback(sampler.stop)
        ended = await run(workload.asks, target, schedule, job.limits, told, told.stop)
    return ended, told.before or Look(), told.stop


def _count(outcomes: Sequence[Outcome], asks: Sequence[Ask], count: Counter) -> None:
    """Tokens by the tokenizer; long texts take their time, and whoever ends it keeps the rest."""
    try:
        count_outputs(outcomes, count)
        count_prompts(outcomes, asks, count)
    except KeyboardInterrupt:
        print("longread: tokens are not all counted: interrupted", file=sys.stderr)


class _Hooks(Progress):
    """Shows, writes, looks at the server before the first request, and takes Ctrl-C once bodies are made."""

    def __init__(self, target: Target, display: Progress, lines: Lines | None, sampler: Sampler | None):
        self.before: Look | None = None
        self.stop = Stop()
        self._target, self._display, self._lines, self._sampler = target, display, lines, sampler
        # While bodies are made nothing else can run, so there Ctrl-C ends the process as anywhere.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def preparing(self, done: int, total: int) -> None:
        self._display.preparing(done, total)
        if done == total:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def warming(self, done: int, total: int) -> None:
        self._display.warming(done, total)

    def started(self, total: int) -> None:
        self.before = look(self._target)
        if self._sampler is not None:
            self._sampler.start()
        self._display.started(total)

    def sent(self, in_flight: int) -> None:
        self._display.sent(in_flight)

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        self._display.finished(outcome, in_flight)
        if self._lines is not None:
            self._lines.add(outcome)

    def _interrupt(self) -> None:
        if not self.stop.asked:
            print(
                "\nlongread: stopping: no new requests, waiting for those in flight; Ctrl-C again stops at once",
                file=sys.stderr,
            )
        self.stop.ask()


def _vllm(job: Job, target: Target, schedule: Schedule, summary: Summary) -> dict[str, Any]:
    """The keys with which vLLM's file begins."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(summary.run.started)),
        "backend": target.backend,
        "model_id": target.model,
        "tokenizer_id": job.tokenizer.name if job.tokenizer is not None else None,
        "num_prompts": summary.run.planned,
        **job.metadata,
        "request_rate": schedule.rate if schedule.rate < math.inf else "inf",
        "burstiness": schedule.burstiness if schedule.burstiness < math.inf else "inf",
        "max_concurrency": schedule.max_concurrency,
    }


def _detail(job: Job, ended: Run) -> dict[str, Any]:
    """vLLM's lists with an entry a request, in the order of the workload; seconds as there."""
    if not job.detailed:
        return {}
    rows = sorted(ended.outcomes, key=lambda each: each.index)
    return {
        "input_lens": [each.prompt_tokens for each in rows],
        "output_lens": [each.output_tokens for each in rows],
        "start_times": [each.sent for each in rows],
        "ttfts": [each.ttft for each in rows],
        "itls": [each.gaps for each in rows],
        "generated_texts": [each.text for each in rows],
        "errors": [each.error or "" for each in rows],
    }


def _provenance(job: Job, target: Target, schedule: Schedule, workload: Workload, ended: Run) -> dict[str, Any]:
    """How to do it again. Values of headers that carry secrets are not written."""
    return {
        **client_provenance(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(ended.started)),
        "started_unix": ended.started,
        "endpoint": target.url.removeprefix(target.base_url),
        "headers": {
            name: "(hidden)" if name.lower() in SECRET_HEADERS else value for name, value in target.headers.items()
        },
        "extra_body": dict(target.extra),
        "workload": {"name": workload.name, "seed": workload.seed, **workload.described},
        "schedule": {
            "open_loop": schedule.open_loop,
            "trace": schedule.trace,
            "rate": schedule.rate if schedule.rate < math.inf else "inf",
            "burstiness": schedule.burstiness if schedule.burstiness < math.inf else "inf",
            "max_concurrency": schedule.max_concurrency,
            "seed": schedule.seed,
        },
        "request_timeout_s": job.limits.request_timeout,
        "metadata": dict(job.metadata),
    }


def client_provenance() -> dict[str, Any]:
    """What measured, and by which command."""
    machine = this_machine(PACKAGES)
    return {
        "command": _HEADER_VALUE.sub(r"\1 (hidden)", command_line()),
        "commit": this_commit(),
        "machine": {"host": platform.node(), "cpu": machine.cpu, "cores": machine.cores, "system": machine.system},
        "python": machine.python,
        "packages": machine.packages,
    }


def result_name(target: Target, schedule: Schedule, now: float) -> str:
    """As vLLM names its files."""
    rate = "trace" if schedule.trace else f"{schedule.rate:g}qps"
    cap = f"-concurrency{schedule.max_concurrency}" if schedule.max_concurrency is not None else ""
    model = "".join(c if c.isalnum() or c in "._-" else "_" for c in target.model.rstrip("/").rpartition("/")[2])
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{target.backend}-{rate}{cap}-{model or 'model'}-{stamp}.json"
