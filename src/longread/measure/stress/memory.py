"""How much memory a server holds now: by its processes on this machine, by NVML, or as it tells itself.

Knows /proc, psutil and NVML. Must not know what was asked of the server.

Judged is a process's own memory (anonymous and shared): pages of files, as weights that are mapped, come and go with
what is read, and are no leak. Pages that two processes share count twice, in each sample alike.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from longread.measure.started import tree_of

_METRIC = re.compile(r"^process_resident_memory_bytes(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_FIELD = re.compile(r"^(RssAnon|RssShmem|VmRSS):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes; None: not known. ``own``: of processes without their files' pages; ``resident``: with them."""

    own: int | None
    resident: int | None
    gpu: int | None


class Memory:
    """``pid``: the root of the server's processes, None where they are not on this machine. ``nvml``: the module, a
    test's stand-in, or None for none.
    """

    def __init__(self, pid: int | None, nvml: Any = None):
        self.pid, self._nvml = pid, nvml

    def sample(self) -> Sample:
        processes = [] if self.pid is None else tree_of(self.pid)
        own, resident = of_processes(processes)
        return Sample(own, resident, self._gpu({each.pid for each in processes}))

    def _gpu(self, pids: set[int]) -> int | None:
        """Of these processes on all GPUs; None where NVML does not tell, as in most containers."""
        if self._nvml is None or not pids:
            return None
        total, found = 0, False
        with suppress(self._nvml.NVMLError):
            for index in range(self._nvml.nvmlDeviceGetCount()):
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(device):
                    if each.pid in pids and each.usedGpuMemory is not None:
                        total, found = total + each.usedGpuMemory, True
        return total if found else None


def of_processes(processes: Sequence[psutil.Process]) -> tuple[int | None, int | None]:
    """(own, resident) bytes, added up; (None, None) without processes."""
    own = resident = 0
    seen = False
    for each in processes:
        try:
            fields = {name: int(kb) * 1024 for name, kb in _FIELD.findall(Path(f"/proc/{each.pid}/status").read_text())}
        except OSError:
            with suppress(psutil.Error):  # another system, or it ended just now
                rss = each.memory_info().rss
                own, resident, seen = own + rss, resident + rss, True
            continue
        if "VmRSS" in fields:
            seen = True
            resident += fields["VmRSS"]
            own += fields["RssAnon"] + fields["RssShmem"] if "RssAnon" in fields else fields["VmRSS"]
    return (own, resident) if seen else (None, None)


def told_by(page: str) -> int | None:
    """What a server's /metrics says of its own process, which may not be the one that holds the model."""
    found = _METRIC.search(page)
    try:
        return int(float(found[1])) if found else None
    except (ValueError, OverflowError):
        return None


def open_nvml() -> Any:
    """NVML, or None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
