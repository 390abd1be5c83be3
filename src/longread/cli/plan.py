"""``longread plan``: what a checkpoint or a public release is, what it takes on this machine or on other hardware.

Knows: the options. Must not know: how plans are made (``planning`` calls the planner where hardware is named).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate, spec_of
from longread.cli.describe import config_lines
from longread.cli.engine_flags import add_memory_flags, options_from
from longread.cli.hardware_flags import add_hardware_flags, refuse_beside_published, refuse_without_hardware
from longread.cli.parser import Parser, UsageError, nearest
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec import count
from longread.spec.config import ResolvedConfig
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.errors import ConfigError, LongreadError
from longread.spec.model import ModelSpec
from longread.spec.reduced import reduced
from longread.spec.releases import release

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="say what a model is and what it takes, here or on other hardware",
        description="Say what a model is (parameters, bytes on disk, cache bytes a token) and how its memory would be "
        "laid out on this machine. With --hardware: memory and capacity there; with a load as well (--isl): ranked "
        "deployments with predicted times. Reads config.json only.",
    )
    parser.add_argument(
        "model",
        metavar="CHECKPOINT|NAME",
        nargs="?",
        help=f"a checkpoint folder or config.json, a bundled model ({', '.join(BUNDLED)}), or a public one such as "
        "V4-Flash",
    )
    parser.add_argument(
        "--layers", metavar="N", help="plan the first N layers only; 1+3: one dense and three MoE layers"
    )
    add_memory_flags(parser)
    add_hardware_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Exit 1 when it does not fit; what the model is gets printed all the same."""
    if args.published:
        refuse_beside_published(args)
        from longread.cli.planning import run_published  # start-up time: searches and reports only when asked for

        return run_published(args)
    if args.model is None and args.calibrate is not None and args.hardware is None:
        if args.layers is not None:
            raise UsageError("--calibrate FILE alone has no model whose layers could be counted; leave --layers out")
        from longread.cli.planning import run_calibration  # start-up time, as above

        return run_calibration(args)
    if args.model is None:
        raise UsageError(f"the following arguments are required: CHECKPOINT|NAME; see {args.parser.prog} --help")
    spec = find_spec(args.model) if args.layers is None else reduced(find_spec(args.model), args.layers)
    if args.hardware is not None:
        from longread.cli.planning import run_hardware  # start-up time, as above

        return run_hardware(args, spec)
    refuse_without_hardware(args)
    print("\n".join(spec_lines(spec)))
    options = options_from(args, args.model)
    try:
        resolved = resolve(options, spec, probe_machine())
    except LongreadError as error:
        print(f"on this machine: does not run: {error}", flush=True)
        return 1
    print("on this machine:")
    print("\n".join(memory_lines(resolved)))
    return 0


def find_spec(name: str) -> ModelSpec:
    """Of a checkpoint folder or a config.json when there is one, else of a bundled model, else of a release.

    Raises ConfigError or CheckpointError.
    """
    if not name:
        raise ConfigError("the model is empty; give a checkpoint folder, or a public model such as V4-Flash")
    if name in BUNDLED or Path(name).is_dir():
        return spec_of(locate(name))
    if Path(name).is_file():
        return spec_from_config(read_config(Path(name)))
    if Path(name).exists():
        raise ConfigError(f"{name}: neither a folder nor a file; give a checkpoint folder or a config.json")
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"{name}: no such folder; give a checkpoint folder, or a public model such as V4-Flash")
    near = nearest(name, BUNDLED)
    if near:
        raise ConfigError(f"{name!r} is not a known model{near}")
    try:
        return release(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; bundled: {', '.join(BUNDLED)}") from None


def spec_lines(spec: ModelSpec) -> list[str]:
    kv = count.kv_bytes_per_token(spec)
    lines = [
        f"{spec.label} ({spec.family}): {spec.layers} layers, vocabulary {spec.vocab:,}, {spec.max_position:,} tokens",
        f"  parameters         {count.parameters(spec):>22,}  ({count.active_parameters(spec):,} active a token)",
        f"  checkpoint bytes   {count.checkpoint_bytes(spec):>22,}  (MTP and scales included)",
        f"  KV bytes a token   {sum(kv.values()):>22,.1f}  in bfloat16: "
        + ", ".join(f"{name} {value:,.1f}" for name, value in kv.items()),
    ]
    fixed = count.fixed_bytes_per_request(spec)
    if fixed:
        lines.append(f"  fixed bytes a request {sum(fixed.values()):>19,}  in bfloat16, compressor state in float32")
    lines.append(
        "  GFLOP a token      "
        + ", ".join(f"{_giga(count.flops_per_token(spec, n))} at {n // 1024}K" for n in (8192, 131072))
    )
    return lines


def _giga(value: float) -> str:
    """In 10^9, with figures enough to say something of a small model, too."""
    giga = value / 1e9
    return f"{giga:,.1f}" if giga >= 1 else f"{giga:.3f}"


def memory_lines(resolved: ResolvedConfig) -> list[str]:
    plan = resolved.memory
    parts = {
        "weights": plan.weights,
        "KV pages": plan.kv_pages,
        "KV slots": plan.kv_slots,
        "KV snapshots": plan.kv_snapshots,
        "workspace (at most)": plan.workspace,
        "logits (at most)": plan.logits,
        "program": plan.runtime,
        **({"host cache": plan.host_cache} if plan.host_cache else {}),
        **({"store's buffers": plan.store_buffers} if plan.store_buffers else {}),
        "total": plan.total,
    }
    return [*config_lines(resolved), *(f"  {name:<20} {value / 2**20:>14,.1f} MiB" for name, value in parts.items())]
