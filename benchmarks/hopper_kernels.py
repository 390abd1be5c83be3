"""Times every GPU kernel at DeepSeek-V4-Flash's sizes beside its floor: [SECTION ...] [--output FILE].

The ceilings (copy, BF16 and FP8 products) are measured first, in the same run. Each row gives the time, the rate and
its share of the ceiling that bounds it. Prefill kernels are timed one by one with a cold L2; decode kernels as graphs
of several calls over different weights, since at a few microseconds the launch would be what is measured. What cannot
run is told in its row and stops nothing. The table comes last.
"""

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longread.kernels.compressor.device_ref import Part
from longread.kernels.fp8.ref import Fp8Weight
from longread.kernels.places import Chunk, Rows
from longread.measure.result import this_commit, this_machine
from longread.spec.releases import release

GIB = 2**30
FP8 = torch.float8_e4m3fn
PAGES = 2304  # of 256 tokens: 512K and some
Run = Callable[[], Any]


@dataclass
class Row:
    """One measurement: ``work`` in ``unit`` (B or FLOP) a call; ``ceiling`` the measured rate that bounds it."""

    section: str
    name: str
    shape: str
    ms: float | None
    work: float
    unit: str
    ceiling: float
    note: str = ""

    @property
    def rate(self) -> float | None:
        return self.work / self.ms * 1e3 if self.ms else None


def alone(run: Run, repeats: int = 7) -> float:
    """Milliseconds of one call, median, L2 flushed before each."""
    for _ in range(2):
        run()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def in_graph(runs: list[Run], repeats: int = 9) -> float:
    """Milliseconds a call of ``runs``, which should work on different data, replayed as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still be making the data
    with torch.cuda.stream(side):
        for run in runs[:2]:
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / len(runs)


class Bench:
    """Collects rows. ``copy``, ``bf16``, ``fp8``: this run's ceilings in B/s and FLOP/s."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.copy = self.bf16 = self.fp8 = 0.0
        self.section = ""

    def ceilings(self) -> None:
        a = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").random_()
        b = torch.empty_like(a)
        self.copy = 2 * a.numel() / alone(partial(b.copy_, a)) * 1e3
        del a, b
        n = 8192
        x, w = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.bf16 = 2 * n**3 / alone(partial(torch.mm, x, w.t())) * 1e3
        one, x8, w8 = torch.ones(n, 1, device="cuda"), x.to(FP8), w.to(FP8)
        product = partial(torch._scaled_mm, x8, w8.t(), one, one.t(), out_dtype=torch.bfloat16)
        self.fp8 = 2 * n**3 / alone(product) * 1e3
        for name, unit in (("copy", "B"), ("bf16", "FLOP"), ("fp8", "FLOP")):
            rate = getattr(self, name)
            self.rows.append(Row("ceilings", name, "", 1e3, rate, unit, rate))

    def add(
        self, name: str, shape: str, run: Run | list[Run], work: float, bound: str, note: str = "", repeats: int = 7
    ) -> None:
        """Time ``run`` alone, or a list of runs as one graph. ``bound``: copy, bf16 or fp8."""
        row = Row(self.section, name, shape, None, work, "B" if bound == "copy" else "FLOP", getattr(self, bound), note)
        try:
            row.ms = in_graph(run) if isinstance(run, list) else alone(run, repeats)
        except Exception as error:  # noqa: BLE001  a variant that cannot run is a result, too
            row.note = f"{type(error).__name__}: {str(error)[:150]}"
            traceback.print_exc()
        self.rows.append(row)
        print(text(row), flush=True)


def text(row: Row) -> str:
    named = f"{row.section:10} {row.name:28} {row.shape:26}"
    if row.ms is None:
        return f"{named} FAILED {row.note}"
    rate = row.rate or 0.0
    shown = f"{rate / 1e12:8.2f} TB/s   " if row.unit == "B" else f"{rate / 1e12:8.0f} TFLOP/s"
    return f"{named} {row.ms * 1e3:10.1f} us {shown} {rate / row.ceiling:6.1%} {row.note}"


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(FP8)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def bytes_(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def fp8_weight(*shape: int) -> Fp8Weight:
    *outer, n, k = shape
    scales = torch.exp2(torch.randint(-8, -4, (*outer, n // 128, k // 128), device="cuda").float())
    return Fp8Weight(fp8(*shape), scales)


def copies(size: int) -> int:
    """How many weights of ``size`` bytes to rotate so that the L2 (60 MB) does not hold them."""
    return max(2, min(16, 300 * 2**20 // size))


def shared_or_alone(t: int, run: Run) -> Run | list[Run]:
    """Few tokens: as a graph of eight calls."""
    return [run] * 8 if t < 64 else run


def linear(bench: Bench) -> None:
    from longread.kernels.fp8 import triton as ops

    for n, k in ((1536, 4096), (40960, 1024), (32768, 1024), (4096, 8192), (4096, 4096), (4096, 2048)):
        weights = [fp8_weight(n, k) for _ in range(copies(n * k))]
        for t in (1, 8, 32, 64, 128):
            q = ops.quantise(bf16(t, k))
            bench.add("fp8 few rows", f"{t}x{k}->{n}", [partial(ops.linear, q, w) for w in weights], n * k, "copy")
        for t in (512, 8192):
            q = ops.quantise(bf16(t, k))
            bench.add("fp8", f"{t}x{k}->{n}", partial(ops.linear, q, weights[0]), 2 * t * n * k, "fp8")
    for n, k in ((2624, 4096), (256, 4096), (129280, 4096)):
        plain = [bf16(n, k) for _ in range(copies(2 * n * k))]
        for t in (1, 8, 32):
            runs: list[Run] = [partial(ops.linear, bf16(t, k), w, torch.float32) for w in plain]
            bench.add("bf16->fp32 few rows", f"{t}x{k}->{n}", runs, 2 * n * k, "copy")
        if n < 10**5:
            run = partial(ops.linear, bf16(8192, k), plain[0], torch.float32)
            bench.add("bf16->fp32", f"8192x{k}->{n}", run, 2 * 8192 * n * k, "bf16")
    for t in (1, 8, 8192):
        q = ops.quantise(bf16(t, 32768))
        sets = [partial(ops.grouped_linear, q, fp8_weight(8, 1024, 4096)) for _ in range(8)]
        few = t < 64
        work = 2**25 if few else 2 * t * 8 * 1024 * 4096
        bench.add("grouped", f"{t}x8x4096->1024", list(sets) if few else sets[0], work, "copy" if few else "fp8")
    for t in (1, 8192):
        cos, x = torch.rand(t, 32, device="cuda"), bf16(t, 4096)
        latents = partial(ops.latents, bf16(t, 1536), bf16(1024), bf16(512), 1e-6, cos, cos, True, True)
        jobs: dict[str, tuple[Run, int]] = {
            "quantise": (partial(ops.quantise, x), t * 4096 * 3),
            "gated": (partial(ops.gated, x, 10.0, True), t * (4096 * 2 + 2048)),
            "latents": (latents, t * (1536 * 2 + 1024 + 1024)),
            "turn_back": (partial(ops.turn_back, bf16(t, 64, 512), cos, cos, True), t * 32768 * 3),
        }
        for name, (job, size) in jobs.items():
            bench.add(name, f"T={t}", shared_or_alone(t, job), size, "copy")


def hyper(bench: Bench) -> None:
    from longread.kernels.hyper import triton as ops

    fn, base = torch.randn(24, 16384, device="cuda") / 128, torch.randn(24, device="cuda")
    w, rest = ops.weights(fn, base, torch.ones(3, device="cuda")), (bf16(4096), 20, 1e-6, 1e-6, True)
    for t in (1, 8, 32, 512, 8192):
        x = bf16(t, 4, 4096)
        first = ops.enter(x, None, None, None, w, *rest)
        run = partial(ops.enter, x, bf16(t, 4096), first.post, first.a, w, *rest)
        size = t * (3 * 32768 + 8192 + 8192 + 4096) + 24 * 16384 * 6
        bench.add("enter", f"T={t}", shared_or_alone(t, run), size, "copy")


def experts(bench: Bench) -> None:
    from longread.kernels.experts import triton as ops
    from longread.kernels.experts.ref import ExpertWeights
    from longread.kernels.fp8 import triton as fp8_ops

    e, d, f, k = 256, 4096, 2048, 6
    moe = release("V4-Flash").moe
    w13, w2 = bytes_(0, 256, e, 2 * f, d // 2), bytes_(0, 256, e, d, f // 2)
    w = ExpertWeights("fp4", w13, bytes_(117, 122, e, 2 * f, d // 32), w2, bytes_(117, 122, e, d, f // 32))
    w = ops.prepare(w)
    gate, bias = bf16(e, d), torch.zeros(e, device="cuda")
    for t in (1, 2, 8, 32, 128, 512, 1024, 4096, 8192, 16384):
        positions = torch.arange(t, device="cuda", dtype=torch.int32)
        token_ids = torch.zeros(t, device="cuda", dtype=torch.int64)
        route = [partial(ops.route, bf16(t, d), gate, bias, moe, positions, None, token_ids) for _ in range(8)]
        bench.add("route", f"T={t}", shared_or_alone(t, route[0]), t * d * 2 + e * d * 2, "copy")
        u, shared = bf16(t, d), bf16(t, d)
        q = fp8_ops.quantise(u)
        routed = [run() for run in route]  # different tokens: a graph's calls then read different experts
        distinct = int(routed[0][0].unique().numel())
        runs = [partial(ops.experts, u, q, ids, weights, w, 10.0, shared) for ids, weights in routed]
        if t < 512:
            size = distinct * 3 * d * f * (0.5 + 1 / 32)
            bench.add("experts", f"T={t} ({distinct} of {e})", list(runs), size, "copy")
            continue
        bench.add("experts", f"T={t}", runs[0], 6.0 * t * k * d * f, "fp8")


def chunk_at(start: int, t: int, pages: int) -> Chunk:
    meta = torch.tensor([start, t, 0, 0], dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda")[: -(-(start + t) // 256)].to(torch.int32)
    return Chunk(meta, torch.arange(start, start + t, device="cuda", dtype=torch.int32), table, start + t)


def rows_at(context: int, b: int, pages: int) -> Rows:
    tables = [torch.randperm(pages, device="cuda")[: -(-context // 256)].to(torch.int32) for _ in range(b)]
    positions = torch.full((b,), context - 1, dtype=torch.int32, device="cuda")
    return Rows(positions, torch.arange(b, device="cuda", dtype=torch.int32), torch.stack(tables), context)


def indexer(bench: Bench) -> None:
    from longread.kernels.indexer import triton as ops

    hi, di, top_k, t = 64, 128, 512, 8192
    store = torch.zeros(PAGES, 64, 132, dtype=torch.uint8, device="cuda")
    store[..., :128] = fp8(PAGES, 64, 128).view(torch.uint8)
    store[..., 128:] = torch.full((PAGES, 64, 1), 0.125, device="cuda").view(torch.uint8)

    def queries(rows: int) -> Run:
        cos = torch.rand(rows, 32, device="cuda")
        return partial(ops.queries, bf16(rows, hi * di), torch.randn(rows, hi, device="cuda"), cos, cos, 0.01, True)

    bench.add("queries", f"T={t}", queries(t), t * hi * di * 3, "copy")
    for start in (0, 24576, 122880, 516096):
        where, n = chunk_at(start, t, PAGES), (start + t) // 4
        q, weights = queries(t)()
        bench.add("keys", f"{n} rows", partial(ops.keys, store, where, di), n * 264, "copy")
        choose = partial(ops.choose_chunk, q, weights, ops.keys(store, where, di), where, top_k)
        pairs = sum((p + 1) // 4 for p in range(start, start + t))
        note = f"{pairs / 1e9:.2f} G pairs"
        bench.add("score + top-k", f"T={t} at {start}", choose, pairs * 16384.0, "fp8", note, repeats=3)
    for b in (1, 8):
        for context in (8192, 131072, 524288):
            choose = partial(ops.choose_rows, *queries(b)(), store, rows_at(context, b, PAGES), top_k)
            bench.add("decode choose", f"B={b} at {context}", [choose] * 8, b * context / 4 * 132, "copy")


def latent_store(*shape: int) -> Tensor:
    """Packed latent rows with sane scales: [..., 584]."""
    store = torch.zeros(*shape, 584, dtype=torch.uint8, device="cuda")
    store[..., :448] = fp8(*shape, 448).view(torch.uint8)
    store[..., 448:576] = bf16(*shape, 64).view(torch.uint8)
    store[..., 576:583] = 120
    return store


def attention(bench: Bench) -> None:
    from longread.kernels.sparse_attention import triton as ops

    h, d, t = 64, 512, 8192
    sink, scale, flop = torch.zeros(h, device="cuda"), d**-0.5, 4.0 * d * h
    csa, hca = latent_store(PAGES, 64), latent_store(PAGES, 2)
    slab, cos = bf16(128 + t, d), torch.rand(t, 32, device="cuda")
    head = (bf16(t, h, d), 1e-6, cos, cos, sink, scale, slab)
    window = partial(ops.chunk_turned, *head, None, None, 0, chunk_at(0, t, PAGES), True)
    bench.add("chunk, window", f"T={t}", window, t * 128 * flop, "bf16")
    for start in (24576, 122880, 516096):
        where, n = chunk_at(start, t, PAGES), (start + t) // 4
        unpack = partial(ops.entries, csa, where, 4, d, 64, torch.bfloat16, None)
        bench.add("entries csa", f"{n} rows", unpack, n * (584 + 1024), "copy")
        rows = ops.entries(hca, where, 128, d, 64, torch.bfloat16, None)
        chosen = torch.randint(0, start // 4, (t, 512), device="cuda", dtype=torch.int32).sort(-1).values
        run = partial(ops.chunk_turned, *head, unpack(), chosen, 4, where, True)
        bench.add("chunk, csa 512", f"T={t} at {start}", run, t * 640 * flop, "bf16", repeats=3)
        keys = 128 + (start + t / 2) / 128
        run = partial(ops.chunk_turned, *head, rows, None, 128, where, True)
        bench.add("chunk, hca", f"T={t} at {start}", run, t * keys * flop, "bf16", repeats=3)
    ring = latent_store(64, 128)
    for b in (1, 8, 32):
        cos = torch.rand(b, 32, device="cuda")
        head = (bf16(b, h, d), 1e-6, cos, cos, sink, scale, ring)
        for context in (8192, 131072, 524288):
            where = rows_at(context, b, PAGES)
            chosen = torch.randint(0, PAGES * 64, (b, 512), device="cuda", dtype=torch.int32)
            run = partial(ops.rows_turned, *head, csa, chosen, 4, where, 64, True)
            bench.add("decode, csa", f"B={b} at {context}", [run] * 8, b * 640 * 584, "copy")
            run = partial(ops.rows_turned, *head, hca, None, 128, where, 64, True)
            bench.add("decode, hca", f"B={b} at {context}", [run] * 8, b * (128 + context / 128) * 584, "copy")


def compressor(bench: Bench) -> None:
    from longread.kernels.compressor import triton as ops
    from longread.kernels.window import triton as window

    ring = latent_store(40, 128)
    for b in (1, 8):
        kv, where = bf16(b, 512), rows_at(8192, b, PAGES)  # windows of both ratios close at position 8191
        for name, ratio in (("csa", 4), ("hca", 128), ("window alone", 0)):
            parts = compressors(b, ratio, b)
            work = b * (1608 + sum(2 * part.kv.shape[1] * 4 for part in parts))
            run = partial(ops.layer_rows, parts, kv, ring, 1e-6, where)
            bench.add(f"layer rows, {name}", f"B={b}", [run] * 8, work, "copy")
    t = 8192
    kv, here = bf16(t, 512), chunk_at(122880, t, PAGES)
    for ratio in (4, 128):
        part = compressors(t, ratio, t // ratio + 2)[0]
        *given, _, _ = part
        run = partial(ops.chunk, *given[:5], 1e-6, *given[5:], here, ratio, False)
        bench.add(f"ratio {ratio}", f"T={t}", run, t * part.kv.shape[1] * 8, "copy")
    bench.add("window slab", f"T={t}", partial(window.slab, ring, kv, here, 64), t * 2048, "copy")
    bench.add("window keep", f"T={t}", partial(window.keep, ring, kv, here), 128 * 1608, "copy")


def compressors(t: int, ratio: int, turns: int) -> list[Part]:
    """Those of a layer over t tokens, columns of one projection as in the model; the latents' comes first."""
    made, at = [], 0
    projected = torch.randn(t, 2624, device="cuda")
    for index, d in ((False, 512), (True, 128))[: {4: 2, 128: 1, 0: 0}[ratio]]:
        width = 2 * d if ratio == 4 else d
        kv, gate = projected[:, at : at + width], projected[:, at + width : at + 2 * width]
        at += 2 * width
        shapes = [(40, 8, width)] * 2 if ratio == 4 else [(40, width)] * 3
        rings = tuple(torch.zeros(shape, device="cuda") for shape in shapes)
        cos = torch.rand(turns, 32, device="cuda")
        store = torch.zeros(PAGES, 64, 132, dtype=torch.uint8, device="cuda")
        made.append(
            Part(
                kv, gate, torch.randn(ratio, width, device="cuda"), rings, torch.ones(d, device="cuda"), cos, cos,
                store if index else latent_store(PAGES, 256 // ratio), ratio, index,
            )
        )  # fmt: skip
    return made


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "linear": linear,
    "hyper": hyper,
    "experts": experts,
    "indexer": indexer,
    "attention": attention,
    "compressor": compressor,
}


def main() -> int:
    """The short table last. 1 where a section failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all when none is given")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"section {name!r} is none of {', '.join(SECTIONS)}")
    if args.output and (args.output.is_dir() or not args.output.absolute().parent.is_dir()):
        parser.error(f"--output {args.output}: is a folder, or its folder does not exist")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} cannot use CUDA here")
    bench, failed = Bench(), list[str]()
    bench.ceilings()
    for name in args.sections or SECTIONS:
        bench.section = name
        try:
            SECTIONS[name](bench)
        except Exception:  # noqa: BLE001  one section must not cost the others theirs
            traceback.print_exc()
            failed.append(f"{name}: FAILED, see above")
        torch.cuda.empty_cache()
    if args.output:
        document = {
            "machine": asdict(this_machine(("torch", "triton"))),
            "gpu": torch.cuda.get_device_name(),
            "commit": this_commit(),
            "command": " ".join(sys.argv),
            "rows": [asdict(row) | {"rate": row.rate} for row in bench.rows],
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join([*failed, *map(text, bench.rows)]))
    return 1 if failed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
