"""``longread demo``: a long text and three questions, answered by the bundled models, cold and warm."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate, spec_of
from longread.cli.parser import Parser, UsageError, count, whole
from longread.spec.errors import CheckpointError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

LANGUAGES = ("en", "zh")
TOKENS = 16384
SHORT_TOKENS = 8192  # reader-v3 was trained on no longer documents
SEED = 1
LIMITS = (
    "The bundled readers were trained on synthetic documents only (contracts, statutes, logs, code, tables): about "
    "another text their answers are often wrong, the times are real."
)


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="ask about a long text, cold and warm, and show the answers beside what was expected",
        description="Write a long contract, ask the bundled models three questions about it, cold and warm, and show "
        "the answers beside the expected ones. Or read text files of yours.",
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="text files; default: a written contract")
    parser.add_argument(
        "--checkpoint",
        action="append",
        metavar="CHECKPOINT",
        help="ask this folder or bundled model, repeatable; default: reader-v4, and reader-v3 about a contract",
    )
    parser.add_argument("--question", action="append", metavar="TEXT", help="about your files; repeatable")
    parser.add_argument("--language", choices=LANGUAGES, default="en", help="of the contract and of the questions")
    parser.add_argument(
        "--tokens", type=count, help=f"length of the contract; default: {TOKENS}, for reader-v3 {SHORT_TOKENS}"
    )
    parser.add_argument("--seed", type=whole, help=f"of the contract and its questions; default: {SEED}")
    parser.add_argument("--max-tokens", type=count, default=128, help="tokens of an answer, thinking included")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.files and (args.tokens is not None or args.seed is not None):
        raise UsageError("--tokens and --seed are about a written contract; leave them out where a FILE is named")
    if args.question and not args.files:
        raise UsageError(
            "--question is about a text of yours: name its FILE (a written contract has its own questions)"
        )
    # Ended from outside, the demo must still take its server and its folder along.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.checkpoint:
        _ask([locate(value) for value in args.checkpoint], args)
        return 0
    try:
        paths = [locate(name) for name in BUNDLED]
    except CheckpointError:
        return _ask_fixtures(args)
    _ask(paths[:1] if args.files else paths, args)
    return 0


def _ask(paths: list[Path], args: argparse.Namespace) -> None:
    specs = [spec_of(path) for path in paths]  # before the first of them is asked for a minute
    from longread.measure import demo  # loads rich and the tokenizer's library

    own = demo.own_text(args.files, args.question or (), args.language) if args.files else None
    if own is not None and any(path.name in BUNDLED for path in paths):
        print(LIMITS, flush=True)
    exams = []
    for path, spec in zip(paths, specs, strict=True):
        reader = demo.Reader.open(path, spec)
        tokens = args.tokens or (SHORT_TOKENS if path.name == "reader-v3" else TOKENS)
        seed = SEED if args.seed is None else args.seed
        exams.append((reader, own or demo.contract(reader, tokens, args.language, seed)))
    demo.run(exams, args.max_tokens)


def _ask_fixtures(args: argparse.Namespace) -> int:
    """In place of bundled models that are not there: tiny untrained ones."""
    from longread.weights.fixture import write_fixture  # loads torch

    print("The bundled models are not there; these are untrained (random weights): the answers are noise.", flush=True)
    with tempfile.TemporaryDirectory(prefix="longread-demo-") as folder:
        paths = [Path(folder) / kind for kind in ("v3", "v4-flash")]
        for path in paths:
            write_fixture(path, path.name)
        _ask(paths, args)
    return 0
