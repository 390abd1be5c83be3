"""Faults as engines really have them, planted into a bundled reader that is served in this process; and two changes
that change nothing. What is patched is one object of one engine, never a module.
"""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longread.cli.checkpoint import locate
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.engine.sampling_state import SamplingState
from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.runner import Server, bind, url
from longread.server.state import ServerState
from longread.spec.config import Dtype, EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.wire.encoding import encoding_for
from longread.wire.tokenizer import Tokenizer

TABLE_ROWS = 8192  # of the rope table that is too short
INT4 = (-8, 7)


@dataclass(frozen=True)
class Fault:
    """``plant`` changes a loaded engine; ``options`` are the engine's; ``reader``: where it shows; ``longer_than``:
    tokens of context from which on it shows; ``harmless``: the gate must pass it.
    """

    name: str
    what: str
    plant: Callable[[LocalEngine], None]
    reader: str = "reader-v4"
    options: Mapping[str, object] = field(default_factory=dict)
    longer_than: int = 0
    harmless: bool = False


def _nothing(engine: LocalEngine) -> None:
    """No fault."""


def _int4_cache(engine: LocalEngine) -> None:
    """Cache rows become integers of 4 bits, without a scale."""
    core = engine._core
    forward = core.runner.forward

    def and_round(batch: Any) -> Tensor:
        logits = forward(batch)
        for group in core.groups:
            if group.kind == "rows":
                for s in batch.segments:
                    rows = torch.arange(s.start // group.tokens_per_row, s.end // group.tokens_per_row)
                    pages = torch.tensor(s.pages)[rows // group.rows_per_page]
                    at = pages * group.rows_per_page + rows % group.rows_per_page
                    flat = core.state[group.name].flatten(1, 2)
                    flat[:, at] = flat[:, at].round().clamp(*INT4)
        return logits

    core.runner.forward = and_round  # type: ignore[method-assign]


def _short_rope_table(engine: LocalEngine) -> None:
    """All positions past the table's end are turned like its last one."""
    model: Any = engine._core.runner._model
    rotations = model._rotations

    def clamped(positions: Tensor, step: Any) -> Any:
        closing = {
            ratio: replace(done, positions=done.positions.clamp(max=TABLE_ROWS - 1))
            for ratio, done in step.closing.items()
        }
        return rotations(positions.clamp(max=TABLE_ROWS - 1), replace(step, closing=closing))

    model._rotations = clamped


def _half_top_k(engine: LocalEngine) -> None:
    model: Any = engine._core.runner._model
    model.top_k //= 2
    for layer in model.layers:
        layer.attention.ix = replace(layer.attention.ix, top_k=model.top_k)


def _stale_ring(engine: LocalEngine) -> None:
    """A hit finds the rings as the slot's last sequence left them."""
    store: Any = engine._core.cache._store
    store.load_snapshot = lambda snapshot, slot: None


def _off_by_one(engine: LocalEngine) -> None:
    """The window that a hit loads is that of one position before."""
    store: Any = engine._core.cache._store
    load = store.load_snapshot
    window = engine._core.state["window"]

    def shifted(snapshot: int, slot: int) -> None:
        load(snapshot, slot)
        window[:, slot] = window[:, slot].roll(1, dims=1)

    store.load_snapshot = shifted


def _swapped_expert(engine: LocalEngine) -> None:
    """Two experts stand in each other's place, in every layer: a wrong line in the table of who holds which."""
    model: Any = engine._core.runner._model
    for layer in model.layers:
        for weights in (layer.ffn.w1, layer.ffn.w2, layer.ffn.w3):
            weights[0], weights[1] = weights[1], weights[0]


def _temperature_ignored(engine: LocalEngine) -> None:
    """Whatever temperature is asked for, but 0: it is 1."""
    runner = engine._core.runner
    choose = runner.choose

    def at_one(logits: Tensor, rows: Any) -> Any:
        def heated(row: SamplingState) -> SamplingState:
            if row.greedy:
                return row
            other = copy.copy(row)
            other.params = replace(row.params, temperature=1.0)
            return other

        return choose(logits, [heated(row) for row in rows])

    runner.choose = at_one  # type: ignore[method-assign]


def _scattered_pages(engine: LocalEngine) -> None:
    """Every second page first, from the last one on: no sequence has two pages side by side."""
    pool = engine._core.cache.pool
    take = pool.take

    def scattered(wanted: int, after: int | None, room: int) -> list[int]:
        free = sorted(take(len(pool.free), None, 0), key=lambda page: (page % 2, -page))
        for page in free[wanted:]:
            pool.release(page, keep=False)
        return free[:wanted]

    pool.take = scattered  # type: ignore[method-assign]


FAULTS = (
    Fault("int4 cache without scales", "cache rows rounded to -8..7", _int4_cache),
    Fault("wrong rope beyond 8K", "a table of 8,192 rows", _short_rope_table, longer_than=TABLE_ROWS),
    Fault("top-k halved", "the indexer keeps half of its rows", _half_top_k),
    Fault("stale ring on a hit", "a snapshot is not loaded", _stale_ring),
    Fault("swapped expert", "experts 0 and 1 of every layer change places", _swapped_expert),
    Fault("off-by-one snapshot", "the window of a snapshot is one position old", _off_by_one),
    Fault("temperature ignored", "every temperature above 0 is 1", _temperature_ignored),
)
HARMLESS = (
    Fault(
        "another chunk size",
        "prefill in steps of 201",
        _nothing,
        options={"max_num_batched_tokens": 201},
        harmless=True,
    ),
    Fault(
        "another page layout",
        "no two pages side by side, other slots",
        _scattered_pages,
        options={"max_num_seqs": 5},
        harmless=True,
    ),
)
NONE = Fault("none", "the base", _nothing, harmless=True)


def fault_of(name: str) -> Fault:
    return next(fault for fault in (NONE, *FAULTS, *HARMLESS) if fault.name == name)


@contextmanager
def faulty_server(fault: Fault, max_model_len: int, pages: int, dtype: Dtype = "float32") -> Iterator[str]:
    """The fault's reader served on a loopback port, its engine in this process; yields the address."""
    path = locate(fault.reader)
    spec = spec_from_config(read_config(path), label=fault.reader)
    tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
    encoding, _ = encoding_for("auto", spec.family, fault.reader, fault.reader, has_think=True)
    chosen: dict[str, Any] = {"max_num_seqs": 6, "num_gpu_blocks_override": pages} | dict(fault.options)

    def make() -> LocalEngine:
        engine = load_engine(EngineOptions(model=str(path), dtype=dtype, max_model_len=max_model_len, **chosen))
        fault.plant(engine)
        return engine

    options = replace(ServerOptions(), port=0, shutdown_timeout=0.2)
    driver = EngineDriver(make, admission=Admission(options.limits))
    metrics = ServerMetrics(
        fault.reader,
        lambda: (driver.engine_info, driver.stats) if driver.state == "ready" else None,
        options.shared,
    )
    state = ServerState(driver, metrics, tokenizer, encoding, options, (fault.reader,), "0.0.0")
    with _listening(state, options) as address:
        yield address


@contextmanager
def _listening(state: ServerState, options: ServerOptions) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    server = Server(create_app(state), state.driver, options)
    started = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await state.driver.loaded()
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="faulty-server", daemon=True)
    thread.start()
    if not started.wait(180):
        raise RuntimeError("the engine was not loaded in time")
    try:
        yield url(listener)
    finally:
        server.should_exit = True
        thread.join(30)
