"""``longread simulate``: serve a load on a virtual clock with the planner's times, and say who waits how long.

Knows: the options. Must not know: how anything is simulated.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.hardware_flags import share, slo, tokens
from longread.cli.parser import Parser, UsageError, count, whole
from longread.spec.config import Slo, step_target
from longread.spec.errors import ConfigError
from longread.spec.step_target import StepTarget

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.engine.virtual import Limits
    from longread.measure.arrivals import Arrival, Kind
    from longread.measure.planned_cost import PlannedCost
    from longread.measure.simulate import Simulation
    from longread.measure.simulation_report import Setting
    from longread.plan.deployment import Deployment

NUM_PROMPTS, OSL = 200, 512
GENERATED = ("rate", "load", "isl", "osl", "mix", "prefix", "num_prompts")
_CLASS = re.compile(r"([^\s=:,]{1,40})=([^:,]+):([^:,]+):([^:,]+)(?::([^:,]+))?")


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="serve a load on a virtual clock: who would wait how long",
        description="Run Longread's own schedule and cache bookkeeping on a virtual clock, each step as long as the "
        "planner predicts it for the model on the hardware, hundreds to thousands of times faster than real time. The "
        "load is a Mooncake trace (JSON lines with timestamp, input_length, output_length, hash_ids), or drawn.",
        epilog="Classes of --mix: NAME=SHARE:ISL:OSL[:PRIORITY], such as short=90%:8K:256,long=10%:256K:512.",
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE.jsonl", help="replay this")
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="a checkpoint folder or a public model: V4-Flash"
    )
    parser.add_argument("--hardware", metavar="MACHINE", required=True, help="2xH20-96, 8xH200, or a TOML file")
    _add_load(parser)
    engine = parser.add_argument_group("engine (as in serve; default: chosen by the planner)")
    engine.add_argument("--max-num-seqs", type=count, metavar="N", help="requests worked on at once")
    engine.add_argument("--max-num-batched-tokens", metavar="N", help="tokens of one step")
    engine.add_argument("--max-model-len", metavar="N", help="tokens of prompt and output together")
    engine.add_argument("--num-gpu-blocks-override", type=count, metavar="N", help="pages of 256 tokens in the cache")
    for part, words in (("tp", "tensor parallel cards"), ("pp", "pipeline stages"), ("cp", "context parallel cards")):
        engine.add_argument(f"--{part}", type=count, metavar="N", help=words)
    engine.add_argument(
        "--slo",
        type=slo,
        metavar="TARGETS",
        help="ttft=2s,tpot=50ms: steps are kept within, and who meets both is counted",
    )
    engine.add_argument(
        "--step-target", metavar="TIME", default="auto", help="what a step may take; none: any; default: auto"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON document (longread.simulation/1) only")
    output.add_argument("--requests", type=Path, metavar="FILE", help="write a JSON line a request")
    output.add_argument("--write-trace", type=Path, metavar="FILE", help="write the load as a Mooncake trace, too")
    parser.set_defaults(run=run, parser=parser)


def _add_load(parser: Parser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=_positive, metavar="R", help="requests/s that arrive, inf: all at once")
    load.add_argument("--load", type=_load_share, metavar="SHARE", help="rate as a share of what is sustained: 80%%")
    load.add_argument("--isl", type=count, metavar="N", help="tokens of a prompt; 512K is 524288")
    load.add_argument("--osl", type=count, metavar="N", help=f"tokens of an answer; default: {OSL}")
    load.add_argument("--mix", type=mix, metavar="CLASSES", help="several classes instead; see below")
    load.add_argument("--prefix", type=share, metavar="SHARE", help="of each prompt that its class shares, 0 to 1")
    load.add_argument("--documents", type=count, default=1, metavar="N", help="different shared beginnings a class")
    load.add_argument(
        "--range-ratio", type=share, default=0.0, metavar="SHARE", help="lengths vary evenly that much up and down"
    )
    load.add_argument("--burstiness", type=_positive, default=1.0, metavar="B", help="1 is Poisson, less is burstier")
    load.add_argument(
        "--num-prompts", type=count, metavar="N", help=f"requests; default: {NUM_PROMPTS}, or the trace's"
    )
    load.add_argument("--speedup", type=_positive, default=1.0, metavar="S", help="replay a trace that much faster")
    load.add_argument("--seed", type=whole, default=0, help="of what is drawn")


def run(args: argparse.Namespace) -> int:
    """Exit 1 when not every request was served."""
    _check(args)
    from longread.measure.arrivals import write_trace
    from longread.measure.simulate import by_class, simulate
    from longread.measure.simulation_report import document, print_simulation, request_rows

    deployment, limits, cost = _engine(args)
    arrivals, words = _arrivals(args, limits, cost)
    if args.write_trace is not None:
        write_trace(args.write_trace, arrivals)
    setting = _setting(args, deployment, limits, cost, words)
    with _bar("simulate", arrivals, args.json) as report:
        simulation = simulate(arrivals, limits, cost, report=report)
    classes = by_class(simulation, setting.targets)
    if args.requests is not None:
        with args.requests.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in request_rows(simulation))
    if args.json:
        print(json.dumps(document(simulation, classes, setting), indent=1, allow_nan=False))
    else:
        from longread.plan.tables import console

        print_simulation(console(), simulation, classes, setting)
    return _code(simulation)


def _code(simulation: "Simulation") -> int:
    return 0 if all(run.error is None for run in simulation.runs) else 1


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for options that contradict each other, ConfigError for files that cannot be written."""
    for path in (args.requests, args.write_trace):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ConfigError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    given = [name for name in GENERATED if getattr(args, name) is not None and name != "num_prompts"]
    if args.trace is not None:
        if given:
            raise UsageError(f"--{given[0]} is of a drawn load, and {args.trace} brings its own")
        return
    if args.speedup != 1.0:
        raise UsageError("--speedup is of a trace; give a TRACE.jsonl, or another --rate")
    if (args.rate is None) == (args.load is None):
        raise UsageError(
            "give a TRACE.jsonl, or a load: either --rate (requests/s) or --load (80%), with --isl or --mix"
        )
    if (args.isl is None) == (args.mix is None):
        raise UsageError("give either --isl (one class) or --mix (several)")
    if args.mix is not None and args.osl is not None:
        raise UsageError("--osl is of one class; --mix says it for each: NAME=SHARE:ISL:OSL")


def _engine(args: argparse.Namespace) -> "tuple[Deployment, Limits, PlannedCost]":
    from longread.cli.plan import find_spec  # the planner's tables: only here
    from longread.measure.planned_cost import PlannedCost, planned_limits, planned_step_target
    from longread.plan.cards import parse_hardware
    from longread.plan.space import Fixed
    from longread.plan.survey import survey

    fixed = Fixed(
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        replicas=1 if args.tp or args.pp or args.cp else None,
        chunk=tokens("max_num_batched_tokens", args.max_num_batched_tokens),
        context=tokens("max_model_len", args.max_model_len),
    )
    found = survey(find_spec(args.model), parse_hardware(args.hardware), engines=("longread",), fixed=fixed)
    d = found.deployment
    if not found.fits:
        raise ConfigError(f"{d.spec.label} does not fit on {d.hardware.label}: longread plan says what is over")
    if args.max_num_seqs is not None:
        d = replace(d, max_num_seqs=args.max_num_seqs)
    if d.chunk < d.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={d.chunk} is below max_num_seqs={d.max_num_seqs}: each decodes a token"
        )
    limits, cost = planned_limits(d, pages=args.num_gpu_blocks_override), PlannedCost(d)
    given = step_target("step_target", args.step_target)
    target = planned_step_target(cost, limits) if given == "auto" else StepTarget(given, "as given")
    return d, replace(limits, slo=Slo(**args.slo) if args.slo else None, step_target=target), cost


def _arrivals(args: argparse.Namespace, limits: "Limits", cost: "PlannedCost") -> "tuple[list[Arrival], str]":
    """The load, and it in words."""
    from longread.measure.arrivals import Mix, generate, read_trace
    from longread.measure.simulate import sustained

    if args.trace is not None:
        speed = f", {args.speedup:g} times faster" if args.speedup != 1 else ""
        read = read_trace(args.trace, speedup=args.speedup, limit=args.num_prompts)
        return read, f"{len(read):,} requests of {args.trace.name}{speed}"
    kinds = tuple(
        replace(kind, prefix=args.prefix or 0.0, documents=args.documents, spread=args.range_ratio)
        for kind in args.mix or _single(args)
    )
    number, infinite = args.num_prompts or NUM_PROMPTS, float("inf")
    rate = args.rate
    words = ""
    if args.load is not None:
        together = generate(Mix(kinds, infinite, number, args.seed))
        with _bar("simulate all at once", together, args.json) as report:
            most = sustained(together, limits, cost, report=report)
        if not most:
            raise ConfigError("--load: none of these requests can be served here; see --max-model-len")
        rate, words = args.load * most, f" ({args.load:.0%} of the {most:.3g}/s that are sustained)"
    told = ", ".join(f"{kind.share:.0%} {kind.name} {kind.isl:,} + {kind.osl:,}" for kind in kinds)
    drawn = Mix(kinds, rate, number, args.seed, args.burstiness)
    pace = f"at {rate:.3g}/s{words}" if rate < infinite else "all at once"
    return generate(drawn), f"{number:,} requests {pace}: {told} tokens, seed {args.seed}"


def _single(args: argparse.Namespace) -> "tuple[Kind, ...]":
    from longread.measure.arrivals import Kind, kind_of

    return (Kind(kind_of(args.isl), 1.0, args.isl, args.osl or OSL),)


def _setting(args: argparse.Namespace, d: "Deployment", limits: "Limits", cost: "PlannedCost", words: str) -> "Setting":
    from longread.measure.result import command_line, this_commit
    from longread.measure.simulation_report import Setting

    seed = None if args.trace is not None else args.seed
    return Setting(d, limits, words, seed, cost.scales, args.slo or {}, command_line(), this_commit())


def _bar(
    label: str, arrivals: "Sequence[Arrival]", quiet: bool
) -> AbstractContextManager[Callable[[int], None] | None]:
    from longread.cli.progress import tokens_bar  # rich

    total = sum(each.isl + each.osl for each in arrivals)
    return nullcontext(None) if quiet else tokens_bar(label, total)


def mix(text: str) -> "tuple[Kind, ...]":
    """Classes of ``--mix``; shares must sum to 100 %."""
    from longread.measure.arrivals import Kind

    kinds = []
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part[:60]!r} is no class; write NAME=SHARE:ISL:OSL, short=90%:8K:256")
        priority = whole(match[5]) if match[5] is not None else 0
        kinds.append(Kind(match[1], share(match[2]), count(match[3]), count(match[4]), priority=priority))
    return tuple(kinds)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


def _load_share(text: str) -> float:
    """0.8 or 80%; above 100% is overload."""
    percent = text.strip().endswith("%")
    value = _positive(text.strip().rstrip("%"))
    return value / 100 if percent else value
