"""``longread bench report``: results, sweeps, gates and plans on one page."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.bench_compare import writable
from longread.cli.parser import Parser, UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EPILOG = """\
The page stands alone: no script, no network. No speed is shown without what its quality gate said; behind a red gate it
is struck out. A gate belongs to the runs of the same model at the same address.
"""


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "report",
        help="one page of any number of results",
        description="Put results, sweeps, gates and plans on one HTML page, and its plots into PNG files.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="or folders; results may be longread's, vLLM's or aiperf's"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PAGE.html", help="write the page there")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write each plot there, too; needs longread[plots]")
    parser.add_argument("--title", metavar="TEXT", help="default: made of the models")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    writable("-o", args.output)
    if args.png is not None and args.png.exists() and not args.png.is_dir():
        raise UsageError(f"--png {args.png} is a file; name a folder")
    from longread.measure.report import command

    return command.report(args.files, args.output, args.png, args.title)
