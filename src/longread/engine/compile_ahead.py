"""Every Triton kernel that some work will launch, compiled side by side before the work is run.

Compiled as the launches come, one kernel waits for the other on one thread. So the work is first run with the launches
of kernels that are not there yet left out: Triton's hook is told of each and notes it. Then threads compile what was
noted: passes, code generation, ptxas and the C compiler of launchers hold no lock of Python's, some six sevenths of the
time (16 threads of an H200's host compiled 149 kernels of V4-Flash in 21 s). Knows Triton's hooks and its cache; must
not know models.

What such work computes is garbage, and its places must not be taken from what a kernel wrote. No kernel that is there
already may run on that: its launch ends that part of the work, whose other kernels are compiled when it is run in
earnest.
"""

import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

THREADS = 16  # at most: beyond, what holds the lock decides
PACKAGE = Path(__file__).parents[1]


class Compiled(Protocol):
    """Of Triton's CompiledKernel. ``run``: asked for the first time, makes its launcher and loads it on the device."""

    @property
    def run(self) -> object: ...


class Jitted(Protocol):
    """Of Triton's JITFunction."""

    def preload(self, specialization_data: str) -> Compiled: ...


@dataclass(frozen=True, slots=True)
class Missing:
    """A kernel to be compiled: the function, and in Triton's words the types and constants of a launch."""

    function: Jitted
    launch: str


class _ThereAlready(Exception):  # noqa: N818  not an error: a launch that was kept from running
    pass


def missing_kernels(work: Iterable[Callable[[], object]]) -> list[Missing]:
    """Run the work without its kernels: those that would be compiled, each once. Launches of other threads run."""
    found: dict[tuple[str, str, str], Missing] = {}
    with _noting(found):
        for run in work:
            with suppress(_ThereAlready):
                run()
    return list(found.values())


@contextmanager
def _noting(found: dict[tuple[str, str, str], Missing]) -> Iterator[None]:
    from triton import knobs

    runtime, own, before = knobs.runtime, threading.get_ident(), knobs.runtime.jit_cache_hook

    def missing(**given: Any) -> bool:
        """True: Triton neither compiles nor launches it."""
        if threading.get_ident() != own:
            return bool(before(**given)) if before is not None else False
        function = given["fn"]
        key = function.module, function.name, given["key"]
        if key not in found:
            found[key] = Missing(function.jit_function, given["compile"]["specialization_data"])
        return True

    def there(metadata: object) -> None:
        if threading.get_ident() == own:
            raise _ThereAlready

    runtime.jit_cache_hook = missing
    runtime.launch_enter_hook.add(there)
    try:
        yield
    finally:
        runtime.launch_enter_hook.remove(there)
        runtime.jit_cache_hook = before


def compile_all(kernels: Sequence[Missing], device: torch.device, told: Callable[[int, int], None]) -> int:
    """Compile them, or fetch them from Triton's cache, and load them on ``device``. ``told``: of how many are done, of
    how many. Returns the number of threads. Raises what compiling the first bad one raised.
    """
    if not kernels:
        return 0
    threads = min(THREADS, len(os.sched_getaffinity(0)), len(kernels))
    settle = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread has its own
    # Triton changes the filters of warnings while it compiles, and threads put back each other's.
    with warnings.catch_warnings(), ThreadPoolExecutor(threads, "compile", settle) as pool:
        futures = [pool.submit(_loaded, kernel) for kernel in kernels]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                told(done, len(futures))
        finally:
            for future in futures:
                future.cancel()
    return threads


def _loaded(kernel: Missing) -> object:
    return kernel.function.preload(kernel.launch).run


class Mark:
    """A file in Triton's cache that says: the kernels of these launches have been compiled into it. With it there is
    nothing to look for; without the kernels, should somebody delete them alone, they are compiled as they come.
    """

    def __init__(self, *launches: object):
        """``launches``: all, beside Longread's own code and the versions of torch and Triton, that they hang on."""
        import triton

        digest = hashlib.blake2b(repr((launches, torch.__version__, triton.__version__)).encode(), digest_size=16)
        for path in sorted(PACKAGE.rglob("*.py")):
            digest.update(path.read_bytes())
        self._path = Path(triton.knobs.cache.dir) / f"longread-{digest.hexdigest()}"

    def there(self) -> bool:
        return self._path.is_file()

    def leave(self) -> None:
        """A cache that cannot be written is told, no more: the next start looks for kernels again."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            log.warning("Triton's cache cannot be written, kernels are compiled at each start: %s", error)
