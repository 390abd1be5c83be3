"""The limits' flags of ``serve``: how much is taken on, and how long it may take.

Knows: Limits' names, which are vLLM's where vLLM has the limit. Must not know: what the limits do.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser
from longread.server.limits import Limits, from_mapping, from_toml

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

LIMIT_FLAGS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "queue_timeout",
    "ttft_timeout",
    "request_timeout",
    "stream_timeout",
    "max_stream_buffer",
)


def add_limit_flags(parser: Parser) -> None:
    group: _ArgumentGroup = parser.add_argument_group(
        "limits",
        "Times in seconds or with a unit (500ms, 2min); none: no limit. What they refuse gets 429, what they "
        "give up gets 504.",
    )
    group.add_argument(
        "--max-num-queued-reqs", metavar="N", default="1024", help="requests that may wait beyond those that run"
    )
    group.add_argument(
        "--max-num-queued-tokens",
        metavar="N",
        help="prompt tokens that may wait to be read; default: what --slo ttft= allows, or no limit",
    )
    group.add_argument("--queue-timeout", metavar="TIME", help="until a prompt begins to be read; default: none")
    group.add_argument("--ttft-timeout", metavar="TIME", help="until the first token; default: none")
    group.add_argument("--request-timeout", metavar="TIME", help="until the end; default: none")
    group.add_argument(
        "--stream-timeout",
        metavar="TIME",
        default="60s",
        help="cut off a client that reads nothing of its answer for so long",
    )
    group.add_argument(
        "--max-stream-buffer", metavar="N", default="16K", help="cut off a client that leaves so many tokens unread"
    )
    group.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help='limits in TOML, such as max_num_queued_reqs = 64 and ttft_timeout = "30s" on lines of their own; before '
        "those of the flags, and read again at SIGHUP",
    )


def limits_from(args: argparse.Namespace) -> Limits:
    """The flags' limits, and on top of them the file's. Raises ConfigError."""
    given = {name: getattr(args, name) for name in LIMIT_FLAGS}
    limits = from_mapping({name: value for name, value in given.items() if value is not None})
    return from_toml(args.limits, limits) if args.limits is not None else limits
