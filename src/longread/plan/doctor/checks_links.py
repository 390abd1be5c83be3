"""How GPUs reach the host and each other: PCIe, NVLink, fabric, topology, NUMA.

Pure: facts in, findings out. A field that is None is never judged.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from longread.plan.doctor.checks_gpu import busy
from longread.plan.doctor.facts import Facts, GpuFacts, NvLink, Topology
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.merging import over_gpus, ranges

# MB/s of one link in one direction, nominal; NVML shows a little more (26,562 for version 4). NVIDIA NVLink pages.
NOMINAL_MBPS = {"2.0": 25_000, "2.2": 25_000, "3.0": 25_000, "3.1": 25_000, "4.0": 25_000, "5.0": 50_000, "6.0": 50_000}
SLOW_LINK = 0.95
MANY_REPLAYS = 1000  # PCIe; a threshold of our own: a sound slot stays near zero for months
MANY_LINK_ERRORS = 100  # NVLink replays and recoveries; likewise
FABRIC_GUIDE = "NVIDIA Fabric Manager user guide; dstack#1167"
FAR = ("SYS",)
THROUGH_CPU = ("PHB", "NODE", "SYS")


def check_links(facts: Facts) -> Iterator[Finding]:
    gpus = [gpu for gpu in facts.gpus or () if "device" not in gpu.unread]
    yield from over_gpus(gpus, _pcie)
    alone = len(gpus) < 2
    yield from over_gpus(gpus, lambda gpu: _nvlink(gpu, alone))
    yield from over_gpus(gpus, _fabric)
    if facts.topology is not None:
        yield from _pairs(facts.topology, gpus)
        yield from _peers(facts.topology, facts)
    yield from _numa(gpus, facts)


def _pcie(gpu: GpuFacts) -> Iterator[Finding]:
    bad = False
    gen, highest, own = gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_gen_device
    if highest is not None and own is not None and highest < own:
        bad = True
        yield Finding(
            "warning",
            "PCIe",
            "the slot offers a lower PCIe generation than the card has: cache loads from host and disk are slower",
            f"generation {highest} of {own}",
            "check slot, riser and BIOS settings: `sudo lspci -vv -s BUS | grep -E 'LnkCap|LnkSta'`",
            "NVSentinel#890 (PCIe down-training)",
        )
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
        bad = True
        yield Finding(
            "warning",
            "PCIe",
            "the link runs with fewer lanes than card and slot have: cache loads from host and disk are slower",
            f"x{gpu.pcie_width} of x{gpu.pcie_width_max}",
            "reseat the card or riser: `sudo lspci -vv -s BUS | grep -E 'LnkCap|LnkSta'`",
            "NVSentinel#890 (PCIe down-training)",
        )
    if gen is not None and highest is not None and gen < highest and busy(gpu):
        bad = True
        yield Finding(
            "warning",
            "PCIe",
            "the link runs below its generation under load",
            f"generation {gen} of {highest}, {gpu.utilization} % busy",
            "check slot and riser: `sudo lspci -vv -s BUS | grep -E 'LnkCap|LnkSta'`",
            "NVSentinel#890 (PCIe down-training)",
        )
    if gpu.pcie_replays:
        many = gpu.pcie_replays >= MANY_REPLAYS
        bad = bad or many
        yield Finding(
            "warning" if many else "note",
            "PCIe",
            "packets had to be sent again over PCIe" + (", many of them: the signal is bad" if many else ""),
            f"{gpu.pcie_replays:,} replays since the driver was loaded",
            "look whether it grows: `nvidia-smi -i {gpus} -q | grep -i replay`" + ("; reseat the card" if many else ""),
        )
    if not bad and highest is not None and gpu.pcie_width is not None:
        now = f"generation {gen} of {highest}, x{gpu.pcie_width}"
        idle = gen is not None and gen < highest
        yield Finding("ok", "PCIe", "not down-trained", now + (": idle GPUs lower it, look under load" if idle else ""))


def _nvlink(gpu: GpuFacts, alone: bool) -> Iterator[Finding]:
    links = gpu.nvlinks
    if not links or gpu.nvlink_count is None:
        return
    up = [link for link in links if link.active]
    down = [link.index for link in links if link.active is False]
    if down and alone and not up:
        yield Finding(
            "note",
            "NVLink",
            "the card's NVLinks are down; with one GPU here nothing would use them",
            f"0 of {gpu.nvlink_count} links up",
        )
    elif down:
        yield Finding(
            "warning" if up else "error",
            "NVLink",
            "links are down: tensor parallelism waits for the slowest pair"
            if up
            else "all links are down: GPUs talk over PCIe, at a fraction of the speed",
            f"{len(up)} of {gpu.nvlink_count} links up; down: {ranges(down)}",
            "`nvidia-smi nvlink -s -i {gpus}`; `systemctl status nvidia-fabricmanager`; `sudo dmesg | grep -i xid`",
            "TensorRT-LLM#17060",
        )
    slow = [link for link in up if _is_slow(link)]
    if slow:
        yield Finding(
            "warning",
            "NVLink",
            "links run below the speed of their version",
            f"links {ranges(link.index for link in slow)}: {slow[0].speed_mbps:,.0f} MB/s, "
            f"nominal {NOMINAL_MBPS[slow[0].version or '']:,}",
            "`nvidia-smi nvlink -s -i {gpus}`; reset the GPUs together",
            "NVIDIA NVLink",
        )
    errors = sum(link.errors or 0 for link in up)
    if errors:
        many = errors >= MANY_LINK_ERRORS
        yield Finding(
            "warning" if many else "note",
            "NVLink",
            "links had to replay or recover" + (", often" if many else ""),
            f"{errors:,} in all since the driver was loaded; links {ranges(link.index for link in up if link.errors)}",
            "look whether it grows: `nvidia-smi nvlink -e -i {gpus}`",
        )
    if up and not down and not slow and errors < MANY_LINK_ERRORS:
        total = sum(link.speed_mbps or 0 for link in up) / 1000
        yield Finding(
            "ok", "NVLink", "all links up", f"{len(up)} links" + (f", {total:,.0f} GB/s each way" if total else "")
        )


def _is_slow(link: NvLink) -> bool:
    nominal = NOMINAL_MBPS.get(link.version or "")
    return nominal is not None and link.speed_mbps is not None and link.speed_mbps < SLOW_LINK * nominal


def _fabric(gpu: GpuFacts) -> Iterator[Finding]:
    fabric = gpu.fabric
    if fabric is None or fabric.state == "not supported":
        return
    if fabric.state != "completed":
        yield Finding(
            "error",
            "fabric",
            "the NVLink fabric is not up, even if all links are: CUDA fails with 802, system not yet initialized",
            f"state: {fabric.state}",
            "`sudo systemctl restart nvidia-fabricmanager` (its version must be the driver's), then look again: "
            "`nvidia-smi -q -i {gpus} | grep -A4 Fabric`",
            FABRIC_GUIDE,
        )
    elif fabric.status:
        yield Finding(
            "error",
            "fabric",
            "the fabric manager finished with an error for this GPU",
            f"status: {fabric.status}",
            "`journalctl -u nvidia-fabricmanager`",
            FABRIC_GUIDE,
        )
    elif fabric.unhealthy:
        yield Finding(
            "warning",
            "fabric",
            "the fabric is up and reports trouble",
            "; ".join(fabric.unhealthy),
            "`journalctl -u nvidia-fabricmanager`; `nvidia-smi -q -i {gpus} | grep -A12 Fabric`",
            FABRIC_GUIDE,
        )
    else:
        yield Finding("ok", "fabric", "completed and healthy" if fabric.unhealthy is not None else "completed")


def _pairs(topology: Topology, gpus: list[GpuFacts]) -> Iterator[Finding]:
    size = range(len(topology.links))
    pairs = {(i, j): topology.links[i][j] for i in size for j in size if i < j and topology.links[i][j]}
    if not pairs:
        return
    kinds = Counter(pairs.values())
    slow = {pair: link for pair, link in pairs.items() if not link.startswith("NV")}
    seen = ", ".join(f"{count} pairs {link}" for link, count in sorted(kinds.items()))
    if slow and len(slow) < len(pairs):
        yield Finding(
            "warning",
            "topology",
            "NVLink joins only some pairs of GPUs: a tensor-parallel group over the others is as slow as PCIe",
            f"{seen}; without NVLink: {_listed(slow)}",
            "choose GPUs that NVLink joins (CUDA_VISIBLE_DEVICES), or put pipeline parallelism between the groups",
            "NCCL troubleshooting guide",
        )
    elif slow:
        linked = any(link.active for gpu in gpus for link in gpu.nvlinks or ())
        far = any(link in FAR for link in slow.values())
        yield Finding(
            "warning" if far or linked else "note",
            "topology",
            "GPUs reach each other over PCIe only"
            + (" and between CPU sockets" if far else "")
            + ": tensor parallelism pays for every layer, pipeline parallelism hardly",
            seen,
            "measure it (nccl-tests, `longread probe`); prefer pipeline parallelism, or small tensor-parallel groups "
            "below one switch",
            "NCCL troubleshooting guide",
        )
    elif len(kinds) > 1:
        yield Finding("warning", "topology", "pairs are joined by different numbers of NVLinks", seen)
    else:
        yield Finding("ok", "topology", "every pair of GPUs is joined by NVLink", seen)


def _listed(pairs: Mapping[tuple[int, int], str]) -> str:
    shown = [f"{i}-{j} {link}" for (i, j), link in list(pairs.items())[:6]]
    return ", ".join(shown) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")


def _peers(topology: Topology, facts: Facts) -> Iterator[Finding]:
    if topology.peer is None:
        return
    size = range(len(topology.peer))
    refused = {
        (i, j): topology.peer[i][j] for i in size for j in size if i < j and topology.peer[i][j] not in ("", "ok")
    }
    if refused:
        yield Finding(
            "warning",
            "peer-to-peer",
            "the driver does not let these GPUs read each other's memory: NCCL goes through host memory",
            _listed(refused),
            "consumer cards lack it; else check ACS and IOMMU in the BIOS: `sudo lspci -vvv | grep ACSCtl`",
            "NCCL troubleshooting guide",
        )
    through_cpu = any(link in THROUGH_CPU or link in ("PIX", "PXB") for row in topology.links for link in row)
    if through_cpu and facts.host is not None and facts.host.iommu == "on":
        yield Finding(
            "warning",
            "IOMMU",
            "the IOMMU translates, which slows down or breaks peer-to-peer over PCIe (NCCL may hang)",
            "iommu groups exist, no iommu=pt on the kernel's command line",
            "boot with `iommu=pt`, or switch the IOMMU off where no virtual machine needs it",
            "NCCL troubleshooting guide, PCI access control services",
        )


def _numa(gpus: list[GpuFacts], facts: Facts) -> Iterator[Finding]:
    host = facts.host
    nodes: dict[int, list[int]] = {}
    for gpu in gpus:
        if gpu.numa_node is not None:
            nodes.setdefault(gpu.numa_node, []).append(gpu.index)
    if host is None or (host.numa_nodes or 1) < 2:
        return
    if gpus and not nodes:
        yield Finding(
            "note",
            "NUMA",
            "which CPU socket each GPU hangs on cannot be read (a virtual machine hides it): bindings are a guess",
            f"{host.numa_nodes} NUMA nodes",
            "`nvidia-smi topo -m` on the host",
        )
    elif nodes:
        told = "; ".join(f"node {node}: GPU {ranges(found)}" for node, found in sorted(nodes.items()))
        yield Finding(
            "note",
            "NUMA",
            "bind each rank to the CPUs and memory of its GPU's socket, else host cache copies cross sockets",
            told,
            "`numactl --cpunodebind=N --membind=N` a rank, or the engine's own NUMA option",
        )
    allowed = host.cpus_allowed
    if allowed is not None:
        cut = [gpu.index for gpu in gpus if gpu.cpus and not gpu.cpus & allowed]
        if cut:
            yield Finding(
                "warning",
                "NUMA",
                "this process may use no CPU near these GPUs",
                f"GPU {ranges(cut)}; CPUs allowed: {ranges(allowed)}",
                "widen the CPU set of the container or job (--cpuset-cpus, taskset)",
            )
