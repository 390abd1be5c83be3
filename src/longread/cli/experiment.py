"""``longread experiment``: a matrix of server options, workloads and gates, as one report of before and after."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli import bench_serve
from longread.cli.checkpoint import locate
from longread.cli.parser import Parser, UsageError, refuse_unknown

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.load.bench import Job

EPILOG = """\
The file holds [base] (command = '… --port {port}' of any engine, or checkpoint = 'DIR'), [[step]] (name, options beside
the base's, remove, env), [[workload]] (name, and options of `longread bench serve`), [gate] (profile, levels, lengths,
documents) and [run] (visits, alone, stacked, metrics). Such a one:

    [base]
    checkpoint = "reader-v4"
    options = {max-model-len = "16K"}

    [[step]]
    name = "whole steps"
    options = "--step-target none"

    [[workload]]
    name = "contracts"
    dataset-name = "documents"
    isl = "4K"
    num-prompts = 16

    [gate]
    profile = "lossless"
    lengths = ["4K"]

    [run]
    visits = 3

Exit code 0: all visits were made, 1: some failed (the report says why), 2: not usable, 130: interrupted (--resume goes
on).
"""


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="what each step of an optimisation gives, alone and stacked",
        description="Start a server with each step's options, measure the same workloads, check quality, compare.",
        epilog=EPILOG,
    )
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder of results; default: FILE's name")
    parser.add_argument("--resume", action="store_true", help="keep the visits that were made, make the others")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP", help="base and this step; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and how long it may take")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from longread.measure.experiment import run as running
    from longread.measure.experiment.file import read_experiment

    experiment = read_experiment(args.file, job_of, locate)
    output = args.output or args.file.with_suffix("")
    if output == args.file:
        raise UsageError(f"{args.file} has no ending, so the folder of results needs a name: -o DIR")
    only = tuple(args.only)
    if args.dry_run:
        return running.dry_run(experiment, output, only)
    return running.run(experiment, output, args.resume, only)


def job_of(argv: Sequence[str]) -> "Job":
    """A workload's options. Raises UsageError."""
    parser = Parser(prog="longread bench serve")
    parser.elsewhere = bench_serve.ELSEWHERE
    bench_serve.add_options(parser)
    args, unknown = parser.parse_known_args(list(argv))
    refuse_unknown(unknown, parser)
    return bench_serve.job_of(args)
