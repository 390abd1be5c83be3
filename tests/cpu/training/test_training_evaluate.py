"""Counting right answers: intervals, cells, a twin whose every answer is known, and the engine over an export."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import ask, card, data, evaluate, exam, export, rows
from training.cells import Asked, share, tables
from training.configs import CONFIGS
from training.saved import Progress, save_weights
from training.tokenizer import EOS, PAD, load

from longread.measure.intervals import wilson
from longread.spec.config_json import spec_from_config
from longread.weights.fixture import random_weights

CPU = torch.device("cpu")


class Oracle(nn.Module):
    """Knows the next token, and says another one wherever ``spoiled(ids)`` (bool [B, T], of the token said) is set."""

    def __init__(self, spoiled: Callable[[Tensor], Tensor]):
        super().__init__()
        self.spoiled = spoiled

    def hidden(self, ids: Tensor) -> Tensor:
        said = torch.where(self.spoiled(ids), ids + 1, ids)
        return torch.nn.functional.pad(said[:, 1:], (0, 1)).float()[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return -(torch.arange(4096) - hidden).abs()


def never(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids, dtype=torch.bool)


def settings(**changes: object) -> evaluate.Settings:
    fields = {"lengths": (1024,), "questions": 24, "turns": 4, "thinking": (False,), "seed0": 7, "workers": 0}
    return evaluate.Settings(**(fields | changes))  # type: ignore[arg-type]


# Values of the closed formula, z = 1.959964: Newcombe, Statistics in Medicine 17 (1998), table I.
@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_values(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(count - right, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 5)[1] == 1.0
    with pytest.raises(ValueError, match="6 right out of 5"):
        wilson(6, 5)


def test_cells_count_by_length_and_key() -> None:
    asked = [Asked(1024, kind, decile, "en", "log", False) for kind, decile in [("single", 0), ("single", 9)]]
    asked.append(Asked(1024, "absent", None, "zh", "log", False))
    made = tables(zip(asked, [True, False, True], strict=True))
    assert [(c["count"], c["right"]) for c in made["length"]] == [(3, 2)]
    assert [(c["kind"], c["count"], c["right"]) for c in made["kind"]] == [("absent", 1, 1), ("single", 2, 1)]
    assert [(c["decile"], c["right"]) for c in made["decile"]] == [(0, 1), (9, 0)]  # absent lies at no depth
    assert share(made["length"][0]) == "66.7 %"


def test_an_oracle_is_always_right() -> None:
    result = evaluate.evaluate(Oracle(never), settings(thinking=(False, True)), CPU)
    (cell,) = result["tables"]["length"]  # type: ignore[index]
    assert cell["count"] == cell["right"] >= 40
    assert {c["thinking"] for c in result["tables"]["thinking"]} == {False, True}  # type: ignore[index]


@pytest.mark.parametrize("thinking", [False, True])
def test_one_wrong_token_makes_its_answer_wrong_and_no_other(thinking: bool) -> None:
    made = rows.Exam(1024, 2, 4, thinking)
    batch = rows.collate([made[0], made[1]], 1024, 3)
    assert len(batch.asked) == 8
    first, second = made[0].targets, made[1].targets
    wrong = {(0, first[1][0]), (0, first[2][-1]), (1, second[3][2])}  # first token, end of turn, inside
    spoiled = torch.zeros(3, 1024, dtype=torch.bool)
    for row, position in wrong:
        spoiled[row, position] = True
    spoiled[1, second[0][0] - 3] = True  # a token of the question, which the model need not say
    right = evaluate.score(Oracle(lambda ids: spoiled), batch, CPU)
    assert right.tolist() == [True, False, False, True, True, True, True, False]


def test_workers_make_the_same_rows() -> None:
    made = rows.Exam(1024, 6, 4, False)
    alone, together = (list(rows.batches(made, workers)) for workers in (0, 2))
    assert [batch.ids.tolist() for batch in alone] == [batch.ids.tolist() for batch in together]
    assert [batch.asked for batch in alone] == [batch.asked for batch in together]


def test_evaluate_counts_exactly() -> None:
    """An oracle that never ends an answer behind an odd token, against a count made from the rows one by one."""
    wanted = settings(questions=40)
    result = evaluate.evaluate(Oracle(lambda ids: (ids == EOS) & (ids.roll(1, 1) % 2 == 1)), wanted, CPU)
    papers = [made[i] for made in wanted.exams() for i in range(len(made))]
    ends = [
        (asked, row.ids[t[-1] - 1] % 2 == 0) for row in papers for asked, t in zip(row.asked, row.targets, strict=True)
    ]
    assert result["tables"] == tables(ends)
    assert 0 < sum(right for _, right in ends) < len(ends)


def test_rows_say_what_they_hold() -> None:
    tokenizer = load()
    row = rows.Exam(2048, 2, 8, True, values=True)[1]
    assert len(row.ids) <= 2048
    assert PAD not in row.ids
    paper = exam.paper(tokenizer, 2048, 1, 8)
    text = tokenizer.decode(row.ids[slice(*row.document)], skip_special_tokens=False)
    assert text == paper.document.text + "\n"
    found = 0
    for question, targets, start, span in zip(paper.questions, row.targets, row.starts, row.values, strict=False):
        said = tokenizer.decode([row.ids[i] for i in targets], skip_special_tokens=False)
        assert said == f"{question.thought}</think>{question.answer}<｜end▁of▁sentence｜>"
        assert tokenizer.decode(row.ids[start : targets[-1]]) == question.answer
        if span is not None:
            found += 1
            value = tokenizer.decode(row.ids[slice(*span)]).strip()
            assert question.answer.startswith(value)
            assert value
    assert found


def test_examinations_and_training_share_no_seed() -> None:
    assert exam.FIRST_SEED < data.FIRST_SEED
    with pytest.raises(ValueError, match="seed0"):
        exam.paper(load(), 1024, 0, 1, seed0=data.FIRST_SEED)
    with pytest.raises(ValueError, match="seed0"):
        exam.paper(load(), 1024, 0, 1, seed0=-(10**12))


def test_questions_take_turns_over_the_depth() -> None:
    paper = exam.paper(load(), 8192, 0, 32)
    deciles = [exam.decile(paper.document, question) for question in paper.questions]
    assert len(deciles) == 32
    assert all(2 <= deciles.count(where) <= 4 for where in range(10))
    assert 1 <= deciles.count(None) <= 4
    room = 8192 - exam.SPARE_TOKENS - 32 * exam.TURN_TOKENS
    assert 0.9 * room < paper.tokens <= room


@pytest.mark.parametrize("number", range(10))
def test_documents_of_4k_have_a_hundred_facts(number: int) -> None:
    """One of each language and domain."""
    assert exam.paper(load(), 4096, number, 16).document.facts >= 100


def test_a_twin_diverges_from_another_where_it_speaks_otherwise() -> None:
    wanted = settings(questions=8)
    same = evaluate.compare(Oracle(never), Oracle(never), wanted, CPU)
    assert [(cell["kl_mean"], cell["flips"]) for cell in same] == [(0.0, 0.0)] * 2
    papers = [made[i] for made in wanted.exams() for i in range(len(made))]
    other = evaluate.compare(Oracle(never), Oracle(lambda ids: ids == EOS), wanted, CPU)
    answers = sum(len(targets) for row in papers for targets in row.targets)
    assert other[0]["count"] == answers
    assert other[0]["flips"] == pytest.approx(8 / answers)
    assert other[1]["flips"] == 0
    said, instead = (-(torch.arange(4096) - token).abs().double() for token in (EOS, EOS + 1))
    divergence = (said.softmax(0) * (said.log_softmax(0) - instead.log_softmax(0))).sum()
    assert other[0]["kl_mean"] == pytest.approx(float(divergence) * 8 / answers, rel=1e-5)


class Selecting(Oracle):
    """Selects the entries of ``windows`` at every token."""

    keep_selection = False

    def __init__(self, windows: list[int]):
        super().__init__(never)
        self.windows = windows

    def hidden(self, ids: Tensor) -> Tensor:
        chosen = torch.zeros(*ids.shape, ids.shape[1] // 4, dtype=torch.bool)
        chosen[:, :, self.windows] = True
        self.selections = [chosen, torch.ones_like(chosen)]
        return super().hidden(ids)


def test_recall_looks_for_the_values_windows() -> None:
    wanted = settings(questions=4)
    exams = [replace(made, values=True) for made in wanted.exams()]
    spans = [span for made in exams for i in range(len(made)) for span in made[i].values if span is not None]
    assert spans
    windows = [span[0] // 4 for span in spans]
    first, every = evaluate.index_quality(Selecting(windows), wanted, CPU)
    assert (first["count"], first["any"]) == (len(spans), 1.0)
    shares = [
        sum(w in windows for w in range(a // 4, (b - 1) // 4 + 1)) / ((b - 1) // 4 - a // 4 + 1) for a, b in spans
    ]
    assert first["all"] == pytest.approx(sum(shares) / len(shares))
    assert (every["any"], every["all"]) == (1.0, 1.0)
    nothing, _ = evaluate.index_quality(Selecting([0]), wanted, CPU)
    assert (nothing["any"], nothing["all"]) == (0.0, 0.0)


def short(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    changes: dict[str, object] = {"num_hidden_layers": 2}
    if reader == "reader-v4":
        changes = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "index_topk": 16}
    monkeypatch.setitem(CONFIGS, reader, CONFIGS[reader] | changes)


@pytest.mark.parametrize("reader", ["reader-v3", "reader-v4"])
def test_from_random_weights_to_the_card(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knows nothing answers nothing right, and says so, in the twin and in the engine."""
    short(monkeypatch, reader)
    state, output = tmp_path / "state", tmp_path / reader
    state.mkdir()
    save_weights(state, random_weights(spec_from_config(CONFIGS[reader])), Progress(reader))
    export.main([reader, "--state", str(state), "--output", str(output)])
    common = ["--lengths", "512", "--questions", "4", "--seed0", "3"]
    twin = [reader, "--state", str(state), "--quantised", "--device", "cpu", *common]
    monkeypatch.setattr(ask, "MAX_TOKENS", 12)
    monkeypatch.setattr(ask, "DECODE_TOKENS", 4)
    results = [tmp_path / f"{name}.json" for name in ("twin", "engine", "divergence")]
    evaluate.main([*twin, "--output", str(results[0])])
    ask.main([str(output), "--each", "4", "--thinking", "both", "--output", str(results[1]), *common])
    evaluate.main([*twin, "--compare", str(output), "--output", str(results[2])])
    capsys.readouterr()
    found = [json.loads(path.read_text()) for path in results]
    assert [cell["right"] for result in found[:2] for cell in result["tables"]["length"]] == [0, 0]
    assert found[1]["tables"]["length"][0]["count"] == 8
    assert found[1]["speed"][0]["ttft_cold_seconds"] > 0
    # The export holds the rounded weights: the twin that rounds them itself says the same.
    assert all(cell["kl_mean"] < 1e-6 and cell["flips"] < 0.01 for cell in found[2]["divergence"])
    card.main([str(path) for path in results])
    printed = capsys.readouterr().out
    assert "| 512 | 8 | 0.0 % | 0.0-32.4 |" in printed
    assert "**By thinking**" in printed


def test_a_reader_without_indexer_has_no_selection(tmp_path: Path) -> None:
    save_weights(tmp_path, random_weights(spec_from_config(CONFIGS["reader-v3"])), Progress("reader-v3"))
    arguments = ["reader-v3", "--state", str(tmp_path), "--selection", "random", "--output", "x.json"]
    with pytest.raises(SystemExit, match="selects nothing"):
        evaluate.main(arguments)
