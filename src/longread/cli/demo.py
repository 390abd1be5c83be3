"""``longread demo``: a long text, asked twice of a tiny checkpoint, and what the second asking saved."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction

KINDS = ("v3", "v4-flash")


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="ask twice about a long text and show what the cache saved",
        description="Serve tiny checkpoints, ask each twice about a long text, and print what the second asking saved.",
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="text files; default: *.md of this folder")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        metavar="PATH",
        help="serve this one, repeatable; default: fresh fixtures",
    )
    parser.add_argument("--max-tokens", type=count, default=64, help="tokens of each answer")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    files = args.files or sorted(Path().glob("*.md"))
    if not files:
        raise UsageError("no *.md file in this folder: name a text file, longread demo FILE")
    from longread.measure import demo

    # Ended from outside, the demo must still take its server and its folder along.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    text = demo.read_documents(files)  # before the fixtures: a file that cannot be read is told at once
    if args.checkpoint:
        demo.run(args.checkpoint, text, args.max_tokens)
        return 0
    from longread.weights.fixture import write_fixture  # loads torch

    print(
        "The bundled checkpoints are untrained (random weights): the answers are noise, the figures are real.",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="longread-demo-") as folder:
        paths = [Path(folder) / kind for kind in KINDS]
        for path in paths:
            write_fixture(path, path.name)
        demo.run(paths, text, args.max_tokens)
    return 0
