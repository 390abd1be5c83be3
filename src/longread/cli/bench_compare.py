"""``longread bench compare``: two results, or two folders of repeated ones, against each other."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError, nearest, shorten

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EPILOG = """\
Exit code 0; with --fail-on worse 1 where a metric of B is worse, with --fail-on inconclusive also 3 where one is open;
2 where the two must not be compared. The same asks are compared in pairs where both files have their requests.
"""


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "compare",
        help="two results against each other",
        description="Say of each metric whether B is better, worse or the same, or how many more requests would tell.",
        epilog=EPILOG,
    )
    parser.add_argument("a", type=Path, metavar="A", help="before: a result, or a folder of repeats")
    parser.add_argument("b", type=Path, metavar="B", help="after; results of longread, vLLM or aiperf")
    parser.add_argument(
        "--gate", type=Path, action="append", default=[], metavar="FILE", help="of `longread gate run -o`"
    )
    parser.add_argument("--metrics", metavar="NAMES", help="as ttft,tpot,e2el; default: all latencies that both have")
    parser.add_argument("--statistics", default="mean,p99", metavar="NAMES", help="of mean,p50,p90,p95,p99")
    parser.add_argument("--margin", type=share, default="2%", metavar="SHARE", help="less than this is no change")
    parser.add_argument("--fail-on", choices=("worse", "inconclusive"), help="for a pipeline: a bad exit code")
    parser.add_argument("--anyway", action="store_true", help="compare what differs in more than what was changed")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the comparison as JSON")
    parser.set_defaults(run=run, parser=parser)


def share(text: str) -> float:
    """0.02 of "2%" and of "0.02"."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not a share below 1; write 2% or 0.02")
    return value


def writable(option: str, path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise UsageError(f"{option} {path} is a folder; name the file in it")


def _names(option: str, text: str, valid: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in found:
        if name not in valid:
            raise UsageError(
                f"{option}: nothing is called {shorten(repr(name))}{nearest(name, valid)} (all: {', '.join(valid)})"
            )
    return found


def run(args: argparse.Namespace) -> int:
    writable("-o", args.output)
    from longread.measure.report import command
    from longread.measure.report.compare import DEFAULT, STATISTICS, Wanted
    from longread.measure.report.definitions import LATENCIES

    wanted = Wanted(
        metrics=DEFAULT if args.metrics is None else _names("--metrics", args.metrics, tuple(LATENCIES)),
        statistics=_names("--statistics", args.statistics, tuple(STATISTICS)),
        margin=args.margin,
        anyway=args.anyway,
    )
    return command.compare(args.a, args.b, args.gate, wanted, args.output, args.fail_on)
