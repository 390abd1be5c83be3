"""The disk store and the system below it: file modes, and what not every platform has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of

from longread.kv.disk import locks
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo

BIG = 2**30


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def filled(folder: Path) -> DiskStore:
    store = DiskStore.open(folder, SMALL, max_bytes=BIG)
    records = chain_of(range(600))
    ids = b"".join(record.run for record in records)
    store.write(records, document=DocumentInfo("doc-a", "a", "", 600, 9, records[-1].key, token_ids=ids, text="a"))
    store.gc()
    return store


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_store_is_its_owners_alone(tmp_path: Path, open_umask: None) -> None:
    folder, file = tmp_path / "above" / "store", tmp_path / "a.lrd"
    store = filled(folder)
    store.export("doc-a", file)
    found = modes(folder)
    assert {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "use.lock", "gc.lock"} <= found.keys()
    assert len([name for name in found if name.endswith(".seg")]) >= 1
    assert found.pop("store") == found.pop("segments") == 0o700
    assert set(found.values()) == {0o600}
    assert file.stat().st_mode & 0o777 == 0o600
    store.close()


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    filled(folder).close()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o770 if path.is_dir() else 0o660)
    before = modes(folder)
    filled(folder).close()
    assert modes(folder) == before


def test_without_fdatasync_all_of_a_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(os, "fsync", fsync)
    filled(tmp_path).close()
    assert any(name.endswith(".seg") for name in synced)


@pytest.mark.parametrize("works", [True, False])
def test_where_fsync_leaves_data_in_the_drives_cache_it_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """As on macOS; on a file system that cannot, fsync is what is left."""
    flushed: list[str] = []
    synced: list[int] = []

    def full(descriptor: int, command: int) -> int:
        assert command == 51
        if not works:
            raise OSError(45, "Operation not supported")
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return 0

    monkeypatch.setattr(locks.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(locks.fcntl, "fcntl", full)
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(os, "fsync", synced.append)
    filled(tmp_path).close()
    assert any(name.endswith(".seg") for name in flushed) == works and synced


def test_without_file_locks_only_a_store_is_refused(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "import psutil, uvicorn, starlette.applications, prometheus_client\n"  # as they are built for this system
        "for name in ('fcntl', 'resource', 'pwd', 'grp', 'termios'):\n"
        "    sys.modules[name] = None\n"
        "for name in ('fdatasync', 'preadv', 'pwritev', 'pread', 'O_CLOEXEC', 'O_NOFOLLOW', 'O_NONBLOCK', 'fork'):\n"
        "    delattr(os, name)\n"
        "from pathlib import Path\n"
        "from longread.kv.disk.store import DiskStore\n"
        "from longread.kv.shelf import DiskShelf\n"
        "import longread.cli.main, longread.cli.ingesting, longread.cli.serving, longread.cli.store\n"
        "import longread.server.app, longread.wire.documents.files, longread.wire.documents.tree\n"
        "from longread.spec.errors import StoreError\n"
        "for call in (lambda path: DiskStore.open(path, None, max_bytes=1),\n"
        "             lambda path: DiskStore.rebuild(path, max_bytes=1)):\n"
        "    try:\n"
        "        call(Path(sys.argv[1]))\n"
        "    except StoreError as error:\n"
        "        print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, text=True, env=env
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("a store needs file locks") == 2
    assert not (tmp_path / "store").exists()


def test_the_benchmark_says_how_it_is_called(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "store.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for words in ((), (str(tmp_path), "a page")):
        ran = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=env)
        assert ran.returncode == 2 and "usage:" in ran.stderr and "Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir())
