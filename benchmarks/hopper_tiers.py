"""The scenarios ``host`` and ``disk`` of hopper_engine.py: a long prompt comes back from a slower tier.

Seconds, bytes and rates of saves and loads, and whether the same bytes are back.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from hopper_driver import Driver, prompt

from longread.kv.disk.store import DiskStore
from longread.kv.host import HostArena
from longread.kv.records import Layout
from longread.kv.tensors import StateTensors
from longread.kv.tiers import Found, Tiers
from longread.kv.transfer import Transfer
from longread.measure.probe_disk import measure_disk
from longread.spec.state import PAGE_TOKENS

EVICTED_AT_ONCE = 64  # pages, as a long prompt wins them


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
