"""``longread plan --emit`` from the command line: what is launched, what is said in the file, and which options fit."""

import json
import shutil
from pathlib import Path

import pytest

from longread.cli import main as cli
from longread.spec.release_configs import CONFIGS

Capture = pytest.CaptureFixture[str]
V4 = ["V4-Flash", "--hardware", "8xH20-96"]
HEADLINE = ["--isl", "524288", "--osl", "512", "--prefix", "0.98", "--concurrency", "100", "--slo", "ttft=2s,tpot=50ms"]
LOAD = ["--isl", "8K", "--osl", "512"]
RESULTS = Path(__file__).parents[3] / "results"


def said(argv: list[str], capsys: Capture, code: int = 0) -> str:
    assert cli.main(["plan", *argv]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.replace("#", " ").split())


@pytest.mark.parametrize("target", ["vllm", "sglang", "compose", "systemd"])
def test_the_headline_load_is_emitted_with_its_missed_targets(target: str, capsys: Capture) -> None:
    text = said([*V4, *HEADLINE, "--emit", target], capsys)
    assert "of the ranking" in text and "deepseek-ai/DeepSeek-V4-Flash" in text
    assert "TTFT target 2 s, predicted at load" in flat(text) and "ttft=2s is likely missed" in flat(text)


def test_the_release_that_was_named_is_launched(capsys: Capture) -> None:
    for name, parser in (("R1", "deepseek_r1"), ("v3.1-terminus", "deepseek_v3"), ("V3-0324", None)):
        text = said([name, "--hardware", "8xH200", *LOAD, "--emit", "vllm"], capsys)
        assert f"vllm serve deepseek-ai/deepseek-{name}".lower() in text.lower()
        assert (f"--reasoning-parser {parser}" in text) == (parser is not None)
    assert "--tool-call-parser deepseek_v31" in said(["V3.2-Exp", "--hardware", "8xH200", "--emit", "vllm"], capsys)


def test_a_folder_is_what_the_engine_loads(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "my r1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    text = said([str(folder), "--hardware", "8xH200", *LOAD, "--emit", "vllm"], capsys)
    assert f"vllm serve '{folder}'" in text and "may hold any of" in flat(text)


def test_what_emit_has_to_know(capsys: Capture) -> None:
    options = ["--model-path", "/data/v4", "--host", "0.0.0.0", "--port", "9000", "--engine-version", "0.26.0"]
    text = said([*V4, *LOAD, "--emit", "vllm", *options], capsys)
    assert "vllm serve /data/v4" in text and "--host 0.0.0.0" in text and "--port 9000" in text and "0.26.0" in text
    two = ["V3.1", "--hardware", "2x8xH20-96", "--tp", "8", "--pp", "2", *LOAD, "--emit", "vllm"]
    text = said([*two, "--nodes", "10.0.0.1,10.0.0.2", "--interface", "bond0"], capsys)
    assert "--master-addr 10.0.0.1" in text and "NCCL_SOCKET_IFNAME=bond0" in text


def test_the_first_layers_of_a_model_are_planned_and_launched_on_one_card(capsys: Capture) -> None:
    whole = cli.main(["plan", "V4-Flash", "--hardware", "H200", "--emit", "longread"])
    assert whole == 2 and "does not fit" in capsys.readouterr().err
    for load in ([], LOAD):
        text = said(["V4-Flash", "--layers", "32", "--hardware", "H200", *load, "--emit", "longread"], capsys)
        assert "longread serve DeepSeek-V4-Flash" in text and "--random-weights" in text and "--layers 32" in text
    assert "32 of 43 layers" in said(["V4-Flash", "--layers", "32", "--hardware", "H200"], capsys)
    assert cli.main(["plan", "V4-Flash", "--layers", "44"]) == 2 and "ask for 1 to 43" in capsys.readouterr().err
    assert cli.main(["plan", "--calibrate", str(RESULTS / "cpu.json"), "--layers", "3"]) == 2
    assert "leave --layers out" in capsys.readouterr().err


def test_a_config_file_that_is_cut_is_launched_from_its_folder(tmp_path: Path, capsys: Capture) -> None:
    """Its label is no name that ``serve`` would find."""
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text(json.dumps(CONFIGS["DeepSeek-V4-Flash"]))
    options = ["--layers", "3", "--hardware", "H200", "--emit", "longread"]
    assert f"longread serve {tmp_path}" in flat(said([str(tmp_path / "config.json"), *options], capsys))
    assert cli.main(["plan", str(tmp_path / "other.json"), *options]) == 2
    assert "finds no model called" in capsys.readouterr().err


def test_a_cut_model_is_launched_cut_on_a_cpu_and_as_itself(capsys: Capture) -> None:
    cut = ["reader-v4", "--layers", "3", "--hardware", "cpu", "--isl", "2K", "--emit", "longread"]
    text = flat(said(cut, capsys))
    assert "--random-weights" in text and "--layers 3" in text
    other = ["V4-Flash", "--layers", " 8 ", "--hardware", "H200", *LOAD, "--emit", "longread"]
    assert "--layers 8 " in flat(said(other, capsys)) + " "
    assert cli.main(["plan", *other, "--model-path", "DeepSeek-V2-Lite"]) == 2
    assert "would be DeepSeek-V2-Lite with 8" in capsys.readouterr().err
    assert cli.main(["plan", *other, "--model-path", ""]) == 2
    assert "--model-path is empty" in capsys.readouterr().err


def test_converted_experts_take_their_checkpoint(capsys: Capture) -> None:
    text = said([*V4, *LOAD, "--emit", "sglang", "--experts", "fp8", "--model-path", "some/V4-FP8"], capsys)
    assert "--model-path some/V4-FP8" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*V4, *LOAD, "--json", "--emit", "vllm"], "--json and --emit"),
        ([*V4, *LOAD, "--json", "--top", "3"], "--json has all"),
        ([*V4, "--top", "3"], "without --isl"),
        ([*V4, *LOAD, "--port", "9000"], "--port is for --emit"),
        ([*V4, *LOAD, "--engine", "vllm", "--emit", "sglang"], "leaves it out"),
        ([*V4, *LOAD, "--experts", "fp8", "--emit", "vllm"], "--model-path"),
        ([*V4, *LOAD, "--tier", "host"], "--prefix"),
        (["--published", "--tp", "3"], "leave --tp out"),
        (["--published", "--layers", "3"], "leave --layers out"),
        (["V3", "--published"], "leave 'V3' out"),
        ([*V4, *LOAD, "--gpu-memory-utilization", "0"], "above 0"),
        ([*V4, *LOAD, "--tp", "0"], "below 1"),
        ([*V4, *LOAD, "--tp", "1000000007"], "8xH20-96 has 8"),
        ([*V4, *LOAD, "--max-model-len", "1000"], "below isl"),
        ([*V4, *LOAD, "--kv-cache-dtype", "fp9"], "'fp9' is not known"),
        ([*V4, *LOAD, "--host-cache-size", "9999999TiB"], "main memory"),
        ([*V4, *LOAD, "--emit", "vllm", "--host", "a b"], "no host name"),
        ([*V4, *LOAD, "--emit", "vllm", "--port", "70000"], "65535"),
        ([*V4, *LOAD, "--emit", "vllm", "--nodes", "a,b"], "2 addresses for 1 nodes"),
        ([*V4, *LOAD, "--emit", "vllm", "--engine-version", "1.0"], "0.26.0 and 0.33.0"),
        (["V3", "--hardware", "8xH20-96", *LOAD, "--html", "/no/such/x.html"], "its folder does not exist"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_or_is_nonsense_is_refused(argv: list[str], words: str, capsys: Capture) -> None:
    assert cli.main(["plan", *argv]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and words in line, line


def test_calibrate_takes_everything_in_results(capsys: Capture) -> None:
    files = [str(path) for path in sorted(RESULTS.iterdir())]
    assert cli.main(["plan", "--calibrate", *files]) == 0
    shown = capsys.readouterr()
    assert "calibration with" in shown.out
    for name in ("frontend-cpu.json", "probe-2xh200.toml", "readers"):
        assert f"skipped {RESULTS / name}" in shown.err
    assert cli.main(["plan", "--calibrate", str(RESULTS / "frontend-cpu.json")]) == 2
    assert "no figures" in capsys.readouterr().err


def test_calibration_without_a_load_is_in_the_json(capsys: Capture) -> None:
    files = ["--calibrate", str(RESULTS / "cpu.json")]
    assert json.loads(said(["V2-Lite", "--hardware", "cpu", *files, "--json"], capsys, 1 if small() else 0))[
        "calibration"
    ]
    assert json.loads(said(["--json", *files], capsys))["kind"] == "calibration"


def small() -> bool:
    """V2-Lite in float32 takes 63 GB."""
    page, pages = 4096, int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) // 4
    return page * pages < 80e9


def test_a_card_name_with_markup_is_shown_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    for name in ("[red]x[/red] [/]", "[red]x"):
        path = tmp_path / "card.toml"
        path.write_text(f'gpus = 8\n[card]\nbase = "H20-96"\nname = "{name}"\n')
        for extra in ([], LOAD):
            assert name in said(["V4-Flash", "--hardware", str(path), *extra], capsys)
    shutil.rmtree(tmp_path)


def test_a_name_of_two_cards_is_said(capsys: Capture) -> None:
    assert cli.main(["plan", "V4-Flash", "--hardware", "8xH20"]) == 0
    assert "H20 is read as H20-96; there is H20-141 too" in capsys.readouterr().err
    assert cli.main(["plan", "V4-Flash", "--hardware", "8xH20-96"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["plan", "V4-Flash", "--hardware", "http://x.toml"]) == 2
    assert "is an address" in capsys.readouterr().err


def test_the_ranked_table_is_whole_in_a_pipe(capsys: Capture) -> None:
    assert "\N{HORIZONTAL ELLIPSIS}" not in said([*V4, *HEADLINE], capsys)


def test_a_context_that_leaves_no_room_for_an_answer_names_the_longest(capsys: Capture) -> None:
    assert cli.main(["plan", *V4, "--isl", "1M", "--osl", "512"]) == 2
    assert "isl=1048064" in capsys.readouterr().err


def test_an_amount_means_the_same_to_plan_and_claim(capsys: Capture) -> None:
    parser = cli.build_parser()
    for text, value in (("8k", 8000), ("8K", 8192)):
        plan = parser.parse_args(["plan", "V3", "--isl", text])
        claim = parser.parse_args(["claim", "--isl", text])
        assert plan.isl == claim.isl == value
