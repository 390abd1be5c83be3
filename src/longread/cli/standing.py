"""``longread explain``: where a call that runs stands, why it is not further, and when it may be."""

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
        help="say why a request waits",
        description="Say where a call stands that has not ended, why it is not further (slots, pages, a prefix that is "
        "being computed, a load, its turn), and when its first token may be expected.",
    )
    parser.add_argument("id", metavar="REQUEST-ID", help="an answer's id, or its X-Request-Id")
    add_source_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    record = source_of(args).one(args.id)
    if args.json:
        told = {name: record.get(name) for name in ("id", "request_id", "state", "standing")}
        print(json.dumps(told, ensure_ascii=False))
        return 0
    from rich.console import Console

    from longread.measure import standing

    standing.draw(record, Console(highlight=False))
    return 0
