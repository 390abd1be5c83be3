"""The training loop on a CPU: it learns, it repeats itself, and a run in parts equals a run in one."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from training.configs import CONFIGS
from training.feed import Feed, choose
from training.loop import Run
from training.muon import Muon, orthogonalise
from training.objective import exact_answers
from training.options import DEFAULTS, Options
from training.saved import PART_BYTES, Progress, save_weights
from training.stages import STAGES, Stage, check_stages, draw_length, rate_factor, read_stages, stage_at
from training.state import load_weights, twin_for
from training.train import parse
from training.twin_v3 import TwinV3
from training.twin_v4 import TwinV4

from longread.weights.fixture import tiny_config

SMALL = {"vocab_size": 16, "hidden_size": 64, "num_nextn_predict_layers": 0}
V4 = tiny_config(
    "v4-flash", **SMALL, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, n_routed_experts=4,
    index_topk=4, hc_sinkhorn_iters=3, hc_mult=2, num_attention_heads=4,
)  # fmt: skip
V3 = tiny_config("v3", **SMALL, num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=2)
SHORT = (
    Stage(0.5, {64: 0.3, 128: 0.7}),
    Stage(1.0, {128: 0.7, 256: 0.3}, sparse=True, fake_quant=True),
)


class Counting(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows that count on from a random start; the second half of each is answers of four tokens, every other four."""

    def __init__(self, length: int, rows: int, seed: int, first: int) -> None:
        super().__init__()
        self._length, self._rows, self._seed, self._first = length, rows, seed, first

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        number = self._first + worker
        place = torch.arange(self._length)
        while True:
            generator = torch.Generator().manual_seed(self._seed * 1000 + self._length + number * 7919)
            start = torch.randint(13, (self._rows, 1), generator=generator)
            weights = torch.where(place < self._length // 2, 2, (place % 8 < 4).int())
            yield ((start + place) % 13 + 3).int(), weights.to(torch.uint8).repeat(self._rows, 1)
            number += workers


def options(folder: Path, **changed: object) -> Options:
    base = Options(
        "reader-v4", folder, planned_minutes=19.0, planned_steps=20, device="cpu", workers=0, tokens_per_step=512,
        lr_muon=0.2, lr_adam=0.05, lr_embed=0.05,
    )  # fmt: skip
    return replace(base, **changed)


def run(given: Options, stages: tuple[Stage, ...] = SHORT) -> tuple[str, Run]:
    torch.manual_seed(given.seed)
    twin = TwinV4(V4, given.seed) if given.has_selection else TwinV3(V3, given.seed)
    training = Run(given, stages, twin, Counting, time.monotonic())
    return training(), training


def lines(folder: Path) -> list[dict[str, object]]:
    """What log.jsonl measured, without its events."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in records if "length" in record]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_v4_learns_and_three_runs_equal_one(tmp_path: Path) -> None:
    reason, whole = run(options(tmp_path / "whole"))
    assert reason == "finished"
    measured = lines(tmp_path / "whole")
    assert measured[-1]["answer_loss"] < 0.7 * measured[0]["answer_loss"]
    assert all(record["index_loss"] > 0 and record["answers"] > 0 for record in measured)

    assert run(options(tmp_path / "parts", steps=7))[0] == "time"
    assert run(options(tmp_path / "parts", steps=6))[0] == "time"
    reason, parts = run(options(tmp_path / "parts"))
    assert reason == "finished"
    assert (parts.progress.step, parts.progress.tokens) == (20, 20 * 512)
    assert parts.progress.taken == whole.progress.taken
    assert equal(parts.twin.native(), whole.twin.native())


def test_v3_learns_and_repeats_itself(tmp_path: Path) -> None:
    stages = tuple(replace(stage, sparse=False, index_weight=0.0) for stage in SHORT)
    runs = [run(options(tmp_path / part, name="reader-v3"), stages)[1] for part in "ab"]
    measured = lines(tmp_path / "a")
    assert measured[-1]["answer_loss"] < 0.7 * measured[0]["answer_loss"]
    assert equal(runs[0].twin.native(), runs[1].twin.native())
    other = run(options(tmp_path / "c", name="reader-v3", seed=1, steps=1), stages)[1]
    assert not equal(runs[0].twin.native(), other.twin.native())


def test_small_weight_files_continue_a_run_without_its_state(tmp_path: Path) -> None:
    _, before = run(options(tmp_path, steps=12))
    (tmp_path / "state.pt").unlink()
    native = before.twin.native()
    for name, value in load_weights(tmp_path).items():
        assert (value - native[name]).abs().max() <= 2**-8 * native[name].abs().max()
    _, after = run(options(tmp_path, steps=1))
    assert after.progress.step == 13
    assert after.optimisers.steps == 1


def test_a_folder_belongs_to_one_reader(tmp_path: Path) -> None:
    run(options(tmp_path, steps=1))
    with pytest.raises(ValueError, match="training of reader-v4, not of reader-v3"):
        run(options(tmp_path, name="reader-v3"))


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_state(tmp_path: Path) -> None:
    run(options(tmp_path, steps=3))
    good = (tmp_path / "state.pt").read_bytes()
    torch.manual_seed(0)
    broken = Run(options(tmp_path), SHORT, TwinV4(V4), Counting, time.monotonic())
    with torch.no_grad():
        broken.twin.groups()["embed"][0][5] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss of step 4 "):
        broken()
    assert (tmp_path / "state.pt").read_bytes() == good


def test_a_run_ends_when_its_time_is_up_and_is_saved(tmp_path: Path) -> None:
    given = options(tmp_path, planned_steps=None, minutes=10.5 / 60)
    reason, ended = run(given)
    assert reason == "time"
    assert 0 < ended.progress.seconds < 3
    assert load_weights(tmp_path)
    # The time trained is kept, the time between runs does not count.
    _, again = run(given)
    assert again.progress.seconds > ended.progress.seconds
    assert again.progress.step > ended.progress.step


def test_positions_are_those_of_the_weights() -> None:
    ids = torch.arange(64, dtype=torch.int32).reshape(2, 32) + 3
    weights = torch.zeros(2, 32, dtype=torch.uint8)
    weights[0, 2:20] = 2
    weights[0, 24:27] = 1
    weights[0, 29:30] = 1
    weights[1, 0:9] = 2  # the first token of a row is never predicted
    weights[1, 31:] = 1
    batch = choose(ids, weights, torch.Generator().manual_seed(0))
    kept = batch.answers.weights == 1
    assert batch.answers.at[kept].tolist() == [23, 24, 25, 28, 62]
    assert batch.answers.ids[kept].tolist() == [27, 28, 29, 32, 66]
    assert batch.spans[kept].tolist() == [0, 0, 0, 1, 2]
    assert len(batch.document.at) == 8
    assert all(weights.flatten()[at + 1] == 2 for at in batch.document.at[batch.document.weights == 1])
    guess = batch.answers.ids.clone()
    guess[1] += 1
    assert [int(n) for n in exact_answers(guess, batch)] == [2, 3]


def test_index_queries_are_answers_first_then_the_rest_of_the_row() -> None:
    weights = torch.zeros(1, 512, dtype=torch.uint8)
    weights[0, 2:300] = 2
    weights[0, 310:330] = 1
    batch = choose(torch.zeros(1, 512, dtype=torch.int32), weights, torch.Generator().manual_seed(0))
    queries = batch.queries[0].tolist()
    assert len(set(queries)) == 128
    assert set(range(309, 329)) <= set(queries)
    assert max(queries) < 330


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_do_not_depend_on_the_workers(workers: int) -> None:
    def take(workers: int, taken: dict[tuple[int, int], int], count: int) -> list[Tensor]:
        feed = Feed(Counting, SHORT, seed=1, tokens=256, workers=workers, pin=False, taken=taken)
        feed.open(0)
        got = [feed.take(0, 64) for _ in range(count)]
        feed.close()
        return [torch.cat([batch.ids.flatten(), batch.document.at, batch.queries.flatten()]) for batch in got]

    expected = take(0, {}, 5)
    found = [*take(workers, {}, 2), *take(workers, {(0, 64): 2}, 3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_muon_moves_every_matrix_by_one_size() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 32), (3, 8, 32), (32, 8)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for scale, parameter in zip((1e-4, 1.0, 1e3), parameters, strict=True):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    Muon(parameters).step(0.1)
    for parameter, size in zip(parameters, (0.1, 0.1, 0.2), strict=True):
        singular = torch.linalg.svdvals(parameter.detach())
        assert ((singular > 0.6 * size) & (singular < 1.3 * size)).all()
        assert (parameter.detach() * parameter.grad).sum() < 0
    assert orthogonalise(torch.zeros(1, 4, 4), 5).abs().max() == 0


def test_stages_follow_progress() -> None:
    for stages in STAGES.values():
        check_stages(stages)
        assert [stage_at(stages, p) for p in (0.0, 0.1, 0.5, 0.7, 0.9, 1.0)] == [0, 1, 3, 4, 5, 5]
        assert not any(stage.sparse for stage in stages)
        # What is stored rounded has to be trained so at the longest rows, up to the end.
        assert [stage.fake_quant for stage in stages[-2:]] == [True, True]
    v4, v3 = STAGES["reader-v4"], STAGES["reader-v3"]
    assert (max(v4[-1].lengths), max(v3[-1].lengths)) == (32768, 16384)
    drawn = [draw_length(v4[2], 0, step) for step in range(1000)]
    assert 150 < drawn.count(512) < 250
    assert rate_factor(0.0, 0) == 0.01
    assert rate_factor(0.6, 500) == 1.0
    assert rate_factor(0.8, 500) == pytest.approx(0.5)
    assert rate_factor(1.0, 500) == 0.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"until": 1.0, "lengths": {"512": 1}, "spares": true}]', "unknown field 'spares'"),
        ('[{"until": 0.9, "lengths": {"512": 1}}]', "exactly 1"),
        ('[{"until": 1.0, "lengths": {"512": 0}}]', "weight above 0"),
    ],
)
def test_wrong_stages_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "stages.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_stages(path)


def test_weight_files_are_small_and_lose_nothing(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((1024, 2048), float(i)) for i in range(9)} | {
        "table": torch.arange(7),
        "small": torch.tensor([0.1]),
    }
    (tmp_path / "weights-7.pt").write_bytes(b"stale")
    save_weights(tmp_path, weights, Progress("reader-v4"))
    files = sorted(tmp_path.glob("weights-*.pt"))
    assert [file.name for file in files] == ["weights-0.pt", "weights-1.pt", "weights-2.pt"]
    assert max(file.stat().st_size for file in files) <= PART_BYTES
    assert equal(load_weights(tmp_path), weights)


def test_the_command_line_has_every_option(tmp_path: Path) -> None:
    given = parse(["reader-v4", "--state", str(tmp_path), "--tokens-per-step", "4096", "--compile"])
    assert given == Options("reader-v4", tmp_path, tokens_per_step=4096, compile=True, **DEFAULTS["reader-v4"])
    other = parse(["reader-v3", "--state", "x", "--stages", "s.json", "--planned-steps", "5", "--lr-adam", "1"])
    assert (other.stages, other.planned_steps) == (Path("s.json"), 5)
    assert (other.lr_muon, other.lr_adam) == (0.005, 1.0)


@pytest.mark.parametrize(("reader", "steps"), [("reader-v3", 20), ("reader-v4", 4)])
def test_the_real_readers_train_on_the_real_documents(tmp_path: Path, reader: str, steps: int) -> None:
    """The documented command on a CPU, shortened: every part of it works, and in 20 steps the loss falls."""
    stages = [{"until": 0.5, "lengths": {"192": 1}}, {"until": 1.0, "lengths": {"256": 1}, "fake_quant": True}]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    command = [sys.executable, "-m", "training.train", reader, "--state", str(tmp_path), "--device", "cpu"]
    command += ["--workers", "0", "--tokens-per-step", "256", "--planned-steps", str(steps)]
    command += ["--stages", str(tmp_path / "stages.json")]
    root = Path(__file__).resolve().parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert f"{reader}: step {steps}," in ended.stdout and "finished" in ended.stdout, ended.stderr[-2000:]
    first, last = lines(tmp_path)
    assert (first["length"], last["length"]) == (192, 256)
    # Four steps of the warm-up move nothing yet.
    assert steps < 20 or last["answer_loss"] < first["answer_loss"] - 0.2
    assert (last["index_loss"] > 0) == (reader == "reader-v4")
    assert load_weights(tmp_path).keys() == twin_for(CONFIGS[reader]).native().keys()
