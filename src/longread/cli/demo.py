"""``longread demo``: a long text and three questions, answered by the bundled models, cold and warm."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate, spec_of
from longread.cli.parser import Parser, UsageError, count, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

LANGUAGES = ("en", "zh")
TOKENS = 16384
SHORT_TOKENS = 8192  # reader-v3 was trained on no longer documents
SEED = 1
LIMITS = (
    "The bundled readers have learned to read made-up documents only (contracts, statutes, logs, code, tables). About "
    "any other text they are most likely wrong; the times are real. Another model: --checkpoint FOLDER"
)

NEXT = """\
Next (in a clone: . .venv/bin/activate):
   longread demo FILE --question TEXT       # about a text of yours
   longread serve {name}                 # for any OpenAI client
   longread plan {name}                  # what it is and what it takes here"""


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
    # Ended from outside, the demo must still take its server along.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    paths = [locate(name) for name in args.checkpoint or (BUNDLED[:1] if args.files else BUNDLED)]
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
    name = next((path.name for path in paths if path.name in BUNDLED), str(paths[0]))
    print(NEXT.format(name=name))
    return 0
