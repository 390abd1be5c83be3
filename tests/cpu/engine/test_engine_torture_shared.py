"""Engines of two processes over one store that is too small for both, and stores that cannot be used: right answers."""

import logging
import os
import random
import sqlite3
import subprocess
import tempfile
import traceback
from io import StringIO
from pathlib import Path

import pytest
import torch
from apart import called, run_apart, single_threaded
from small_disk import run_on_small_disk

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.disk.store import DiskStore
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.weights.fixture import write_fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LIMIT = 1_500_000  # three of the documents
DOCUMENTS = 5
ROUNDS = 12


def start(model: Path, store: Path | None) -> LocalEngine:
    kept: dict[str, object] = {"store": str(store), "store_size": LIMIT} if store is not None else {}
    return load_engine(
        EngineOptions(
            model=str(model),
            dtype="float32",
            num_gpu_blocks_override=6,
            max_model_len=1024,
            max_num_seqs=1,
            max_num_batched_tokens=256,
            snapshot_interval=256,
            **kept,  # type: ignore[arg-type]
        )
    )


def text(seed: int) -> tuple[int, ...]:
    draws = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 400, (600,), generator=draws).tolist())


def ask(engine: LocalEngine, tokens: tuple[int, ...]) -> tuple[list[int], FinishEvent]:
    engine.submit(GenerationRequest("r", tokens, GREEDY))
    out: list[int] = []
    while True:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                out.append(event.token_id)
            else:
                return out, event


def asked_by_two(place: Path) -> None:
    """Each asks what the other may be evicting or writing just then."""
    torch.set_num_threads(1)
    model, store = place / "model", place / "store"
    write_fixture(model, "v4-flash")
    alone = start(model, None)
    expected = [ask(alone, text(seed))[0] for seed in range(DOCUMENTS)]
    single_threaded()
    children = []
    for seed in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            (place / f"from-disk-{seed}").write_text(str(asks(model, store, seed, expected)))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a process's edge: it must not go on as a second parent
            traceback.print_exc()
        finally:
            os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    # Either may find all that it wrote evicted by the other; not both.
    assert sum(int((place / f"from-disk-{seed}").read_text()) for seed in range(2)), "nothing ever came from the disk"
    opened = DiskStore.open(store, None, max_bytes=LIMIT)
    report = opened.verify()
    assert not (report.corrupt or report.unsound_rows or report.index_faults) and report.records, report
    opened.gc()
    assert opened.stats().file_bytes <= LIMIT and not opened.verify().unreachable
    opened.close()


def asks(model: Path, store: Path, seed: int, expected: list[list[int]]) -> int:
    """How often something came from the disk."""
    draw, from_disk = random.Random(seed), 0
    engine = start(model, store)
    for _ in range(ROUNDS):
        number = draw.randrange(DOCUMENTS)
        tokens, ended = ask(engine, text(number))
        assert tokens == expected[number]
        assert ended.reuse is not None
        from_disk += ended.reuse.disk_tokens > 0
        if draw.random() < 0.3:
            engine.close()
            engine = start(model, store)
    assert not engine.stats().store_corrupt_records
    assert engine.flush(30)
    engine.close()
    return from_disk


def test_two_processes_evict_from_each_other_and_answer_right(tmp_path: Path) -> None:
    run_apart(__file__, asked_by_two, tmp_path)


def read_only(place: Path) -> None:
    """A file system that is mounted for reading only."""
    told = StringIO()
    logging.basicConfig(stream=told, level=logging.ERROR)
    with tempfile.TemporaryDirectory() as elsewhere:
        model = Path(elsewhere) / "model"
        write_fixture(model, "v4-flash")
        first = start(model, place / "store")
        expected, _ = ask(first, text(0))
        first.close()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        second = start(model, place / "store")
        assert second.store is None
        assert "service goes on without the store" in told.getvalue() and "cannot be written to" in told.getvalue()
        assert ask(second, text(0))[0] == expected
        second.close()
        store = DiskStore.open(place / "store", None, max_bytes=LIMIT, read_only=True)
        assert store.verify().sound and store.stats().records["page"] == 2
        store.close()


def test_a_read_only_store_is_told_and_service_goes_on(tmp_path: Path) -> None:
    run_on_small_disk(__file__, read_only, tmp_path)


@pytest.mark.parametrize(
    ("what", "says"),
    [("newer", "a store of format 9"), ("database", "not a Longread store"), ("damaged", "verify --rebuild")],
)
def test_a_store_that_cannot_be_used_is_told_and_service_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, says: str
) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    write_fixture(model, "v4-flash")
    first = start(model, store)
    expected, _ = ask(first, text(0))
    first.close()
    index = store / "index.sqlite"
    if what == "damaged":
        index.write_bytes(b"x" * 4096)
    else:
        database = sqlite3.connect(index)
        database.execute("PRAGMA user_version = 9" if what == "newer" else "PRAGMA application_id = 5")
        database.close()
    before = {path: path.read_bytes() for path in store.rglob("*.s*")}
    second = start(model, store)
    assert second.store is None
    assert "service goes on without the store" in caplog.text and says in caplog.text
    assert ask(second, text(0))[0] == expected
    second.close()
    assert {path: path.read_bytes() for path in before} == before


if __name__ == "__main__":
    called([asked_by_two, read_only])
