"""What of the environment and of running servers' options makes them slow or fail: traps that H20 and H200 owners met.

Pure: facts in, findings out.
"""

import re
from collections.abc import Iterator

from longread.plan.doctor.facts import Facts, GpuFacts, Server
from longread.plan.doctor.finding import Finding, Severity

GIB = 2**30
_H20 = re.compile(r"\bH20\b")  # H20 and H20-3e, not H200
H20_SMALL = 100 * GIB  # below: the 96 GB card
NCCL_DOCS = "NCCL environment variables"
# Variable, values for which it matters (None: any but "", "0"), severity, what it does, only with several GPUs.
VARIABLES: tuple[tuple[str, Severity, str, str, bool], ...] = (
    ("NCCL_P2P_DISABLE", "warning", "switches off NVLink and PCIe peer-to-peer between GPUs", NCCL_DOCS, True),
    ("NCCL_SHM_DISABLE", "warning", "makes NCCL use the network inside the machine", NCCL_DOCS, True),
    ("NCCL_NVLS_DISABLE", "note", "switches off NVLink SHARP", NCCL_DOCS, True),
    ("NCCL_IB_DISABLE", "note", "switches off InfiniBand: several nodes would talk over TCP", NCCL_DOCS, False),
    (
        "CUDA_LAUNCH_BLOCKING",
        "warning",
        "waits for every kernel: for debugging only",
        "CUDA environment variables",
        False,
    ),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "warning",
        "makes every allocation a call to the driver",
        "PyTorch CUDA notes",
        False,
    ),
    (
        "CUDA_DISABLE_PTX_JIT",
        "note",
        "forbids compiling PTX: cards newer than the wheel fail",
        "CUDA documentation",
        False,
    ),
)
TP_OPTIONS = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp")


def check_serving(facts: Facts) -> Iterator[Finding]:
    gpus = facts.gpus or ()
    yield from _environment(facts)
    yield from _tuned_tables(facts)
    yield from _small_h20(gpus)
    for server in facts.servers or ():
        yield from (*_offload(server), *_eager(server), *_wide(server, gpus), *_deepep(server))


def _environment(facts: Facts) -> Iterator[Finding]:
    environment = (facts.versions.environment if facts.versions else None) or {}
    several = len(facts.gpus or ()) > 1
    for name, severity, what, source, needs_several in VARIABLES:
        value = environment.get(name, "")
        if value not in ("", "0") and (several or not needs_several):
            yield Finding(severity, name, f"{name} {what}", f"{name}={value}", f"`unset {name}`", source)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and facts.gpus:
        named = [part for part in visible.split(",") if part.strip() not in ("", "-1")]
        if len(named) < len(facts.gpus):
            yield Finding(
                "note" if named else "warning",
                "CUDA_VISIBLE_DEVICES",
                "programs started from here see only a part of the GPUs"
                if named
                else "programs started from here see no GPU",
                f"CUDA_VISIBLE_DEVICES={visible!r}, {len(facts.gpus)} GPUs",
            )
    if any(part.rstrip("/").endswith("/stubs") for part in environment.get("LD_LIBRARY_PATH", "").split(":")):
        yield Finding(
            "error",
            "LD_LIBRARY_PATH",
            "CUDA's stub libraries are on the search path: programs find a libcuda that cannot do anything",
            f"LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}",
            "take the folder out; stubs are for linking only",
            "CUDA installation guide",
        )


def table_name(gpu: GpuFacts) -> str:
    """How vLLM and SGLang write the card in the names of their tuned tables."""
    return (gpu.name or "").replace(" ", "_")


def _tuned_tables(facts: Facts) -> Iterator[Finding]:
    tables = (facts.versions.kernel_tables if facts.versions else None) or {}
    cards = sorted({table_name(gpu) for gpu in facts.gpus or () if gpu.name})
    for engine, names in tables.items():
        if not names:  # not in this wheel at all: kept elsewhere, or not read
            continue
        for card in cards:
            own = [name for name in names if f"device_name={card}," in f"{name},"]
            wide = [name for name in own if name.startswith("E=256,") and "fp8_w8a8" in name]
            if not own:
                near = sorted({part for name in names for part in name.split(",") if part.startswith("device_name=")})
                close = [name.removeprefix("device_name=") for name in near if card.split("-")[0] in name]
                yield Finding(
                    "warning",
                    f"{engine} tuned tables",
                    f"{engine} has no tuned MoE table for {card}: Triton MoE kernels silently take slow defaults "
                    "(the Marlin path of V4.1 does not use them)",
                    f"0 of {len(names)} tables" + (f"; there are some for {', '.join(close)}" if close else ""),
                    f"tune with {engine}'s benchmark_moe (tuning_fused_moe_triton), or copy a near card's table under "
                    f"device_name={card}",
                    "vllm-project/vllm#44152, #42284; sgl-project/sglang#6835, #17133",
                )
            elif not wide:
                yield Finding(
                    "note",
                    f"{engine} tuned tables",
                    f"{engine} has tables for {card}, none for 256 FP8 experts (DeepSeek-V3): a default is taken there",
                    f"{len(own)} tables",
                    source="vllm-project/vllm#44152",
                )
            else:
                yield Finding(
                    "ok", f"{engine} tuned tables", f"tables for {card}", f"{len(own)}, {len(wide)} for 256 FP8 experts"
                )


def _small_h20(gpus: tuple[GpuFacts, ...]) -> Iterator[Finding]:
    small = [
        gpu for gpu in gpus if "H20" in (gpu.name or "").split() and gpu.memory_total and gpu.memory_total < H20_SMALL
    ]
    if small:
        total = sum(gpu.memory_total or 0 for gpu in small) / GIB
        yield Finding(
            "note",
            "H20 96 GB",
            "these are 96 GB cards; many recipes say H20 and mean the 141 GB card (H20-3e): check what they assume",
            f"{len(small)} cards, {(small[0].memory_total or 0) / GIB:.0f} GiB each, {total:.0f} GiB together",
            "`longread plan MODEL --hardware 8xH20-96`",
            "vllm-project/recipes (DeepSeek-V3.2), vllm-project/vllm#40592",
        )


def _who(server: Server) -> str:
    return f"{server.engine} server" + (f" {server.pid}" if server.pid else "")


def _offload(server: Server) -> Iterator[Finding]:
    value = server.value("--cpu-offload-gb")
    if value not in (None, "", "0", "0.0"):
        yield Finding(
            "warning",
            _who(server),
            "weights are offloaded to host memory and come over PCIe in every step",
            f"--cpu-offload-gb {value}",
            "start it without; if it then does not fit: fewer sequences, a shorter maximum, or more GPUs",
            "vllm-project/vllm#42284 (8 x H20: 2,434 tokens/s without, 120 with 35 GB)",
        )


def _eager(server: Server) -> Iterator[Finding]:
    for option in ("--enforce-eager", "--disable-cuda-graph"):
        if server.value(option) not in (None, "false", "False"):
            yield Finding(
                "warning",
                _who(server),
                "CUDA graphs are off: decoding waits for kernel launches",
                option,
                "start it without, once what it was set for is solved",
            )


def _wide(server: Server, gpus: tuple[GpuFacts, ...]) -> Iterator[Finding]:
    value = server.value(*TP_OPTIONS) or ""
    if value.isdigit() and int(value) >= 16 and any(_H20.search(gpu.name or "") for gpu in gpus):
        yield Finding(
            "warning",
            _who(server),
            "tensor parallelism over two nodes leaves expert columns that are no multiple of the FP8 block of 128 "
            "(V4-Pro: 3072 / 16 = 192)",
            f"tensor parallel size {value}",
            "tensor parallelism within a node, pipeline parallelism between nodes",
            "sgl-project/sglang#23602",
        )


def _deepep(server: Server) -> Iterator[Finding]:
    on = server.value("--enable-deepep-moe") is not None or server.value("--moe-a2a-backend") == "deepep"
    if server.engine == "sglang" and on and server.value("--disable-cuda-graph") is None:
        yield Finding(
            "note",
            _who(server),
            "DeepEP with CUDA graphs takes about 20 GB a GPU beside the weights, missing for the cache",
            "DeepEP is on",
            source="sgl-project/sglang#24947",
        )
