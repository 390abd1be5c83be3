"""``longread simulate``: loads drawn and replayed, results for people and for programs, refusals in one line."""

import json
from pathlib import Path

import pytest

from longread.cli import main as cli
from longread.cli.simulate import mix

Capture = pytest.CaptureFixture[str]
HERE = ["simulate", "--model", "V4-Flash", "--hardware", "2xH20-96"]
SMALL = ["--rate", "0.2", "--isl", "4K", "--osl", "8", "--num-prompts", "6"]


def failing(argv: list[str], capsys: Capture, code: int = 2) -> str:
    assert cli.main(argv) == code
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("longread: error: ")
    return line


def test_a_drawn_load_is_shown_as_a_table(capsys: Capture) -> None:
    load = ["--load", "80%", "--mix", "short=75%:8K:16,long=25%:128K:16", "--num-prompts", "16"]
    assert cli.main([*HERE, *load, "--slo", "ttft=5s"]) == 0
    shown = capsys.readouterr()
    assert "DeepSeek-V4-Flash on 2xH20-96, TP2" in shown.out
    assert "(80% of the " in shown.out
    rows = {line.split()[0] for line in shown.out.splitlines() if line.startswith(("short", "long"))}
    assert rows == {"short", "long"}
    assert "meets targets" in shown.out
    assert "times real time" in shown.out


def test_the_same_seed_gives_the_same_document(capsys: Capture) -> None:
    def document(*more: str) -> dict:
        assert cli.main([*HERE, *SMALL, "--json", *more]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made.pop("wall_seconds") > 0
        return made

    first = document("--seed", "1")
    assert first == document("--seed", "1")
    assert first["schema"] == "longread.simulation/1"
    assert first["load"] == {"what": first["load"]["what"], "requests": 6, "seed": 1}
    assert document("--seed", "2")["classes"] != first["classes"]


def test_a_load_is_written_as_a_trace_and_replayed(tmp_path: Path, capsys: Capture) -> None:
    trace, rows = tmp_path / "t.jsonl", tmp_path / "rows.jsonl"
    drawn = [*HERE, *SMALL, "--prefix", "90%", "--json", "--write-trace", str(trace)]
    assert cli.main(drawn) == 0
    first = json.loads(capsys.readouterr().out)["classes"]["up to 8K"]
    assert first["cached_tokens"] > 0
    assert cli.main([*HERE, str(trace), "--json", "--requests", str(rows)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["load"] == {"what": "6 requests of t.jsonl", "requests": 6, "seed": None}
    replayed = again["classes"]["up to 8K"]
    assert replayed["cached_tokens"] == first["cached_tokens"]
    assert replayed["ttft"]["max"] == pytest.approx(first["ttft"]["max"], rel=0.01)
    assert len(rows.read_text().splitlines()) == 6
    assert cli.main([*HERE, str(trace), "--json", "--num-prompts", "2", "--speedup", "1000"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["what"] == "2 requests of t.jsonl, 1000 times faster"


def test_all_at_once_is_a_load_too(capsys: Capture) -> None:
    assert cli.main([*HERE, "--rate", "inf", "--isl", "4K", "--osl", "8", "--num-prompts", "6"]) == 0
    assert "load: 6 requests all at once: 100% up to 8K 4,096 + 8 tokens, seed 0" in capsys.readouterr().out


def test_requests_that_do_not_fit_are_named_and_the_exit_code_says_so(capsys: Capture) -> None:
    small = [*HERE, *SMALL, "--num-gpu-blocks-override", "8"]
    assert cli.main(small) == 1
    assert "up to 8K: 6 not served: 4,104 tokens, and 2,048 are the most" in capsys.readouterr().out
    line = failing([*HERE, "--load", "80%", "--isl", "4K", "--num-gpu-blocks-override", "8"], capsys)
    assert "none of these requests can be served here" in line


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "give a TRACE.jsonl, or a load"),
        (["--rate", "1", "--load", "80%", "--isl", "8K"], "either --rate (requests/s) or --load"),
        (["--rate", "1"], "give either --isl (one class) or --mix"),
        (["--rate", "1", "--isl", "8K", "--mix", "a=1:8K:1"], "give either --isl (one class) or --mix"),
        (["--rate", "1", "--mix", "a=1:8K:1", "--osl", "3"], "--osl is of one class"),
        (["--rate", "1", "--mix", "a=90%:8K:1"], "must sum to 1 (100%): 0.9"),
        (["--rate", "1", "--mix", "a=90%:8K"], "'a=90%:8K' is no class"),
        (["--rate", "1", "--mix", "a=x:8K:1"], "'x' is not a share"),
        (["--rate", "1", "--mix", "a=1:8K:0"], "0 is below 1"),
        (["--rate", "0", "--isl", "8K"], "'0' is not a number above 0"),
        (["--rate", "nan", "--isl", "8K"], "'nan' is not a number above 0"),
        (["--load", "x%", "--isl", "8K"], "'x' is not a number above 0"),
        (["--rate", "1", "--isl", "8K", "--speedup", "2"], "--speedup is of a trace"),
        (["t.jsonl", "--rate", "1"], "--rate is of a drawn load"),
        (["t.jsonl", "--prefix", "1"], "--prefix is of a drawn load"),
        (["--rate", "1", "--isl", "8K", "--requests", "nowhere/rows.jsonl"], "its folder does not exist"),
        (["--rate", "1", "--isl", "8K", "--write-trace", "/"], "/: is a folder"),
        (["--rate", "1", "--isl", "8K", "--num-prompts", "1000M"], "are too many to draw"),
        (["nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        (["--rate", "1", "--isl", "8K", "--max-num-seqs", "9000"], "max_num_batched_tokens=8192 is below max_num_seqs"),
        (["--rate", "1", "--isl", "8K", "--max-num-seqs", "3000"], "nothing is left for the cache"),
        (["--rate", "1", "--isl", "8K", "--seeds", "3"], "did you mean --seed?"),
    ],
)
def test_loads_that_cannot_be_are_refused_in_one_line(more: list[str], told: str, capsys: Capture) -> None:
    assert told in failing([*HERE, *more], capsys)


def test_a_machine_that_the_model_does_not_fit_on_is_refused(capsys: Capture) -> None:
    line = failing(["simulate", "--model", "V3", "--hardware", "1xH20-96", *SMALL], capsys)
    assert "does not fit" in line


def test_a_mix_has_shares_lengths_and_priorities() -> None:
    chat, book = mix("chat=0.9:8K:256,book=10%:1M:64:100")
    assert (chat.name, chat.share, chat.isl, chat.osl, chat.priority) == ("chat", 0.9, 8192, 256, 0)
    assert (book.share, book.isl, book.priority) == (0.1, 2**20, 100)


def test_no_figure_is_cut_on_a_terminal_of_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longread.plan.tables.PIPED", 80)
    load = ["--rate", "1", "--mix", "short=75%:8K:16,long=25%:128K:16", "--num-prompts", "8"]
    assert cli.main([*HERE, *load, "--slo", "ttft=5s"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    (named,) = [line for line in shown.splitlines() if line.startswith("class")]
    assert sorted(named.split()) == ["class", "long", "short"]
    for name in ("queue p50/p99", "TTFT p50/p99", "gap p99/max", "E2E of alone p50/p99", "meets targets"):
        assert f"\n{name} " in shown
