"""``longread stress``: five pressure tests against any OpenAI-compatible server.

Exit codes besides the common ones (1: FAIL, 2: not usable, 130: interrupted): 0 PASS, 3 INCONCLUSIVE.
"""

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.bench_serve import extra_of, headers_of, number
from longread.cli.checkpoint import locate, spec_of, tokenizer_of
from longread.cli.gate import seconds
from longread.cli.parser import Parser, UsageError, count, shorten, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.started import Launch
    from longread.measure.stress.run import Settings

TESTS = ("cold", "context", "mixed", "reasoning", "recovery")
EPILOG = """\
Exit code 0: PASS, 1: FAIL, 3: INCONCLUSIVE, 2: not usable, 130: interrupted (what was measured is judged and kept).
A process is killed only if it was started here or named by --pid.
"""


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="five pressure tests, each with a verdict",
        description="Cold start, long context, mixed load, reasoning stability and failure recovery of a server.",
        epilog=EPILOG,
    )
    _server(parser)
    _tests(parser)
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="of `longread serve`, with --serve")
    parser.set_defaults(run=run, parser=parser)


def _server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="of a server that runs, http://host:port")
    group.add_argument("--serve", metavar="CHECKPOINT", help="start `longread serve CHECKPOINT`; its options after --")
    group.add_argument(
        "--start", metavar="COMMAND", help="start any engine: 'vllm serve DIR --port {port}'; {port} is a free one"
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for the server that is started"
    )
    group.add_argument("--ready-timeout", type=seconds, default="30m", metavar="TIME", help="for one start")
    group.add_argument("--pid", type=count, metavar="N", help="of a running server: memory is read; recovery kills it")
    group.add_argument("--model", help="default: the one that /v1/models names")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="may be repeated")
    group.add_argument("--extra-body", metavar="JSON", help="fields of every request's body")
    group.add_argument("--thinking", action="store_true", help="ask for reasoning in every request's chat template")
    group.add_argument(
        "--tokenizer",
        type=tokenizer_of,
        metavar="PATH",
        help="folder, tokenizer.json or bundled model: exact lengths; default: --serve's, else estimated",
    )
    group.add_argument("--request-timeout", type=number, default=600.0, metavar="SECONDS", help="of one request")


def _tests(parser: Parser) -> None:
    group = parser.add_argument_group("tests")
    group.add_argument(
        "--tests", metavar="LIST", help=f"some of {','.join(TESTS)}; default: all that can be made of this server"
    )
    group.add_argument("--limits", type=Path, metavar="FILE.toml", help="name = value; --list-limits prints them all")
    group.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    group.add_argument("--list-limits", action="store_true", help="print all limits, their defaults and reasons")
    group.add_argument("--budget", type=seconds, default="10m", metavar="TIME", help="for all tests; 90s, 10m, 2h")
    group.add_argument("--seed", type=whole, help="of texts; default: new each time, so that no cache knows them")
    group.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the result as JSON; requests and log beside it"
    )
    group.add_argument("--starts", type=count, default=3, help="cold: how often the server is started")
    group.add_argument("--interval", type=seconds, default="2s", metavar="TIME", help="cold: between two starts")
    group.add_argument("--long-tokens", type=count, default="16K", help="context, mixed: tokens of a long document")
    group.add_argument("--context-requests", type=count, default=60, help="context: long requests, all of that length")
    group.add_argument("--shorts", type=count, default=400, help="mixed: short requests alone, and as many beside")
    group.add_argument("--short-rate", type=number, metavar="R", help="mixed: a second; default: one in flight")
    group.add_argument("--longs", type=count, default=1, help="mixed: long documents under way at a time")
    group.add_argument("--reasoning-requests", type=count, default=200, help="reasoning: requests")
    group.add_argument("--reasoning-tokens", type=count, default=2048, help="reasoning: tokens of an answer at most")
    group.add_argument("--concurrency", type=count, default=4, help="reasoning: requests in flight")
    group.add_argument("--temperature", type=number, default=0.6, help="reasoning: of the sampler")
    group.add_argument("--in-flight", type=count, default=8, help="recovery: requests in flight at the kill")
    group.add_argument(
        "--kill", metavar="LIST", help="recovery: worker, server; default: both with --serve, server with --start"
    )


def run(args: argparse.Namespace) -> int:
    from longread.measure.stress import command

    if args.list_limits:
        return command.limits()
    settings = settings_of(args)
    _writable(args.output)
    left = [test for test in TESTS if test not in settings.tests]
    if args.tests is None and left:
        able = f"a running server allows {', '.join(settings.tests)}; {' and '.join(left)}"
        print(f"stress: {able} need --serve or --start (or --tests recovery with --pid)", file=sys.stderr)
    return command.run(settings, args.output)


def settings_of(args: argparse.Namespace) -> "Settings":
    """Raises ConfigError for everything that can be wrong before a server is started or asked."""
    from longread.measure.load.target import Target, base_url
    from longread.measure.stress import cold, context, mixed, reasoning, recovery
    from longread.measure.stress.host import named
    from longread.measure.stress.limits import limits_of
    from longread.measure.stress.run import Settings
    from longread.measure.workloads.counting import counter

    launch = _launch(args)
    if args.pid is not None:
        if launch is not None:
            raise UsageError("--pid names a server that runs, and --serve and --start start one; give one of them")
        named(args.pid)
    if launch is None and args.base_url is None:
        raise UsageError("which server? Give --base-url URL, --serve CHECKPOINT or --start COMMAND")
    tokenizer = args.tokenizer or (locate(args.serve) if args.serve is not None else None)
    if tokenizer is not None:
        counter(str(tokenizer))
    style = extra_of(args.extra_body)
    if args.thinking:
        style["chat_template_kwargs"] = {"thinking": True}
    if not args.temperature <= 2:
        raise UsageError(f"--temperature {args.temperature:g}: it must be from 0 to 2")
    tokens = args.long_tokens
    return Settings(
        Target(base_url(args.base_url or "127.0.0.1:1"), args.model or "", headers=headers_of(args.header), extra={}),
        launch,
        args.pid,
        _which(args, launch is not None),
        limits_of(args.limits, args.limit),
        args.budget,
        args.request_timeout,
        None if tokenizer is None else str(tokenizer),
        secrets.randbits(31) if args.seed is None else args.seed,
        style,
        args.ready_timeout,
        cold.Plan(args.starts, args.interval, (1024, tokens)),
        context.Plan(tokens, args.context_requests),
        mixed.Plan(args.shorts, args.short_rate, args.longs, tokens),
        reasoning.Plan(args.reasoning_requests, args.concurrency, args.temperature, args.reasoning_tokens),
        recovery.Plan(_kills(args), args.in_flight),
    )


def _launch(args: argparse.Namespace) -> "Launch | None":
    from longread.measure.started import launch_of, own_launch

    if args.serve_options and args.serve is None:
        raise UsageError(f"unexpected argument {shorten(args.serve_options[0])!r}: options after -- are of --serve")
    env = _env(args.env)
    if args.serve is not None:
        if args.start is not None or args.base_url is not None:
            raise UsageError("--serve, --start and --base-url each say which server is meant; give one of them")
        spec_of(locate(args.serve))
        return own_launch(str(locate(args.serve)), args.serve_options, env)
    if args.start is not None:
        from longread.measure.load.target import base_url

        return launch_of(args.start, None if args.base_url is None else base_url(args.base_url), env)
    if env:
        raise UsageError("--env is for a server that is started here; give --serve or --start")
    return None


def _env(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise UsageError(f"--env {shorten(text)!r}: it is written NAME=VALUE")
        found[name] = value
    return found


def _which(args: argparse.Namespace, started: bool) -> tuple[str, ...]:
    if args.tests is None:
        able = {"cold": started, "recovery": started}
        return tuple(test for test in TESTS if able.get(test, True))
    return tuple(part.strip() for part in args.tests.split(","))


def _kills(args: argparse.Namespace) -> tuple[str, ...]:
    if args.pid is not None:
        if args.kill is not None:
            raise UsageError("--pid says what is killed; leave out --kill")
        return ("pid",)
    if args.kill is None:
        return ("worker", "server") if args.serve is not None else ("server",)
    found = tuple(part.strip() for part in args.kill.split(","))
    wrong = [each for each in found if each not in ("worker", "server")]
    if wrong or len(set(found)) < len(found):
        raise UsageError(f"--kill {shorten(args.kill)!r}: name worker, server or both")
    return found


def _writable(path: Path | None) -> None:
    """Before an hour's work, not after it."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"-o {path}: cannot be written there; name a file in a folder that exists")
