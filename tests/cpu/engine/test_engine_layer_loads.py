"""The device's engine computes on pages that are still on their way from main memory: it answers as a CPU engine does,
which computes everything, whatever has arrived by when.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_answers import GREEDY, answers, prompt
from late_link import LateLink

from longread.engine import engine as engines
from longread.engine import load_device, slices
from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.kv import layer_loads, tensors
from longread.kv.arrivals import Arrival
from longread.kv.tensors import StateTensors
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.weights.fixture import write_fixture

LENGTH = 1290  # of a book: five pages and a tail
OPTIONS = {
    "max_model_len": 2304,
    "max_num_seqs": 3,
    "num_gpu_blocks_override": 11,
    "max_num_batched_tokens": 1024,
    "host_cache_size": 64 << 20,
}


@pytest.fixture(scope="module", params=["v4-flash", "v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late") / "m"
    extra = {"sliding_window": 128} if request.param == "v4-flash" else {}
    write_fixture(folder, request.param, seed=3, **extra)
    return folder


class Poisoned(layer_loads.LayerLoads):
    """Where a load's pages will lie there is nothing good until they are there."""

    loads = 0

    def begin(self, memory: torch.Tensor, starts: Sequence[int], places: Sequence[int]) -> Arrival:
        type(self).loads += 1
        for parts in self._ranges:
            for storage, _, (first, stop) in parts:
                storage[first:stop, torch.tensor(places)] = 0x7FFFFFFF if storage.dtype == torch.int64 else -1
        return super().begin(memory, starts, places)


def cpu_engine(model: Path) -> LocalEngine:
    return load_resolved(model, *_resolved(model))


@pytest.fixture
def late_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """ "cuda" is a CPU here, and nothing moves on its link until it is waited for."""
    monkeypatch.setattr(load_device, "cuda_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(load_device, "StateTensors", partial(StateTensors, staging=1 << 20))
    monkeypatch.setattr(layer_loads, "link_of", lambda copies, marks: LateLink(marks))
    monkeypatch.setattr(layer_loads, "LEAST_BYTES", 0)
    monkeypatch.setattr(tensors, "LayerLoads", Poisoned)
    Poisoned.loads = 0
    spec, config = _resolved(model)
    return load_resolved(model, spec, replace(config, device="cuda"))


def _resolved(model: Path) -> tuple[Any, Any]:
    spec = spec_from_config(read_config(model))
    chosen = EngineOptions(str(model), dtype="float32", device="cpu", **OPTIONS)
    return spec, resolve(chosen, spec, probe_machine())


def link(engine: LocalEngine) -> LateLink:
    store = engine._cache._store
    assert isinstance(store, StateTensors) and store._layered is not None
    found = store._layered.link
    assert isinstance(found, LateLink)
    return found


def ask(engine: LocalEngine, ids: tuple[int, ...]) -> tuple[list[int], FinishEvent]:
    engine.submit(GenerationRequest("r", ids, GREEDY))
    tokens: list[int] = []
    end: FinishEvent | None = None
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.append(event.token_id)
            elif isinstance(event, FinishEvent):
                end = event
    assert end is not None and end.error is None
    return tokens, end


@pytest.mark.parametrize(("kept", "more"), [(LENGTH, 0), (1280, 1), (LENGTH, 40), (LENGTH, 700)])
def test_a_suffix_is_computed_while_its_pages_come(model: Path, late_engine: LocalEngine, kept: int, more: int) -> None:
    """The same prompt; behind a landing point a row, a short chunk and a long one. Then again from the device."""
    book, other = prompt(LENGTH, 1), prompt(LENGTH + 900, 2)
    asked = (*book[:kept], *prompt(more, 3))
    expected = answers(cpu_engine(model), [asked])[0]
    ask(late_engine, book)
    ask(late_engine, other)  # needs the room
    before = link(late_engine).late
    tokens, end = ask(late_engine, asked)
    assert tokens == expected
    assert end.reuse is not None and end.reuse.host_tokens > 500
    assert more != 1 or end.times.prefill_tokens == 1
    assert Poisoned.loads > 1 and link(late_engine).late > before
    assert ask(late_engine, asked)[0] == expected
    late_engine._cache.check()
    late_engine.close()


def test_others_go_on_beside_a_load(model: Path, late_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come and go, and are evicted and loaded, while answers run; every one is the CPU engine's."""
    monkeypatch.setattr(engines, "SLICE", 0.0)
    monkeypatch.setattr(slices, "FIRST_LAYERS", 1)
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    books = [prompt(LENGTH, 11), prompt(LENGTH + 300, 12), prompt(1100, 13)]
    asked = [
        prompt(40, 14), books[0], books[1], (*books[0], 7), books[2], (*books[1], *prompt(60, 15)),
        (*books[0], *prompt(600, 16)), (*books[2], *prompt(33, 17)), books[1], (*books[0][:1200], *prompt(9, 18)),
    ]  # fmt: skip
    expected = answers(cpu_engine(model), asked, long)
    assert answers(late_engine, asked, long) == expected
    assert Poisoned.loads > 2 and link(late_engine).late
    late_engine._cache.check()
    late_engine.close()


@pytest.mark.parametrize("way", ["cancel", "session", "close"])
def test_what_happens_to_a_load_that_was_begun(model: Path, late_engine: LocalEngine, way: str) -> None:
    book, other = prompt(LENGTH, 21), prompt(LENGTH + 900, 22)
    asked = (*book, *prompt(30, 23))
    expected = answers(cpu_engine(model), [asked])[0]
    ask(late_engine, book)
    ask(late_engine, other)
    late_engine.submit(GenerationRequest("gone", asked, GREEDY))
    begun = Poisoned.loads
    while Poisoned.loads == begun:
        late_engine.step()
    tiers = late_engine._tiers
    assert tiers is not None and link(late_engine).pending()
    if way == "close":
        late_engine.close()
        assert not tiers.host._holds and not link(late_engine).pending()
        return
    late_engine.cancel("gone")
    if way == "session":
        with late_engine.session() as session:
            session.sync(asked)
            assert [session.step(GREEDY) for _ in range(5)] == expected[:5]
    else:
        assert ask(late_engine, other)[1].reason == "length"  # on the pages that were to come
    assert ask(late_engine, asked)[0] == expected
    late_engine._cache.check()
    late_engine.close()
