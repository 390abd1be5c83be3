"""Files from another machine, each recognised by its content, as the Facts of one machine.

Knows: which reader takes what. Must not know: any format.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from longread.plan.doctor.facts import Facts, GpuFacts, Topology, Versions
from longread.plan.doctor.finding import SCHEMA
from longread.plan.doctor.saved.environment import read_check_env, read_collect_env
from longread.plan.doctor.saved.joining import join, with_peers
from longread.plan.doctor.saved.log import looks_like_log, read_log
from longread.plan.doctor.saved.report import read_report
from longread.plan.doctor.saved.smi import read_smi_text, read_smi_xml
from longread.plan.doctor.saved.text import STRUCTURED_BYTES, Saved, read_file
from longread.plan.doctor.saved.topology import read_links, read_peers, read_topology
from longread.spec.errors import ConfigError

FILES = 64
ALL_BYTES = 512 * 2**20
HEAD = 65_536
UNDERSTOOD = (
    "`nvidia-smi -q -x`, `nvidia-smi -q`, `nvidia-smi topo -m`, `nvidia-smi topo -p2p r`, `nvidia-smi nvlink -s`, "
    "`vllm collect-env`, `python -m sglang.check_env`, `longread doctor --json`, and logs of vLLM, SGLang, Longread "
    "and the kernel (dmesg, journalctl -k)"
)
MATRIX = re.compile(rb"^\s{0,10}(?:\x1b\[\d{0,2}m)?GPU0\b.{0,2000}\n\s{0,4}GPU0\s{1,20}X\b", re.MULTILINE)


def read_saved(paths: Sequence[Path]) -> Facts:
    """One machine's facts. ConfigError for a file that cannot be read or is none of what is understood.

    Limits: 64 files, 512 MiB together; 16 MiB of a file with structure; of a log above 64 MiB, its first 16 and last
    48 MiB.
    """
    if len(paths) > FILES:
        raise ConfigError(f"--from: {len(paths)} files; at most {FILES}")
    parts: list[tuple[str, Facts]] = []
    peers = []
    size = 0
    for path in paths:
        saved = read_file(path)
        size += len(saved.data)
        if size > ALL_BYTES:
            raise ConfigError(f"--from: the files are more than {ALL_BYTES // 2**20} MiB together")
        kind = recognise_kind(saved)
        if kind == "peers":
            matrix = read_peers(saved.lines())
            if matrix is None:
                raise _unknown(saved)
            peers.append((saved.name, matrix))
            parts.append((saved.name, Facts()))
        else:
            parts.append((saved.name, _read(kind, saved)))
    facts = join(parts)
    for name, matrix in peers:
        facts = with_peers(facts, matrix, name)
    return replace(facts, origin=", ".join(str(path) for path in paths))


def recognise_kind(saved: Saved) -> str:
    """By content, never by name. ConfigError for what is not understood."""
    head = saved.data[:HEAD].lstrip()
    kind = _kind(head, saved)
    if kind != "log" and saved.size > STRUCTURED_BYTES:
        raise ConfigError(f"--from {saved.name}: {saved.size:,} bytes; at most {STRUCTURED_BYTES:,} for this kind")
    return kind


def _kind(head: bytes, saved: Saved) -> str:
    if head.startswith(b"<") and b"<nvidia_smi_log" in head:
        return "smi xml"
    if head.startswith(b"{") and f'"schema": "{SCHEMA.partition("/")[0]}'.encode() in head:
        return "report"
    if b"NVSMI LOG" in head[:2000]:
        return "smi text"
    if b"PyTorch version" in head and b"CUDA used to build PyTorch" in head:
        return "collect-env"
    if re.search(rb"^PyTorch: ", head, re.MULTILINE) and re.search(rb"^Python: ", head, re.MULTILINE):
        return "check-env"
    if MATRIX.search(head):
        return (
            "peers"
            if b"Chipset not supported" in head or re.search(rb"^\s{0,4}GPU0.{0,400}\bOK\b", head, re.MULTILINE)
            else "topology"
        )
    if re.search(rb"^GPU \d{1,3}: .{1,200}\(UUID: ", head, re.MULTILINE) and re.search(
        rb"^\s{1,8}Link \d", head, re.MULTILINE
    ):
        return "links"
    if looks_like_log(saved.data) or read_log(saved).logs:
        return "log"
    raise _unknown(saved)


def _unknown(saved: Saved) -> ConfigError:
    hint = ""
    if b"| NVIDIA-SMI " in saved.data[:HEAD]:
        hint = " This is the table of plain `nvidia-smi`: save `nvidia-smi -q -x` instead."
    return ConfigError(f"--from {saved.name}: not recognised.{hint} Understood are {UNDERSTOOD}")


def _read(kind: str, saved: Saved) -> Facts:
    if kind in ("smi xml", "smi text"):
        gpus, driver, cuda = read_smi_xml(saved) if kind == "smi xml" else read_smi_text(saved)
        return Facts(gpus=gpus, versions=Versions(driver=driver, cuda_driver=cuda))
    if kind == "report":
        return read_report(saved)
    if kind == "collect-env":
        return read_collect_env(saved)
    if kind == "check-env":
        return read_check_env(saved)
    if kind == "topology":
        read: tuple[tuple[GpuFacts, ...], Topology] | None = read_topology(saved.lines())
        if read is None:
            raise _unknown(saved)
        return Facts(gpus=read[0], topology=read[1])
    if kind == "links":
        return Facts(gpus=read_links(saved.lines()))
    return read_log(saved)
