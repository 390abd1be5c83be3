"""Facts of one machine out of several files.

What an earlier file says stays; a later one fills what is still open. Where two say different things that one machine
cannot both be (names, sizes, versions), the difference is kept as a Conflict. What moves from moment to moment (clocks,
heat, counters) may differ. Knows: which fields are which. Must not know: formats.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from longread.plan.doctor.facts import Conflict, Facts, GpuFacts, HostFacts, Topology, Versions

# What cannot change between two looks at one machine, short of a new installation.
STEADY_GPU = {"name", "uuid", "bus", "compute_capability", "memory_total", "nvlink_count", "pcie_gen_device"}
STEADY_VERSIONS = {"driver", "cuda_driver", "torch_cuda"}
STEADY_HOST = {"cpu", "cpus_online", "numa_nodes", "memory_total", "kernel"}


def join(parts: Sequence[tuple[str, Facts]]) -> Facts:
    """``parts``: file name and what it says, in the order given by the user. At least one."""
    first_name, facts = parts[0]
    conflicts: list[Conflict] = list(facts.conflicts)
    said: dict[str, str] = {}  # which file gave a part first
    for part in ("gpus", "versions", "host", "topology"):
        if getattr(facts, part) is not None:
            said[part] = first_name
    for name, other in parts[1:]:
        conflicts += other.conflicts
        facts = replace(
            facts,
            gpus=_gpus(facts.gpus, other.gpus, said.get("gpus", ""), name, conflicts),
            versions=_versions(facts.versions, other.versions, said.get("versions", ""), name, conflicts),
            host=_whole(facts.host, other.host, STEADY_HOST, "host", said.get("host", ""), name, conflicts),
            topology=_topology(facts.topology, other.topology, said.get("topology", ""), name, conflicts),
            servers=_chain(facts.servers, other.servers),
            xids=_chain(facts.xids, other.xids),
            logs=_chain(facts.logs, other.logs),
            live=facts.live or other.live,
            unread={**other.unread, **facts.unread},
        )
        for part in ("gpus", "versions", "host", "topology"):
            if getattr(other, part) is not None:
                said.setdefault(part, name)
    facts = replace(facts, conflicts=tuple(conflicts))
    if facts.topology is not None and len(facts.topology.links) != len(facts.gpus or ()):
        facts = replace(facts, topology=None)  # told as a conflict already: the numbers of GPUs differ
    return facts


def _chain(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if one is None or other is None:
        return one if other is None else other
    return (*one, *(item for item in other if item not in one))


def _gpus(
    ours: tuple[GpuFacts, ...] | None,
    theirs: tuple[GpuFacts, ...] | None,
    we: str,
    they: str,
    conflicts: list[Conflict],
) -> tuple[GpuFacts, ...] | None:
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    if len(ours) != len(theirs):
        conflicts.append(
            Conflict(
                field="number of GPUs", first=str(len(ours)), first_from=we, second=str(len(theirs)), second_from=they
            )
        )
    by_uuid = {gpu.uuid: gpu for gpu in theirs if gpu.uuid}
    by_bus = {gpu.bus: gpu for gpu in theirs if gpu.bus}
    by_index = {gpu.index: gpu for gpu in theirs}
    merged = []
    for gpu in ours:
        same = by_uuid.get(gpu.uuid or "") or by_bus.get(gpu.bus or "")
        if same is None and len(ours) == len(theirs):
            same = by_index.get(gpu.index)
        elif same is not None:
            same = replace(same, index=gpu.index)
        merged.append(gpu if same is None else _whole(gpu, same, STEADY_GPU, f"GPU {gpu.index}", we, they, conflicts))
    return tuple(merged)


def _versions(
    ours: Versions | None, theirs: Versions | None, we: str, they: str, conflicts: list[Conflict]
) -> Versions | None:
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    merged = _whole(ours, theirs, STEADY_VERSIONS, "", we, they, conflicts)
    packages = dict(theirs.packages or {})
    for name, package in (ours.packages or {}).items():
        other = packages.get(name)
        if other is not None and _bare(other.version) != _bare(package.version):
            conflicts.append(
                Conflict(field=name, first=package.version, first_from=we, second=other.version, second_from=they)
            )
        packages[name] = package if package.requires is not None or other is None else other
        if other is not None and package.requires is None:
            packages[name] = replace(other, version=package.version)
    known = ours.packages is not None or theirs.packages is not None
    environment = (
        None
        if ours.environment is None and theirs.environment is None
        else {**(theirs.environment or {}), **(ours.environment or {})}
    )
    return replace(merged, packages=packages if known else None, environment=environment)


def _bare(version: str) -> str:
    return version.partition("+")[0]


def _topology(
    ours: Topology | None, theirs: Topology | None, we: str, they: str, conflicts: list[Conflict]
) -> Topology | None:
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    if ours.links != theirs.links:
        if len(ours.links) == len(theirs.links):
            pair = next(
                (i, j) for i, row in enumerate(ours.links) for j, link in enumerate(row) if link != theirs.links[i][j]
            )
            conflicts.append(
                Conflict(
                    field=f"link of GPU {pair[0]} and {pair[1]}",
                    first=ours.links[pair[0]][pair[1]],
                    first_from=we,
                    second=theirs.links[pair[0]][pair[1]],
                    second_from=they,
                )
            )
        return ours
    return replace(ours, peer=ours.peer or theirs.peer)


def _whole(
    ours: Any, theirs: Any, steady: set[str], subject: str, we: str, they: str, conflicts: list[Conflict]
) -> Any:
    """``ours`` with ``theirs`` where it is None."""
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    filled: dict[str, Any] = {}
    for field in fields(ours):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine is None and other is not None:
            filled[field.name] = other
        elif field.name in steady and None not in (mine, other) and mine != other:
            conflicts.append(
                Conflict(
                    field=f"{subject} {field.name.replace('_', ' ')}".strip(),
                    first=_told(mine),
                    first_from=we,
                    second=_told(other),
                    second_from=they,
                )
            )
    if isinstance(ours, GpuFacts | HostFacts | Versions):
        filled["unread"] = {
            name: why
            for name, why in {**theirs.unread, **ours.unread}.items()
            if getattr(ours, name, None) is None and filled.get(name) is None
        }
    return replace(ours, **filled)


def _told(found: object) -> str:
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def with_peers(facts: Facts, peer: tuple[tuple[str, ...], ...], name: str) -> Facts:
    """A peer matrix has no links of its own: it goes into a topology of the same size."""
    topology = facts.topology
    if topology is None or len(topology.links) != len(peer) or topology.peer is not None:
        return (
            facts
            if topology is not None
            else replace(facts, unread={**facts.unread, "peer": f"{name}: add `nvidia-smi topo -m`"})
        )
    return replace(facts, topology=replace(topology, peer=peer))
