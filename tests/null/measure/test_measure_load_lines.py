"""What a log gets of a run that nobody watches: soon after something moved, and now and then while nothing does."""

import pytest

from longread.cli.checkpoint import tokenizer_of
from longread.cli.main import build_parser
from longread.measure.load.bench import estimated
from longread.measure.load.outcome import Outcome
from longread.measure.load.terminal import EVERY, QUIET, _Lines
from longread.measure.workloads import build
from longread.spec.errors import ConfigError


def test_a_run_in_which_nothing_moves_is_not_silent() -> None:
    lines = _Lines(now=0.0)
    lines.warming(0, 1)
    assert lines.due(EVERY) == f"warming up: 0 of 1 requests answered; {EVERY:.0f} s"
    assert lines.due(2 * EVERY) is None, "nothing new: no line yet"
    assert lines.due(EVERY + QUIET) is not None, "but not silent either"


def test_a_run_that_moves_is_told_with_its_counts() -> None:
    lines = _Lines(now=0.0)
    lines.started(16)
    for in_flight in (1, 2):
        lines.sent(in_flight)
    assert (lines.due(1.0) or "").startswith("0 of 16 requests, 2 in flight; ")
    lines.finished(Outcome("a", "documents", status="failed"), 1)
    assert (lines.due(2.0) or "").startswith("1 of 16 requests, 1 in flight, 1 not answered; ")
    assert lines.due(3.0) is None


def test_random_ids_without_a_vocabulary_say_which_options_give_one() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer.*vocab_size=N.*--dataset-name documents"):
        build("random", {})


@pytest.mark.parametrize("command", ["bench serve", "bench sweep --sweep rate=auto", "bench workload", "stress"])
def test_a_bundled_model_names_a_tokenizer(command: str) -> None:
    args = build_parser().parse_args([*command.split(), "--tokenizer", "reader-v4"])
    assert (args.tokenizer / "tokenizer.json").is_file()


@pytest.mark.parametrize(("tokens", "warned"), [(1_000, False), (1_373, True), (700, True), (None, False)])
def test_prompts_that_are_not_as_long_as_wanted_are_told(tokens: int | None, warned: bool) -> None:
    workload = build("documents", {"isl": "1K", "num_prompts": 1})
    said = estimated(workload, [Outcome("a", "documents", status="ok", prompt_tokens=tokens)])
    assert bool(said) == warned
    assert not said or "--tokenizer" in said[0]


def test_prompts_counted_by_a_tokenizer_are_not_doubted() -> None:
    workload = build("documents", {"isl": "1K", "num_prompts": 1, "tokenizer": str(tokenizer_of("reader-v4"))})
    assert estimated(workload, [Outcome("a", "documents", status="ok", prompt_tokens=1_373)]) == []
