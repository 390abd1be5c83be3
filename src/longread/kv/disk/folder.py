"""A store's folder: what lies in it, whether it is one of ours, and the locks of those who have it open.

Knows names, modes and locks. Must not know records, nor what the index says.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longread.kv.disk.catalogue import check_marks, damaged
from longread.kv.disk.locks import open_own, share_lock, take_lock, try_lock
from longread.kv.disk.reserve import RESERVE_NAME
from longread.kv.disk.segments import segment_files
from longread.spec.errors import StoreError, StoreVersionError

INDEX_NAME = "index.sqlite"
SEGMENTS = "segments"
LOCK_NAME = "use.lock"
COLLECT_LOCK = "gc.lock"


def holds_store(path: Path) -> bool:
    """Whether a store is in the folder, be it one that lost its index."""
    return (path / INDEX_NAME).is_file() or bool(segment_files(path / SEGMENTS))


def refuse_links(path: Path) -> None:
    """SQLite and the collector would write to, or delete, what a link in a folder from elsewhere points to."""
    for each in path.iterdir() if path.is_dir() else ():
        if each.is_symlink() and (each.name == SEGMENTS or each.name.startswith(INDEX_NAME)):
            raise StoreError(
                f"{path}: {each.name} is a symbolic link, which no store makes; to keep a store elsewhere, link "
                f"or move the whole folder"
            )


def refuse_others(path: Path, to_rebuild: bool = False) -> None:
    """Before anything is written: an index that is sound, but another program's or another version's, stays as it is.

    Raises StoreVersionError; StoreDamagedError only if it is not ``to_rebuild``, which is for those.
    """
    try:
        check_marks(path / INDEX_NAME)
    except StoreVersionError as error:
        more = "; if it is this store's all the same, move it away and rebuild" if to_rebuild else ""
        raise StoreVersionError(f"{error}{more}") from error
    except StoreError:
        if not to_rebuild:
            raise


def require_index(path: Path) -> None:
    """Records without an index must not get an empty one: what no index names is deleted."""
    if _lost_index(path):
        UseLock(path / LOCK_NAME, read_only=True).release()  # waits for a rebuild that is just putting it in its place
        if _lost_index(path):
            raise damaged(path / INDEX_NAME, "it is lost")


def _lost_index(path: Path) -> bool:
    """Segments are looked for first: in a store that is being made they come after the index."""
    return bool(segment_files(path / SEGMENTS)) and not (path / INDEX_NAME).exists()


def make_folder(path: Path) -> None:
    """For its owner alone: texts and token ids lie in it unencrypted. A folder that is there keeps its mode.

    Raises StoreVersionError for a folder that holds something else, or a file.
    """
    if path.exists() and not path.is_dir():
        raise StoreVersionError(f"{path}: a file, not a folder; give another name")
    if not (path / INDEX_NAME).exists() and path.is_dir():
        own = {SEGMENTS, LOCK_NAME, COLLECT_LOCK, RESERVE_NAME, "lost+found"}
        foreign = sorted(each.name for each in path.iterdir() if each.name not in own)
        if not foreign and (path / SEGMENTS).is_dir():
            foreign = sorted(each.name for each in (path / SEGMENTS).iterdir())
        if foreign:
            raise StoreVersionError(f"{path}: not empty and not a store (it has {foreign[0]!r}); give an empty folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / SEGMENTS).mkdir(mode=0o700, exist_ok=True)


class UseLock:
    """Held by whoever has the store open: alone while it is made or indexed anew, else shared."""

    def __init__(self, path: Path, read_only: bool):
        self.alone = False
        self._file: int | None = None
        try:
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            self._file = open_own(path, flags)
        except OSError:
            if not read_only:
                raise
            return  # a reader does no harm without it
        if not read_only:
            self.alone = try_lock(self._file)
        if not self.alone:
            self.share()  # waits while another process makes the store

    def share(self) -> None:
        if self._file is not None:
            share_lock(self._file)
            self.alone = False

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time collects garbage."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        take_lock(descriptor)
        yield
    finally:
        os.close(descriptor)
