"""The probe: rates by a known clock, a disk that is really written, and a description that the planner reads back."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from longread.cli import main as cli
from longread.measure import probe as probing
from longread.measure import probe_disk, probe_rates
from longread.measure.probe import Effort, choose_device, probe
from longread.measure.probe_card import ProbeError, figure, gpu_card, shown
from longread.measure.probe_rates import Measured, NotHereError
from longread.plan.cards import card, parse_hardware
from longread.plan.hardware_file import machine_toml
from longread.spec.errors import ConfigError

TINY = Effort(memory=2**16, host=2**16, matrix=128, cpu_memory=2**16, cpu_matrix=128, disk=2**23, seconds=0.02)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does is no part of a test."""
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(probing, "last_level_cache", lambda: None)  # tiny sizes stay tiny


def quiet(done: int, total: int, what: str) -> None:
    del done, total, what


# --- rates ---------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a run moves forward, so that a rate has one right value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def takes(self, *seconds: float) -> Callable[[], None]:
        queue = list(seconds)

        def run() -> None:
            self.now += queue.pop(0) if len(queue) > 1 else queue[0]

        return run


def test_a_rate_is_the_median_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Clock(monkeypatch).takes(100.0, 2.0, 1.0, 4.0)  # the first is not counted
    one = probe_rates.cpu_rate("x", "B/s", 8.0, run, budget=6.5)
    assert one.samples == (4.0, 8.0, 2.0) and one.value == 4.0


def test_the_budget_ends_it_and_three_samples_are_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(probe_rates.cpu_rate("x", "B/s", 1.0, Clock(monkeypatch).takes(1.0), budget=0.1).samples) == 3
    long = probe_rates.cpu_rate("x", "B/s", 1.0, Clock(monkeypatch).takes(1.0), budget=1e9)
    assert len(long.samples) == probe_rates.REPEATS


def test_a_copy_counts_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, float] = {}

    def rate(name: str, unit: str, work: float, run: Callable[[], object], budget: float) -> Measured:
        seen[name] = work
        run()
        return Measured(name, unit, (work,))

    monkeypatch.setattr(probe_rates, "cpu_rate", rate)
    probe_rates.cpu_memory(4096, 1.0)
    probe_rates.cpu_matrix(torch.float32, "fp32", 128, 1.0)
    assert seen == {"copy": 8192, "read": 4096, "fp32 128^3": 2.0 * 128**3}


def test_what_torch_refuses_is_no_error_of_ours() -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel image\nsecond line")

    with pytest.raises(NotHereError, match=r"^no kernel image$"):
        probe_rates.cpu_rate("x", "B/s", 1.0, refuse, 1.0)


@pytest.mark.parametrize("kind", ["bf16", "int8", "tf32", "fp32", "fp8 row-wise", "fp8 tensor-wise"])
def test_products_are_products(kind: str) -> None:
    """On the CPU with torch's own kernels: operands, layouts and scales are such that the result is a @ b.T."""
    torch.manual_seed(0)
    a, b = torch.randn(128, 256), torch.randn(64, 256)
    try:
        got = probe_rates.PRODUCTS[kind](a, b)()
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"not on this CPU: {error}")
    assert isinstance(got, torch.Tensor)
    expected = a @ b.t()
    scale = 30.0**2 if kind == "int8" else 1.0
    off = (got.float() / scale - expected).abs().max() / expected.abs().max()
    assert off < (0.1 if "8" in kind else 0.02)


def test_block_scales_have_the_shapes_that_torch_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *rest: object, **_: object) -> None:
        seen.extend((tuple(t.shape), t.stride()) for t in (a, b, *rest) if isinstance(t, torch.Tensor))

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    probe_rates.PRODUCTS["fp8 1x128 by 128x128"](torch.randn(256, 640), torch.randn(384, 640))()
    left, right, scales_a, scales_b = seen
    assert left == ((256, 640), (640, 1)) and right == ((640, 384), (1, 640))
    assert scales_a == ((256, 5), (1, 256))  # rows first in memory
    assert scales_b == ((8, 3), (1, 8))  # depth 5 padded to 8


# --- disk ----------------------------------------------------------------------------------------------------------


def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "file_system", lambda folder: "ext4")


def test_a_disk_is_written_read_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch)
    calls: list[str] = []

    def spy(name: str) -> Callable[..., object]:
        own = getattr(os, name)

        def call(*args: object) -> object:
            calls.append(name)
            return own(*args)

        return call

    for name in ("fsync", "posix_fadvise"):
        monkeypatch.setattr(os, name, spy(name))
    written, read, note = probe_disk.measure_disk(tmp_path, 2 * probe_disk.BLOCK, 5.0)
    assert written > 0 and read > 0 and note == ""
    assert calls[:2] == ["fsync", "posix_fadvise"]
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    notes: list[str] = []
    assert probing._disk(tmp_path, TINY, notes) == {}
    assert "No space left" in notes[0] and list(tmp_path.iterdir()) == []


def test_never_more_than_a_tenth_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=25 * probe_disk.BLOCK))
    sizes: list[int] = []

    def write(handle: int, size: int, seconds: float) -> tuple[float, int]:
        sizes.append(size)
        return 1.0, size

    monkeypatch.setattr(probe_disk, "_write", write)
    monkeypatch.setattr(probe_disk, "_read", lambda handle, size: 1.0)
    probe_disk.measure_disk(tmp_path, 10**12, 1.0)
    assert sizes == [2 * probe_disk.BLOCK]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="too few"):
        probe_disk.measure_disk(tmp_path, 10**12, 1.0)


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "file_system", lambda folder: "tmpfs")
    notes: list[str] = []
    assert probing._disk(tmp_path, TINY, notes) == {} and "lies in memory (tmpfs)" in notes[0]


def test_the_cache_that_cannot_be_dropped_gives_no_read_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch)
    monkeypatch.delattr(os, "posix_fadvise")
    notes: list[str] = []
    assert list(probing._disk(tmp_path, TINY, notes)) == ["disk write"] and "page cache" in notes[0]


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="needs Linux")
def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert probe_disk.file_system(Path("/proc/self")) == "proc"
    assert probe_disk.file_system(Path("/")) not in ("", "proc")


# --- the whole -----------------------------------------------------------------------------------------------------


def test_this_cpu_survives_its_file(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    probed = probe(CPU, None, TINY, lambda done, total, what: said.append((done, total, what)))
    path = tmp_path / "here.toml"
    path.write_text(machine_toml(probed.hardware, probed.evidence))
    assert parse_hardware(str(path)) == probed.hardware
    one = probed.hardware.card
    assert one.architecture == "cpu" and {"fp32", "bf16"} <= set(one.flops) and one.measured_bandwidth
    assert all("longread probe, torch" in f.source for f in (one.bandwidth, *one.flops.values()))
    assert said[0][:2] == (0, 3) and said[-1][:2] == (3, 3)
    samples = probed.evidence["samples"]
    assert isinstance(samples, dict) and len(samples["copy, B/s"]) >= 3


def test_a_missing_kind_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def matrix(dtype: torch.dtype, name: str, most: int, budget: float) -> Measured:
        if name == "bf16":
            raise NotHereError("no bf16")
        return Measured(f"{name} 8^3", "FLOP/s", (1e9,))

    monkeypatch.setattr(probe_rates, "cpu_matrix", matrix)
    probed = probe(CPU, None, TINY, quiet)
    assert set(probed.hardware.card.flops) == {"fp32"}
    assert probed.notes == ("matrix product, bf16: not here: no bf16",)


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 80.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 2**30, 140 * 2**30))
    assert len(probing._busy(CPU)) == 1 and "80 % of the processor" in probing._busy(CPU)[0]
    assert "80.0 GiB of the GPU" in probing._busy(torch.device("cuda", 0))[1]
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 3.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 * 2**30, 140 * 2**30))
    assert probing._busy(torch.device("cuda", 0)) == []


def test_nothing_measured_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[Measured]:
        raise NotHereError("no")

    monkeypatch.setattr(probe_rates, "cpu_memory", refuse)
    with pytest.raises(ProbeError, match="memory could not be measured"):
        probe(CPU, None, TINY, quiet)


# --- a GPU's card, from what its driver says -----------------------------------------------------------------------

H200_RATES = (
    Measured("copy", "B/s", (4.1e12,)),
    Measured("copy by a kernel", "B/s", (4.2e12,)),
    Measured("read", "B/s", (3.9e12,)),
    Measured("bf16 8192^3", "FLOP/s", (750e12,)),
    Measured("fp8 row-wise 8192^3", "FLOP/s", (1350e12,)),
    Measured("fp8 1x128 by 128x128 8192^3", "FLOP/s", (1220e12,)),
    Measured("host to device", "B/s", (49e9,)),
    Measured("device to host", "B/s", (55e9,)),
)
PAIRS = (Measured("GPU 0 to 1", "B/s", (390e9,)), Measured("GPU 1 to 0", "B/s", (370e9,)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.device]:
    def make(name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), smi: str = "") -> torch.device:
        properties = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            multi_processor_count=132,
            L2_cache_size=60 * 2**20,
            uuid="ab-cd",
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 2**30, 139 * 2**30))

        def run(*_: object, **__: object) -> SimpleNamespace:
            if not smi:
                raise FileNotFoundError("nvidia-smi")
            return SimpleNamespace(stdout=smi)

        monkeypatch.setattr(subprocess, "run", run)
        return torch.device("cuda", 0)

    return make


def test_a_known_card_keeps_its_peaks_and_gets_its_measurements(gpu: Callable[..., torch.device]) -> None:
    notes: list[str] = []
    smi = "GPU-xx, 1, 1\nGPU-ab-cd, 143771, 650.00\n"
    one = gpu_card(gpu(smi=smi), (*H200_RATES, *PAIRS), "here", notes)
    known = card("H200")
    assert (one.name, one.flops, one.bandwidth) == ("H200", known.flops, known.bandwidth)
    assert one.measured_bandwidth and one.measured_bandwidth.value == 4.2e12
    assert one.measured_flops["fp8"].value == 1350e12
    assert "fp8 1x128 by 128x128 8192^3: 1,220 TFLOP/s" in one.measured_flops["fp8"].source
    assert one.pcie and one.pcie.value == 49e9
    assert one.nvlink and one.nvlink.value == 370e9 and "one direction" in one.nvlink.source
    assert (one.memory.value, one.usable.value) == (143771 * 2**20, 139 * 2**30)
    assert one.power and one.power.value == 650
    assert notes == []


def test_without_nvidia_smi_and_peers_the_table_helps(gpu: Callable[..., torch.device]) -> None:
    one = gpu_card(gpu(), H200_RATES, "here", [])
    assert one.memory == one.usable and one.power == card("H200").power and one.nvlink == card("H200").nvlink
    odd = gpu_card(gpu(smi="GPU-ab-cd, [N/A], [N/A]\n"), H200_RATES, "here", [])
    assert odd.memory == odd.usable and odd.power == card("H200").power


def test_an_unknown_card_is_what_was_measured(gpu: Callable[..., torch.device], tmp_path: Path) -> None:
    notes: list[str] = []
    one = gpu_card(gpu("NVIDIA  Tomorrow X", (12, 1)), (*H200_RATES, *PAIRS), "here", notes)
    assert (one.name, one.architecture) == ("NVIDIA Tomorrow X", "blackwell")
    assert one.bandwidth.value == 4.2e12 and one.flops["fp8"].value == 1350e12
    assert one.nvlink and "not in the table" in notes[0]
    slow = gpu_card(gpu("Tomorrow X", (8, 9)), (*H200_RATES, Measured("GPU 0 to 1", "B/s", (25e9,))), "here", notes)
    assert slow.nvlink is None and slow.architecture == "ada"


def test_cards_before_ampere_are_refused(gpu: Callable[..., torch.device]) -> None:
    with pytest.raises(ProbeError, match=r"7\.5"):
        gpu_card(gpu("Tesla T4", (7, 5)), H200_RATES, "here", [])


def once(name: str, unit: str, work: float, run: Callable[[], object], device: object, budget: float) -> Measured:
    run()
    return Measured(name, unit, (work,))


def test_gpu_measurements_count_what_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, without events: the operations and their work are the same."""
    monkeypatch.setattr(probe_rates, "cuda_rate", once)
    moved = {one.name: one.value for one in probe_rates.gpu_memory(4096, CPU, 1.0)}
    assert moved == {"copy": 8192, "copy by a kernel": 8192, "read": 4096}
    before = torch.get_float32_matmul_precision()
    seen: list[str] = []
    product = probe_rates.PRODUCTS["tf32"]

    def spied(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
        seen.append(torch.get_float32_matmul_precision())
        return product(a, b)

    monkeypatch.setitem(probe_rates.PRODUCTS, "tf32", spied)
    monkeypatch.setitem(probe_rates.PRODUCTS, "fp32", spied)
    for kind in ("tf32", "fp32"):
        assert probe_rates.gpu_matrix(kind, 64, CPU, 1.0) == Measured(f"{kind} 64^3", "FLOP/s", (2.0 * 64**3,))
    assert seen == ["high", "highest"] and torch.get_float32_matmul_precision() == before
    own = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: own(*a, **k))
    assert [one.value for one in probe_rates.host_link(4096, CPU, 1.0)] == [4096, 4096]


def test_memory_that_is_not_there_is_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(torch, "randn", none)
    for run in (lambda: probe_rates.gpu_memory(64, CPU, 1.0), lambda: probe_rates.gpu_matrix("bf16", 64, CPU, 1.0)):
        with pytest.raises(NotHereError, match="out of memory"):
            run()


@pytest.fixture
def two_gpus(gpu: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = gpu(smi="GPU-ab-cd, 143771, 700.00\n")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(probe_rates, "gpu_memory", lambda *_: H200_RATES[:3])
    monkeypatch.setattr(probe_rates, "host_link", lambda *_: H200_RATES[6:])
    monkeypatch.setattr(probe_rates, "peers", lambda *_: PAIRS)

    def matrix(kind: str, size: int, *_: object) -> Measured:
        if kind == "int8":
            raise NotHereError("no int8 here")
        return Measured(f"{kind} {size}^3", "FLOP/s", (60e12,))

    monkeypatch.setattr(probe_rates, "gpu_matrix", matrix)
    return device


def test_a_machine_of_two_gpus_survives_its_file(two_gpus: torch.device, tmp_path: Path) -> None:
    probed = probe(two_gpus, None, Effort(), quiet)
    path = tmp_path / "h200.toml"
    path.write_text(machine_toml(probed.hardware, probed.evidence))
    assert parse_hardware(str(path)) == probed.hardware
    assert probed.hardware.label == "2xH200"
    assert probed.hardware.card.power and probed.hardware.card.power.value == 700
    assert set(probed.hardware.card.measured_flops) == {"fp8", "bf16", "tf32", "fp32"}
    assert any("no int8 here" in note for note in probed.notes)
    assert probed.evidence["device"] == "NVIDIA H200"


def test_older_cards_are_not_asked_for_fp8(two_gpus: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not [what for what, _ in probing._gpu_steps(two_gpus, Effort()) if "fp8" in what]


def test_a_gpu_that_others_fill_is_refused(two_gpus: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 139 * 2**30))
    with pytest.raises(ProbeError, match=r"only 1\.0 GiB"):
        probe(two_gpus, None, Effort(), quiet)


def test_unequal_gpus_are_not_counted(gpu: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    names = ["NVIDIA H20", "NVIDIA H20", "NVIDIA L20"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=names[i]))
    notes: list[str] = []
    assert probing._equal_gpus(notes) == 2 and "only GPUs like the first" in notes[0]


def test_units_are_readable() -> None:
    assert shown(Measured("read", "B/s", (1.5e9,))) == "read: 1.5 GB/s"
    assert shown(Measured("bf16 8192^3", "FLOP/s", (7.5612e14,))) == "bf16 8192^3: 756.1 TFLOP/s"
    assert shown(Measured("x", "B/s", (0.5,))) == "x: 0.5 B/s"
    assert figure([Measured("copying", "B/s", (1.0,))], "copy", "s") is None


# --- command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "Effort", lambda: TINY)


def test_the_command_writes_a_file_that_plan_reads(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    assert cli.main(["probe", "--device", "cpu", "--no-disk", "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "copy: " in out and f"--hardware {path}" in out
    assert err.startswith("probe 0/3: memory\n") and err.endswith("probe 3/3: done\n")
    assert parse_hardware(str(path)).card.architecture == "cpu"


def test_without_a_file_stdout_is_the_description(
    tiny: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["probe", "--device", "cpu", "--disk", str(tmp_path)]) == 0
    path = tmp_path / "piped.toml"
    path.write_text(capsys.readouterr().out)
    assert parse_hardware(str(path)).gpus == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--output", "x.txt"], "must end with .toml"),
        (["--output", "none/x.toml"], "its folder does not exist"),
        (["--disk", "none"], "no such folder"),
        (["--disk", ".", "--no-disk"], "exclude each other"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probing, "probe", lambda *_: pytest.fail("measured"))
    assert cli.main(["probe", *argv]) == 2
    assert words in capsys.readouterr().err


def test_no_cuda_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="finds no GPU"):
        choose_device("cuda")
    device, why = choose_device("auto")
    assert device.type == "cpu" and "the CPU was measured: torch" in why
    assert choose_device("cpu") == (CPU, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == (torch.device("cuda", 0), "")
    assert choose_device("cpu") == (CPU, "")


def test_no_torch_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("longread.measure.probe")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["probe", "--no-disk"]) == 2
    assert "torch, which is not installed" in capsys.readouterr().err
