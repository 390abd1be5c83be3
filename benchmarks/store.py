"""The disk store against the raw disk, in the same run: DIR [--output FILE].

For each size of page: writes a chain through the store and as one plain file (both with fdatasync after the same
batches), then reads both back cold (page cache dropped with posix_fadvise) and warm: the file in blocks of 1 MiB, the
store as the loader does it, each page checked, ahead into a few rooms that a device would copy from. Then makes an
index of many pages and times opening it and looking up a chain. Processors' seconds are of all threads. Who goes first
changes from round to round: a virtual disk answers the second reader from a cache of the host that cannot be dropped.
Ratios are of one round each; figures are medians with the
extremes. The default sizes: a page of reader-v4, of 32 layers of V4-Flash, and the 1 and 3 MB that pages of released
models have.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longread.kv.disk.store import DiskStore
from longread.kv.records import Kind, Layout, Record, chain_key
from longread.measure.result import this_commit, this_machine
from longread.spec.state import PAGE_TOKENS

ROUNDS = 5
ROOMS, ROOM_BYTES = 5, 8 * 2**20  # that are read into in turn; touched before, as in a server that has run for a while
BLOCK_BYTES = 2**20
AIM = 1.5  # raw rate over the store's, cold
BATCH_BYTES = 32 * 2**20  # one landing point's portion
LOOKUPS = 2048  # pages of a 512K-token prompt


def pages(layout: Layout, count: int, payload: memoryview, seed: int = 0) -> Iterator[Record]:
    """One chain. Payloads are slices of the same random bytes: the disk sees different ones, the CPU makes none."""
    parent = layout.root
    for depth in range(1, count + 1):
        run = array("i", [seed, depth, *range(PAGE_TOKENS - 2)]).tobytes()
        key = chain_key(parent, run)
        start = (depth * 4096) % (len(payload) - layout.page_bytes)
        yield Record("page", key, parent, depth, run, payload[start : start + layout.page_bytes])
        parent = key


def batches(records: Sequence[Record], size: int) -> Iterator[Sequence[Record]]:
    step = max(BATCH_BYTES // size, 1)
    for start in range(0, len(records), step):
        yield records[start : start + step]


def raw_write(path: Path, records: Sequence[Record], size: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for batch in batches(records, size):
        for record in batch:
            os.write(file, record.payload)
        os.fdatasync(file)
    os.close(file)


def raw_read(path: Path, into: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    while os.readv(file, [into[:BLOCK_BYTES]]):
        pass
    os.close(file)


def store_write(folder: Path, layout: Layout, records: Sequence[Record], size: int) -> None:
    store = DiskStore.open(folder, layout, max_bytes=2**40)
    for batch in batches(records, size):
        store.write(batch)
    store.close()


def store_load(store: DiskStore, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview]) -> None:
    """Look a chain up and load it."""
    _check(len(store.present("page", [key for _, key in wanted])) == len(wanted))
    for batch in store.batches(wanted, rooms):
        _check(all(verdict == "whole" for verdict, _ in batch))


def drop_cached(*paths: Path) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seconds(work: Callable[[], None]) -> float:
    return measured(work)[0]


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and seconds of processors."""
    started, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - spent


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


def throughput(folder: Path, record_bytes: int, total: int, rooms: Sequence[memoryview]) -> dict[str, object]:
    """GB/s of payload, and how many times faster the raw disk is, for pages of one size."""
    layout = Layout(bytes(16), "benchmark", "bytes", record_bytes, 0)
    payload = memoryview(os.urandom(record_bytes + 64 * 2**20))
    records = list(pages(layout, total // record_bytes, payload))
    wanted: list[tuple[Kind, bytes]] = [("page", record.key) for record in records]
    total = len(records) * record_bytes
    raw, where = folder / "raw", folder / "store"
    times: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        for kept, spent in zip((times, busy), measured(work), strict=True):
            kept.setdefault(name, []).append(spent)

    for number in range(ROUNDS):
        shutil.rmtree(where, ignore_errors=True)
        raw.unlink(missing_ok=True)
        work = {
            "raw_write": lambda: raw_write(raw, records, record_bytes),
            "store_write": lambda: store_write(where, layout, records, record_bytes),
            "raw_read": lambda: raw_read(raw, rooms[0]),
        }
        order = ("raw", "store") if number % 2 else ("store", "raw")
        for who in order:
            timed(f"{who}_write", work[f"{who}_write"])
        drop_cached(raw, *(where / "segments").iterdir())
        store = DiskStore.open(where, layout, max_bytes=2**40)
        work["store_read"] = lambda opened=store: store_load(opened, wanted, rooms)
        for heat in ("cold", "warm"):
            for who in order:
                timed(f"{who}_read_{heat}", work[f"{who}_read"])
        store.close()
    shutil.rmtree(where)
    raw.unlink()
    ratios = {
        what: spread([s / r for s, r in zip(times[f"store_{what}"], times[f"raw_{what}"], strict=True)])
        for what in ("write", "read_cold", "read_warm")
    }
    rates = {name: spread([total / each / 1e9 for each in spent]) for name, spent in times.items()}
    cpu = {name: spread([each / total * 1e9 for each in spent]) for name, spent in busy.items()}
    return {
        "page_bytes": record_bytes,
        "pages": len(records),
        "GB/s": rates,
        "raw_over_store": ratios,
        "processor_s_a_GB": cpu,
    }


def opening(folder: Path, count: int) -> dict[str, object]:
    """Milliseconds to open a store of ``count`` pages and to look a 512K-token chain up in it."""
    layout = Layout(hashlib.blake2b(b"open", digest_size=16).digest(), "benchmark", "bytes", 64, 0)
    payload = memoryview(os.urandom(2**16))
    where = folder / "store"
    store = DiskStore.open(where, layout, max_bytes=2**40)
    keys: list[bytes] = []
    for start in range(0, count, LOOKUPS):
        chain = list(pages(layout, min(LOOKUPS, count - start), payload, seed=start))
        store.write(chain)
        keys = [record.key for record in chain] if start == 0 else keys
    store.close()
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        drop_cached(where / "index.sqlite")
        for name, spent in look_up(where, layout, keys).items():
            times.setdefault(name, []).append(spent)
    index = (where / "index.sqlite").stat().st_size
    shutil.rmtree(where)
    return {
        "pages": count,
        "index_bytes_a_page": round(index / count),
        "chain_pages": len(keys),
        "ms": {name: round(1000 * statistics.median(each), 1) for name, each in times.items()},
        "open_cold_ms_max": round(1000 * max(times["open_cold"]), 1),
    }


def look_up(where: Path, layout: Layout, keys: Sequence[bytes]) -> dict[str, float]:
    """Seconds: with nothing of the index in memory, in the operating system's, and in the process's own."""
    spent = {}
    for heat in ("cold", "warm"):
        started = time.perf_counter()
        store = DiskStore.open(where, layout, max_bytes=2**40)
        spent[f"open_{heat}"] = time.perf_counter() - started
        spent[f"present_{heat}"] = seconds(lambda opened=store: _check(len(opened.present("page", keys)) == len(keys)))
        spent["chain_whole_rows"] = seconds(lambda opened=store: _check(len(opened.known("page", keys)) == len(keys)))
        spent["chain_again"] = seconds(lambda opened=store: _check(len(opened.known("page", keys)) == len(keys)))
        spent["present_again"] = seconds(lambda opened=store: _check(len(opened.present("page", keys)) == len(keys)))
        spent["single_gets_again"] = seconds(lambda opened=store: _check(all(opened.get("page", k) for k in keys)))
        store.close()
    return spent


def _check(right: bool) -> None:
    if not right:
        sys.exit("a page that was written is not known")


def line(figures: dict[str, Any]) -> str:
    rates, ratios, busy = figures["GB/s"], figures["raw_over_store"], figures["processor_s_a_GB"]
    told = (
        f"{what} {rates[f'store_{what}']['median']:.2f} of {rates[f'raw_{what}']['median']:.2f} GB/s "
        f"({ratios[what]['median']:.2f}x, {busy[f'store_{what}']['median']:.2f} s of processors a GB)"
        for what in ("read_cold", "read_warm", "write")
    )
    return f"pages of {figures['page_bytes']:,} bytes: {', '.join(told)}; aim, cold: {AIM}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the disk is that is measured")
    parser.add_argument("--kib", default="122,690,1024,3072", help="sizes of a page (%(default)s)")
    parser.add_argument("--mib", type=int, default=384, help="written and read, each way and round (%(default)s)")
    parser.add_argument("--pages", type=int, default=100_000, help="in the index that is opened (%(default)s)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = args.folder / "longread-store-benchmark"
    folder.mkdir()
    try:
        rooms = [memoryview(bytearray(b"\1" * ROOM_BYTES)) for _ in range(ROOMS)]
        rows = []
        for kib in map(int, args.kib.split(",")):
            rows.append(throughput(folder, kib * 1024, args.mib * 2**20, rooms))
            print(line(rows[-1]), flush=True)
        index = opening(folder, args.pages)
        print(json.dumps(index), flush=True)
    finally:
        shutil.rmtree(folder)
    if args.output:
        report = {
            "benchmark": "the disk store against the raw disk",
            "commit": this_commit(),
            "command": " ".join(["python", *sys.argv]),
            "machine": asdict(this_machine(("longread", "xxhash"))),
            "load_average": os.getloadavg(),
            "aim_raw_over_store_read_cold": AIM,
            "rows": rows,
            "index": index,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
