"""An index that is lost or made anew: interrupted at any moment, no record and no document is lost."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from errno import EIO, ENOMEM
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of

from longread.kv.disk.catalogue import Catalogue
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Record
from longread.spec.errors import StoreDamagedError, StoreError, StoreFullError, StoreVersionError

BIG = 2**30
SEGMENTS = 5


def chains() -> list[list[Record]]:
    return [chain_of([number, *range(700)]) for number in range(SEGMENTS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five segments of a chain each, the last a document."""
    path = tmp_path / "store"
    for number, chain in enumerate(chains()):
        store = DiskStore.open(path, SMALL, max_bytes=BIG)
        ids = b"".join(record.run for record in chain)
        document = DocumentInfo("doc-x", "x", "", len(ids) // 4, 4, chain[-1].key, token_ids=ids, text="text")
        store.write(chain, document=document if number == SEGMENTS - 1 else None)
        store.close()
    assert len(segments(path)) == SEGMENTS
    return path


def segments(path: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in (path / "segments").iterdir()}


def assert_all_there(path: Path) -> None:
    store = DiskStore.open(path, SMALL, max_bytes=BIG)
    for record in (record for chain in chains() for record in chain):
        into = bytearray(len(record.payload))
        assert store.read(record.kind, record.key, memoryview(into))
        assert into == record.payload
    assert store.verify().sound
    document = store.document("doc-x")
    assert document is not None
    assert document.text == "text"
    store.close()
    assert len(segments(path)) == SEGMENTS


def lose_index(path: Path) -> None:
    for each in path.glob("index.sqlite*"):
        each.unlink()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("rest", [None, b""])
def test_records_without_an_index_are_not_deleted(folder: Path, read_only: bool, rest: bytes | None) -> None:
    before = segments(folder)
    lose_index(folder)
    if rest is not None:
        (folder / "index.sqlite").write_bytes(rest)
    with pytest.raises(StoreDamagedError, match="verify --rebuild"):
        DiskStore.open(folder, SMALL, max_bytes=BIG, read_only=read_only)
    assert segments(folder) == before
    store, count = DiskStore.rebuild(folder, max_bytes=BIG)
    assert count == sum(len(chain) for chain in chains())
    store.close()
    assert segments(folder) == before


def test_an_index_whose_tables_were_lost_with_its_log_is_not_a_new_one(folder: Path) -> None:
    before = segments(folder)
    lose_index(folder)
    empty = sqlite3.connect(folder / "index.sqlite")
    empty.execute("PRAGMA journal_mode = WAL")
    empty.close()
    with pytest.raises(StoreDamagedError, match="verify --rebuild"):
        DiskStore.open(folder, SMALL, max_bytes=BIG)
    assert segments(folder) == before


def test_only_what_is_called_like_a_segment_is_ours(folder: Path, tmp_path: Path) -> None:
    (folder / "segments" / "holiday.seg").write_text("mine")
    DiskStore.open(folder, SMALL, max_bytes=BIG).close()
    DiskStore.rebuild(folder, max_bytes=BIG)[0].close()
    store = DiskStore.open(folder, SMALL, max_bytes=BIG)
    store.gc(0)
    store.close()
    assert (folder / "segments" / "holiday.seg").read_text() == "mine"
    other = tmp_path / "other"
    (other / "segments").mkdir(parents=True)
    (other / "segments" / "holiday.seg").write_text("mine")
    with pytest.raises(StoreVersionError, match=r"holiday\.seg"):
        DiskStore.open(other, SMALL, max_bytes=BIG)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, StoreFullError])
def test_interrupted_it_leaves_the_old_index(folder: Path, stop: type[BaseException]) -> None:
    count = 0

    def progress(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count >= 3:  # a full disk also in the reserve's room, in which it is tried once more
            raise stop

    with pytest.raises(stop):
        DiskStore.rebuild(folder, max_bytes=BIG, progress=progress)
    assert not [*folder.glob("*.new*"), *folder.glob("*.damaged*")]
    assert not [each for each in Path("/proc/self/fd").iterdir() if str(folder) in os.path.realpath(each)]
    assert_all_there(folder)
    DiskStore.rebuild(folder, max_bytes=BIG)[0].close()
    assert_all_there(folder)


def test_a_full_disk_at_the_end_leaves_the_old_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Catalogue) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Catalogue, "into_one_file", full)
    with pytest.raises(StoreFullError):
        DiskStore.rebuild(folder, max_bytes=BIG)
    assert not list(folder.glob("*.new*"))
    assert_all_there(folder)


KILLED = """
import os, signal, sys
from pathlib import Path
from longread.kv.disk.store import DiskStore
left = int(sys.argv[2])
def step(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def stepping(real):
    def call(*arguments, **named):
        step()
        return real(*arguments, **named)
    return call
os.replace = stepping(os.replace)
Path.unlink = stepping(Path.unlink)
DiskStore.rebuild(Path(sys.argv[1]), max_bytes=2**30, progress=step)[0].close()
"""


def test_killed_at_each_step_nothing_is_lost(folder: Path) -> None:
    """Each time rebuilt at once after the kill, as the error says, if the store cannot be opened."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    refused = 0
    for steps in range(1, 30):
        arguments = [sys.executable, "-c", KILLED, str(folder), str(steps)]
        code = subprocess.run(arguments, env=environment, check=False).returncode
        try:
            DiskStore.open(folder, SMALL, max_bytes=BIG).close()
        except StoreDamagedError:
            refused += 1
            DiskStore.rebuild(folder, max_bytes=BIG)[0].close()
        assert_all_there(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert 0 < refused < steps // 2


def test_no_saved_index_is_written_over(folder: Path) -> None:
    contents = []
    for number in range(3):
        mark = f"damage {number}".encode()
        contents.append(mark)
        (folder / "index.sqlite").write_bytes(mark)
        DiskStore.rebuild(folder, max_bytes=BIG)[0].close()
    saved = [folder / f"index.sqlite.damaged{end}" for end in ("", ".2", ".3")]
    assert [each.read_bytes() for each in saved] == contents


def test_what_only_the_log_of_the_old_index_tells_is_taken_over(folder: Path) -> None:
    """And the log does not stay beside the new index."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from longread.kv.disk.store import DiskStore\n"
        "store = DiskStore.open(Path(sys.argv[1]), None, max_bytes=2**30)\n"
        "assert store.pin('doc-x')\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True)
    assert (folder / "index.sqlite-wal").stat().st_size
    store, _ = DiskStore.rebuild(folder, max_bytes=BIG)
    assert [each.pinned for each in store.documents()] == [True]
    store.close()
    assert (folder / "index.sqlite.damaged-wal").stat().st_size
    assert_all_there(folder)


def test_no_store_is_not_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        DiskStore.rebuild(tmp_path, max_bytes=BIG)
    assert not list(tmp_path.iterdir())


def test_whoever_opens_while_the_new_index_is_put_in_its_place_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.replace, []

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if Path(source).name == "index.sqlite":  # now there is none
            other.start()
            other.join(0.2)
            assert other.is_alive()

    other = threading.Thread(target=lambda: opened.append(DiskStore.open(folder, SMALL, max_bytes=BIG)))
    monkeypatch.setattr(os, "replace", replace)
    store, _ = DiskStore.rebuild(folder, max_bytes=BIG)
    other.join()
    assert len(opened) == 1
    opened[0].close()
    store.close()
    assert_all_there(folder)


@pytest.mark.parametrize(("error", "left"), [(EIO, 1), (ENOMEM, 0)])
def test_where_the_disk_cannot_read_the_rest_is_entered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: int, left: int
) -> None:
    """The first records of each segment lie in the bad block; a shortage of memory is no bad block."""
    real = os.pread

    def pread(file: int, size: int, at: int) -> bytes:
        if at < 2000:
            raise OSError(error, os.strerror(error))
        return real(file, size, at)

    monkeypatch.setattr("longread.kv.disk.rebuild.BLOCK_BYTES", 512)
    monkeypatch.setattr(os, "pread", pread)
    if not left:
        with pytest.raises(StoreError, match="memory"):
            DiskStore.rebuild(folder, max_bytes=BIG)
        assert_all_there(folder)
        return
    store, count = DiskStore.rebuild(folder, max_bytes=BIG)
    assert 0 < count < sum(len(chain) for chain in chains())
    assert store.verify().records == count
    store.close()


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 9", "PRAGMA application_id = 77"])
def test_what_is_not_damaged_but_anothers_is_not_set_aside(folder: Path, statement: str) -> None:
    """A newer version's index tells of documents, too, and any program may call its database so."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        index.execute(statement)
        index.commit()
    before = (folder / "index.sqlite").read_bytes()
    with pytest.raises(StoreVersionError, match=r"another folder.*; if it is this store's all the same, move it away"):
        DiskStore.rebuild(folder, max_bytes=BIG)
    assert (folder / "index.sqlite").read_bytes() == before
    assert not list(folder.glob("*.damaged*")) and not list(folder.glob("*.new*"))
    (folder / "index.sqlite").rename(folder / "away")
    store, entered = DiskStore.rebuild(folder, max_bytes=BIG)
    assert entered
    store.close()
