"""The table of cards and what users write for a machine: figures that can be true, names that mean one card."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.plan import cards, hardware_file
from longread.plan.cards import card, card_names, find_card, parse_hardware
from longread.plan.hardware_file import FIGURES, machine_toml
from longread.plan.machine import last_level_cache
from longread.spec.errors import ConfigError
from longread.spec.hardware import Card, Figure

GIB = 1024**3
WANTED = (
    "H20-96",
    "H20-141",
    "H200",
    "H100",
    "H800",
    "A100-80",
    "A800-80",
    "L20",
    "L40S",
    "RTX-4090",
    "RTX-5090",
    "B200",
)
SXM = {
    "H20-96": 450,
    "H20-141": 450,
    "H200": 450,
    "H100": 450,
    "H800": 200,
    "A100-80": 300,
    "A800-80": 200,
    "B200": 900,
}


def figures(one: Card) -> dict[str, Figure]:
    found = {key: getattr(one, key) for key in FIGURES if getattr(one, key)}
    found |= {f"flops.{rate}": figure for rate, figure in one.flops.items()}
    return found | {f"measured_flops.{rate}": figure for rate, figure in one.measured_flops.items()}


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_hardware(text)
    return str(caught.value)


def test_the_table_holds_what_the_planner_promises() -> None:
    assert card_names() == (*WANTED, "cpu")


@pytest.mark.parametrize("name", card_names())
def test_every_figure_is_positive_marked_and_sourced(name: str) -> None:
    for key, figure in figures(card(name)).items():
        assert figure.value > 0, key
        assert figure.mark in ("vendor sheet", "measured", "derived", "press"), key
        assert len(figure.source) >= 5 and "TODO" not in figure.source and "placeholder" not in figure.source, key
        if figure.mark == "measured" and key.startswith("measured_"):
            assert re.search(r"#\d+|one H200|longread probe", figure.source), f"{key}: measured by whom?"


@pytest.mark.parametrize("name", WANTED)
def test_sizes_and_rates_are_sane(name: str) -> None:
    one = card(name)
    assert one.sms and one.l2 and one.pcie and one.compute_capability
    # 8 GB of a "24 GB" card, or GiB read as GB, would fall out of these.
    assert 0.94 <= one.usable.value / one.memory.value <= 0.998
    assert 0.5e12 < one.bandwidth.value < 10e12 and 20 * GIB < one.memory.value < 200 * GIB
    assert 30e6 < one.l2.value < 150e6 and 70 <= one.sms.value <= 200
    assert one.power is None or 200 <= one.power.value <= 1200
    assert 25e9 < one.pcie.value <= 64e9
    if one.measured_bandwidth:
        assert 0.6 < one.measured_bandwidth.value / one.bandwidth.value < 1
    for rate, figure in one.measured_flops.items():
        assert 0.5 < figure.value / one.flops[rate].value < 1.2, rate


@pytest.mark.parametrize("name", WANTED)
def test_rates_halve_with_the_width_of_the_type(name: str) -> None:
    one = card(name)
    flops = {rate: figure.value for rate, figure in one.flops.items()}
    if one.architecture == "ampere":
        assert "fp8" not in flops and "fp4" not in flops
        assert flops["int8"] == pytest.approx(2 * flops["bf16"])
    else:
        assert flops["fp8"] == pytest.approx(2 * flops["bf16"], rel=0.02)
    assert ("fp4" in flops) == (one.architecture == "blackwell")
    assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=0.03)
    assert flops["fp32"] <= flops["tf32"]
    assert {"ampere": 8, "ada": 8, "hopper": 9}.get(one.architecture, 10) <= (one.compute_capability or (0, 0))[0]


@pytest.mark.parametrize("name", WANTED)
def test_links_are_one_direction(name: str) -> None:
    one = card(name)
    assert one.pcie and "one direction" in one.pcie.source
    if name in SXM:
        assert one.nvlink and one.nvlink.value == SXM[name] * 1e9 and "one direction" in one.nvlink.source
    else:
        assert one.nvlink is None


def test_facts_that_everything_hangs_on() -> None:
    h20, h20e, h200 = card("H20-96"), card("H20-141"), card("H200")
    assert (h20.flops["bf16"].value, h20.flops["fp8"].value, h20.bandwidth.value) == (148e12, 296e12, 4.0e12)
    assert (h20e.bandwidth.value, h20e.flops["fp8"].value) == (4.8e12, 296e12)
    assert h20.usable.value == 95 * GIB
    assert h200.usable.value == pytest.approx(139.8 * GIB)
    assert h200.measured_bandwidth and h200.measured_bandwidth.value == 4.14e12
    assert h200.measured_flops["bf16"].value == 756e12
    assert h200.pcie and (h200.pcie.value, h200.pcie.mark) == (49.5e9, "measured")
    assert h200.flops["fp8"].value / h20.flops["fp8"].value == pytest.approx(6.7, rel=0.01)


def test_names_and_aliases_mean_one_card_each() -> None:
    seen: dict[str, str] = {}
    for name in card_names():
        for alias in (name, *card(name).aliases):
            assert seen.setdefault(cards._plain(alias), name) == name, alias
            assert card(alias) is card(name)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H20", "H20-96"),
        ("NVIDIA H20-3e", "H20-141"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A800-SXM4-80GB", "A800-80"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_the_driver_s_name_finds_the_card(driver: str, name: str) -> None:
    assert card(driver).name == name


@pytest.mark.parametrize(
    "driver",
    ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "NVIDIA H20 MIG 1g"],
)
def test_a_relative_is_not_the_card(driver: str) -> None:
    assert find_card(driver) is None


@pytest.mark.parametrize(
    ("text", "label", "total"),
    [
        ("H200", "1xH200", 1),
        ("8xH20-96", "8xH20-96", 8),
        ("8 x h20-3e", "8xH20-141", 8),
        ("2x8xH20-96", "2x8xH20-96", 16),
        ("8×RTX 4090", "8xRTX-4090", 8),
        ("8X4090", "8xRTX-4090", 8),
        ("1x8xH200", "8xH200", 8),
        ("cpu", "1xcpu", 1),
    ],
)
def test_what_a_user_writes(text: str, label: str, total: int) -> None:
    machine = parse_hardware(text)
    assert (machine.label, machine.total_gpus) == (label, total)


def test_nodes_talk_over_the_reference_machine_s_ports_or_what_is_given() -> None:
    assert parse_hardware("8xH200").network is None
    network = parse_hardware("4x8xH200").network
    assert network and (network.value, network.mark) == (400e9, "derived") and "8 cards" in network.source
    for text in ("2x8xH200@200GB/s", "2x8xH200@1600Gb/s", "2x8xH200@1.6Tbit/s", "2x8xL20 @ 200 GB/s"):
        given = parse_hardware(text).network
        assert given and given.value == pytest.approx(200e9), text
    assert parse_hardware("2x8xL20").network is None  # no reference machine: nothing is promised


def test_the_cpu_is_this_machine() -> None:
    machine = parse_hardware("cpu")
    assert machine.host_memory == machine.card.memory
    assert machine.card.usable.value <= machine.card.memory.value
    assert machine.card.memory.mark == "measured"
    assert machine.card.compute_capability is None and machine.card.nvlink is None


def caches(folder: Path, *found: tuple[int, int, int, str, str]) -> Path:
    for processor, index, level, size, shared in found:
        place = folder / f"cpu{processor}" / "cache" / f"index{index}"
        place.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
            (place / name).write_text(text + "\n")
    return folder


def test_the_last_cache_counts_once_for_those_who_share_it(tmp_path: Path) -> None:
    two = [(cpu, 2, 2, "1024K", str(cpu)) for cpu in range(4)]
    three = [(cpu, 3, 3, "32M", "0-1" if cpu < 2 else "2-3") for cpu in range(4)]
    assert last_level_cache(caches(tmp_path / "a", *two, *three)) == 64 * 2**20
    assert last_level_cache(caches(tmp_path / "b", *two)) == 4 * 2**20
    assert last_level_cache(caches(tmp_path / "c", (0, 3, 3, "odd", "0"))) is None
    assert last_level_cache(tmp_path / "none") is None


def test_more_cores_calculate_more(monkeypatch: pytest.MonkeyPatch) -> None:
    generic = card("cpu").flops["fp32"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    scaled = parse_hardware("cpu").card
    assert scaled.flops["fp32"].value == pytest.approx(4 * generic.value)
    assert scaled.flops["fp32"].mark == "derived" and scaled.bandwidth == card("cpu").bandwidth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no hardware given", "8xH20-96"]),
        ("   ", ["no hardware given"]),
        ("0xH200", ["0 is no number of GPUs", "from 1"]),
        ("-8xH200", ["-8 is no number"]),
        ("1.5xH200", ["1.5 is no number"]),
        ("0x8xH200", ["0 is no number"]),
        ("2x0xH200", ["0 is no number"]),
        ("9999999999xH200", ["is no number"]),
        ("3x", ["no card after the count", "H20-96"]),
        ("8x", ["no card after the count"]),
        ("1x2x3xH200", ["3 counts", "2x8xH20-96"]),
        ("H2000", ["not a known card", "did you mean H200", "known: H20-96", "longread probe"]),
        ("8xH20-95", ["H20-95", "did you mean H20-96"]),
        ("8xB300", ["did you mean B200"]),
        ("H200x8", ["did you mean 8xH200"]),
        ("MI300X", ["not a known card", "known:"]),
        ("16xH20-96", ["at most 8 H20-96", "2x8xH20-96"]),
        ("12xH200", ["at most 8"]),
        ("2xcpu", ["one machine"]),
        ("8xH200@200GB/s", ["one node"]),
        ("2x8xH200@fast", ["@fast is no rate", "@200GB/s"]),
        ("2x8xH200@0GB/s", ["is no rate"]),
        ("x" * 5000, ["not a known card"]),
    ],
)
def test_nonsense_is_refused_with_what_to_write(text: str, words: list[str]) -> None:
    message = refused(text)
    assert all(word in message for word in words), message
    assert len(message) < 500 and "\n" not in message


def test_no_hint_where_nothing_is_near() -> None:
    assert "did you mean" not in refused("quux")


@pytest.mark.parametrize("name", [*WANTED, "2x8xH20-96", "8xH100"])
def test_every_machine_survives_its_file(name: str, tmp_path: Path) -> None:
    machine = parse_hardware(name)
    path = tmp_path / "my.toml"
    path.write_text(machine_toml(machine, {"note": 'odd " \\ \x7f é 😀', "samples": {"a b": [1.5, 2]}, "on": True}))
    assert parse_hardware(str(path)) == machine


FIGURE = '{ value = 1, unit = "%s", mark = "measured", source = "mine" }'
CARD = f"""
[card]
name = "mine"
architecture = "hopper"
memory = {FIGURE % "TiB"}
usable = {FIGURE % "TB"}
bandwidth = {FIGURE % "TB/s"}
[card.flops]
bf16 = {FIGURE % "PFLOP/s"}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return str(path)


def test_a_user_s_own_card(tmp_path: Path) -> None:
    machine = parse_hardware(written(tmp_path, f"gpus = 4\n{CARD}\n[host]\nmemory = {FIGURE % 'TiB'}"))
    assert machine.label == "4xmine" and machine.card.flops["bf16"] == Figure(1e15, "measured", "mine")
    assert machine.host_memory == Figure(1024.0**4, "measured", "mine") and machine.disk_read is None
    assert machine.card.power is None and machine.card.compute_capability is None


def test_a_known_card_with_one_figure_changed(tmp_path: Path) -> None:
    text = f'gpus = 8\n[card]\nbase = "H20-96"\n[card.measured_flops]\nfp8 = {FIGURE % "TFLOP/s"}\n'
    mine, known = parse_hardware(written(tmp_path, text)).card, card("H20-96")
    assert mine.measured_flops == {**known.measured_flops, "fp8": Figure(1e12, "measured", "mine")}
    assert (mine.name, mine.bandwidth, mine.flops) == (known.name, known.bandwidth, known.flops)
    assert parse_hardware(written(tmp_path, 'card = "H200"')).card is card("H200")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["card is missing"]),
        ("card = 3", ["card must be a table"]),
        ('card = "H2000"', ["not a known card", "did you mean H200"]),
        ('gpus = 0\ncard = "H200"', ["gpus must be a whole number from 1"]),
        ('gpus = true\ncard = "H200"', ["gpus must be a whole number"]),
        ('gpu = 8\ncard = "H200"', ["gpu is not a known key", "did you mean gpus"]),
        ('nodes = 2\ncard = "H200"', ["host.network is missing"]),
        ("[card]\nname = 'x'", ["card.architecture is missing", "hopper"]),
        ("[card]\nbase = 'nonsuch'", ["not a known card"]),
        ("[card]\nname = ''", ["card.name must be"]),
        (CARD.replace("hopper", "gaudi"), ["card.architecture is 'gaudi'", "hopper"]),
        (CARD.replace("bandwidth =", "bandwith ="), ["card.bandwith is not a known key", "did you mean bandwidth"]),
        (CARD.replace("usable =", "power ="), ["card.power.unit", "a power is written in W"]),
        (CARD.replace("bf16", "fp16"), ["card.flops.fp16 is not a known key", "bf16"]),
        (CARD[: CARD.index("[card.flops]")], ["card.flops is missing"]),
        (CARD.replace(f"memory = {FIGURE % 'TiB'}", ""), ["card.memory is missing"]),
        (CARD.replace('"TB/s"', '"TB"'), ["card.bandwidth.unit is 'TB'", "GB/s"]),
        (CARD.replace('value = 1, unit = "TB/s"', 'value = 0, unit = "TB/s"'), ["card.bandwidth.value", "above 0"]),
        (CARD.replace('value = 1, unit = "TB/s"', 'value = nan, unit = "TB/s"'), ["card.bandwidth.value"]),
        (CARD.replace('value = 1, unit = "TB/s"', 'value = inf, unit = "TB/s"'), ["card.bandwidth.value"]),
        (CARD.replace(', source = "mine" }\n[card.flops]', " }\n[card.flops]"), ["card.bandwidth.source is missing"]),
        (CARD.replace('mark = "measured"', 'mark = "guess"', 1), ["card.memory.mark is 'guess'", "vendor sheet"]),
        (CARD.replace("usable", "x", 1).replace("memory", "usable").replace("x =", "memory ="), ["more than memory"]),
        (
            CARD + f"[card.measured_flops]\nbf16 = {FIGURE % 'PFLOP/s'.replace('1,', '2,')}".replace("= 1", "= 2"),
            ["2 times"],
        ),
        (CARD.replace("value = 1,", "value = 1e308,", 1), ["card.memory.value must be"]),
        (CARD.replace("value = 1,", f"value = 1{'0' * 400},", 1), ["card.memory.value must be", "beyond 10^18"]),
        (f"gpus = 1{'0' * 5000}", ["not a TOML file"]),
        ("gpus = " + "[" * 5000, ["not a TOML file"]),
        (CARD + "aliases = 3", ["aliases is not a known key"]),
        ("[card", ["not a TOML file"]),
        ("compute = \x00", ["not a TOML file"]),
    ],
)
def test_a_wrong_file_names_file_and_key(text: str, words: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, text)
    message = refused(path)
    assert all(word in message for word in words), message
    assert path in message or "not a known card" in message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no such file; `longread probe --output" in refused(str(tmp_path / "none.toml"))
    assert "folder" in refused(f"{tmp_path}/")
    assert "more than 65,536 bytes" in refused(written(tmp_path, "#" * 2**21))
    (tmp_path / "latin.toml").write_bytes(b'card = "\xff"')
    assert "not UTF-8" in refused(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    "text", ["\0.toml", "~nobody-of-that-name/x.toml", "/" + "x" * 5000 + ".toml", "/dev/null/x.toml"]
)
def test_paths_that_no_system_takes(text: str) -> None:
    assert len(refused(text)) < 700


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"[-+]?[0-9]{0,5}[x×*]?[0-9]*x?(H20|H200|B|cpu|4090)?-?[0-9]*(@.{0,8})?"))
def test_any_text_is_a_machine_or_a_refusal(text: str) -> None:
    try:
        machine = parse_hardware(text)
    except ConfigError as error:
        assert len(str(error)) < 700
    else:
        assert machine.total_gpus >= 1 and machine.card.memory.value > 0


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIGURES, "value", "unit"]), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["memory", "flops", "name", "architecture", "base", "aliases", "compute_capability"]), JUNK)
def test_any_value_in_a_file_is_a_machine_or_a_refusal(key: str, junk: object) -> None:
    document = {"gpus": 1, "card": {"base": "H200", key: junk}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_file, "_load", lambda path, origin: document)
        try:
            machine = parse_hardware("any.toml")
        except ConfigError as error:
            assert len(str(error)) < 700
        else:
            assert machine.card.memory.value > 0
