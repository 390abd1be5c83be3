"""A file system of a few MiB that is really full: a tmpfs in a mount namespace of its own, which ends with the process.

A test runs one of its functions there, in a fresh process: ``run_on_small_disk(__file__, "name", tmp_path)``, and has
``if __name__ == "__main__": called()`` at the end of its file. The function takes the folder where it is mounted.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

_ENTER = 'mount -t tmpfs -o size="$1" tmpfs "$2" || exit 77; shift 2; exec "$@"'


def run_on_small_disk(file: str, function: str, folder: Path, size: str = "8m") -> str:
    """What the function printed. Its failure is the test's; where nothing can be mounted, the test is skipped."""
    own = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-r", "-m")
    command = [*own, "sh", "-c", _ENTER, "sh", size, str(folder), sys.executable, file, function, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    if ran.returncode == 77 or "unshare" in ran.stderr:
        pytest.skip(f"no small file system can be mounted here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def called(functions: Mapping[str, Callable[[Path], None]]) -> None:
    """Run the function that the command line names."""
    functions[sys.argv[1]](Path(sys.argv[2]))


class Ballast:
    """A file that takes all the room that there is but ``left`` bytes."""

    def __init__(self, folder: Path):
        self.path = folder / "ballast"

    def fill(self, left: int = 0) -> None:
        self.free()
        stat = os.statvfs(self.path.parent)
        with self.path.open("wb") as file:
            if stat.f_bavail * stat.f_frsize > left:
                os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - left)

    def free(self) -> None:
        self.path.unlink(missing_ok=True)
