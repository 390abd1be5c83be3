"""The engine on one GPU at real widths with random weights: [SCENARIO ...] [--model NAME] [--layers N] [--output FILE].

In one process, one engine, in the order given: the first requests of all shapes, cold first tokens and the time of each
prefill chunk, warm first tokens from the device, from pinned main memory and from a disk, decode at several batches and
contexts, many distinct long prompts that must all be found again, and the gaps of a running decode while a long prompt
is read. ``profile`` adds each kernel's share of a chunk. Prompts are random ids. Device copy, host link and disk are
measured in the same run. Memory is told as planned and as torch counted it; kernels that are compiled once the engine
is ready are counted.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.disk.store import DiskStore
from longread.kv.host import HostArena
from longread.kv.records import Layout
from longread.kv.tensors import StateTensors
from longread.kv.tiers import Found, Tiers
from longread.kv.transfer import Transfer
from longread.measure.probe_disk import measure_disk
from longread.measure.result import this_commit, this_machine
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, from_mapping
from longread.spec.engine import FirstToken, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import ConfigError, LongreadError
from longread.spec.reduced import random_spec
from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages, state_groups

KILO = 1024
VOCAB = 102400  # V2's, the smallest of the public models'
ANSWER = 8  # tokens of an answer
EVICTED_AT_ONCE = 64  # pages, as a long prompt wins them
FIRST_LENGTHS = (1, 2, 15, 17, 100, 255, 257, 511, 513, 700, 1100, 2047, 2049, 5000, 8191, 8193, 12000)
FIRST_SUFFIXES = (1, 33, 200, 513, 3000)
FIRST_BATCHES = (1, 2, 3, 8)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, VOCAB), k=length))


class Driver:
    """An engine with its requests' events; every step's seconds and every token's moment are kept."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.count = 0
        self.steps: list[float] = []
        self.cold: dict[int, float] = {}  # first tokens of prompts of which nothing was cached, by their length
        self.said: dict[str, list[int]] = {}

    def submit(self, ids: Sequence[int], tokens: int, **sampled: Any) -> str:
        """As the server does it: page identities are made beside the tokens, before the engine's clock starts."""
        self.count += 1
        prompt, root = tuple(ids), self.engine.info.cache_root
        start = time.perf_counter()
        data = array("i", prompt).tobytes()
        hashed = HashedTokens(root, data, hash_pages(root, data), min(prompt), max(prompt))
        self.hash_s = time.perf_counter() - start
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | sampled))
        self.engine.submit(GenerationRequest(f"r{self.count}", prompt, sampling, hashed))
        return f"r{self.count}"

    def run(self, until: Callable[[dict[str, list[float]]], bool] | None = None) -> dict[str, list[float]]:
        """Step until nothing is left (or ``until`` says so); the moments of each request's tokens."""
        moments: dict[str, list[float]] = {}
        self.firsts: dict[str, FirstToken] = {}
        self.said = {}
        while self.engine.has_work():
            start = time.perf_counter()
            events = self.engine.step()
            now = time.perf_counter()
            if events or now - start > 1e-3:
                self.steps.append(now - start)
            for event in events:
                if isinstance(event, TokenEvent):
                    moments.setdefault(event.request_id, []).append(now)
                    self.said.setdefault(event.request_id, []).append(event.token_id)
                    if event.first:
                        self.firsts[event.request_id] = event.first
            if until is not None and until(moments):
                break
        return moments

    def ttft(self, ids: Sequence[int], tokens: int = 1) -> dict[str, Any]:
        """One request: seconds to its first token, parts, reuse and the seconds of its steps."""
        self.steps = []
        name = self.submit(ids, tokens)
        self.run()
        first = self.firsts[name]
        times, reuse = first.times, first.reuse
        if times.prefill_tokens == len(ids):
            self.cold[len(ids)] = times.first_token - times.arrived
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


def push_out(driver: Driver) -> dict[str, Any]:
    """Win every page that nobody holds, as one more long prompt would; what was cached goes to the tiers below.

    Seconds until the engine may go on (``issued_s``), and until the last byte has arrived (``saved_s``).
    """
    cache = driver.engine._core.cache
    before, evicted = driver.engine.stats().host_cache_used_bytes, cache.pages_evicted
    torch.cuda.synchronize()
    start = time.perf_counter()
    lease = cache.open(prompt(PAGE_TOKENS, 4321))
    for pages in range(EVICTED_AT_ONCE, cache.pool.available + EVICTED_AT_ONCE, EVICTED_AT_ONCE):
        cache.reserve(lease, min(pages, len(lease.pages) + cache.pool.available) * PAGE_TOKENS)
    issued = time.perf_counter() - start
    _tensors(driver).settle()
    saved = time.perf_counter() - start
    cache.close(lease)
    moved, pages = driver.engine.stats().host_cache_used_bytes - before, cache.pages_evicted - evicted
    return {
        "pages": pages,
        "bytes_to_host": moved,
        "issued_s": issued,
        "saved_s": saved,
        "issued_us_a_page": 1e6 * issued / max(pages, 1),
        "saved_B/s": moved / saved,
    }


def _tensors(driver: Driver) -> StateTensors:
    store = driver.engine._core.cache._store
    assert isinstance(store, StateTensors)
    return store


@contextmanager
def _transfers(driver: Driver) -> Iterator[list[Transfer]]:
    """The loads that begin in here."""
    tiers, begun = driver.engine._tiers, []
    assert tiers is not None
    start = tiers.start

    def noted(found: Found) -> Transfer:
        begun.append(start(found))
        return begun[-1]

    tiers.start = noted  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        tiers.start = start  # type: ignore[method-assign]


def _loaded(driver: Driver, ids: Sequence[int], tier: str) -> dict[str, Any]:
    """One request whose prompt has to come from ``tier``: with the bytes that it brought and their rate.

    ``load_s``: what it waited before it began to compute; ``link_s``: from the first byte to the last, which of a load
    layer by layer is beside the computing.
    """
    with _transfers(driver) as begun:
        row = driver.ttft(ids)  # until nothing is left to do, so every load is over
    del row["steps_s"]
    tensors, tokens = _tensors(driver), row["reused"][("device", "host", "disk").index(tier)]
    size = -(-tokens // PAGE_TOKENS) * tensors.page_bytes + tensors.ring_bytes
    waited = row["parts_s"].get(f"load_{tier}", 0.0)
    layered = [each.arrival.seconds() for each in begun if each.arrival is not None]
    seconds = sum(layered) if layered else waited
    row |= {"bytes": size, "load_s": waited, "link_s": seconds, "layer_by_layer": bool(layered)}
    return row | {"B/s": size / seconds if seconds else None}


def _longest(driver: Driver, args: argparse.Namespace, seed: int) -> tuple[Callable[[int], list[int]], dict[str, Any]]:
    """The longest prompt of ``cold`` with the n-th 32 other tokens behind it, and its first token from the device."""
    at = max(range(len(args.lengths)), key=lambda i: args.lengths[i])
    base = prompt(args.lengths[at], 10 + at)
    first = driver.ttft(base)["ttft_s"]
    ask = lambda n: [*base, *prompt(32, seed + n)]  # noqa: E731
    return ask, _loaded(driver, ask(0), "device") | {"before_s": first}


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a prompt would land on the device, and hashes of what lies there: of every 16th page, the last and a
    partial one, and of the rings.
    """

    tokens: int
    pages: tuple[str, ...]
    ring: str

    def beside(self, was: "Landing") -> dict[str, Any]:
        differ = sum(now != before for now, before in zip_longest(self.pages, was.pages))
        return {
            "same_bytes": self == was,
            "landed": [was.tokens, self.tokens],
            "pages_that_differ": differ,
            "same_ring": self.ring == was.ring,
        }


def _landing(driver: Driver, ids: Sequence[int]) -> Landing:
    cache, tensors = driver.engine._core.cache, _tensors(driver)
    landing = cache._find(cache.chain(ids), partial=True)
    whole, hashes = landing.whole(), []
    page, ring = memoryview(bytearray(tensors.page_bytes)), memoryview(bytearray(tensors.ring_bytes))
    for entry in [*whole[::16], *whole[-1:], *([landing.partial] if landing.partial else [])]:
        tensors.read_page(entry.page, page, entry.length)
        hashes.append(hashlib.blake2b(page).hexdigest())
    if landing.at is not None and landing.at.snapshot is not None:
        tensors.read_ring(landing.at.snapshot, ring)
    return Landing(landing.tokens, tuple(hashes), hashlib.blake2b(ring).hexdigest())


def host(driver: Driver, args: argparse.Namespace) -> Any:
    """The longest prompt out of the device and back from pinned main memory, twice (host_cache_size must hold it)."""
    ask, before = _longest(driver, args, 5500)
    was, rows = _landing(driver, ask(-1)), []
    for n in (1, 2):
        saved = push_out(driver)
        row = _loaded(driver, ask(n), "host")
        rows.append(row | {"saved": saved} | _landing(driver, ask(-1)).beside(was))
    link = args.ceilings["host_to_device_B/s"]
    return {"rows": rows, "device": before, "link_B/s": link, "share_of_link": max(r["B/s"] or 0 for r in rows) / link}


def disk(driver: Driver, args: argparse.Namespace) -> Any:
    """The longest prompt from a disk store, with nothing of it in main memory and then with all of it in the system's
    cache of files. Leaves the engine without tiers.
    """
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        written, read, note = measure_disk(Path(folder), 2**30, 20.0)
        _exchange_tiers(driver, Path(folder) / "store")
        start = time.perf_counter()
        ask, before = _longest(driver, args, 6600)  # which goes to the disk beside it
        whole = driver.engine.flush(120.0)
        spent = time.perf_counter() - start
        behind = spent - before["before_s"] - before["ttft_s"]
        was, rows = _landing(driver, ask(-1)), []
        for n, source in ((1, "the disk"), (2, "the system's cache of files")):
            push_out(driver)
            if n == 1:
                _forget_files(Path(folder))
            row = _loaded(driver, ask(n), "disk")
            rows.append({"from": source} | row | _landing(driver, ask(-1)).beside(was))
        stats = driver.engine.stats()
        assert driver.engine._tiers is not None
        driver.engine._tiers.close()
        driver.engine._tiers = driver.engine._scheduler._tiers = None
    return {
        "rows": rows,
        "device": before,
        "disk_read_B/s": read,
        "disk_write_B/s": written,
        "share_of_disk": (rows[0]["B/s"] or 0) / read,
        "note": note,
        "written_bytes": stats.store_written_bytes,
        "written_s": spent,  # with both prompts, which are computed meanwhile...
        "written_behind_s": behind,  # ...and what of it was left when they were
        "written_whole": whole,
        "errors": stats.store_errors,
    }


def _exchange_tiers(driver: Driver, folder: Path) -> None:
    """A disk store and no host tier in place of what the engine began with: loading 30 layers anew takes minutes, and
    a store from the beginning would be written beside every other measurement.
    """
    engine, core, tensors = driver.engine, driver.engine._core, _tensors(driver)
    if engine._tiers is not None:
        engine._tiers.close()
    layout = Layout(engine.info.cache_root, engine.info.model, "bfloat16", tensors.page_bytes, tensors.ring_bytes)
    store = DiskStore.open(folder, layout, max_bytes=32 * 2**30)
    host = HostArena(tensors.page_bytes, tensors.ring_bytes, 0, tensors.allocate_host)
    tiers = Tiers(core.cache, tensors, host, store)
    engine._tiers = engine._scheduler._tiers = tiers


def _forget_files(folder: Path) -> None:
    """Have the system forget what it holds of these files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


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
