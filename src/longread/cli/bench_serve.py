"""``longread bench serve``: a workload against any OpenAI-compatible server."""

import argparse
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from longread.cli.checkpoint import tokenizer_of
from longread.cli.parser import Parser, UsageError, count, shorten, whole
from longread.spec.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.load.bench import Job
    from longread.measure.load.target import Target
    from longread.measure.quality import Check
    from longread.measure.workloads.ask import Workload

TRACE = "trace"
DATASETS = ("random", "documents", "chat", "shared-prefix", "agent", "mixed", "security", "custom", TRACE)
IDS = ("random", TRACE)  # made as plain prompts, unless chats are wanted
DEFAULT_URL = "http://127.0.0.1:8000"
# What vLLM's bench has, and what there is here instead.
ELSEWHERE = {
    "api-key": "the key is read from OPENAI_API_KEY, so that it is in no shell history; or give --header",
    "append-result": "each run has a file of its own; `longread bench compare` and `report` read several",
    "disable-tqdm": "the progress bar is only drawn on a terminal",
    "ramp-up-strategy": "`longread bench sweep` measures one rate after the other",
    "sharegpt-output-len": "use --dataset-name custom with --dataset-path, and --osl",
    "use-beam-search": "beam search is not measured",
    "logprobs": "give it as --extra-body '{\"logprobs\": 5}'",
    "top-p": "give it as --extra-body '{\"top_p\": 0.9}'",
    "top-k": "give it as --extra-body '{\"top_k\": 50}'",
}
EPILOG = """\
Without --request-rate all requests are due at once; with --max-concurrency that is a closed loop. A rate with a cap is
an open loop that the cap may hold back; the result says how much. Ctrl-C stops sending and keeps what was measured.
TPOT = (E2E - TTFT) / (output tokens - 1); gaps between chunks are called itl in the file, as in vLLM's.
"""


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "serve",
        help="a workload against any OpenAI-compatible server",
        description="Send a workload to an OpenAI-compatible server (Longread, vLLM, SGLang) and measure every stream.",
        epilog=EPILOG,
    )
    parser.elsewhere = ELSEWHERE
    add_options(parser)
    _quality(parser)
    parser.set_defaults(run=run, parser=parser)


def add_options(parser: Parser) -> None:
    """All that says one run; ``job_of`` reads it."""
    _server(parser)
    _workload(parser)
    _load(parser)
    _result(parser)


def _server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help=f"default {DEFAULT_URL}; instead of --host and --port")
    group.add_argument("--host", help="default 127.0.0.1")
    group.add_argument("--port", type=count, help="default 8000")
    group.add_argument(
        "--backend", choices=("openai", "openai-chat"), help="completions or chat; default: the dataset's"
    )
    group.add_argument("--endpoint", metavar="PATH", help="default /v1/completions or /v1/chat/completions")
    group.add_argument("--model", help="default: the one that /v1/models names")
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="sent along; may be repeated"
    )
    group.add_argument("--extra-body", metavar="JSON", help="fields of every request's body")
    group.add_argument("--temperature", type=number, help="default: the dataset's, else 0 (greedy)")
    group.add_argument("--ignore-eos", action="store_true", help="every answer is as long as wanted")


def _workload(parser: Parser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="what is sent")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of custom, and the Mooncake JSONL of trace")
    group.add_argument("--num-prompts", type=count, metavar="N", help="requests; default: the dataset's")
    group.add_argument("--isl", metavar="LENGTHS", help="tokens of a prompt, or a distribution of them")
    group.add_argument("--osl", metavar="LENGTHS", help="tokens of an answer at most, or a distribution")
    group.add_argument("--random-input-len", metavar="N", help="vLLM's name for --isl with --dataset-name random")
    group.add_argument("--random-output-len", metavar="N", help="vLLM's name for --osl with --dataset-name random")
    group.add_argument("--random-range-ratio", metavar="R", help="lengths even from N*(1-R) to N*(1+R)")
    group.add_argument("--random-prefix-len", metavar="N", help="tokens that all prompts begin with, beside --isl")
    group.add_argument("--dataset-option", action="append", default=[], metavar="NAME=VALUE", help="of that dataset")
    group.add_argument("--trace-speedup", type=number, default=1.0, metavar="X", help="2: the trace in half its time")
    group.add_argument(
        "--tokenizer",
        type=tokenizer_of,
        metavar="PATH",
        help="folder, tokenizer.json or bundled model: exact lengths, counts",
    )
    group.add_argument("--seed", type=whole, default=0, help="of the workload and of the arrivals")


def _load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=number, default=math.inf, metavar="R", help="requests (sessions) a second"
    )
    group.add_argument(
        "--burstiness", type=number, default=1.0, metavar="B", help="shape of gamma gaps; 1 Poisson, inf constant"
    )
    group.add_argument("--max-concurrency", type=count, metavar="N", help="requests (sessions) under way at most")
    group.add_argument("--num-warmups", type=whole, default=1, metavar="N", help="requests before, which do not count")
    group.add_argument("--request-timeout", type=number, default=21600.0, metavar="SECONDS", help="of one request")
    group.add_argument("--duration", type=number, default=math.inf, metavar="SECONDS", help="nothing new after that")


def _result(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="SLOs, as ttft:200 tpot:50 e2el:5000"
    )
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="which metrics")
    group.add_argument("--metric-percentiles", default="50,90,95,99", metavar="PERCENTS", help="which percentiles")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the result there, requests beside it")
    group.add_argument("--save-result", action="store_true", help="write it under a name as vLLM's")
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="where --save-result writes")
    group.add_argument("--result-filename", metavar="NAME", help="the name for --save-result")
    group.add_argument("--save-detailed", action="store_true", help="answers and gaps of each request as well")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="kept in the result")
    group.add_argument("--no-calibration", action="store_true", help="do not measure the client itself afterwards")
    group.add_argument(
        "--sample-interval", type=number, default=1.0, metavar="SECONDS", help="looks at /metrics and GPUs; 0: none"
    )
    group.add_argument("--server-pid", type=count, metavar="PID", help="its process here: memory is sampled, too")


def _quality(parser: Parser) -> None:
    group = parser.add_argument_group("quality (no speed on red)")
    group.add_argument(
        "--gate", metavar="PROFILE", help="run `longread gate` first: lossless, fp8-class, int4-class or a .toml file"
    )
    group.add_argument("--gate-base", type=Path, metavar="FILE", help="made by `longread gate base`: compare with it")
    group.add_argument("--gate-levels", metavar="LIST", help="default: 1,4 with a base (it says what is asked), else 0")
    group.add_argument("--gate-budget", type=number, default=600.0, metavar="SECONDS", help="for the gate")


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not a number of at least 0")
    return value


def run(args: argparse.Namespace) -> int:
    job = job_of(args)
    from longread.measure.load.bench import bench

    return bench(job)


def job_of(args: argparse.Namespace) -> "Job":
    """Raises ConfigError for everything that can be wrong without asking the server."""
    from longread.measure.load.bench import Job
    from longread.measure.load.goodput import parse_goodput
    from longread.measure.load.metrics import Wanted, parse_metrics, parse_percents
    from longread.measure.load.run import Limits
    from longread.measure.load.schedule import Schedule

    options = _options(args)
    return Job(
        base_url=_url(args),
        workload=lambda: _built(args, options),
        schedule=Schedule(args.request_rate, args.burstiness, args.max_concurrency, args.seed),
        limits=Limits(args.request_timeout, args.duration, args.num_warmups),
        wanted=Wanted(
            parse_metrics(args.percentile_metrics),
            parse_percents(args.metric_percentiles),
            parse_goodput(args.goodput) or None,
        ),
        backend=args.backend,
        endpoint=_endpoint(args.endpoint),
        model=args.model,
        headers=headers_of(args.header),
        extra=_extra(args),
        tokenizer=args.tokenizer,
        output=_output(args),
        detailed=args.save_detailed,
        calibrated=not args.no_calibration,
        sample_every=_interval(args.sample_interval),
        server_pid=args.server_pid,
        metadata=pairs("--metadata", args.metadata),
        gate=_gate(args),
    )


def _interval(seconds: float) -> float:
    if 0 < seconds < 0.1 or not math.isfinite(seconds):
        raise UsageError(f"--sample-interval {seconds:g}: at least 0.1 s, since each look asks the server; 0 is none")
    return seconds


def _gate(args: argparse.Namespace) -> "Check | None":
    """A sweep and an experiment have no such options."""
    if getattr(args, "gate", None) is None:
        for name in ("gate_base", "gate_levels"):
            if getattr(args, name, None) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of --gate PROFILE; give that too")
        return None
    from longread.measure.quality import check_of

    levels = None
    if args.gate_levels is not None:
        words = args.gate_levels.split(",")
        if any(word not in ("0", "1", "2", "3", "4") for word in words):
            raise UsageError(f"--gate-levels {shorten(args.gate_levels)!r}: name some of 0, 1, 2, 3, 4")
        levels = tuple(map(int, words))
    return check_of(args.gate, args.gate_base, levels, args.gate_budget)


def _url(args: argparse.Namespace) -> str:
    from longread.measure.load.target import base_url

    if args.base_url is not None:
        if args.host is not None or args.port is not None:
            raise UsageError("--base-url and --host or --port both say where the server is; give one of them")
        return base_url(args.base_url)
    host = args.host or "127.0.0.1"
    return base_url(f"http://{f'[{host}]' if ':' in host else host}:{args.port or 8000}")


def _endpoint(path: str | None) -> str | None:
    if path is not None and not path.startswith("/"):
        raise UsageError(f"--endpoint {shorten(path)!r}: it is a path and begins with /, as /v1/chat/completions")
    return path


def headers_of(given: list[str]) -> dict[str, str]:
    """With the key of the environment, unless a header brings its own."""
    found: dict[str, str] = {}
    for text in given:
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not name or not name.isascii() or any(not c.isprintable() or c == " " for c in name):
            raise UsageError(f"--header {shorten(name)!r}: it is written NAME:VALUE")
        if not all(c.isprintable() and ord(c) < 256 for c in value):
            raise UsageError(f"--header {name}: its value holds characters that no header can")
        found[name] = value
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if key and "authorization" not in (name.lower() for name in found):
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("OPENAI_API_KEY holds characters that no header can")
        found["Authorization"] = f"Bearer {key}"
    return found


def extra_of(text: str | None) -> dict[str, object]:
    """--extra-body. Raises UsageError."""
    if text is None:
        return {}
    try:
        extra = orjson.loads(text)  # which takes no NaN and no half of a surrogate pair: neither can be sent
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body must be a JSON object, not {shorten(text)}")
    return extra


def _extra(args: argparse.Namespace) -> dict[str, object]:
    extra = extra_of(args.extra_body)
    flags = {"temperature": args.temperature, "ignore_eos": True if args.ignore_eos else None}
    for name, value in flags.items():
        if value is not None:
            if name in extra:
                raise UsageError(f"--extra-body and --{name.replace('_', '-')} both set {name}; give one of them")
            extra[name] = value
    from longread.measure.load.target import Target

    Target("http://unused", "unused", extra=extra)  # refuses the bench's own fields
    return extra


def _output(args: argparse.Namespace) -> Any:
    if args.output is not None:
        if args.save_result or args.result_dir is not None or args.result_filename is not None:
            raise UsageError("--output names the file; --save-result, --result-dir and --result-filename do too")
        return _no_folder(args.output)
    if not args.save_result:
        for name in ("result_dir", "result_filename"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is where --save-result writes; give --save-result too")
        if args.save_detailed:
            raise UsageError("--save-detailed needs a result to be in; give --save-result or --output FILE")
        return None
    folder = args.result_dir or Path()
    if args.result_filename is not None:
        return _no_folder(folder / args.result_filename)

    def named(target: "Target", schedule: Any) -> Path:
        from longread.measure.load.bench import result_name

        return folder / result_name(target, schedule, time.time())

    return named


def _no_folder(path: Path) -> Path:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file in it")
    return path


def pairs(option: str, words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise UsageError(f"{option} {shorten(word)!r}: it is written KEY=VALUE")
        if name in found:
            raise UsageError(f"{option} sets {shorten(name)} twice")
        found[name] = value
    return found


def _options(args: argparse.Namespace) -> dict[str, object]:
    """The dataset's options by its own names, from flags and --dataset-option."""
    options: dict[str, object] = dict(pairs("--dataset-option", args.dataset_option))
    for flag, name in (
        ("num_prompts", "num_prompts"),
        ("isl", "isl"),
        ("osl", "osl"),
        ("random_input_len", "isl"),
        ("random_output_len", "osl"),
        ("random_range_ratio", "range_ratio"),
        ("random_prefix_len", "prefix_len"),
    ):
        value = getattr(args, flag)
        if value is None:
            continue
        spelled = f"--{flag.replace('_', '-')}"
        if flag.startswith("random_") and args.dataset_name != "random":
            raise UsageError(
                f"{spelled} is of --dataset-name random; for {args.dataset_name} give --isl, --osl or --dataset-option"
            )
        if name in options:
            raise UsageError(f"{spelled} and another option both set {name}; give one of them")
        options[name] = value
    if args.dataset_path is not None and args.dataset_name not in ("custom", TRACE):
        raise UsageError(
            f"--dataset-path is of --dataset-name custom or trace; {args.dataset_name} makes its own texts"
        )
    if args.dataset_path is None and args.dataset_name in ("custom", TRACE):
        raise UsageError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name == TRACE:
        refused = [name for name in ("isl", "osl") if name in options]
        if refused:
            raise UsageError(f"a trace says its lengths itself, so --{refused[0]} cannot be set; --num-prompts can")
        options["speedup"] = args.trace_speedup
    elif args.trace_speedup != 1.0:
        raise UsageError("--trace-speedup is of --dataset-name trace")
    return options


def _built(args: argparse.Namespace, options: Mapping[str, object]) -> "Workload":
    from longread.measure.workloads import build

    more: dict[str, object] = {"seed": args.seed}
    if args.tokenizer is not None:
        more["tokenizer"] = str(args.tokenizer)
    if args.dataset_path is not None:
        more["path"] = args.dataset_path
    if args.dataset_name in IDS and args.backend == "openai-chat":
        more["form"] = "chat"
    return build(args.dataset_name, {**more, **options})
