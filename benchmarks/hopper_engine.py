"""The engine on one GPU at real widths with random weights: [SCENARIO ...] [--model NAME] [--layers N] [--output FILE].

In one process, one engine: cold first tokens and the time of each prefill chunk, warm first tokens from the device,
decode at several batches and contexts, many distinct long prompts that must all be found again, and the gaps of a
running decode while a long prompt is read. ``--profile`` adds each kernel's share of a chunk. Prompts are random ids.
Device copy and host link are measured in the same run. Memory is told as planned and as torch counted it.
"""

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.measure.result import this_commit, this_machine
from longread.spec.config import EngineOptions
from longread.spec.engine import FirstToken, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.reduced import random_spec
from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages, state_groups

KILO = 1024


def prompt(length: int, seed: int, vocab: int = 129280) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, vocab), k=length))


class Driver:
    """An engine with its requests' events; every step's seconds and every token's moment are kept."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.count = 0
        self.steps: list[float] = []

    def submit(self, ids: Sequence[int], tokens: int) -> str:
        """As the server does it: page identities are made beside the tokens, before the engine's clock starts."""
        self.count += 1
        prompt, root = tuple(ids), self.engine.info.cache_root
        start = time.perf_counter()
        data = array("i", prompt).tobytes()
        hashed = HashedTokens(root, data, hash_pages(root, data), min(prompt), max(prompt))
        self.hash_s = time.perf_counter() - start
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.engine.submit(GenerationRequest(f"r{self.count}", prompt, sampling, hashed))
        return f"r{self.count}"

    def run(self, until: Callable[[dict[str, list[float]]], bool] | None = None) -> dict[str, list[float]]:
        """Step until nothing is left (or ``until`` says so); the moments of each request's tokens."""
        moments: dict[str, list[float]] = {}
        self.firsts: dict[str, FirstToken] = {}
        while self.engine.has_work():
            start = time.perf_counter()
            events = self.engine.step()
            now = time.perf_counter()
            if events or now - start > 1e-3:
                self.steps.append(now - start)
            for event in events:
                if isinstance(event, TokenEvent):
                    moments.setdefault(event.request_id, []).append(now)
                    if event.first:
                        self.firsts[event.request_id] = event.first
            if until is not None and until(moments):
                break
        return moments

    def ttft(self, ids: Sequence[int]) -> dict[str, Any]:
        """One request to its first token: seconds, parts, reuse and the seconds of its steps."""
        self.steps = []
        name = self.submit(ids, 1)
        self.run()
        first = self.firsts[name]
        times, reuse = first.times, first.reuse
        return {
            "tokens": len(ids),
            "ttft_s": times.first_token - times.arrived,
            "hash_s": self.hash_s,
            "parts_s": times.parts(),
            "computed": times.prefill_tokens,
            "reused": None if reuse is None else [reuse.device_tokens, reuse.host_tokens, reuse.disk_tokens],
            "steps_s": [round(step, 5) for step in self.steps],
        }


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


def _all_began(names: Sequence[str], moments: dict[str, list[float]]) -> bool:
    return all(moments.get(name) for name in names)


def decode(driver: Driver, args: argparse.Namespace) -> Any:
    """TPOT: the median gap of tokens 8 to 64 of requests that run side by side."""
    rows = []
    for batch, length, seed in args.decodes:
        names = [driver.submit([*prompt(length, seed + n), *prompt(8, 7 + n)], 64) for n in range(batch)]
        driver.run(partial(_all_began, names))
        moments = driver.run()
        gaps = sorted(b - a for name in names for a, b in zip(moments[name][4:], moments[name][5:], strict=False))
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
        "spent_bytes_per_token": (pages * page + snapshots * slot) / (9 * length),
    }


def stall(driver: Driver, args: argparse.Namespace) -> Any:
    """Gaps of one running decode while a long prompt is read, and what reading takes beside it."""
    runner = driver.submit(prompt(2048, 900), 100_000)
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


SCENARIOS = {"cold": cold, "warm": warm, "decode": decode, "distinct": distinct, "stall": stall, "profile": profiled}


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
        rows.append((batch, context, seed[0] if seed else 3000 + context))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--model", default="DeepSeek-V4-Flash")
    parser.add_argument("--layers", default="8")
    parser.add_argument(
        "--option", action="append", default=[], help="NAME=VALUE of EngineOptions, whole numbers as such"
    )
    parser.add_argument("--lengths", type=lambda v: [int(n) for n in v.split(",")], default=[8 * KILO, 32 * KILO])
    parser.add_argument("--decodes", type=triples, default=[(1, 8 * KILO, 10), (8, 8 * KILO, 10)])
    parser.add_argument("--distinct", type=int, default=128 * KILO)
    parser.add_argument("--book", type=int, default=512 * KILO)
    parser.add_argument("--profile", type=int, default=16 * KILO)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {
        "machine": asdict(this_machine(("torch", "triton"))),
        "gpu": torch.cuda.get_device_name(),
        "commit": this_commit(),
        "command": " ".join(sys.argv),
        "ceilings": ceilings(),
    }
    extra = {name: int(v) if v.lstrip("-").isdigit() else v for name, v in (o.split("=", 1) for o in args.option)}
    start = time.perf_counter()
    options = EngineOptions(model=args.model, device="cuda", random_weights=True, layers=args.layers, **extra)
    driver = Driver(load_engine(options))
    info = driver.engine.info
    document["ready_s"] = time.perf_counter() - start
    document["planned_bytes"], document["allocated_bytes"] = info.predicted_bytes, info.allocated_bytes
    document["pages"] = info.num_pages
    print({k: v for k, v in document.items() if k != "machine"}, flush=True)
    for name in args.scenarios:
        start = time.perf_counter()
        try:
            document[name] = SCENARIOS[name](driver, args)
        except Exception as error:  # noqa: BLE001  one scenario must not cost the others theirs
            document[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(name, f"{time.perf_counter() - start:.1f} s", json.dumps(document[name])[:1500], flush=True)
        document["peak_allocated"] = torch.cuda.max_memory_allocated()
        document["peak_reserved"] = torch.cuda.max_memory_reserved()
        if args.output:
            args.output.write_text(json.dumps(document, indent=1) + "\n")
    print("peak", document.get("peak_allocated"), "planned", info.predicted_bytes)


if __name__ == "__main__":
    main()
