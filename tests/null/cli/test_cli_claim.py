"""``longread claim``: text and options, exit codes, errors of one line, JSON."""

import json

import pytest

from longread.cli import main as cli

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["claim", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("text", "code", "outcome"),
    [
        ("512K first token in 168 ms, 100 concurrent, 8xH20, DeepSeek-V4.1", 3, "only if"),
        ("512K first token in 168 ms, cold, 8xH20, DeepSeek-V4.1", 4, "impossible"),
        ("8卡H200 V4-Flash 128K 首字 4秒 冷启动", 0, "plausible"),
        ("V4-Flash 8xH200 8K TTFT 60 s cold", 0, "conservative"),
    ],
)
def test_exit_code_by_the_verdict(text: str, code: int, outcome: str, capsys: Capture) -> None:
    found, out, err = run(capsys, text)
    assert (found, err) == (code, "")
    assert out.startswith(f"verdict: {outcome}\n")


@pytest.mark.parametrize("columns", ["46", "80", "120"])
@pytest.mark.parametrize(
    "text",
    [
        "512K first token in 168 ms, 100 concurrent, 8xH20",
        "512K first token in 168 ms, cold, 8xH20, V3",
        "20k tok/s total, 30 ms per token, 512K TTFT 168ms, 100 concurrent, 98% hit, from host memory, 8xH20, V4",
    ],
)
def test_the_verdict_is_one_screen_and_full_has_all(
    text: str, columns: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, short, _ = run(capsys, text)
    lines = short.splitlines()
    assert len(lines) <= 25 and max(len(line) for line in lines) <= int(columns)
    assert lines[0] == f"verdict: { {3: 'only if', 4: 'impossible'}[code] }"
    shown = " ".join(short.split())
    assert "what decides: " in shown and "claimed 168 ms; floor" in shown and "--full: every reading" in shown
    full_code, full, _ = run(capsys, text, "--full")
    assert full_code == code and full.count("\n") > 40
    assert max(len(line) for line in full.splitlines()) <= int(columns)
    assert "what to ask:" in full and "what would settle it:" in full


@pytest.mark.parametrize(("length", "tokens"), [("8k", 8000), ("8K", 8192), ("1m", 10**6), ("1M", 2**20)])
def test_a_length_means_the_same_in_a_sentence_and_in_an_option(length: str, tokens: int, capsys: Capture) -> None:
    for argv in ([f"{length} TTFT 9 s on 8xH200 V4-Flash"], ["TTFT 9 s on 8xH200 V4-Flash", "--isl", length]):
        _, out, _ = run(capsys, *argv, "--json")
        assert json.loads(out)["claim"]["isl"] == tokens


def test_options_say_the_same_as_a_sentence(capsys: Capture) -> None:
    options = "--model V4-Flash --hardware 8xH20-96 --isl 512K --ttft 168ms --concurrency 100 --suffix 32 --tier host"
    code, out, _ = run(capsys, *options.split(), "--json")
    sentence = "512K first token in 168 ms, 100 concurrent, 8xH20-96, V4-Flash, suffix 32, from host memory"
    other, spoken, _ = run(capsys, sentence, "--json")
    first, second = json.loads(out), json.loads(spoken)
    assert code == other
    assert first["cases"] == second["cases"]
    assert first["schema"] == "longread.claim/1"


def test_options_add_to_a_sentence(capsys: Capture) -> None:
    _, out, _ = run(capsys, "512K in 168 ms", "--hardware", "8xH20", "--model", "V3.2", "--state", "warm", "--json")
    document = json.loads(out)
    assert document["claim"]["hardware"] == ["8xH20-96", "8xH20-141"]
    assert [f["group"] for f in document["cases"][0]["findings"]] == ["first token", "memory"]
    code, _, err = run(
        capsys, "512K in 168 ms on 8xH20 V4-Flash", "--hardware", "8xH20-96", "--throughput", "200k/user"
    )
    assert (code, err) == (4, "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "names no hardware"),
        (["128K in 1 s on 8xH20 V3", "--percentile", "foo"], "'foo' is none; write p1 to p99.99"),
        (["TTFT 1 s on 8xH20 V3", "--isl", "128K", "--suffix", "10", "--prefix", "0.5"], "drop one of them"),
        (["512K with turbo on 8xH20"], "'turbo' in the claim is not understood"),
        (["512K in 1 s on 8xH20 V3", "--model", "V9"], "'V9' is not a known model"),
        (["512K in 1 s on 8xH20 V3", "--model", "V3.2"], "--model differs"),
        (["512K in 1 s on 8xH20 V3", "--isl", "8K"], "--isl differs"),
        (["512K in 1 s on 8xH20 V3", "--hardware", "8xH200"], "--hardware differs"),
        (["--hardware", "8xH20", "--isl", "8K", "--ttft", "soon"], "ttft: 'soon' is no time"),
        (["--hardware", "8xH20", "--throughput", "fast"], "throughput: 'fast' is no rate"),
        (["--hardware", "8xH20", "--isl", "8K", "--ttft", "1s", "--prefix", "1.5"], "outside 0..1"),
        (["--hardware", "8xH2O", "--isl", "8K"], "not a known card"),
        (["--hardware", "8xH20"], "nothing to judge"),
    ],
)
def test_what_cannot_be_judged_is_one_line_and_exit_2(argv: list[str], words: str, capsys: Capture) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
