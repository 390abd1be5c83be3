"""``longread fixture``: write a tiny checkpoint in DeepSeek's own format, with random weights."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError, count, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

# As in weights/fixture.py, which loads torch: too slow for --help. A test holds the two together.
KINDS = ("v2-lite", "v3", "v4-flash", "v4-pro")
MAX_SEED = 2**60  # as --seed of serve; the generators' own seeds are 64-bit sums of it


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="write a tiny checkpoint with random weights, to try the server with",
        description="Write a tiny checkpoint in DeepSeek's own on-disk format. Random weights: the answers are noise.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="folder to write; must be missing or empty")
    parser.add_argument("--kind", choices=KINDS, required=True, help="which architecture")
    parser.add_argument(
        "--quantised", action="store_true", help="store weights as the release does: FP8 blocks, FP4 experts"
    )
    parser.add_argument("--shards", type=count, default=1, help="number of safetensors files")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the random weights")
    parser.set_defaults(run=run, parser=parser)


def _seed(text: str) -> int:
    value = whole(text)
    if value > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_SEED}")
    return value


def run(args: argparse.Namespace) -> int:
    if args.path.exists() and (not args.path.is_dir() or any(args.path.iterdir())):
        raise UsageError(f"{args.path}: exists and is not an empty folder; name another path")
    from longread.weights.fixture import write_fixture  # loads torch

    write_fixture(args.path, args.kind, seed=args.seed, quantised=args.quantised, shards=args.shards)
    total = sum(file.stat().st_size for file in args.path.iterdir())
    print(f"wrote a {args.kind} fixture, {total:,} bytes: try `longread serve {args.path}`")
    return 0
