"""The disk store killed at random, two hundred times: what was written is there, and nothing wrong is ever served."""

import os
import random
import signal
import time
import traceback
from pathlib import Path

from apart import called, run_apart, single_threaded
from recordmaker import SMALL, chain_of, served

from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Record

LIMIT = 60_000


def named(records: list[Record]) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    return DocumentInfo("doc-x", "x", "tiny", len(ids) // 4, 4, records[-1].key, token_ids=ids, text="text")


def write_until_killed(path: Path, seed: int, told: int) -> None:
    """Writes, touches, evicts and compacts without end. Each finished write is told to the parent by a byte."""
    store = DiskStore.open(path, SMALL, max_bytes=LIMIT)
    draw = random.Random(seed)
    os.write(told, b"s")
    for number in range(100_000):
        chain = chain_of([seed, number, *range(draw.randrange(10, 2000))])
        store.write(chain, document=named(chain) if number % 5 == 0 else None)
        os.write(told, b"w")
        store.touch([record.key for record in chain])
        if number % 7 == 0:
            store.gc(LIMIT // 2)


def started(path: Path, seed: int) -> tuple[int, int]:
    """A writer's process, and the pipe through which it tells what it has done, or what has ended it."""
    single_threaded()
    out, told = os.pipe()
    child = os.fork()
    if child:
        os.close(told)
        return child, out
    try:
        os.close(out)
        write_until_killed(path, seed, told)
    except BaseException:  # noqa: BLE001 - a process's edge: it must not go on as a second parent
        os.write(told, traceback.format_exc().encode())
    finally:
        os._exit(1)


def kill_at_random(path: Path, seeds: list[int], draw: random.Random) -> list[int]:
    """Lets one writer a seed run and kills them. Returns how many writes each had finished."""
    running = [started(path, seed) for seed in seeds]
    said = [os.read(out, 1) for _, out in running]
    time.sleep(draw.random() * 0.03)
    for number, (child, out) in enumerate(running):
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(out, "rb") as rest:
            said[number] += rest.read()
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, said[number].decode()
    assert all(each.startswith(b"s") and not each.strip(b"sw") for each in said), said
    return [len(each) - 1 for each in said]


def killed(place: Path) -> None:
    """150 times one writer, 25 times two at once."""
    draw = random.Random(11)
    for number in range(175):
        seeds = [number] if number % 7 else [number, 1000 + number]
        finished = kill_at_random(place, seeds, draw)
        store = DiskStore.open(place, SMALL, max_bytes=LIMIT)
        report = store.verify()
        assert report.sound or report.broken_documents, report
        assert not report.corrupt
        assert store.corrupt == 0
        assert report.unreachable == 0
        for seed, count in zip(seeds, finished, strict=True):
            again = random.Random(seed)
            chains = [chain_of([seed, n, *range(again.randrange(10, 2000))]) for n in range(count)]
            found = [served(store, chain) for chain in chains]
            # What was written last and answered is there whole: only what was in flight may be lost. (A collection
            # may have been under way, but that takes the oldest first. A second writer may push it out.)
            if chains and len(seeds) == 1:
                assert found[-1] == len(chains[-1])
        files = {path.name: path.stat().st_size for path in (place / "segments").iterdir()}
        assert sum(files.values()) == store.stats().file_bytes  # orphans and torn ends are gone
        store.close()


def test_killed_two_hundred_times_nothing_wrong_is_served(tmp_path: Path) -> None:
    run_apart(__file__, killed, tmp_path)


if __name__ == "__main__":
    called([killed])
