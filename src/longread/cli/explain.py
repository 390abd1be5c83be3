"""``longread explain``: where a call that runs stands, and why; ``longread store explain``: why one did not reuse more.
Both from the running server's record of the call.
"""

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longread.cli.parser import Parser
from longread.cli.trace import add_source_flags, source_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

Record = Mapping[str, Any]


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="say why a request waits",
        description="Say where a call stands that has not ended, why it is not further (slots, pages, a prefix that is "
        "being computed, a load, its turn), and when its first token may be expected.",
    )
    _complete(parser)
    parser.set_defaults(told=_standing, draw=_draw_standing)


def add_store_parser(actions: "_SubParsersAction[Parser]", name: str) -> None:
    parser = actions.add_parser(
        name,
        help="say why a call did not reuse more",
        description="Say what a call reused, from which tier, and why no more: with the two texts around the first "
        "difference where the prompt differs from one that was read before. Asks the running server, not the folder.",
    )
    _complete(parser)
    parser.set_defaults(told=_reuse, draw=_draw_reuse)


def _complete(parser: Parser) -> None:
    parser.add_argument("id", metavar="REQUEST-ID", help="an answer's id, or its X-Request-Id")
    add_source_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    record = source_of(args).one(args.id)
    if args.json:
        print(json.dumps(args.told(record), ensure_ascii=False))
        return 0
    from rich.console import Console

    args.draw(record, Console(highlight=False))
    return 0


def _standing(record: Record) -> Record:
    return {name: record.get(name) for name in ("id", "request_id", "state", "standing")}


def _reuse(record: Record) -> Record:
    told = {name: record[name] for name in ("id", "request_id", "difference")}
    return told | {"reuse": record["longread"]["reuse"]}


def _draw_standing(record: Record, console: "Console") -> None:
    from longread.measure import standing

    standing.draw(record, console)


def _draw_reuse(record: Record, console: "Console") -> None:
    from longread.measure import explain

    explain.draw(record, console)
