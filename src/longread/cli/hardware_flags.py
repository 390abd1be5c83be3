"""``longread plan``'s options for other hardware: machine, load, targets, what is fixed, and what is written.

Knows: how values are written on a command line. Must not know: what a plan is.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import UsageError, count
from longread.spec.config import parse_bytes, parse_slo
from longread.spec.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _ActionsContainer

ENGINES = ("longread", "vllm", "sglang")
TARGETS = ("longread", "vllm", "sglang", "compose", "systemd")
TOP = 6
LOAD = ("osl", "prefix", "concurrency", "slo", "tier")
FIXED = ("tp", "pp", "cp", "dp", "ep", "replicas", "experts", "kv_cache_dtype", "gpu_memory_utilization")
OUTPUT = ("engine", "top", "json", "html", "emit", "calibrate")
LAUNCH = ("model_path", "host", "port", "engine_version", "nodes", "interface")
# Options of this machine's own engine that say nothing about other hardware.
_MINE = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "host_cache_size")
_HERE = ("max_num_seqs", "kv_cache_memory_bytes", "num_gpu_blocks_override")


def add_hardware_flags(parser: "_ActionsContainer") -> None:
    machine = parser.add_argument_group("other hardware")
    machine.add_argument(
        "--hardware", metavar="MACHINE", help="8xH20-96, 2x8xH200 (two nodes), cpu, or a TOML file of `longread probe`"
    )
    machine.add_argument("--engine", type=engines, metavar="NAMES", help=f"of {', '.join(ENGINES)}; default: all")
    load = parser.add_argument_group("load (with --hardware)")
    load.add_argument("--isl", type=count, metavar="N", help="tokens of a prompt; 512K is 524288")
    load.add_argument("--osl", type=count, metavar="N", help="tokens of an answer; default: 512")
    load.add_argument("--prefix", type=share, metavar="SHARE", help="of the prompt that was read before, 0 to 1")
    load.add_argument("--concurrency", type=count, metavar="N", help="requests in flight at once; default: 1")
    load.add_argument("--slo", type=slo, metavar="TARGETS", help="ttft=2s,tpot=50ms: means at that concurrency")
    load.add_argument("--tier", choices=("device", "host", "disk"), help="where what was read before lies")
    fixed = parser.add_argument_group("fix what is searched (with --hardware)")
    for name, words in (
        ("tp", "tensor parallel cards"),
        ("pp", "pipeline stages"),
        ("cp", "context parallel cards"),
        ("dp", "attention data parallel groups inside tp"),
        ("replicas", "whole copies"),
    ):
        fixed.add_argument(f"--{name}", type=count, metavar="N", help=words)
    fixed.add_argument("--ep", action=argparse.BooleanOptionalAction, help="routed experts whole on cards")
    fixed.add_argument("--experts", choices=("native", "fp8", "int4", "bf16"), help="type of routed experts in memory")
    fixed.add_argument("--kv-cache-dtype", metavar="TYPE", help="bfloat16, fp8, fp8_ds_mla, ...")
    fixed.add_argument("--gpu-memory-utilization", type=some, metavar="SHARE", help="of a card's memory; default: 0.92")
    output = parser.add_argument_group("output (with --hardware)")
    output.add_argument("--top", type=count, metavar="N", help=f"ranked deployments to show; default: {TOP}")
    output.add_argument("--json", action="store_true", help="print one JSON document (schema longread.plan/1) only")
    output.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with plots")
    output.add_argument("--emit", choices=TARGETS, help="print only the command or file that starts the best plan")
    output.add_argument(
        "--calibrate", type=Path, nargs="+", metavar="FILE", help="results of `longread bench` to learn from"
    )
    output.add_argument("--published", action="store_true", help="published runs against their predictions, and stop")
    add_launch_flags(parser)


def add_launch_flags(parser: "_ActionsContainer") -> None:
    launch = parser.add_argument_group("what --emit has to know")
    launch.add_argument(
        "--model-path", metavar="PATH|REPO", help="what the engine loads; default: DeepSeek's own repository"
    )
    launch.add_argument("--host", metavar="ADDRESS", help="where it answers; default: 127.0.0.1")
    launch.add_argument("--port", type=count, metavar="N", help="of the first replica; default: 8000")
    launch.add_argument("--engine-version", metavar="X.Y.Z", help="default: the newest that is known")
    launch.add_argument("--nodes", metavar="NAMES", help="addresses of the machines, the head first: node0,node1")
    launch.add_argument("--interface", metavar="NAME", help="network interface between the machines")


def refuse_beside_published(args: argparse.Namespace) -> None:
    """Raises UsageError: the table of published runs is one, whatever else is given."""
    if args.model is not None:
        raise UsageError(f"--published is a table of all runs; leave {args.model[:80]!r} out")
    for name in (*_MINE, "layers", "hardware", "isl", *LOAD, *FIXED, *OUTPUT, *LAUNCH):
        if name != "json" and getattr(args, name) not in (None, False):
            raise UsageError(f"--published stands alone or with --json; leave --{name.replace('_', '-')} out")


def refuse_pairs(args: argparse.Namespace) -> None:
    """Raises UsageError for options of which one would be ignored beside the other."""
    if args.json and args.emit is not None:
        raise UsageError("--json and --emit both print; give one of them")
    if args.top is not None and (args.json or args.emit is not None or args.isl is None):
        other = "--json has all" if args.json else "--emit prints one" if args.emit else "without --isl there are none"
        raise UsageError(f"--top counts ranked deployments on the screen; {other}")
    if args.emit is None:
        for name in LAUNCH:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --emit (one of {', '.join(TARGETS)})")
    if args.emit in ENGINES and args.engine is not None and args.emit not in args.engine:
        raise UsageError(f"--emit {args.emit}, but --engine {','.join(args.engine)} leaves it out")
    if args.model_path is None and args.emit is not None and args.experts in ("fp8", "int4", "bf16"):
        raise UsageError(f"--experts {args.experts} with --emit: name the converted checkpoint with --model-path")
    if args.tier is not None and not args.prefix:
        raise UsageError(f"--tier {args.tier} says where a read prefix lies; give its share: --prefix 0.98")


def refuse_without_hardware(args: argparse.Namespace) -> None:
    """Raises UsageError for an option that needs --hardware."""
    for name in ("isl", *LOAD, *FIXED, *OUTPUT, *LAUNCH):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} needs --hardware (such as 8xH20-96)")


def refuse_here(args: argparse.Namespace) -> None:
    """Raises UsageError for an option that is about this machine's engine, and for a load without its prompt."""
    for name in _HERE:
        if getattr(args, name) is not None:
            other = "--concurrency" if name == "max_num_seqs" else "--gpu-memory-utilization"
            raise UsageError(f"--{name.replace('_', '-')} is for this machine; with --hardware use {other}")
    if args.dtype != "auto":
        raise UsageError("--dtype is for this machine; with --hardware use --experts and --kv-cache-dtype")
    if args.isl is None:
        for name in LOAD:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is part of a load; give the prompt too: --isl 131072")


def engines(text: str) -> tuple[str, ...]:
    """Names separated by commas, in the order given."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is no engine; choose of {', '.join(ENGINES)}")
    return names


def share(text: str) -> float:
    """0.98 or 98%."""
    match = re.fullmatch(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(%?)", text.strip()[:40])
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share; write 0.98 or 98%")
    value = float(match[1]) / (100 if match[2] else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is outside 0..1")
    return value


def some(text: str) -> float:
    """A share above 0."""
    value = share(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text[:40]} is nothing; write above 0, such as 0.92")
    return value


def slo(text: str) -> dict[str, float]:
    """Targets in seconds by name."""
    try:
        targets = parse_slo("targets", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return {name: value for name in ("ttft", "tpot") if (value := getattr(targets, name)) is not None}


def size(name: str, text: str | None) -> int | None:
    """Bytes of an option that may be missing. Raises ConfigError."""
    return None if text is None else parse_bytes(name, text)


def tokens(name: str, text: str | None) -> int | None:
    """Tokens of an option that may be missing. Raises ConfigError."""
    if text is None:
        return None
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}") from None
