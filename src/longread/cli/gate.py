"""``longread gate``: is the output of a server what it was, or what another's is? Against any OpenAI-compatible server.

Exit codes besides the common ones (1: FAIL, 2: not usable, 130: interrupted): 0 PASS, 3 INCONCLUSIVE.
"""

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError, count, shorten, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.gate.run import Settings

EPILOG = "Exit code 0: PASS, 1: FAIL, 3: INCONCLUSIVE, 2: not usable, 130: interrupted (what was measured is kept)."
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="check that answers did not change",
        description="Quality gates over HTTP, offline: exactness, likelihood, needles, answers, critical values.",
        epilog=EPILOG,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, title="kinds")
    base = kinds.add_parser("base", help="record what a server says, to compare others with")
    _server_flags(base)
    _plan_flags(base, "1,2,3,4")
    base.add_argument("--like", type=Path, metavar="BASE", help="ask exactly what was asked for this file")
    base.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="write the base there")
    base.set_defaults(run=run_base, parser=base)
    run = kinds.add_parser("run", help="judge a server, against a base or by itself", epilog=EPILOG)
    _server_flags(run)
    _plan_flags(run, "0,1,2,3,4")
    run.add_argument("--base", type=Path, metavar="BASE", help="made by `longread gate base`; it sets what is asked")
    _profile_flag(run)
    run.add_argument(
        "--pressure-tokens", type=count, default="256K", help="most tokens that level 0 reads to fill the cache"
    )
    run.add_argument("--all", action="store_true", help="show figures that are not judged, too")
    run.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the result as JSON; evidence beside it as .jsonl"
    )
    run.set_defaults(run=run_gate, parser=run)
    compare = kinds.add_parser("compare", help="judge one recorded base against another", epilog=EPILOG)
    compare.add_argument("base", type=Path)
    compare.add_argument("candidate", type=Path)
    _profile_flag(compare)
    compare.add_argument("--all", action="store_true", help="show figures that are not judged, too")
    compare.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result as JSON")
    compare.set_defaults(run=run_compare, parser=compare)
    profiles = kinds.add_parser("profiles", help="print all limits with their reasons")
    profiles.add_argument("own", nargs="?", metavar="FILE.toml", help="show a profile of your own beside them")
    profiles.set_defaults(run=run_profiles, parser=profiles)


def _server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", required=True, metavar="URL", help="http://host:port, with or without /v1")
    group.add_argument("--model", metavar="NAME", help="default: the server's first model")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    group.add_argument("--concurrency", type=count, default=4, help="requests at once")
    group.add_argument("--timeout", type=seconds, default="5m", metavar="TIME", help="for one request")
    group.add_argument("--budget", type=seconds, default="30m", metavar="TIME", help="for all of it; 90s, 10m, 2h")
    group.add_argument("--max-requests", type=count, default=20_000, help="for all of it")


def _plan_flags(parser: Parser, levels: str) -> None:
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--levels",
        type=_numbers,
        default=levels,
        metavar="LIST",
        help="0 exactness, 1 likelihood, 2 needles, 3 answers, 4 critical values",
    )
    group.add_argument("--lengths", type=_lengths, default="1K,4K,16K", metavar="LIST", help="tokens of the documents")
    group.add_argument("--documents", type=count, default=8, help="of each length, at most; fewer where that decides")
    group.add_argument(
        "--style",
        choices=("plain", "instructed"),
        help="plain: document and question alone; instructed: with what a general model must be told. "
        "default: plain for the bundled readers",
    )
    group.add_argument("--seed", type=whole, default=0, help="of the documents")
    group.add_argument(
        "--asks",
        type=Path,
        metavar="FILE",
        help="your own prompts with references besides: JSON lines with messages or prompt, and expected "
        "(as `longread bench workload --output` writes them)",
    )


def _profile_flag(parser: Parser) -> None:
    parser.add_argument(
        "--profile",
        default="lossless",
        metavar="NAME",
        help="lossless, fp8-class, int4-class or a .toml file; `longread gate profiles` prints the limits",
    )


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,3})?)(s|m|min|h)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is no time; write 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2] or ""]


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d(,\d)*", text):
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is no list like 0,2,4")
    return tuple(int(part) for part in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))


def _settings(args: argparse.Namespace) -> "Settings":
    from longread.measure.gate.documents import read_own
    from longread.measure.gate.run import PRESSURE_TOKENS, Settings

    return Settings(
        base_url=args.base_url,
        model=args.model,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY") or None,
        lengths=args.lengths,
        documents=args.documents,
        levels=args.levels,
        style=args.style,
        seed=args.seed,
        seconds=args.budget,
        max_requests=args.max_requests,
        timeout=args.timeout,
        concurrency=args.concurrency,
        own=None if args.asks is None else read_own(args.asks),
        pressure_tokens=getattr(args, "pressure_tokens", PRESSURE_TOKENS),
    )


def _writable(path: Path | None) -> None:
    """Before an hour's work, not after it."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"-o {path}: cannot be written there; name a file in a folder that exists")


def run_base(args: argparse.Namespace) -> int:
    _writable(args.output)
    settings = _settings(args)
    from longread.measure.gate import command

    return command.base(settings, args.like, args.output)


def run_gate(args: argparse.Namespace) -> int:
    _writable(args.output)
    settings = _settings(args)
    from longread.measure.gate import command

    return command.run(settings, args.profile, args.base, args.output, args.all)


def run_compare(args: argparse.Namespace) -> int:
    _writable(args.output)
    from longread.measure.gate import command

    return command.compare(args.base, args.candidate, args.profile, args.output, args.all)


def run_profiles(args: argparse.Namespace) -> int:
    from longread.measure.gate import command

    return command.profiles(args.own)
