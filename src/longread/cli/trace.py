"""``longread trace``: where the time of one call went, drawn from the server's record of it."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError, count

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.calls import Source

LIST_WIDTH = 1000  # room for any row; none is padded to it
URL = "http://127.0.0.1:8000"


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="show where the time of a call went",
        description="Draw the time to a call's first byte as the sum of its parts. Without an id: list the last calls.",
    )
    parser.add_argument("id", nargs="?", metavar="REQUEST-ID", help="an answer's id, or its X-Request-Id")
    parser.add_argument("--last", type=count, default=20, metavar="N", help="how many calls to list, without an id")
    add_source_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def add_source_flags(parser: Parser) -> None:
    """Which server is asked, and how the answer is shown."""
    parser.add_argument("--url", default=URL, help=f"the server; default: {URL}")
    parser.add_argument("--api-key", metavar="KEY", help="its API key")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its API key is this file's first line")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")


def source_of(args: argparse.Namespace) -> "Source":
    """The server that the flags name. Raises UsageError."""
    from longread.measure.calls import Source  # loads httpx

    key = args.api_key
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip().split("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {args.api_key_file}: cannot be read: {error}") from error
        if not key:
            raise UsageError(f"--api-key-file {args.api_key_file}: holds no key")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key holds characters that cannot stand in a header")
    return Source(args.url, key)


def run(args: argparse.Namespace) -> int:
    source = source_of(args)
    told = source.newest(args.last) if args.id is None else source.one(args.id)
    if args.json:
        print(json.dumps(told, ensure_ascii=False))
        return 0
    from rich.console import Console

    from longread.measure import trace

    # The list is as wide as its rows are, wherever it goes to: what is asked for next is an id, and whole.
    console = Console(highlight=False, width=None if isinstance(told, dict) else LIST_WIDTH)
    if isinstance(told, dict):
        trace.draw(told, console)
    elif told:
        console.print(trace.table(told))
    else:
        console.print("no call has reached this server's engine yet")
    return 0
