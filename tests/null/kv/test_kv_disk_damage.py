"""The disk store under attack: killed processes, flipped bits, cut files, full and read-only disks."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from apart import called, run_apart
from recordmaker import SMALL, chain_of, payload_of, served

from longread.kv.disk import format as record_format
from longread.kv.disk.segments import SegmentWriter
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Record
from longread.spec.errors import StoreDamagedError, StoreError, StoreFullError, StoreReadOnlyError

BIG = 2**30
LIMIT = 60_000


def named(records: list[Record], **fields: bool) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    return DocumentInfo("doc-x", "x", "tiny", len(ids) // 4, 4, records[-1].key, token_ids=ids, text="text", **fields)


@pytest.mark.parametrize("kind", ["page", "tail", "ring"])
def test_flipped_bits_in_a_record_make_a_miss(tmp_path: Path, kind: str) -> None:
    """Each byte of the header and the run's ends, and bytes of the payload; every time that record alone is lost."""
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records = chain_of(range(300))
    store.write(records)
    [segment] = (tmp_path / "segments").iterdir()
    target = next(record for record in records if record.kind == kind)
    size = record_format.record_size(target)
    at = sum(record_format.record_size(record) for record in records[: records.index(target)])
    head = record_format.HEADER_BYTES + len(target.run)
    spots = [*range(record_format.HEADER_BYTES + min(len(target.run), 4)), *range(head - 2, head + 2), size - 1]
    for number, spot in enumerate(spots):
        with segment.open("r+b") as file:
            file.seek(at + spot)
            byte = file.read(1)
            file.seek(at + spot)
            file.write(bytes([byte[0] ^ 1 << number % 8]))
        assert served(store, records) == len(records) - 1
        assert store.corrupt == number + 1
        assert store.get(target.kind, target.key) is None
        with segment.open("r+b") as file:
            file.truncate(at + size if target is records[-1] else segment.stat().st_size)
        assert store.write([target]) > 0  # it can be written anew, at another place
        [place] = store._catalogue.query(
            "SELECT s.name, r.offset FROM records r JOIN segments s ON s.id = r.segment WHERE r.key = ? AND r.kind = ?",
            (target.key, record_format.KINDS.index(target.kind)),
        )
        segment, at = tmp_path / "segments" / place[0], place[1]
    store.close()


def test_cut_segments_make_misses(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records = chain_of(range(900))
    store.write(records)
    [segment] = (tmp_path / "segments").iterdir()
    size, before = segment.stat().st_size, len(records)
    for cut in (size - 1, size - 400, 3000, record_format.HEADER_BYTES, 1, 0):
        os.truncate(segment, cut)
        now = served(store, records)
        assert now < before or now == 0
        before = now
    assert store.corrupt == len(records)
    segment.unlink()
    assert served(store, records) == 0
    store.write(records)
    store.close()
    again = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    again.gc()
    served(again, records)
    assert again.write(records) > 0
    again.close()
    last = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    assert served(last, records) == len(records)
    last.close()


def _open_and_use(path: Path, records: list[Record]) -> int:
    """What is served; -1 if the store says that it cannot."""
    try:
        store = DiskStore.open(path, SMALL, max_bytes=BIG)
    except StoreError:
        return -1
    try:
        found = served(store, records)
        store.nearest(SMALL.root, records[0].run)
        store.tails({SMALL.root: records[0].run})
        store.documents()
        store.write(records)
        served(store, records)
        store.gc()
    except StoreError:
        return -1
    finally:
        with suppress(StoreError):
            store.close()
    return found


def test_flipped_bits_and_cuts_in_the_index_never_serve_wrong_bytes(tmp_path: Path) -> None:
    original = tmp_path / "original"
    store = DiskStore.open(original, SMALL, max_bytes=BIG)
    records = chain_of(range(1500))
    store.write(records, document=named(records))
    store.close()
    index = (original / "index.sqlite").read_bytes()
    draw = random.Random(3)
    used = [at for at in range(len(index)) if index[at]]
    outcomes = []
    for number in range(150):
        copy = tmp_path / "copy"
        shutil.copytree(original, copy)
        damaged = bytearray(index)
        if number % 5 == 0:
            del damaged[draw.randrange(1, len(damaged)) :]
        else:
            for at in draw.sample(used, 1 + number % 3):
                damaged[at] ^= 1 << draw.randrange(8)
        (copy / "index.sqlite").write_bytes(damaged)
        outcomes.append(_open_and_use(copy, records))
        shutil.rmtree(copy)
    assert -1 in outcomes  # damage that is refused, and damage that costs nothing, or some records
    assert len(records) in outcomes


def test_a_damaged_index_is_made_anew_from_the_records(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records, lost = chain_of(range(1500)), chain_of([7, *range(300)])
    store.write(lost)
    store.write(records, document=named(records, pinned=True))
    with pytest.raises(StoreError, match="another process"):
        DiskStore.rebuild(tmp_path, max_bytes=BIG)
    store.close()
    [segment] = (tmp_path / "segments").iterdir()
    with segment.open("r+b") as file:
        file.seek(record_format.HEADER_BYTES + 50)
        file.write(b"damage")
    index = tmp_path / "index.sqlite"
    data = bytearray(index.read_bytes())
    data[:100] = bytes(100)
    index.write_bytes(data)
    with pytest.raises(StoreDamagedError, match="--rebuild"):
        DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    again, count = DiskStore.rebuild(tmp_path, max_bytes=BIG)
    assert count == len(records) + len(lost) - 1
    again.close()
    assert (tmp_path / "index.sqlite.damaged").exists()
    with_model = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    assert served(with_model, records) == len(records)
    assert [each.layout for each in with_model.models()] == [SMALL]
    with_model.close()


def test_documents_outlive_an_index_that_can_still_be_read(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records = chain_of(range(1500))
    store.write(records, document=named(records, pinned=True))
    store.close()
    again, count = DiskStore.rebuild(tmp_path, max_bytes=BIG)
    assert count == len(records)
    [document] = again.documents()
    assert document.pinned
    assert again.document_state(document).whole
    again.close()


def fail_after(monkeypatch: pytest.MonkeyPatch, calls: int, error: int) -> Callable[[], None]:
    """From the given call on, writes to segments fail as on a full disk, having written a part."""
    real, count = os.pwritev, 0

    def pwritev(file: int, views: list[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count < calls:
            return real(file, views, offset)
        if count == calls:
            return real(file, [views[0][:7]], offset)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwritev", pwritev)
    return lambda: monkeypatch.setattr(os, "pwritev", real)


@pytest.mark.parametrize("calls", [1, 2, 4, 7])
def test_a_full_disk_loses_only_the_write_in_hand(tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=60_000)
    before, records = chain_of(range(400)), chain_of(range(5, 1900))
    store.write(before)
    mend = fail_after(monkeypatch, calls, 28)
    with pytest.raises(StoreFullError, match="disk is full"):
        store.write(records)
    mend()
    assert served(store, before) == len(before)
    assert served(store, records) == 0
    assert store.verify().sound
    files = sum(path.stat().st_size for path in (tmp_path / "segments").iterdir())
    assert files == store.stats().file_bytes
    assert store.write(records) > 0
    assert served(store, records + before) == len(records + before)
    store.close()


def test_a_small_file_system_really_full(tmp_path: Path) -> None:
    """With a limit on the size of any file, segments and index both run into it."""
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from recordmaker import SMALL, chain_of\n"
        "from longread.kv.disk.store import DiskStore\n"
        "from longread.spec.errors import StoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = DiskStore.open(Path(sys.argv[1]), SMALL, max_bytes=2**30)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "done = refused = 0\n"
        "for n in range(60):\n"
        "    chain = chain_of([n, *range(3000)])\n"
        "    try:\n"
        "        store.write(chain)\n"
        "        done += 1\n"
        "    except StoreError as error:\n"
        "        refused += 1\n"
        "        continue\n"
        "    for record in chain:\n"
        "        into = bytearray(len(record.payload))\n"
        "        assert store.read(record.kind, record.key, memoryview(into)) and into == record.payload\n"
        "print(done, refused)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr
    done, refused = (int(text) for text in ran.stdout.split())
    assert done > 3
    assert refused > 3
    store = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    assert store.verify().sound
    for n in range(done):
        served(store, chain_of([n, *range(3000)]))
    store.close()


def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = DiskStore.open(folder, SMALL, max_bytes=BIG)
    records = chain_of(range(600))
    store.write(records)
    store.close()
    for path in (folder, folder / "segments"):
        path.chmod(0o555)
    for path in folder.rglob("*.*"):
        path.chmod(0o444)
    run_apart(__file__, read_as_nobody, tmp_path)
    folder.chmod(0o755)
    (folder / "segments").chmod(0o755)


def read_as_nobody(parent: Path) -> None:
    """In a process of its own, since it gives up what it may do."""
    folder, records = parent / "store", chain_of(range(600))
    if os.geteuid() == 0:  # for whom no folder is read-only
        for path in (parent, *parent.parents):
            if path.stat().st_uid == 0 and path != Path("/") and path.is_relative_to("/tmp/"):
                path.chmod(path.stat().st_mode | 0o055)
        os.setgid(65534)
        os.setuid(65534)
    with pytest.raises(StoreReadOnlyError):
        DiskStore.open(folder, SMALL, max_bytes=BIG)
    store = DiskStore.open(folder, SMALL, max_bytes=BIG, read_only=True)
    assert served(store, records) == len(records)
    with pytest.raises(StoreReadOnlyError):
        store.write(records)
    store.touch([records[0].key])
    assert store.verify().sound
    store.close()


def test_a_lost_log_of_the_index_loses_writes_only(tmp_path: Path) -> None:
    """The write-ahead log torn or gone: older rows stay, and every record served is right."""
    store = DiskStore.open(tmp_path / "a", SMALL, max_bytes=BIG)
    chains = [chain_of([n, *range(500)]) for n in range(30)]
    for chain in chains:
        store.write(chain)
    for cut in (0, 40, 5000, 60_000):
        copy = tmp_path / f"copy{cut}"
        shutil.copytree(tmp_path / "a", copy)
        os.truncate(copy / "index.sqlite-wal", cut)
        (copy / "index.sqlite-shm").unlink()
        try:
            again = DiskStore.open(copy, SMALL, max_bytes=BIG)
        except StoreError:
            continue
        for chain in chains:
            served(again, chain)
        assert not again.verify().corrupt
        again.close()
    store.close()


def test_rows_are_dropped_when_they_contradict_their_record(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records = chain_of(range(600))
    store.write(records)
    database = sqlite3.connect(tmp_path / "index.sqlite")
    database.execute("UPDATE records SET depth = 9 WHERE key = ? AND kind = 0", (records[0].key,))
    database.execute("UPDATE records SET offset = offset + 1 WHERE key = ? AND kind = 1", (records[2].key,))
    database.execute("UPDATE records SET size = 'x' WHERE key = ? AND kind = 2", (records[2].key,))
    database.execute(
        "UPDATE runs SET run = zeroblob(1024) WHERE record = (SELECT id FROM records WHERE key = ?)", (records[1].key,)
    )
    database.commit()
    database.close()
    assert served(store, records) == 0
    assert store.write(records) > 0
    assert store.corrupt == 4
    assert served(store, records) == len(records)
    assert payload_of("ring", records[2].key) == records[3].payload
    store.close()


def test_a_batch_that_fails_is_cut_off_over_several_segments(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 4000)
    records = chain_of(range(3000))
    for record in records[:3]:  # two segments, the second half full
        writer.append(record, SMALL.root)
    lengths = writer.sync()
    writer.commit()
    for record in records:
        writer.append(record, SMALL.root)
    assert len(list(tmp_path.iterdir())) > 5
    writer.rollback()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == lengths
    writer.append(records[0], SMALL.root)
    writer.sync()
    writer.commit()
    writer.finish()


def test_rows_found_unsound_while_they_are_deleted_are_each_counted_once(tmp_path: Path) -> None:
    """Look-ups find them on threads of their own while a write takes and deletes what was found so far."""
    records = chain_of(range(256 * 40), rings=False)
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=BIG)) as store:
        store.write(records)
        with store._catalogue.transaction() as write:
            write.execute("UPDATE records SET parent = zeroblob(16)")
        going = threading.Event()

        def look(part: list[Record]) -> None:
            while not going.is_set():
                store.known("page", [record.key for record in part])

        threads = [threading.Thread(target=look, args=(records[n::3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while store.corrupt < len(records) and time.monotonic() < deadline:
            store._reader.drop_unsound()
        going.set()
        for thread in threads:
            thread.join()
        store._reader.drop_unsound()
        assert store.stats().records.get("page", 0) == 0
        assert store.corrupt == len(records)


if __name__ == "__main__":
    called([read_as_nobody])
