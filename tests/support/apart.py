"""Runs a function of a test file in a fresh process: for tests that fork (a test run has threads), that change what
the process may do, or that need a mount of their own.

The file has ``if __name__ == "__main__": called(...)`` at its end. The function takes the folder that it works in.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def run_apart(file: str, function: Callable[[Path], None], folder: Path, *, before: Sequence[str] = ()) -> str:
    """What the function printed; its failure is the test's. ``before``: a command that runs the rest of its line.

    Raises FileNotFoundError if there is no such command, and UnableError if it says so by its status.
    """
    command = [*before, sys.executable, "-W", "error", file, function.__name__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ran.returncode == UnableError.STATUS:
        raise UnableError(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


class UnableError(Exception):
    """The command before the function could not do its part."""

    STATUS = 77


def single_threaded() -> None:
    """To be called before a fork: this process has one thread. One that was joined may still be on its way out."""
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < deadline, "a process with threads cannot fork safely"
        time.sleep(0.001)


def called(functions: Sequence[Callable[[Path], None]]) -> None:
    """Run the function that the command line names."""
    {each.__name__: each for each in functions}[sys.argv[1]](Path(sys.argv[2]))
