"""Options of vLLM and SGLang given to ``serve``: each is refused with what there is instead."""

import re
from pathlib import Path

import pytest

from longread.cli import main as cli
from longread.cli.peer_options import PEER_OPTIONS

Capture = pytest.CaptureFixture[str]
KNOWN = Path(__file__).parents[1] / "plan" / "known_flags"
SHORT = {"tp", "pp", "dp", "ep", "dcp", "pcp", "q", "O", "cc"}  # aliases, which the lists leave out
GONE = {"swap-space"}  # of versions before those of the lists
SERVE = next(action for action in cli.build_parser()._actions if action.dest == "command").choices["serve"]  # type: ignore[index,call-overload]


def told(capsys: Capture, *argv: str) -> str:
    assert cli.main(["serve", "reader-v4", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    return line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--tensor-parallel-size", "8"],
            "longread serve has no --tensor-parallel-size: the engine runs in one process",
        ),
        (["-tp", "8"], "has no -tp: the engine runs in one process"),
        (["--mem-fraction-static", "0.8"], ": --gpu-memory-utilization"),
        (["--enable-chunked-prefill"], "prompts are always read in chunks"),
        (["--no-enable-chunked-prefill"], "prompts are always read in chunks"),
        (["--enable_chunked_prefill"], "prompts are always read in chunks"),
        (["--enforce-eager"], "are graphs on a GPU"),
        (["--context-length", "8192"], ": --max-model-len"),
        (["--model-path", "/models/x"], "the checkpoint is the first argument"),
    ],
)
def test_a_peer_s_option_is_refused_with_what_there_is_instead(argv: list[str], words: str, capsys: Capture) -> None:
    assert words in told(capsys, *argv)


def test_other_commands_and_unknown_names_get_the_nearest_name_as_ever(capsys: Capture) -> None:
    assert "did you mean --max-model-len?" in told(capsys, "--max-modl-len", "4")
    assert cli.main(["demo", "--enforce-eager"]) == 2
    assert "unknown option --enforce-eager" in capsys.readouterr().err


def test_the_table_names_what_peers_have_and_serve_has_not() -> None:
    real = {
        line.lstrip("-") for file in KNOWN.glob("*.txt") for line in file.read_text().splitlines() if line[0] == "-"
    }
    assert set(PEER_OPTIONS) - SHORT - GONE <= real
    own = {name.lstrip("-") for name in SERVE.option_names()}
    assert not set(PEER_OPTIONS) & own


def test_what_it_points_to_exists() -> None:
    own = set(SERVE.option_names()) | {"--hardware", "--emit"}  # of plan
    for instead in PEER_OPTIONS.values():
        assert set(re.findall(r"--[a-z][a-z-]+", instead)) <= own, instead
        assert len(instead) <= 200 and "\n" not in instead
