"""``longread bench profile``: where the time to the first token goes: client, server, kernels."""

import argparse
import math
from typing import TYPE_CHECKING

from longread.cli import bench_serve
from longread.cli.parser import Parser, UsageError, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.load.bench import Job

STEPS = 16
INTERRUPTED = 130
EPILOG = """\
Longread tells the parts of each answer; of vLLM and SGLang the histograms at /metrics are read. Kernels need
`longread serve --profiler-config '{"profiler": "torch"}'`; they are profiled in a second run, since that slows steps.
--hardware is the machine that serves: a file of `longread probe` on it is best.
"""


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "profile",
        help="where the TTFT goes: client, server, kernels",
        description="Time a workload, divide its TTFT into the parts of client and server, and profile the server's "
        "steps by op, with each op's share of the roofline.",
        epilog=EPILOG,
    )
    parser.elsewhere = bench_serve.ELSEWHERE
    group = parser.add_argument_group("profile")
    group.add_argument("--num-steps", type=count, default=STEPS, metavar="N", help="steps of the server to profile")
    group.add_argument("--hardware", metavar="MACHINE", help="for the roofline: cpu, H200, or a file of longread probe")
    bench_serve.add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.save_result or args.result_dir is not None or args.result_filename is not None:
        raise UsageError("a profile has one file: --output FILE")
    if args.output is not None and args.output.is_dir():
        raise UsageError(f"{args.output} is a folder; name the file in it")
    from longread.measure.profile.command import profile
    from longread.measure.profile.kernels import check_hardware
    from longread.measure.profile.terminal import show
    from longread.plan.cards import parse_hardware
    from longread.spec.profiler import MOST_STEPS

    if args.num_steps > MOST_STEPS:
        raise UsageError(f"--num-steps {args.num_steps}: at most {MOST_STEPS}")
    hardware = parse_hardware(args.hardware) if args.hardware is not None else None
    if hardware is not None:
        check_hardware(hardware)
    if args.request_rate == math.inf and args.max_concurrency is None:
        args.max_concurrency = 1  # all at once would show a queue and little else
    output = args.output
    done = profile(_job(args, 0), _job(args, 1), args.num_steps, hardware, output)
    show(done)
    if output is not None:
        print(f"written: {output}")
    if done.interrupted:
        return INTERRUPTED
    return 0 if done.timed.summary.completed else 1


def _job(args: argparse.Namespace, turn: int) -> "Job":
    """The second run has prompts of its own: those of the first are in the server's prefix cache."""
    changed = {
        "output": None,
        "save_detailed": False,
        "seed": (args.seed + turn) % 2**32,
        "num_prompts": args.num_prompts or STEPS,
        "no_calibration": args.no_calibration or turn > 0,
        "num_warmups": 0 if turn else args.num_warmups,
    }
    return bench_serve.job_of(argparse.Namespace(**{**vars(args), **changed}))
