"""Two requests at once on one chain while that is being evicted: host and disk below a pool that is too small for them
and a third one, and every logit is bit for bit the one of an engine that nobody disturbs.
"""

import dataclasses
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

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)  # needs a third page then
ONE = SamplingParams(temperature=0.0, max_tokens=1)
ROUNDS = 4
POOL = 8  # pages: two questions begin with four of them and the third request with two; each grows by one


class Apart(Runner):
    """Computes each sequence by itself on a copy of its state in fixed places, and keeps the logits by request.

    A sum's rounding depends on the rows beside and on which pages are neighbours; so nothing is left that the logits
    can depend on but what the cache holds and where a prompt landed.
    """

    def __init__(self, core: Core):
        super().__init__(core.runner._model, core.state)
        self.seen: dict[str, list[Tensor]] = {}
        self._core = core
        self._bench = {
            group.name: torch.empty_like(core.state[group.name][:, : POOL if group.kind == "rows" else 1])
            for group in core.groups
        }
        self._apart = Runner(core.runner._model, self._bench)

    def forward(self, batch: Batch) -> Tensor:
        rows: list[Tensor] = []
        for segment in batch.segments:
            here = slice(segment.offset, segment.offset + segment.length)
            wanted = [row for row in batch.logit_rows if here.start <= row < here.stop]
            timelines = [batch.sampling[batch.logit_rows.index(row)] for row in wanted]
            moved = dataclasses.replace(segment, slot=0, offset=0, pages=tuple(range(len(segment.pages))))
            last = array("q", [row - here.start for row in wanted])
            alone = Batch(batch.token_ids[here], batch.positions[here], (moved,), last, tuple(timelines))
            places = {"rows": list(segment.pages), "ring": [segment.slot]}
            for group in self._core.groups:
                at = places[group.kind]
                self._bench[group.name][:, : len(at)] = self._core.state[group.name][:, at]
            rows.append(self._apart.forward(alone))
            for group in self._core.groups:
                at = places[group.kind]
                self._core.state[group.name][:, at] = self._bench[group.name][:, : len(at)]
            for timeline, row in zip(timelines, rows[-1], strict=True):
                self.seen.setdefault(timeline.key, []).append(row.clone())
        return torch.cat(rows)


def start(model: Path, store: Path, **options: object) -> tuple[LocalEngine, Apart]:
    given = {"max_model_len": POOL * 256, "max_num_seqs": 3, "max_num_batched_tokens": 768, "store": str(store)}
    engine = load_engine(EngineOptions(model=str(model), dtype="float32", **(given | options)))  # type: ignore[arg-type]
    apart = Apart(engine._core)
    engine._core = dataclasses.replace(engine._core, runner=apart)
    return engine, apart


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(10, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


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
@pytest.mark.parametrize("kind", ["v3", "v4-flash"])
def test_hits_on_one_chain_while_it_is_evicted_are_the_same_bits(kind: str, length: int, tmp_path: Path) -> None:
    model, document = tmp_path / "model", text(length, 1)
    write_fixture(model, kind)
    questions = {}
    for i in range(ROUNDS):  # every other one's answer needs another page, when the pool has none left
        size = 765 - length if i % 2 else 30 + 9 * i
        questions |= {f"{who}{i}": document + text(size, 10 * i + n + 2) for n, who in enumerate("ab")}
    for name in ("quiet", "busy"):
        first, _ = start(model, tmp_path / name, num_gpu_blocks_override=POOL)
        ask(first, "document", document, ONE)
        assert first.flush(30)
        first.close()
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
