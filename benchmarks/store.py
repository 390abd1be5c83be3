"""The disk store against the raw disk, in the same run: DIR [RECORD_KIB] [TOTAL_MIB] [PAGES].

Writes TOTAL_MIB of pages of RECORD_KIB through the store and as one plain file (both with fdatasync after the same
batches), reads both back cold (page cache dropped with posix_fadvise) and warm, then makes an index of PAGES pages and
times opening it and looking up a chain. Raw and store runs alternate; figures are medians of 5 with the extremes.
Prints one JSON line.
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
from pathlib import Path

from longread.kv.disk.store import DiskStore
from longread.kv.records import Layout, Record, chain_key
from longread.spec.state import PAGE_TOKENS

ROUNDS = 5
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


def raw_read(path: Path, size: int, into: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    while os.readv(file, [into[:size]]) == size:
        pass
    os.close(file)


def store_write(folder: Path, layout: Layout, records: Sequence[Record], size: int) -> None:
    store = DiskStore.open(folder, layout, max_bytes=2**40)
    for batch in batches(records, size):
        store.write(batch)
    store.close()


def store_read(folder: Path, layout: Layout, records: Sequence[Record], into: memoryview) -> None:
    store = DiskStore.open(folder, layout, max_bytes=2**40)
    for record in records:
        if not store.read("page", record.key, into[: layout.page_bytes]):
            sys.exit("a record did not come back whole")
    store.close()


def drop_cached(*paths: Path) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rate(total: int, times: list[float]) -> dict[str, float]:
    """GB/s: median, lowest and highest."""
    return {
        "median": round(total / statistics.median(times) / 1e9, 3),
        "low": round(total / max(times) / 1e9, 3),
        "high": round(total / min(times) / 1e9, 3),
    }


def throughput(folder: Path, record_bytes: int, total: int) -> dict[str, dict[str, float]]:
    layout = Layout(bytes(16), "benchmark", "bytes", record_bytes, 0)
    payload = memoryview(os.urandom(record_bytes + 64 * 2**20))
    records = list(pages(layout, total // record_bytes, payload))
    total = len(records) * record_bytes
    raw, where, into = folder / "raw", folder / "store", memoryview(bytearray(record_bytes))
    times: dict[str, list[float]] = {}

    work = {
        "raw_write": lambda: raw_write(raw, records, record_bytes),
        "store_write": lambda: store_write(where, layout, records, record_bytes),
        "raw_read": lambda: raw_read(raw, record_bytes, into),
        "store_read": lambda: store_read(where, layout, records, into),
    }
    for number in range(ROUNDS):
        shutil.rmtree(where, ignore_errors=True)
        raw.unlink(missing_ok=True)
        # Who goes first changes: a virtual disk answers the second reader from a cache that cannot be dropped.
        order = ("raw", "store") if number % 2 else ("store", "raw")
        for who in order:
            times.setdefault(f"{who}_write", []).append(seconds(work[f"{who}_write"]))
        drop_cached(raw, *(where / "segments").iterdir())
        for heat in ("cold", "warm"):
            for who in order:
                times.setdefault(f"{who}_read_{heat}", []).append(seconds(work[f"{who}_read"]))
    shutil.rmtree(where)
    raw.unlink()
    return {name: rate(total, each) for name, each in times.items()}


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
        spent[f"chain_{heat}"] = seconds(lambda opened=store: _check(len(opened.known("page", keys)) == len(keys)))
        spent["chain_again"] = seconds(lambda opened=store: _check(len(opened.known("page", keys)) == len(keys)))
        spent["single_gets_again"] = seconds(lambda opened=store: _check(all(opened.get("page", k) for k in keys)))
        store.close()
    return spent


def _check(right: bool) -> None:
    if not right:
        sys.exit("a page that was written is not known")


def main() -> None:
    parser = argparse.ArgumentParser(description="The disk store against the raw disk, in the same run.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the disk is that is measured")
    parser.add_argument("kib", type=int, nargs="?", default=1024, metavar="RECORD_KIB")
    parser.add_argument("mib", type=int, nargs="?", default=1024, metavar="TOTAL_MIB")
    parser.add_argument("count", type=int, nargs="?", default=100_000, metavar="PAGES")
    args = parser.parse_args()
    folder, kib, mib, count = args.folder / "longread-store-benchmark", args.kib, args.mib, args.count
    folder.mkdir()
    try:
        figures = {"record_kib": kib, "total_mib": mib, "GB/s": throughput(folder, kib * 1024, mib * 2**20)}
        figures["index"] = opening(folder, count)
        figures["load_average"] = os.getloadavg()
        print(json.dumps(figures))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
