"""Files that a user names: pipes, devices, huge, deep and damaged ones end at once in one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longread.plan.bench_file import other_kind, read_runs
from longread.plan.cards import parse_hardware
from longread.plan.hardware_file import machine_toml
from longread.spec.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.parametrize(
    ("read", "name"),
    [(lambda p: parse_hardware(str(p)), "x.toml"), (read_runs, "x.json"), (other_kind, "x.json")],
    ids=["hardware", "runs", "kind"],
)
def test_a_pipe_and_a_device_are_not_read(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    makers: tuple[Callable[[Path], None], ...] = (os.mkfifo, lambda p: p.symlink_to("/dev/zero"))
    for make in makers:
        path = tmp_path / name
        make(path)
        with pytest.raises(ConfigError, match="pipe or a device"):
            read(path)
        path.unlink()


def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(".".join(["a"] * 20000) + "=1")
    with pytest.raises(ConfigError, match="line 1 has a key of more than 64 dots"):
        parse_hardware(str(path))
    path.write_text("#" + "x" * 70000)
    with pytest.raises(ConfigError, match="more than 65,536 bytes"):
        parse_hardware(str(path))


def test_the_samples_of_a_probe_are_no_keys() -> None:
    measured = parse_hardware(str(Path(__file__).parents[3] / "results" / "probe-2xh200.toml"))
    assert (measured.gpus, measured.card.name) == (2, "H200")


def test_texts_may_hold_many_dots(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    hardware = parse_hardware("8xH20-96")
    text = machine_toml(hardware, {"note": "." * 200})
    path.write_text(text)
    assert parse_hardware(str(path)).card.memory == hardware.card.memory


@pytest.mark.parametrize(("value", "unit"), [("1e-3", "GB/s"), ("60", "PB/s")])
def test_a_bandwidth_with_a_slipped_unit_is_refused(value: str, unit: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    figure = f'{{ value = {value}, unit = "{unit}", mark = "measured", source = "x" }}'
    path.write_text(f'gpus = 8\n[card]\nbase = "H20-96"\nbandwidth = {figure}\n')
    with pytest.raises(ConfigError, match="is the unit right"):
        parse_hardware(str(path))


ENDLESS = '{"quantity": "decode", "model": "V3", "samples": [1], "context": 1e400, "batch": 1}'
DAMAGED = ['{"a":' * 20000, "{", f'{{"schema": 1, "figures": [{ENDLESS}]}}', '{"schema": 1, "figures": [3]}']


@pytest.mark.parametrize("text", DAMAGED, ids=["deep", "cut", "endless", "a number"])
def test_a_damaged_result_is_one_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_runs(path)


def test_results_of_other_kinds_are_told_apart() -> None:
    assert other_kind(RESULTS / "cpu.json") is None
    for name in ("frontend-cpu.json", "warm-ttft-cpu.json", "vllm-cpu.json"):
        assert "no figures" in (other_kind(RESULTS / name) or "")
    assert other_kind(RESULTS) == "a folder"
    assert "probe" not in json.dumps(other_kind(RESULTS / "probe-2xh200.toml"))


def test_full_width_digits_count_and_odd_signs_are_refused() -> None:
    assert parse_hardware("８ｘH20-96").gpus == 8
    for text in ("H200\N{UNICORN FACE}", "8xH20-96!", "8xH20-96;rm"):
        with pytest.raises(ConfigError, match="is in no card's name"):
            parse_hardware(text)
