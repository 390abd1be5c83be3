"""An engine, and ``longread ingest``, over a store whose disk is really full: right answers meanwhile, and with room
again the store goes on.
"""

import logging
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from apart import called
from small_disk import Ballast, run_on_small_disk

from longread.cli import main as cli
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.weights.fixture import write_fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def start(model: Path, store: Path | None) -> LocalEngine:
    return load_engine(
        EngineOptions(
            model=str(model),
            dtype="float32",
            num_gpu_blocks_override=16,
            max_model_len=1024,
            max_num_seqs=2,
            max_num_batched_tokens=256,
            store=str(store) if store is not None else None,
        )
    )


def text(seed: int, length: int = 700) -> tuple[int, ...]:
    draws = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 400, (length,), generator=draws).tolist())


def ask(engine: LocalEngine, tokens: tuple[int, ...]) -> tuple[list[int], FinishEvent]:
    engine.submit(GenerationRequest("r", tokens, GREEDY))
    out: list[int] = []
    while True:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                out.append(event.token_id)
            else:
                return out, event


def served_on(place: Path) -> None:
    """Full before the store is opened, while it is written, and when it is closed."""
    ballast, store, told = Ballast(place), place / "store", StringIO()
    logging.basicConfig(stream=told, level=logging.ERROR)
    with tempfile.TemporaryDirectory() as elsewhere:
        model = Path(elsewhere) / "model"
        write_fixture(model, "v4-flash")
        alone = start(model, None)
        expected = {seed: ask(alone, text(seed))[0] for seed in range(4)}
        first = start(model, store)
        assert ask(first, text(0))[0] == expected[0] and first.flush(30)
        ballast.fill()
        for seed in (1, 0, 1, 2):
            assert ask(first, text(seed))[0] == expected[seed]
        assert first.flush(30)
        assert first.stats().store_errors and told.getvalue().count("the disk is full") == 1
        ballast.free()
        assert ask(first, text(3))[0] == expected[3]  # a write that succeeds brings the refused ones after it
        longer = ask(first, text(1) + text(9, 30))[0]  # the pages that could not be written are written now
        assert first.flush(30)
        ballast.fill()
        first.close()
        second = start(model, store)  # with or without the store: where not even it can be opened, that is said
        for seed in range(4):
            assert ask(second, text(seed))[0] == expected[seed]
        assert second.store is not None or "service goes on without the store" in told.getvalue()
        second.close()
        ballast.free()
        third = start(model, store)
        for tokens, answer in (*((text(seed), expected[seed]) for seed in (0, 2, 3)), (text(1) + text(9, 30), longer)):
            found, ended = ask(third, tokens)
            assert found == answer
            assert ended.reuse is not None and ended.reuse.disk_tokens >= 512, ended.reuse
        assert third.store is not None
        report = third.store.verify()
        assert report.sound and not report.unreachable, report
        third.close()


def ingested(place: Path) -> None:
    """A disk that fills up while a document is read: the command says so; with room it goes on."""
    ballast, file = Ballast(place), place / "a.txt"
    file.write_text(
        "".join(f"{i}. The gauge at mile {i * 37 % 101} showed {i * 7919 % 1000} feet.\n" for i in range(90))
    )
    with tempfile.TemporaryDirectory() as elsewhere:
        model = Path(elsewhere) / "model"
        write_fixture(model, "v4-flash")
        command = ["ingest", str(file), "--model", str(model), "--store", str(place / "store"), "--json"]
        for left in (0, 20_000, 100_000, 300_000):
            ballast.fill(left)
            assert (ran := run(command)) == (1, "", True), ran
        ballast.free()
        status, out, _ = run(command)
        assert status == 0 and '"id"' in out
        ballast.fill()
        assert run(["store", "ls", "--store", str(place / "store")])[0] in (0, 1)
        ballast.free()
        assert run(["store", "verify", "--store", str(place / "store")])[0] == 0


def run(command: list[str]) -> tuple[int, str, bool]:
    """Status and output of a command, and whether its last words were about room."""
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        status = cli.main(command)
    assert "Traceback" not in error.getvalue()
    last = (error.getvalue().splitlines() or [""])[-1]
    return (
        status,
        out.getvalue(),
        any(words in last for words in ("the disk is full", "more room", "could not be opened")),
    )


SCENES: list[Callable[[Path], None]] = [served_on, ingested]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_on_a_small_disk(scene: Callable[[Path], None], tmp_path: Path) -> None:
    run_on_small_disk(__file__, scene, tmp_path)


if __name__ == "__main__":
    called(SCENES)
