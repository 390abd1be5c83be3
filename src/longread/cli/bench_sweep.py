"""``longread bench sweep``: one quantity of the load varied, the rest as ``longread bench serve``."""

import argparse
import math
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longread.cli import bench_serve
from longread.cli.parser import Parser, UsageError, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.load.bench import Job
    from longread.measure.sweep.axis import Axis
    from longread.measure.sweep.run import At, Frontier, Goal, Task
    from longread.measure.workloads.counting import Counter

REQUESTS = 100
INTERRUPTED = 130
EPILOG = """\
context: one document, each point asks for its first L tokens; what the point before read is in the server's prefix
cache, so only the newest interval of tokens is prefilled, and all points to 1M cost one prefill. --max-goodput finds
the largest rate or concurrency at which a share of requests meets the SLOs: each load tried is met, missed or
undecided, by an interval. Ctrl-C keeps what was measured; --resume goes on with it.
"""
# Set by the sweep for each point, or without meaning in one.
NOT_HERE = {
    "save_result": "a sweep has one file: --output FILE",
    "result_dir": "a sweep has one file: --output FILE",
    "result_filename": "a sweep has one file: --output FILE",
}
# What must be the same for points to stand in one sweep.
SETTINGS = (
    *("backend", "endpoint", "model", "extra_body", "temperature", "ignore_eos", "dataset_name", "num_prompts", "isl"),
    *("osl", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len", "dataset_option"),
    *("seed", "burstiness", "max_concurrency", "request_timeout", "duration", "goodput", "percentile_metrics"),
    *("metric_percentiles", "max_goodput", "goodput_share", "waves", "min_seconds", "warm_repeats", "num_warmups"),
)


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "sweep",
        help="concurrency, rate or context varied; the knee; the most load under an SLO",
        description="Measure an OpenAI-compatible server at several concurrencies, rates or context lengths.",
        epilog=EPILOG,
    )
    parser.elsewhere = bench_serve.ELSEWHERE
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--sweep",
        required=True,
        metavar="AXIS=VALUES",
        help="concurrency=1,2,4 | concurrency=1:64 | concurrency=auto | rate=… | context=1K:1M | context=1K:max",
    )
    group.add_argument("--resume", action="store_true", help="go on with --output: whole points are kept")
    group.add_argument("--overwrite", action="store_true", help="begin anew where --output is there already")
    group.add_argument(
        "--max-time", type=bench_serve.number, default=math.inf, metavar="SECONDS", help="no point begins after that"
    )
    group.add_argument(
        "--waves",
        type=count,
        default=4,
        metavar="N",
        help=f"requests of a point for each slot, at least; at least --num-prompts ({REQUESTS}) in all",
    )
    group.add_argument(
        "--min-seconds", type=bench_serve.number, default=10.0, metavar="S", help="of a point of a rate, at least"
    )
    group.add_argument("--max-goodput", action="store_true", help="search for the most load that meets --goodput")
    group.add_argument(
        "--goodput-share", type=bench_serve.number, default=0.9, metavar="SHARE", help="of requests that must meet it"
    )
    group.add_argument(
        "--precision", type=bench_serve.number, default=0.05, metavar="SHARE", help="of the search's interval"
    )
    group.add_argument("--max-probes", type=count, default=12, metavar="N", help="loads that the search tries at most")
    group.add_argument(
        "--warm-repeats", type=count, default=2, metavar="N", help="of each prompt of a context sweep, read from cache"
    )
    group.add_argument(
        "--cold-at", metavar="LENGTHS", help="context lengths at which a cold prompt is measured too, as 8K,64K"
    )
    bench_serve.add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from longread.measure.sweep.axis import parse_axis
    from longread.measure.sweep.run import Sweep
    from longread.measure.sweep.terminal import show

    axis = parse_axis(args.sweep)
    _check(args, axis)
    task, server = _task(args, axis)
    book = _book(args, task, server)
    sweep = Sweep(task, book)
    try:
        sweep.run()
    finally:
        show(book.document)
    print(f"written: {args.output}")
    if sweep.interrupted:
        return INTERRUPTED
    return 0 if any(point["result"].get("completed") for point in book.points) else 1


def _check(args: argparse.Namespace, axis: "Axis") -> None:
    """Raises UsageError for what contradicts itself, before anything is asked of a server."""
    for name, instead in NOT_HERE.items():
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')}: {instead}")
    if args.output is None:
        raise UsageError("a sweep is written as it goes: give --output FILE")
    if args.output.is_dir():
        raise UsageError(f"{args.output} is a folder; name the file in it")
    if args.resume and args.overwrite:
        raise UsageError("--resume keeps what is in --output and --overwrite does not; give one of them")
    if args.resume and not args.output.exists():
        raise UsageError(f"--resume: {args.output} is not there; leave --resume out to begin")
    if args.output.exists() and not (args.resume or args.overwrite):
        raise UsageError(f"{args.output} is there already; --resume goes on with it, --overwrite begins anew")
    if args.dataset_name == bench_serve.TRACE:
        raise UsageError("a trace has arrivals of its own, so nothing is left to sweep; use longread bench serve")
    if args.request_rate != math.inf and axis.name != "rate":
        raise UsageError(f"--request-rate is not set in a sweep of {axis.name}; use --sweep rate=…")
    if args.max_concurrency is not None and axis.name != "rate":
        raise UsageError(f"--max-concurrency is not set in a sweep of {axis.name}; use --sweep concurrency=…")
    if args.request_rate != math.inf:
        raise UsageError("--request-rate is what --sweep rate=… varies; leave it out")
    if not args.max_time > 0:
        raise UsageError("--max-time 0: it must be above 0")
    _check_search(args, axis)
    if axis.name != "context" and args.cold_at is not None:
        raise UsageError("--cold-at is of --sweep context=…")


def _check_search(args: argparse.Namespace, axis: "Axis") -> None:
    if not args.max_goodput:
        return
    if axis.name == "context":
        raise UsageError("--max-goodput searches a rate or a concurrency; give --sweep rate=auto")
    if not args.goodput:
        raise UsageError("--max-goodput needs the SLOs: --goodput ttft:MS tpot:MS e2el:MS")
    if axis.values is not None and not axis.bounds:
        raise UsageError(f"--max-goodput chooses the loads itself: --sweep {axis.name}=auto or {axis.name}=LOW:HIGH")
    if not 0 < args.goodput_share < 1:
        raise UsageError(
            f"--goodput-share {args.goodput_share:g}: it must lie between 0 and 1; of 1 no sample can tell"
        )
    if not 0.001 <= args.precision <= 1:
        raise UsageError(f"--precision {args.precision:g}: it must be from 0.001 to 1")


def _task(args: argparse.Namespace, axis: "Axis") -> "tuple[Task, dict[str, Any]]":
    from longread.measure.load.server import look, only_model
    from longread.measure.load.target import Target
    from longread.measure.sweep.run import Task

    requests = args.num_prompts or REQUESTS
    goal = _goal(args, requests) if args.max_goodput else None
    first = bench_serve.job_of(_namespace(args, request_rate=math.inf))
    if axis.name != "context":
        first.workload()  # what is wrong with it is said now
    found = look(Target(first.base_url, "", headers=first.headers))
    model = first.model or only_model(first.base_url, found)
    server = {"url": first.base_url, "model": model, "version": found.version}
    frontier = None
    if axis.name == "context":
        axis, frontier = _frontier(args, axis, found.model_facts.get("max_model_len"))
    return Task(
        axis=axis,
        job=lambda at: _job(args, at),
        requests=requests,
        waves=args.waves,
        min_seconds=args.min_seconds,
        max_seconds=args.max_time,
        goal=goal,
        frontier=frontier,
    ), server


def _goal(args: argparse.Namespace, requests: int) -> "Goal":
    from longread.measure.load.goodput import parse_goodput
    from longread.measure.sweep.judging import RAMP, needed
    from longread.measure.sweep.run import Goal

    goal = Goal(parse_goodput(args.goodput), args.goodput_share, args.precision, args.max_probes)
    most, least = int(4 * requests * (1 - RAMP)), needed(goal.share, goal.z)
    if most < least:
        raise UsageError(
            f"--num-prompts {requests}: with at most {most} requests judged at a load, none could be told to meet "
            f"{goal.share:.0%} over {goal.probes} probes; give at least {math.ceil(least / 4 / (1 - RAMP))}"
        )
    return goal


def _namespace(args: argparse.Namespace, **changed: object) -> argparse.Namespace:
    plain = {"output": None, "max_goodput": False}
    return argparse.Namespace(**{**vars(args), **plain, **changed})


def _file(args: argparse.Namespace, name: str | None) -> Path | None:
    """Beside the sweep's file: each run's own result, with its requests."""
    if name is None:
        return None
    folder: Path = args.output.with_name(args.output.name.removesuffix(".json") + ".points")
    return folder / f"{name}.json"


def _job(args: argparse.Namespace, at: "At") -> "Job":
    """Prompts of its own for each run: what an earlier point sent is in the server's prefix cache."""
    seed = (args.seed + zlib.crc32(at.key.encode())) % 2**32
    changed: dict[str, object] = {"num_prompts": at.requests, "seed": seed, "output": _file(args, at.file)}
    if at.axis == "concurrency":
        changed |= {"max_concurrency": int(at.value), "request_rate": math.inf, "burstiness": 1.0}
    else:
        changed |= {"request_rate": at.value}
    changed["no_calibration"] = args.no_calibration or args.max_goodput or at.file is None
    return bench_serve.job_of(_namespace(args, **changed))


def _lengths(axis: "Axis", osl: int, most: object) -> tuple[float, ...]:
    """The axis's values, to the end that the server's ``max_model_len`` allows. Raises UsageError beyond it."""
    from longread.measure.sweep.axis import doubling

    values = axis.values or ()
    room = most - osl if isinstance(most, int) and not isinstance(most, bool) else None
    if axis.to_max:
        if room is None:
            raise UsageError("the server does not say max_model_len, so where context=…:max ends is not known; name it")
        if room <= values[0]:
            raise UsageError(
                f"the server's max_model_len is {most}: with {osl} answer tokens nothing fits above {values[0]:g}"
            )
        values = doubling(values[0], room)
    if room is not None and values[-1] > room:
        raise UsageError(
            f"--sweep context: {values[-1]:,.0f} tokens and an answer of {osl} are more than the server's "
            f"max_model_len {most:,}; end at {room:,} or take context=…:max"
        )
    return values


def _frontier(args: argparse.Namespace, axis: "Axis", most: object) -> "tuple[Axis, Frontier]":
    from dataclasses import replace

    from longread.measure.sweep.frontier import source
    from longread.measure.sweep.run import Frontier
    from longread.measure.workloads.counting import counter

    osl = _answer(args)
    values = _lengths(axis, osl, most)
    if args.backend == "openai-chat":
        raise UsageError("a context sweep sends token ids, so that each prompt begins the next: --backend openai")
    cold = _cold(args, values)
    count_tokens: Counter = counter(str(args.tokenizer) if args.tokenizer else None)
    options = dict(bench_serve.pairs("--dataset-option", args.dataset_option))
    vocabulary, language = options.pop("vocab_size", None), options.pop("language", "en")
    if options:
        raise UsageError(f"--dataset-option {next(iter(options))}: a context sweep takes vocab_size and language")
    ids = None if vocabulary is None else _count("--dataset-option vocab_size", str(vocabulary))

    def made(length: int, seed: int) -> Any:
        return source(args.dataset_name, seed, length, count_tokens, ids, language)

    def job(workload: Any, file: str | None) -> "Job":
        base = bench_serve.job_of(
            _namespace(args, backend="openai", num_warmups=0, no_calibration=True, dataset_option=[], ignore_eos=False)
        )
        return replace(base, workload=workload, output=_file(args, file))

    longest = int(max(values))
    return replace(axis, values=values, to_max=False), Frontier(
        document=made(longest, args.seed),
        other=lambda place, tokens: made(tokens, (args.seed + 1 + place) % 2**32),
        job=job,
        osl=osl,
        repeats=args.warm_repeats,
        cold_at=cold,
        extra={"ignore_eos": True},
    )


def _count(name: str, text: str) -> int:
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name} {text[:60]}: {error}") from None


def _answer(args: argparse.Namespace) -> int:
    for name in ("isl", "num_prompts", "random_input_len", "random_range_ratio", "random_prefix_len", "dataset_path"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: a context sweep says its prompts itself, by its lengths")
    return _count("--osl", args.osl or args.random_output_len or "16")


def _cold(args: argparse.Namespace, values: tuple[float, ...]) -> tuple[int, ...]:
    if args.cold_at is None:
        return ()
    lengths = tuple(_count("--cold-at", word.strip()) for word in args.cold_at.split(","))
    for length in lengths:
        if length not in values:
            listed = ", ".join(f"{value:g}" for value in values)
            raise UsageError(f"--cold-at {length}: it is no point of the sweep ({listed})")
    return lengths


def _book(args: argparse.Namespace, task: "Task", server: dict[str, Any]) -> Any:
    from longread.measure.load.bench import client_provenance
    from longread.measure.sweep.frontier import DEFINITIONS
    from longread.measure.sweep.store import Book

    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["tokenizer"] = args.tokenizer.name if args.tokenizer is not None else None
    settings["dataset_path"] = args.dataset_path.name if args.dataset_path is not None else None
    settings |= {"axis": task.axis.name, "server": server}
    settings = {name: None if value == math.inf else value for name, value in settings.items()}
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    provenance = {"settings": settings, "date": now, **client_provenance()}
    book = Book(args.output, task.axis, provenance, DEFINITIONS if task.frontier is not None else {})
    if args.resume:
        print(f"{book.resume()} points kept from {args.output}")
    book.write()
    return book
