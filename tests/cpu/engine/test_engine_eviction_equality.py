"""Two requests at once on one chain while that is being evicted: host and disk below a pool that is too small for them
and a third one, and every logit is bit for bit the one of an engine that nobody disturbs.
"""

import dataclasses
import shutil
from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.engine.batch import Batch
from longread.engine.core import Core
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.engine.runner import Runner
from longread.spec.config import EngineOptions
from longread.spec.engine import EngineStats, FinishEvent, GenerationRequest, SamplingParams
from longread.weights.fixture import write_fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)  # needs a third page then
ONE = SamplingParams(temperature=0.0, max_tokens=1)
ROUNDS = 4
LAYERS: dict[str, dict[str, object]] = {  # one of each kind
    "v3": {"num_hidden_layers": 2},
    "v4-flash": {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1},
    "v4-pro": {"num_hidden_layers": 3, "compress_ratios": [128, 4, 128, 0], "num_hash_layers": 1},
}
POOL = 8  # pages: two questions begin with four of them and the third request with two; each grows by one


class Apart(Runner):
    """Computes each sequence of a step by itself, where its pages and its slot lie, and keeps the logits by request.

    A product's rounding depends on how many rows it has; so nothing is left that the logits can depend on but what the
    cache holds, where that lies, and where a prompt landed.
    """

    def __init__(self, core: Core):
        super().__init__(core.runner._model, core.state)
        self.seen: dict[str, list[Tensor]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}

    def forward(self, batch: Batch) -> Tensor:
        rows: list[Tensor] = []
        for segment in batch.segments:
            here = slice(segment.offset, segment.offset + segment.length)
            wanted = [row for row in batch.logit_rows if here.start <= row < here.stop]
            timelines = [batch.sampling[batch.logit_rows.index(row)] for row in wanted]
            own = dataclasses.replace(segment, offset=0)
            last = array("q", [row - here.start for row in wanted])
            alone = Batch(batch.token_ids[here], batch.positions[here], (own,), last, tuple(timelines))
            rows.append(super().forward(alone))
            for timeline, row in zip(timelines, rows[-1], strict=True):
                self.seen.setdefault(timeline.key, []).append(row.clone())
                self.tables[timeline.key] = segment.pages
        return torch.cat(rows)


def start(model: Path, store: Path, **options: object) -> tuple[LocalEngine, Apart]:
    given = {"max_model_len": POOL * 256, "max_num_seqs": 3, "max_num_batched_tokens": 768, "store": str(store)}
    engine = load_engine(EngineOptions(model=str(model), dtype="float32", **(given | options)))  # type: ignore[arg-type]
    apart = Apart(engine._core)
    engine._core = dataclasses.replace(engine._core, runner=apart)
    return engine, apart


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(10, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def breaks(pages: tuple[int, ...]) -> list[int]:
    return [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]


def step(engine: LocalEngine) -> dict[str, FinishEvent]:
    ends = {event.request_id: event for event in engine.step() if isinstance(event, FinishEvent)}
    engine._cache.check()
    assert engine._tiers is not None
    engine._tiers.check()
    return ends


def drain(engine: LocalEngine) -> dict[str, FinishEvent]:
    ends: dict[str, FinishEvent] = {}
    while engine.has_work():
        ends |= step(engine)
    return ends


def ask(engine: LocalEngine, name: str, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY) -> FinishEvent:
    engine.submit(GenerationRequest(name, tokens, sampling))
    return drain(engine)[name]


def arena_size(engine: LocalEngine) -> int:
    """Two rings (a quarter of the arena at most is theirs) and some pages: less than the document."""
    assert engine._tiers is not None
    records = engine._tiers._records
    return 8 * records.ring_bytes if records.ring_bytes else 2 * records.page_bytes


class Pressed:
    """The rounds: two new questions about the document, beside somebody who needs pages when they have the rest, and
    between rounds somebody who pushes the document out, whole or its end.
    """

    def __init__(self, engine: LocalEngine, questions: dict[str, tuple[int, ...]]):
        self.ends: dict[str, FinishEvent] = {}
        self.meanwhile = 0  # pages evicted in steps after which several sequences shared a page
        for i in range(ROUNDS):
            for name in [f"push{i}", f"a{i}", f"b{i}"] if i % 2 else [f"a{i}", f"b{i}", f"push{i}"]:
                sampling = LONGER if name.startswith("push") else GREEDY
                engine.submit(GenerationRequest(name, questions.get(name, text(500, 100 + i)), sampling))
                self._step(engine)
            while engine.has_work():
                self._step(engine)
            if i < ROUNDS - 1:
                ask(engine, f"between{i}", text((1900, 1100, 1600)[i], 200 + i))

    def _step(self, engine: LocalEngine) -> None:
        assert engine._tiers is not None
        if engine._tiers._transfers:  # so that who loads runs beside who does not
            engine._tiers.wait(10)
        before = engine.stats().pages_evicted
        self.ends |= step(engine)
        if max(engine._cache.pool.references) > 1:
            self.meanwhile += engine.stats().pages_evicted - before


@pytest.mark.parametrize("length", [512, 700], ids=["page-end", "mid-page"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_hits_on_one_chain_while_it_is_evicted_are_the_same_bits(kind: str, length: int, tmp_path: Path) -> None:
    model, document = tmp_path / "model", text(length, 1)
    write_fixture(model, kind, **LAYERS[kind])
    questions = {}
    for i in range(ROUNDS):  # every other one's answer needs another page, when the pool has none left
        size = 765 - length if i % 2 else 30 + 9 * i
        questions |= {f"{who}{i}": document + text(size, 10 * i + n + 2) for n, who in enumerate("ab")}
    first, _ = start(model, tmp_path / "quiet", num_gpu_blocks_override=POOL)
    ask(first, "document", document, ONE)
    assert first.flush(30)
    first.close()
    shutil.copytree(tmp_path / "quiet", tmp_path / "busy")
    quiet, undisturbed = start(model, tmp_path / "quiet", num_gpu_blocks_override=64)
    assert {ask(quiet, name, tokens).cached_tokens for name, tokens in questions.items()} == {length}
    quiet.close()
    options = {"num_gpu_blocks_override": POOL, "host_cache_size": arena_size(quiet)}
    engine, disturbed = start(model, tmp_path / "busy", **options)
    pressed = Pressed(engine, questions)
    stats: EngineStats = engine.stats()
    engine.close()
    assert pressed.meanwhile >= 3 and stats.reused_host_tokens and stats.reused_disk_tokens
    for name in questions:
        assert pressed.ends[name].cached_tokens == length, name
        assert len(undisturbed.seen[name]) == GREEDY.max_tokens
        for got, known in zip(disturbed.seen[name], undisturbed.seen[name], strict=True):
            assert torch.equal(got, known), name
    # None of it would be proved if no sequence had its pages in another order, with other breaks between them.
    assert any(breaks(disturbed.tables[name]) != breaks(undisturbed.tables[name]) for name in questions)
