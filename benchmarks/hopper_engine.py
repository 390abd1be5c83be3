"""The engine on one GPU at real widths with random weights: [SCENARIO ...] [--model NAME] [--layers N] [--output FILE].

In one process, one engine, in the order given: the first requests of all shapes, cold first tokens and the time of each
prefill chunk, warm first tokens from the device, from pinned main memory and from a disk, decode at several batches and
contexts, many distinct long prompts that must all be found again, and the gaps of a running decode while a long prompt
is read. ``profile`` adds each kernel's share of a chunk. Prompts are random ids. Device copy, host link and disk are
measured in the same run; tiers below the device are hopper_tiers.py's. Memory is told as planned and as torch counted
it; kernels that are compiled once the engine is ready are counted.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hopper_driver import Driver, prompt
from hopper_tiers import disk, host

from longread.engine.load import load_engine
from longread.measure.result import this_commit, this_machine
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, from_mapping
from longread.spec.errors import ConfigError, LongreadError
from longread.spec.reduced import random_spec
from longread.spec.state import PAGE_TOKENS, state_groups

KILO = 1024
ANSWER = 8  # tokens of an answer
FIRST_LENGTHS = (1, 2, 15, 17, 100, 255, 257, 511, 513, 700, 1100, 2047, 2049, 5000, 8191, 8193, 12000)
FIRST_SUFFIXES = (1, 33, 200, 513, 3000)
FIRST_BATCHES = (1, 2, 3, 8)


def cold(driver: Driver, args: argparse.Namespace) -> Any:
    """First tokens of fresh prompts; the shortest first once to warm up."""
    driver.ttft(prompt(args.lengths[0], 1))
    return [driver.ttft(prompt(length, 10 + i)) for i, length in enumerate(args.lengths)]


def warm(driver: Driver, args: argparse.Namespace) -> Any:
    """The prompts of ``cold`` once more with 32 other tokens behind: found on the device."""
    rows = []
    for i, length in enumerate(args.lengths):
        ids = prompt(length, 10 + i)
        rows += [driver.ttft([*ids, *prompt(32, 1000 * length + n)]) for n in range(3)]
    return rows


def first(driver: Driver, args: argparse.Namespace) -> Any:
    """Requests of all shapes, each twice with other tokens: the first of a shape takes what the second does, if nothing
    is prepared while the engine serves. To be run first.
    """
    rows: list[dict[str, Any]] = []
    room = driver.engine.info.max_model_len - ANSWER

    def twice(name: str, run: Callable[[int], object]) -> None:
        worst = []
        for turn in range(2):
            driver.steps = []
            run(10_000 * (turn + 1))
            worst.append(max(driver.steps, default=0.0))
        rows.append({"shape": name, "longest_step_s": worst})

    def together(batch: int, seed: int, **sampled: Any) -> None:
        for n in range(batch):
            driver.submit(prompt(40 + 7 * n, seed + n), ANSWER, **sampled)
        driver.run()

    def beside(seed: int) -> None:
        """A long prompt comes while another one is answered."""
        runner = driver.submit(prompt(50, seed), 64)
        driver.run(lambda moments: len(moments.get(runner, ())) > 4)
        driver.submit(prompt(min(9000, room), seed + 1), ANSWER)
        driver.run()

    for length in FIRST_LENGTHS:
        if length <= room:
            twice(f"prompt of {length}", lambda seed, length=length: driver.ttft(prompt(length, seed), 2))
    base = prompt(min(4096, room // 2), 9999)
    driver.ttft(base)
    for length in FIRST_SUFFIXES:
        if len(base) + length <= room:
            ask = lambda seed, length=length: driver.ttft([*base, *prompt(length, seed)], 2)  # noqa: E731
            twice(f"suffix of {length}", ask)
    for batch in FIRST_BATCHES:
        twice(f"batch of {batch}", lambda seed, batch=batch: together(batch, seed))
    twice("batch of 3, sampled", lambda seed: together(3, seed, temperature=0.7, top_p=0.9))
    twice("batch of 2, log-probabilities", lambda seed: together(2, seed, logprobs=5))
    twice("a long prompt beside a decode", beside)
    excess = sorted(((row["longest_step_s"][0] - row["longest_step_s"][1], row["shape"]) for row in rows), reverse=True)
    return {"compiled_so_far": len(args.compiled), "longest_excess_s": excess[:5], "rows": rows}


def _all_began(names: Sequence[str], moments: dict[str, list[float]]) -> bool:
    return all(moments.get(name) for name in names)


def decode(driver: Driver, args: argparse.Namespace) -> Any:
    """TPOT: the median gap of 64 tokens of requests that run side by side, once all of them do."""
    rows = []
    for batch, length, seed in args.decodes:
        prompts = [prompt(length, seed + n) for n in range(batch)]
        for ids in prompts if batch > 1 else ():  # read beforehand, so that none ends before the last one begins
            driver.ttft(ids)
        names = [driver.submit([*ids, *prompt(8, 7 + n)], 64) for n, ids in enumerate(prompts)]
        began = driver.run(partial(_all_began, names))
        moments = driver.run()
        last = max(began[name][0] for name in names)
        gaps = sorted(
            b - a
            for name in names
            for a, b in zip(moments[name], moments[name][1:], strict=False)
            if a >= last  # and so not beside a prompt
        )
        rows.append(
            {"batch": batch, "context": length, "tpot_ms": 1e3 * statistics.median(gaps), "p99_ms": 1e3 * gaps[-1]}
        )
        print(rows[-1], flush=True)
    return rows


def distinct(driver: Driver, args: argparse.Namespace) -> Any:
    """Nine prompts of 128K one after the other, then each again: where it was found."""
    length = args.distinct
    first = [driver.ttft(prompt(length, 500 + n)) for n in range(9)]
    again = [driver.ttft([*prompt(length, 500 + n), *prompt(32, 77 + n)]) for n in range(9)]
    stats, groups = driver.engine.stats(), state_groups(random_spec(args.model, args.layers), "fp8")
    page, slot = sum(g.bytes_per_page(2) for g in groups), sum(g.bytes_per_slot(2) for g in groups)
    pages, snapshots = stats.pages_cached + stats.pages_held, stats.snapshots_held
    return {
        "cold_s": [row["ttft_s"] for row in first],
        "again": again,
        "pages": pages,
        "snapshots": snapshots,
        "needed_bytes_per_token": page / PAGE_TOKENS,
        # Of all that is kept, other scenarios' prompts too: nothing else takes pages.
        "spent_bytes_per_token": (pages * page + snapshots * slot) / (pages * PAGE_TOKENS),
    }


def stall(driver: Driver, args: argparse.Namespace) -> Any:
    """Gaps of one running decode while a long prompt is read, and what reading takes beside it and by itself."""
    if args.book not in driver.cold:
        driver.ttft(prompt(args.book, 902))
    alone = driver.cold[args.book]
    short = prompt(2048, 900)
    runner = driver.submit(short, min(100_000, driver.engine.info.max_model_len - len(short)))
    driver.run(lambda moments: len(moments.get(runner, [])) >= 16)
    book = driver.submit(prompt(args.book, 901), 1)
    start = time.perf_counter()
    moments = driver.run(lambda moments: book in moments)
    seconds = time.perf_counter() - start
    driver.engine.cancel(runner)
    driver.run()
    gaps = sorted(b - a for a, b in zip(moments[runner], moments[runner][1:], strict=False))
    at = [gaps[min(len(gaps) - 1, int(len(gaps) * q))] * 1e3 for q in (0.5, 0.9, 0.99)]
    return {
        "book": args.book,
        "book_s": seconds,
        "alone_s": alone,
        "cost": seconds / alone - 1,
        "tokens_meanwhile": len(gaps),
        "gap_ms_p50_p90_p99": at,
        "worst_ms": gaps[-1] * 1e3,
    }


def profiled(driver: Driver, args: argparse.Namespace) -> Any:
    """Shares of GPU time by kernel of one cold prompt of the given length."""
    ids = prompt(args.profile, 1234)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        row = driver.ttft(ids)
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.key_averages():
        total[event.key[:90]] += event.self_device_time_total
        calls[event.key[:90]] += event.count
    whole = sum(total.values())
    table = [[name, calls[name], round(us / 1e3, 2), round(us / whole, 4)] for name, us in total.most_common(40)]
    print(f"{args.profile} tokens: {row['ttft_s']:.3f} s, GPU busy {whole / 1e6:.3f} s")
    for line in table[:30]:
        print(f"{line[3]:7.1%} {line[2]:10.2f} ms {line[1]:6} {line[0]}")
    return {"tokens": args.profile, "ttft_s": row["ttft_s"], "gpu_s": whole / 1e6, "kernels": table}


SCENARIOS = {
    "first": first,
    "cold": cold,
    "warm": warm,
    "distinct": distinct,
    "decode": decode,
    "stall": stall,
    "host": host,
    "disk": disk,
    "profile": profiled,
}


def ceilings() -> dict[str, float]:
    a = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    out = {}
    for name, work, to, source in (
        ("copy_B/s", 2 * a.numel(), b, a),
        ("host_to_device_B/s", 2**30, b[: 2**30], host),
        ("device_to_host_B/s", 2**30, host, b[: 2**30]),
    ):
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        out[name] = 5 * work / (time.perf_counter() - start)
    del a, b, host
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return out


def triples(value: str) -> list[tuple[int, int, int]]:
    """B:CONTEXT[:SEED],...; the seed of ``cold``'s prompts (10 + index) finds them in the cache."""
    rows = []
    for part in value.split(","):
        batch, context, *seed = (int(n) for n in part.split(":"))
        if batch < 1 or context < 1 or len(seed) > 1:
            raise argparse.ArgumentTypeError(f"{part!r}: write B:CONTEXT or B:CONTEXT:SEED, of at least 1")
        rows.append((batch, context, seed[0] if seed else 3000 + context))
    return rows


def scenario(name: str) -> str:
    if name not in SCENARIOS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SCENARIOS)}")
    return name


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Raises ConfigError."""
    given: dict[str, object] = {"model": args.model, "layers": args.layers}
    for option in args.option:
        name, there, value = option.partition("=")
        if not there or name in given or name in ("device", "random_weights"):
            raise ConfigError(
                f"--option {option!r}: write NAME=VALUE, each name once, and --model and --layers as such"
            )
        given[name] = {"true": True, "false": False}.get(value, value)
    return from_mapping(given | {"device": "cuda", "random_weights": True})


def check_amounts(parser: argparse.ArgumentParser, args: argparse.Namespace, longest: int) -> None:
    """Leave with 2 where a prompt is none, or longer than the engine takes with what is asked behind it."""
    room = longest - ANSWER - 64
    used = {"distinct": [args.distinct], "stall": [args.book], "profile": [args.profile]}
    used |= dict.fromkeys(("cold", "warm", "host", "disk"), args.lengths)
    used["decode"] = [context for _, context, _ in args.decodes]
    for name in args.scenarios:
        for tokens in used.get(name, ()):
            if not 1 <= tokens <= room:
                parser.error(f"{name}: a prompt of {tokens:,} tokens; this engine takes 1 to {room:,} of them here")
    if args.disk and not args.disk.is_dir():
        parser.error(f"--disk {args.disk}: is no folder")


def main() -> int:
    """1 where a scenario failed, 2 where what is asked for cannot be: found before anything is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", type=scenario, help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--model", default="DeepSeek-V4-Flash")
    parser.add_argument("--layers", default="8")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE of EngineOptions, amounts as on serve's command line"
    )
    parser.add_argument("--lengths", type=lambda v: [int(n) for n in v.split(",")], default=[8 * KILO, 32 * KILO])
    parser.add_argument("--decodes", type=triples, default=[(1, 8 * KILO, 10), (8, 8 * KILO, 10)])
    parser.add_argument("--distinct", type=int, default=128 * KILO)
    parser.add_argument("--book", type=int, default=512 * KILO)
    parser.add_argument("--profile", type=int, default=16 * KILO)
    parser.add_argument("--disk", type=Path, help="folder on the disk that is measured (default: the temporary one)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    try:
        options = engine_options(args)
        config = resolve(options, random_spec(options.model, options.layers), probe_machine())
    except LongreadError as error:
        parser.error(str(error))
    check_amounts(parser, args, config.max_model_len)
    if args.output and (args.output.is_dir() or not args.output.absolute().parent.is_dir()):
        parser.error(f"--output {args.output}: is a folder, or its folder does not exist")
    args.ceilings, args.compiled, failed = ceilings(), [], 0
    document: dict[str, Any] = {
        "machine": asdict(this_machine(("torch", "triton"))),
        "gpu": torch.cuda.get_device_name(),
        "commit": this_commit(),
        "command": " ".join(sys.argv),
        "ceilings": args.ceilings,
    }
    start = time.perf_counter()
    driver = Driver(load_engine(options))
    info = driver.engine.info
    document["ready_s"] = time.perf_counter() - start
    document["planned_bytes"], document["allocated_bytes"] = info.predicted_bytes, info.allocated_bytes
    document["pages"] = info.num_pages
    import triton  # behind the refusals: --help needs no GPU build of torch

    triton.knobs.runtime.jit_post_compile_hook = lambda **given: args.compiled.append(given.get("repr"))
    print({k: v for k, v in document.items() if k != "machine"}, flush=True)
    for name in args.scenarios:
        start = time.perf_counter()
        try:
            document[name] = SCENARIOS[name](driver, args)
        except Exception as error:  # noqa: BLE001  one scenario must not cost the others theirs
            document[name], failed = f"{type(error).__name__}: {error}", 1
            traceback.print_exc()
        print(name, f"{time.perf_counter() - start:.1f} s", json.dumps(document[name])[:1500], flush=True)
        document["peak_allocated"] = torch.cuda.max_memory_allocated()
        document["peak_reserved"] = torch.cuda.max_memory_reserved()
        document["compiled_while_serving"] = args.compiled
        if args.output:
            args.output.write_text(json.dumps(document, indent=1) + "\n")
    print("peak", document.get("peak_allocated"), "planned", info.predicted_bytes, "compiled", len(args.compiled))
    return failed


if __name__ == "__main__":
    sys.exit(main())
