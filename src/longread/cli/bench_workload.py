"""``longread bench workload``: see a workload, or write it as JSON lines.

Knows: the arguments and what is printed. Must not know: how anything is made.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import tokenizer_of
from longread.cli.parser import Parser, UsageError, count, shorten, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Callable

    from longread.measure.workloads import Ask

SHOWN = 240  # characters of a prompt's end
FLAGS = ("seed", "num_prompts", "isl", "osl", "tokenizer")


def add_parser(kinds: "_SubParsersAction[Parser]") -> None:
    parser = kinds.add_parser(
        "workload",
        help="show what a workload asks, or write it as JSON lines",
        description="Show a workload's first requests with the answers that are right, or write all of it as JSON "
        "lines: for bench serve's custom dataset, or for vLLM's. Without a name: the workloads and their options.",
        epilog="Lengths: N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or list:N,N,… "
        "Example: longread bench workload documents --isl 64K --dataset-option questions=4 --output f.jsonl",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="documents, chat, agent, …; none: list them all")
    parser.add_argument(
        "--dataset-option",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="of that workload, as in bench serve",
    )
    parser.add_argument("--seed", metavar="N", help="what everything is drawn from")
    parser.add_argument("--num-prompts", metavar="N", help="how many requests")
    parser.add_argument("--isl", metavar="LENGTHS", help="tokens of a prompt, or a distribution of them")
    parser.add_argument("--osl", metavar="LENGTHS", help="tokens of an answer at most, or a distribution")
    parser.add_argument(
        "--tokenizer",
        type=tokenizer_of,
        metavar="PATH",
        help="folder, tokenizer.json or bundled model: exact lengths",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all requests as JSON lines")
    parser.add_argument(
        "--format", choices=("longread", "vllm"), default="longread", help="vllm: prompt and output_tokens only"
    )
    parser.add_argument("--sample", type=whole, default=2, metavar="N", help="requests shown")
    parser.add_argument("--show", type=count, default=SHOWN, metavar="N", help="characters shown of each prompt's end")
    parser.add_argument("--json", action="store_true", help="print the workload's provenance as JSON only")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        return _list()
    from longread.measure.workloads import build
    from longread.measure.workloads.lines import write

    made = build(args.name, _given(args))
    if args.output is not None:
        size = write(args.output, made.asks, args.format, _progress(len(made.asks)) if sys.stderr.isatty() else None)
        print(f"{args.output}: {len(made.asks):,} requests, {size:,} bytes", file=sys.stderr)
    if args.json:
        print(json.dumps(made.described, ensure_ascii=False, indent=2))
        return 0
    told = made.described
    print(f"{made.name}: {len(made.asks):,} requests, seed {made.seed}, generator {told['generator']}")
    print(f"lengths by {told['lengths_by']}; sha256 of the first {told['prompts_hashed']}: {told['prompts_sha256']}")
    for index in range(min(args.sample, len(made.asks))):
        print(*_shown(made.asks[index], args.show), sep="\n")
    return 0


def _given(args: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = {}
    for word in args.dataset_option:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise UsageError(f"{shorten(repr(word))}: an option of a workload is written NAME=VALUE")
        found[name.replace("-", "_")] = value
    for name in FLAGS:
        value = getattr(args, name)
        if value is not None and name in found:
            raise UsageError(f"--{name.replace('_', '-')} and {name}= both set it; give one of them")
        if value is not None:
            found[name] = str(value)
    return found


def _list() -> int:
    from longread.measure.workloads import KINDS

    for name, kind in KINDS.items():
        print(f"{name}: {kind.about}")
        for option in kind.options:
            told = "" if option.default is None else f" (default: {str(option.default).removesuffix('.0')})"
            print(f"    {option.name:14} {option.help}{told}")
    return 0


def _shown(ask: "Ask", characters: int) -> list[str]:
    """A request's head, the end of its prompt, and the answer that is right."""
    length = f"{ask.isl:,} tokens in" if ask.isl is not None else "about as many tokens in as asked for"
    lines = [f"\n{ask.key} ({ask.kind}): {length}, {ask.max_tokens:,} out at most"]
    if ask.messages is not None:
        said = ask.messages[-1]
        text = f"{said['role']}: … {str(said.get('content') or '')[-characters:]}"
    else:
        text = str(ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt or ())[-16:])[-characters:]
    lines += [f"    {line}" for line in text.splitlines()]
    if ask.expected is not None:
        lines.append(f"  right: {ask.expected.kind}: {shorten(ask.expected.text)}")
    return lines


def _progress(of: int) -> "Callable[[int], None]":
    def tell(done: int) -> None:
        print(f"\r{done:,} of {of:,}", end="\n" if done == of else "", file=sys.stderr, flush=True)

    return tell
