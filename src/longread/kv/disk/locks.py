"""Opening the store's own files, locks on them that a process loses when it ends, and what not every platform has.

Knows file descriptors. Must not know what is locked. A platform without flock can import the store, not open one.
"""

import os
import stat
from contextlib import suppress
from errno import EINVAL, ELOOP, ENXIO
from pathlib import Path

from longread.spec.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class ForeignFileError(OSError):
    """Something else lies where one of the store's files belongs."""


def open_own(path: Path, flags: int) -> int:
    """Open a regular file, or make it for its owner alone. A link is not followed and a FIFO not waited for: whoever
    made the folder could have put either there. Raises ForeignFileError for such, else OSError.
    """
    flags |= os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (ELOOP, ENXIO) or isinstance(error, IsADirectoryError):
            raise _foreign(path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _foreign(path)


def _foreign(path: Path) -> ForeignFileError:
    return ForeignFileError(EINVAL, f"{path.name} is not a regular file; the store did not make it: take it away")


def require_locks(path: Path) -> None:
    """Before anything is made in ``path``. Raises StoreError where files cannot be locked."""
    if fcntl is None:
        raise StoreError(
            f"{path}: a store needs file locks (flock), which this system does not have (Windows); leave --store out, "
            "or run Longread on Linux or macOS"
        )


def take_lock(descriptor: int) -> None:
    """Alone; waits for all others."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Alone, if nobody else has it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share_lock(descriptor: int) -> None:
    """With others who share it; waits for who has it alone, and gives up having it alone."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def sync_data(descriptor: int) -> None:
    """Put a file's bytes and length on the disk. macOS has no fdatasync, and its fsync leaves them in the drive's cache
    (fsync(2) there); some of its file systems know no F_FULLFSYNC.
    """
    whole = getattr(fcntl, "F_FULLFSYNC", None)
    if whole is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, whole)
            return
    getattr(os, "fdatasync", os.fsync)(descriptor)
