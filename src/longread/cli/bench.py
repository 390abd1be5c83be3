"""``longread bench``: measure this machine."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli import bench_compare, bench_profile, bench_report, bench_serve, bench_sweep, bench_workload
from longread.cli.checkpoint import locate, spec_of
from longread.cli.parser import Parser, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(name, help="measure", description="Measure on this machine and keep the evidence.")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, title="kinds")
    bench_serve.add_parser(kinds)
    bench_sweep.add_parser(kinds)
    bench_profile.add_parser(kinds)
    bench_workload.add_parser(kinds)
    bench_compare.add_parser(kinds)
    bench_report.add_parser(kinds)
    cpu = kinds.add_parser(
        "cpu",
        help="prefill and decode on the CPU, against transformers",
        description="Prefill and decode on the CPU, against transformers' generate on the same checkpoints.",
    )
    cpu.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="folders or bundled models; default: fresh v3 and v4-flash fixtures with real head sizes",
    )
    cpu.add_argument("--context", type=count, default=8192, help="tokens of the prefill prompt")
    cpu.add_argument("--decode-context", type=count, default=512, help="tokens of each decode prompt")
    cpu.add_argument("--new-tokens", type=count, default=64, help="tokens decoded")
    cpu.add_argument("--rounds", type=count, default=3, help="how often the engines take turns")
    cpu.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    cpu.set_defaults(run=run_cpu, parser=cpu)


def run_cpu(args: argparse.Namespace) -> int:
    checkpoints = [locate(value) for value in args.checkpoints]
    for checkpoint in checkpoints:
        spec_of(checkpoint)  # before the first is measured for minutes
    from longread.measure import cpu  # loads rich

    settings = cpu.Settings(args.context, args.decode_context, args.new_tokens, args.rounds)
    if checkpoints:
        cpu.run(checkpoints, settings, args.output)
        return 0
    from longread.weights.fixture import write_fixture  # loads torch

    with tempfile.TemporaryDirectory(prefix="longread-bench-") as folder:
        paths = [Path(folder) / kind for kind in cpu.SHAPES]
        for path in paths:
            write_fixture(path, path.name, 0, False, 1, **cpu.SHAPES[path.name])
        cpu.run(paths, settings, args.output)
    return 0
