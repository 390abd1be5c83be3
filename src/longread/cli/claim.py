"""``longread claim``: whether what somebody says of speed or capacity can be true.

Exit codes: 0 plausible or conservative; 3 true only under conditions; 4 impossible; 2 the claim cannot be read; 1 it
failed while running. Of several models or machines that the words fit, the one that suits the claim best counts.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, count
from longread.spec.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.plan.claims.claim import Claim

_OPTIONS = ("isl", "osl", "concurrency", "suffix", "tier", "engine")


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="judge what somebody claims of speed or capacity",
        description="Hold a claim against what physics allows and what engines reach: a verdict (impossible, only if "
        "..., plausible, conservative), what decides it, and what would have to be granted. With --full also every "
        "reading, the arithmetic, and the measurement that settles it. English or Chinese, or options, or both. Of "
        "lengths, 512K is 524,288 and 512k is 512,000, as in all options (and in vLLM's).",
        epilog="Exit code: 0 plausible or conservative, 3 only under conditions, 4 impossible, 2 not understood.",
    )
    parser.add_argument(
        "text", nargs="?", metavar="CLAIM", help='such as "512K first token in 168 ms, 100 concurrent, 8xH20, V4-Flash"'
    )
    parser.add_argument("--model", metavar="NAME", help="a public model, such as V3.2; V4 means Flash and Pro")
    parser.add_argument("--hardware", metavar="MACHINE", help="such as 8xH20-96, 2x8xH200, or a TOML file")
    parser.add_argument("--isl", type=count, help="tokens of the prompt")
    parser.add_argument("--osl", type=count, help="tokens of the answer")
    parser.add_argument("--ttft", metavar="TIME", help="claimed time to the first token, such as 168ms")
    parser.add_argument("--tpot", metavar="TIME", help="claimed time per output token, such as 45ms")
    parser.add_argument("--throughput", metavar="RATE", help="claimed tokens/s: 20k, 30/user, 700/gpu, 16k/input")
    parser.add_argument("--concurrency", type=count, help="requests at once")
    parser.add_argument("--prefix", type=float, metavar="SHARE", help="share of the prompt that was read before, 0..1")
    parser.add_argument("--suffix", type=count, metavar="TOKENS", help="tokens of the prompt that were not")
    parser.add_argument("--state", choices=("cold", "warm"), help="judge only this reading")
    parser.add_argument("--tier", choices=("device", "host", "disk"), help="where the read part lies")
    parser.add_argument("--engine", choices=("vllm", "sglang", "longread"), help="which engine is claimed to do it")
    parser.add_argument("--percentile", metavar="P", help="which one is claimed, such as p99")
    parser.add_argument(
        "--full", action="store_true", help="every reading with its arithmetic, what would settle it, and what to ask"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from longread.plan.claims.judge import judge
    from longread.plan.claims.report import EXIT, WIDTH, claim_document, claim_text
    from longread.plan.claims.short import claim_short

    verdict = judge(claim_from(args))
    if args.json:
        print(json.dumps(claim_document(verdict), indent=2, ensure_ascii=False))
    else:
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        print(claim_text(verdict, width) if args.full else claim_short(verdict, width))
    return EXIT[verdict.outcome]


def claim_from(args: argparse.Namespace) -> "Claim":
    """Text and options together. Raises ConfigError where they differ, or where neither says what is needed."""
    from longread.plan.claims.claim import Claim
    from longread.plan.claims.text import parse_percentile, read_words, with_models

    claim = read_words(args.text) if args.text is not None else Claim((), ())
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    given |= {"state": args.state} if args.state else {}
    given |= {"cached": args.prefix} if args.prefix is not None else {}
    given |= {"percentile": parse_percentile(args.percentile)} if args.percentile is not None else {}
    given |= _measured(args) | _named(args)
    for name, value in given.items():
        said = getattr(claim, name)
        if said not in (None, ()) and said != value and not (name == "hardware" and all(one in said for one in value)):
            raise ConfigError(f"--{_option(name)} differs from what the claim's text says; drop one of them")
    claim = replace(claim, **given)
    if not claim.hardware:
        raise ConfigError("the claim names no hardware; add such as 8xH20 to it, or --hardware 8xH20-96")
    return with_models(claim)


def _option(name: str) -> str:
    return {"cached": "prefix", "specs": "model", "rate": "throughput"}.get(name, name)


def _measured(args: argparse.Namespace) -> dict[str, object]:
    from longread.plan.claims.text import parse_rate, parse_time

    found: dict[str, object] = {
        name: parse_time(name, getattr(args, name)) for name in ("ttft", "tpot") if getattr(args, name)
    }
    if args.throughput:
        found["rate"] = parse_rate("throughput", args.throughput)
    return found


def _named(args: argparse.Namespace) -> dict[str, object]:
    from longread.plan.claims.names import machines_named, models_named

    found: dict[str, object] = {}
    if args.model:
        found["specs"] = models_named(args.model)
    if args.hardware:
        found["hardware"] = machines_named(args.hardware)
    return found
