"""``longread store explain``: why a call did not reuse more, from the server's record of it."""

import argparse
import json
from typing import TYPE_CHECKING

from longread.cli.parser import Parser
from longread.cli.trace import add_source_flags, source_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="say why a call did not reuse more",
        description="Say what a call reused, from which tier, and why no more: with the two texts around the first "
        "difference where the prompt differs from one that was read before. Asks the running server, not the folder.",
    )
    parser.add_argument("id", metavar="REQUEST-ID", help="an answer's id, or its X-Request-Id")
    add_source_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    record = source_of(args).one(args.id)
    if args.json:
        told = {name: record[name] for name in ("id", "request_id", "difference")}
        print(json.dumps(told | {"reuse": record["longread"]["reuse"]}, ensure_ascii=False))
        return 0
    from rich.console import Console

    from longread.measure import explain

    explain.draw(record, Console(highlight=False))
    return 0
