"""Locks on open files that a process loses when it ends, and what else of the system not every platform has.

Knows file descriptors. Must not know what is locked. A platform without flock can import the store, not open one.
"""

import os
from pathlib import Path

from longread.spec.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def require_locks(path: Path) -> None:
    """Before anything is made in ``path``. Raises StoreError where files cannot be locked."""
    if fcntl is None:
        raise StoreError(
            f"{path}: a store needs file locks (flock), which this system does not have; leave --store out"
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
    """Put a file's bytes and length on the disk. macOS has no fdatasync."""
    getattr(os, "fdatasync", os.fsync)(descriptor)
