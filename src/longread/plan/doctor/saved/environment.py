"""``vllm collect-env`` (and torch's collect_env) and ``python -m sglang.check_env``: versions, cards, topology.

Both are lists of "name : value" with a matrix inside. Knows: their names. Must not know: which pairs are bad.
"""

import re
from collections.abc import Mapping, Sequence

from longread.plan.doctor.facts import Facts, GpuFacts, HostFacts, Package, Versions
from longread.plan.doctor.saved.text import Saved, value
from longread.plan.doctor.saved.topology import read_topology
from longread.plan.doctor.versions import normalised, release, told_environment, wheel_architectures

ENTRIES, GPUS = 2000, 64
NAME = re.compile(r"[A-Za-z][\w .(),/-]{0,80}")
PIP = re.compile(r"\[pip3?\] ([\w.-]{1,80})==(\S{1,80})")
CONDA = re.compile(r"\[conda\] ([\w.-]{1,80})\s{1,80}(\d\S{0,80})")
VARIABLE = re.compile(r"([A-Z][A-Z0-9_]{1,80})=(.*)")
UNKNOWN = {
    "",
    "N/A",
    "None",
    "Could not collect",
    "No CUDA",
    "Module Not Found",
    "Not Available",
    "No relevant packages",
}
RENAMED = {"pytorch": "torch", "flashinfer": "flashinfer-python"}


def read_collect_env(saved: Saved) -> Facts:
    """Also torch's own, whose names are the same in one block."""
    lines = saved.lines()
    entries = _entries(lines)
    packages: dict[str, Package] = {}
    for line in lines[:ENTRIES]:
        found = PIP.match(line) or CONDA.match(line)
        if found:
            name = normalised(found[1])
            packages.setdefault(name, Package(name=name, version=value(found[2])))
    torch = _said(entries, "PyTorch version")
    if torch is not None:
        packages["torch"] = Package(name="torch", version=torch)
    vllm = _said(entries, "vLLM Version")
    if vllm is not None and vllm.split()[0][:1].isdigit():
        packages["vllm"] = Package(name="vllm", version=vllm.split()[0])
    cuda = _said(entries, "CUDA used to build PyTorch")
    variables = {found[1]: value(found[2]) for line in lines[-400:] if (found := VARIABLE.match(line))}
    return _facts(
        lines,
        packages,
        torch_cuda=cuda if cuda is not None else "" if torch and "+cpu" in torch else None,
        python=_said(entries, "Python version"),
        driver=_said(entries, "Nvidia driver version"),
        named=_cards(lines),
        host=_host(entries, lines),
        environment=told_environment(variables),
    )


def read_check_env(saved: Saved) -> Facts:
    lines = saved.lines()
    entries = _entries(lines)
    packages: dict[str, Package] = {}
    for name, text in entries.items():
        plain = normalised(name)
        if " " not in name and re.match(r"\d", text) and plain not in ("python",):
            plain = RENAMED.get(plain, plain)
            packages[plain] = Package(name=plain, version=text.split()[0])
    torch = packages.get("torch")
    label = torch.version.partition("+")[2] if torch else ""
    cuda = f"{label[2:4]}.{label[4:]}" if re.fullmatch(r"cu\d{3}", label) else "" if label == "cpu" else None
    nofile = _said(entries, "ulimit soft")
    named: dict[int, tuple[str | None, tuple[int, int] | None]] = {}
    for name, text in entries.items():
        found = re.fullmatch(r"GPU ([\d,]{1,200})( Compute Capability)?", name)
        for part in found[1].split(",") if found else ():
            if part.isdigit() and int(part) < GPUS:
                old = named.get(int(part), (None, None))
                capability = re.fullmatch(r"(\d{1,2})\.(\d)", text)
                if found and found[2]:
                    named[int(part)] = (old[0], (int(capability[1]), int(capability[2])) if capability else None)
                else:
                    named[int(part)] = (text, old[1])
    return _facts(
        lines,
        packages,
        torch_cuda=cuda,
        python=_said(entries, "Python"),
        driver=_said(entries, "CUDA Driver Version"),
        named=named,
        host=HostFacts(nofile=int(nofile)) if nofile and nofile.isdigit() and len(nofile) < 18 else None,
        environment=None,
    )


def _facts(
    lines: Sequence[str],
    packages: Mapping[str, Package],
    *,
    torch_cuda: str | None,
    python: str | None,
    driver: str | None,
    named: Mapping[int, tuple[str | None, tuple[int, int] | None]],
    host: HostFacts | None,
    environment: Mapping[str, str] | None,
) -> Facts:
    unread: dict[str, str] = {}
    architectures, source = wheel_architectures(packages, torch_cuda, unread)
    read = read_topology(lines)
    placed = {gpu.index: gpu for gpu in (read[0] if read else ())}
    gpus = tuple(
        GpuFacts(
            index=index,
            name=named.get(index, (None, None))[0],
            compute_capability=named.get(index, (None, None))[1],
            numa_node=placed[index].numa_node if index in placed else None,
            cpus=placed[index].cpus if index in placed else None,
        )
        for index in sorted({*named, *placed})
    )
    versions = Versions(
        python=python.split()[0] if python else None,
        driver=driver if driver and release(driver) else None,
        packages=packages,
        torch_cuda=torch_cuda,
        torch_arch=architectures,
        torch_arch_from=source,
        environment=environment,
        unread={name: why for name, why in unread.items() if "--ask-torch" not in why},
    )
    topology = read[1] if read and len(read[0]) == len(gpus) and len(gpus) > 1 else None
    return Facts(gpus=gpus or None, topology=topology, versions=versions, host=host)


def _entries(lines: Sequence[str]) -> dict[str, str]:
    """ "name: value" by name, the first of each; not more than 2,000."""
    entries: dict[str, str] = {}
    for line in lines:
        name, colon, rest = line.partition(":")
        if colon and len(entries) < ENTRIES and NAME.fullmatch(name.rstrip()):
            entries.setdefault(name.rstrip(), value(rest))
    return entries


def _said(entries: Mapping[str, str], name: str) -> str | None:
    text = entries.get(name, "")
    return None if text in UNKNOWN else text


def _cards(lines: Sequence[str]) -> dict[int, tuple[str | None, tuple[int, int] | None]]:
    """ "GPU 0: NVIDIA H200", on lines of their own, or behind the name of the entry where there is one card."""
    named: dict[int, tuple[str | None, tuple[int, int] | None]] = {}
    for line in lines:
        found = re.match(r"(?:GPU models and configuration\s{0,40}: )?GPU (\d{1,2}): (.{1,200})", line)
        if found and int(found[1]) < GPUS:
            named.setdefault(int(found[1]), (value(found[2].partition(" (UUID")[0]), None))
    return named


def _flags(lines: Sequence[str]) -> frozenset[str] | None:
    """The longest line of lscpu, which other entries are cut before."""
    for line in lines:
        name, colon, rest = line.partition(":")
        if colon and name.strip() == "Flags" and len(rest) < 4000:
            return frozenset(rest.split())
    return None


def _host(entries: Mapping[str, str], lines: Sequence[str]) -> HostFacts:
    def number(name: str) -> int | None:
        text = _said(entries, name) or ""
        return int(text) if text.isdigit() and len(text) < 8 else None

    platform = re.match(r"Linux-(.{1,100}?)-x86_64", _said(entries, "Python platform") or "")
    return HostFacts(
        kernel=platform[1] if platform else None,
        cpu=_said(entries, "Model name"),
        cpus_online=number("CPU(s)"),
        numa_nodes=number("NUMA node(s)"),
        cpu_flags=_flags(lines),
    )
