"""Room that a store keeps for getting smaller: a file of nothing, let go of where a full disk stands in the way of it.

Knows one file and its file system. Must not know what the room is used for.

Even to forget records takes room, for the index's log. The file is truncated, never deleted, so that its lock is one
for all processes: who holds it has taken the room, and gives back what is left of it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EOPNOTSUPP
from pathlib import Path
from typing import TypeVar

from longread.kv.disk.locks import open_own, try_lock
from longread.spec.errors import StoreFullError

RESERVE_NAME = "gc.reserve"
SIZE = 16 * 2**20  # the log, what must go from there into the database before the log begins anew, and a margin
LIMIT_SHARE = 32  # a store whose size limit is not so many reserves has none...
DISK_SHARE = 8  # ...nor one on so small a file system
BLOCK_BYTES = 4096
T = TypeVar("T")


class Reserve:
    """The reserve of the store in ``folder``. ``limit``: the store's size, 0: this process makes none.
    ``record_bytes``: of the largest record, which must fit in to be moved.
    """

    def __init__(self, folder: Path, limit: int, record_bytes: int = 0):
        self.path = folder / RESERVE_NAME
        disk, size = os.statvfs(folder), max(SIZE, SIZE // 2 + 2 * record_bytes)
        size += -size % BLOCK_BYTES
        fits = size <= min(limit // LIMIT_SHARE, disk.f_blocks * disk.f_frsize // DISK_SHARE)
        self.wanted = size if fits else 0
        self._lent = 0

    @property
    def size(self) -> int:
        """Bytes now; 0 while some process has let go of them."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def within(self, limit: int) -> int:
        """Bytes that count in a limit, also while this process has let go of them; a small limit has none."""
        size = max(self.size, self._lent)
        return size if size <= limit // LIMIT_SHARE else 0

    def stands(self) -> bool:
        """Whether records may be written: the reserve is there, made up again if need be, or there is room for it
        twice. Else another process may have let go of it just now, and that room is not for records.
        """
        if self.size >= self.wanted:
            return True
        self.make()
        disk = os.statvfs(self.path.parent)
        return self.size >= self.wanted or disk.f_bavail * disk.f_frsize >= 2 * self.wanted

    def make(self) -> None:
        """Grow to what is wanted, as far as there is room; not while another process has let go of it."""
        if self.wanted:
            with self._alone(os.O_CREAT) as file:
                if file is not None:
                    _grow(file, self.wanted)

    def fit(self, limit: int) -> None:
        """Give it up if it is too large for a store of ``limit`` bytes."""
        if self.size and not self.within(limit):
            with self._alone() as file:
                if file is not None:
                    os.ftruncate(file, 0)

    def lend(self, work: Callable[[], T]) -> T:
        """Do something that makes the store smaller; where the disk is full, do it again in the reserve's room, of
        which what is left then is taken back. Raises what ``work`` raises.
        """
        try:
            return work()
        except StoreFullError:
            with self._alone() as file:
                self._lent = os.fstat(file).st_size if file is not None else 0
                if file is None or not self._lent:
                    raise
                os.ftruncate(file, 0)
                try:
                    return work()
                finally:
                    _grow(file, self._lent)
                    self._lent = 0

    @contextmanager
    def _alone(self, flags: int = 0) -> Iterator[int | None]:
        """The file under its lock; None if there is none, or another has the lock."""
        try:
            descriptor = open_own(self.path, os.O_RDWR | flags)
        except FileNotFoundError:
            yield None
            return
        try:
            yield descriptor if try_lock(descriptor) else None
        finally:
            os.close(descriptor)


def _grow(file: int, wanted: int) -> None:
    """To ``wanted`` bytes, or as near as there is room."""
    disk, size = os.fstatvfs(file), os.fstat(file).st_size
    more = min(wanted - size, disk.f_bavail * disk.f_frsize) // BLOCK_BYTES * BLOCK_BYTES
    if more <= 0:
        return
    try:
        _allocate(file, size, more)
    except OSError:  # a quota, or less than was said to be free: what was begun is given back
        with suppress(OSError):
            os.ftruncate(file, size)


def _allocate(file: int, offset: int, size: int) -> None:
    allocate = getattr(os, "posix_fallocate", None)  # macOS has none, and some file systems cannot
    if allocate is not None:
        try:
            allocate(file, offset, size)
            return
        except OSError as error:
            if error.errno not in (EINVAL, EOPNOTSUPP):
                raise
    data = os.urandom(size)  # zeros take no room where the file system compresses
    while data:
        done = os.pwrite(file, data, offset)
        offset, data = offset + done, data[done:]
