"""How fast a folder's disk writes and reads large files.

Knows files and the page cache. Must not know what the figures are for.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from longread.spec.errors import ConfigError

BLOCK = 8 * 2**20
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
SHARE = 10  # at most a tenth of what is free


def measure_disk(folder: Path, size: int, seconds: float) -> tuple[float, float, str]:
    """Bytes/s written (to the disk, not to its cache) and read back (from the disk), and a note ("" if there is none).

    Writes a file of at most ``size`` bytes, of a tenth of the free space, and for at most ``seconds``; removes it
    whatever happens. Raises ConfigError where the folder cannot tell, OSError where it cannot be written.
    """
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise ConfigError(f"{folder} lies in memory ({kind}), not on a disk; name a folder on one with --disk")
    free = shutil.disk_usage(folder).free
    size = min(size, free // SHARE) // BLOCK * BLOCK
    if size < BLOCK:
        raise ConfigError(f"{folder}: {free:,} bytes free are too few to measure its disk")
    handle, name = tempfile.mkstemp(prefix=".longread-probe-", dir=folder)
    try:
        written, size = _write(handle, size, seconds)
        note = "" if _drop_cache(handle, size) else "the page cache could not be dropped: reads came from memory"
        return written, _read(handle, size), note
    finally:
        os.close(handle)
        os.unlink(name)


def _write(handle: int, size: int, seconds: float) -> tuple[float, int]:
    """Random blocks, so that no layer compresses them or shares equal ones; the final sync is part of the time."""
    noise = bytearray(os.urandom(BLOCK))
    begun, done = time.perf_counter(), 0
    while done < size and (not done or time.perf_counter() - begun < seconds):
        noise[:16] = os.urandom(16)
        done += os.write(handle, noise)
    os.fsync(handle)
    return done / (time.perf_counter() - begun), done


def _drop_cache(handle: int, size: int) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(handle, 0, size, os.POSIX_FADV_SEQUENTIAL)
    return True


def _read(handle: int, size: int) -> float:
    os.lseek(handle, 0, os.SEEK_SET)
    buffer = memoryview(bytearray(BLOCK))
    begun, done = time.perf_counter(), 0
    while done < size:
        got = os.readv(handle, [buffer])
        if not got:
            break
        done += got
    return done / (time.perf_counter() - begun)


def file_system(folder: Path) -> str:
    """The kind of file system under ``folder``; "" where the operating system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    place, best, kind = folder.resolve(), -1, ""
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        path = Path(mount.replace("\\040", " "))
        if (place == path or path in place.parents) and len(path.parts) >= best:
            best, kind = len(path.parts), found
    return kind
