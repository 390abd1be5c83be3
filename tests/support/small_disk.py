"""A file system of a few MiB to be filled: a tmpfs in a mount namespace of its own, which ends with the process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from apart import UnableError, run_apart

_ENTER = f'mount -t tmpfs -o size="$1" tmpfs "$2" || exit {UnableError.STATUS}; shift 2; exec "$@"'


def run_on_small_disk(file: str, function: Callable[[Path], None], folder: Path, size: str = "8m") -> str:
    """``run_apart`` where ``folder`` is that file system. Where nothing can be mounted, the test is skipped."""
    own = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-r", "-m")
    may = f'unshare -m true 2>/dev/null || unshare -r -m true || exit {UnableError.STATUS}; exec "$@"'
    before = ("sh", "-c", may, "sh", *own, "sh", "-c", _ENTER, "sh", size, str(folder))
    try:
        return run_apart(file, function, folder, before=before)
    except UnableError as error:
        pytest.skip(f"no small file system can be mounted here: {error}")


class Ballast:
    """A file that takes all the room that there is but ``left`` bytes."""

    def __init__(self, folder: Path, name: str = "ballast"):
        self.path = folder / name

    def fill(self, left: int = 0) -> None:
        self.free()
        stat = os.statvfs(self.path.parent)
        with self.path.open("wb") as file:
            if stat.f_bavail * stat.f_frsize > left:
                os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - left)

    def free(self) -> None:
        self.path.unlink(missing_ok=True)
