"""``nvidia-smi topo -m``, ``topo -p2p r`` and ``nvlink -s``: how the GPUs of a machine hang together.

Knows: the three texts. Must not know: what is good or bad.
"""

import re
from collections.abc import Sequence

from longread.plan.doctor.facts import GpuFacts, NvLink, Topology
from longread.plan.doctor.saved.text import value

GPUS, LINKS, CPUS = 64, 64, 8192
LINK = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS")
PEER = {
    "OK": "ok",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "I/O hub topology not supported",
    "DR": "disabled by the driver's registry key",
    "NS": "not supported",
    "U": "unknown",
}
Matrix = tuple[tuple[str, ...], ...]


def read_topology(lines: Sequence[str]) -> tuple[tuple[GpuFacts, ...], Topology] | None:
    """GPUs with their CPUs and NUMA node, and the matrix of their links; None where there is no whole matrix.

    Columns of network cards are left out. The CPU lists come last in a row, and their columns may be empty.
    """
    rows = _rows(lines)
    if rows is None:
        return None
    size = len(rows)
    if any(len(row) < size or not all(LINK.fullmatch(cell) for cell in row[:size]) for row in rows):
        return None
    links = tuple(tuple(row[:size]) for row in rows)
    gpus = []
    for index, row in enumerate(rows):
        rest = [cell for cell in row[size:] if not LINK.fullmatch(cell)]
        cpus = _cpus(rest[0]) if rest else None
        node = rest[1] if len(rest) > 1 and rest[1].isdigit() and len(rest[1]) < 6 else None
        gpus.append(GpuFacts(index=index, cpus=cpus, numa_node=None if node is None else int(node)))
    return tuple(gpus), Topology(links=links)


def read_peers(lines: Sequence[str]) -> Matrix | None:
    """As ``Topology.peer``."""
    rows = _rows(lines)
    if rows is None:
        return None
    size = len(rows)
    if any(len(row) < size for row in rows):
        return None
    return tuple(
        tuple("ok" if i == j else PEER.get(cell, value(cell)) for j, cell in enumerate(row[:size]))
        for i, row in enumerate(rows)
    )


def read_links(lines: Sequence[str]) -> tuple[GpuFacts, ...]:
    """By "GPU 0: NVIDIA H200 (UUID: GPU-...)" and, below it, "Link 0: 26.562 GB/s" or "Link 0: <inactive>"."""
    gpus: list[GpuFacts] = []
    links: list[list[NvLink]] = []
    for line in lines:
        head = re.match(r"GPU (\d{1,3}): (.{1,200}?) \(UUID: ([\w-]{1,80})\)", line)
        if head and len(gpus) < GPUS:
            gpus.append(GpuFacts(index=int(head[1]), name=value(head[2]), uuid=head[3]))
            links.append([])
            continue
        link = re.match(r"\s{0,20}Link (\d{1,3}): (?:(\d{1,6}(?:\.\d{1,6})?) GB/s|<inactive>|inactive)", line)
        if link and gpus and len(links[-1]) < LINKS:
            speed = float(link[2]) * 1000 if link[2] else None
            links[-1].append(NvLink(index=int(link[1]), active=speed is not None, speed_mbps=speed))
    return tuple(
        GpuFacts(index=gpu.index, name=gpu.name, uuid=gpu.uuid, nvlink_count=len(found), nvlinks=tuple(found))
        for gpu, found in zip(gpus, links, strict=True)
    )


def _rows(lines: Sequence[str]) -> list[list[str]] | None:
    """The cells behind "GPU0", "GPU1"... below the header that names them in this order."""
    for at, line in enumerate(lines):
        names = line.split()
        count = 0
        while count < len(names) and names[count] == f"GPU{count}":
            count += 1
        if count == 0 or count > GPUS or (len(names) > 1 and names[1:2] == ["X"]):
            continue
        rows: list[list[str]] = []
        for row in lines[at + 1 : at + 1 + count]:
            cells = row.split()
            if not cells or cells[0] != f"GPU{len(rows)}":
                break
            rows.append(cells[1:])
        if len(rows) == count:
            return rows
    return None


def _cpus(text: str) -> frozenset[int] | None:
    """``"0-55,112-167"``; None for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if ends is None:
            return None
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or last >= CPUS:
            return None
        found.update(range(first, last + 1))
    return frozenset(found)
