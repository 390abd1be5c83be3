"""Runs a native model on a device: decode and short chunks as captured graphs, long chunks launch by launch.

Knows tensors, buckets and the model's launches; must not know requests, queues or pages' owners. Everything a graph
reads lies at a fixed place (staged inputs, page tables, state); nothing waits for the device but ``Choosing.result``,
and the end of a step that read a prompt.

Buckets. A batch of decoding rows is padded to a power of two, a chunk to sizes that lie at most a quarter apart; what
is told of the context (``bound``) to one of a few lengths, so that short contexts do not pay the grids of long ones.
All of them run once before the engine is ready, with a layer of each kind, and what they launch is compiled before that
on all cores: no kernel is compiled, and no graph captured, while it serves.
"""

import itertools
import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longread.engine.batch import Batch
from longread.engine.compile_ahead import Mark, compile_all, missing_kernels
from longread.engine.device_sampler import Choosing, DeviceSampler
from longread.engine.page_tables import PageTables
from longread.engine.sampler import Sample
from longread.engine.sampling_state import SamplingState
from longread.engine.slices import WHOLE, Pace, Part, Slices, Work
from longread.engine.staging import Staging
from longread.kernels.places import Chunk, Rows
from longread.kv.arrivals import Arrivals
from longread.models.inputs import StepInputs
from longread.models.native_step import SAVE_STEP, Layers, Piece, Save, finished, pieces
from longread.spec.batch import Segment
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, pages_for

log = logging.getLogger(__name__)

GRAPH_CHUNKS = (16, 32, 64, 128, 256, 512)  # tokens of the chunks that have graphs: suffixes, and ends of prompts
GRAPH_BOUNDS = (2048, 8192, 32768, 131072, 524288)  # and the longest context: what graphs are told of contexts
EAGER_STEP = 2048  # tokens; up to EAGER_EVEN a long chunk's bound is a multiple, beyond an eighth of a power of two
EAGER_EVEN = 16384
TOLD_SECONDS = 2.0
State = Mapping[str, Tensor]
Parts = Generator[Part, None, Tensor | None]  # a prompt's part; yields what it launches next
Progress = Callable[[str, int, int], None]  # what is prepared, how many are, of how many


class DeviceModel(Protocol):
    """What is needed of a native model (models/native_v4.py, native_v3.py). ``starts``: where long chunks begin, before
    ``end``, that between them meet what is planned for once a shape. ``abridged``: the model and its state with as few
    layers as launch all that a step of all layers does, each layer's buffers included. No operation between its kernels
    takes a place in memory from what a kernel wrote (compile_ahead.py).
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, token_ids: Tensor, where: Rows, state: State) -> Tensor: ...

    def chunk(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool, saves: Sequence[Save] = ()
    ) -> Tensor | None: ...

    def chunk_layers(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool | Tensor, saves: Sequence[Save] = ()
    ) -> Layers: ...

    def keep(self, slot: int, ring: int, state: State) -> None: ...

    def starts(self, end: int) -> Sequence[int]: ...

    def abridged(self, state: State) -> "tuple[DeviceModel, State]": ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What steps are bounded by: sequences at a time, tokens of a step, tokens of a sequence; ids in the vocabulary."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """A launched step of decoding rows: where they are (int32 [B]), and their tokens, which are being chosen."""

    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    choosing: Choosing


class DeviceRunner:
    """The interface of engine.runner.Runner. ``slots``: ring rows of running sequences, which tables are kept by.

    ``graphs``: capture graphs; off, the same launches run each time, also on a CPU. ``arrivals``: of the storage that
    ``state`` is of; None: nothing of it is used before it is there.
    """

    def __init__(
        self,
        model: DeviceModel,
        state: State,
        limits: Limits,
        *,
        slots: int,
        device: torch.device,
        graphs: bool,
        arrivals: Arrivals | None = None,
    ):
        self._model, self._state, self._limits, self._device = model, state, limits, device
        self._arrivals = Arrivals() if arrivals is None else arrivals
        self._graphs = graphs
        self._longest = pages_for(limits.max_model_len) * PAGE_TOKENS
        self._bounds = [*(b for b in GRAPH_BOUNDS if b < self._longest), self._longest]
        self._buckets = batch_buckets(limits.max_num_seqs)
        self._sizes = chunk_sizes(limits.max_num_batched_tokens)
        most = max(16, self._buckets[-1])
        self._tables = PageTables(slots, pages_for(limits.max_model_len), device)
        int32, int64 = torch.int32, torch.int64
        self._rows = Staging({"ids": (int64, most), "positions": (int32, most), "slots": (int32, most)}, device)
        self._chunk = Staging({"meta": (int32, 4), "ids": (int64, self._sizes[-1])}, device)
        self._places = torch.arange(self._sizes[-1], dtype=int32, device=device)
        self._logits = torch.zeros(self._buckets[-1], limits.vocab, device=device)
        self._last = torch.zeros(1, limits.vocab, device=device)
        self._pace = Pace()
        self._sampler = DeviceSampler(device, self._buckets[-1], limits.vocab)
        self._captured: dict[tuple[str, int, int], torch.cuda.CUDAGraph] = {}
        if graphs:
            self._pool = torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(device)

    def forward(self, batch: Batch) -> Tensor:
        """Launch a batch; float32 logits [R, vocab] on the device, one row for each of ``batch.sampling``, valid until
        the next call. Decoding rows come first. Waits for the device only where a prompt was read.
        """
        with torch.inference_mode():
            self._tables.update(batch.segments)
            singles = [s for s in batch.segments if s.length == 1]
            self._await(singles)
            if singles:
                self._run_rows(
                    [batch.token_ids[s.offset] for s in singles],
                    np.array([s.start for s in singles], dtype=np.int32),
                    np.array([s.slot for s in singles], dtype=np.int32),
                )
            where = {s.offset: i for i, s in enumerate(singles)}  # logits' row of a row of the batch
            chunks = [s for s in batch.segments if s.length > 1]
            free = len(singles)
            for place, segment in enumerate(chunks):
                logits = finished(self._layers(batch, segment))
                if logits is not None:
                    self._logits[free + place].copy_(logits[0])
                where[segment.offset + segment.length - 1] = free + place
            order = [where[row] for row in batch.logit_rows]
            if chunks:
                self._wait()
            if order == list(range(len(order))):
                return self._logits[: len(order)]
            return self._logits[order]

    def decode(self, batch: Batch, rows: Sequence[SamplingState]) -> Decoding:
        """Launch a batch of decoding rows alone, and the choice of their tokens by ``rows``, to be asked for its result
        before anything else is launched but chunks' slices.
        """
        with torch.inference_mode():
            self._tables.update(batch.segments)
            self._await(batch.segments)
            positions = np.array([s.start for s in batch.segments], dtype=np.int32)
            slots = np.array([s.slot for s in batch.segments], dtype=np.int32)
            return self._decode(batch.token_ids, positions, slots, rows)

    def go_on(self, before: Decoding, token_ids: Sequence[int], rows: Sequence[SamplingState]) -> Decoding:
        """The same rows one position further, on the pages that they had; ``before`` is over, and what it chose are
        their tokens now.
        """
        with torch.inference_mode():
            return self._decode(token_ids, before.positions + np.int32(1), before.slots, rows)

    def _decode(
        self, token_ids: Sequence[int], positions: NDArray[np.int32], slots: NDArray[np.int32],
        rows: Sequence[SamplingState],
    ) -> Decoding:  # fmt: skip
        self._run_rows(token_ids, positions, slots)
        return Decoding(positions, slots, self._sampler.begin(self._logits[: len(rows)], rows, picked=True))

    def begin_chunks(self, batch: Batch) -> Slices:
        """The same for a batch of chunks that are computed slice by slice; other batches may run in between."""
        with torch.inference_mode():
            self._tables.update(batch.segments)
        dropped: set[int] = set()
        return Slices(self._all_layers(batch, dropped), dropped, self._device, self._pace)

    def sliceable(self, lengths: Sequence[int]) -> bool:
        """Whether chunks of these lengths have layers to cut between: short ones are graphs, which run whole."""
        return any(length > GRAPH_CHUNKS[-1] for length in lengths)

    def lost(self, error: Exception) -> bool:
        """Whether the device can do nothing more for this process."""
        return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)

    def choose(self, logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample]:
        """One token for each row of logits."""
        with torch.inference_mode():
            choosing = self._sampler.begin(logits, rows)
        return choosing.result()

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile every kernel, run each bucket once, and capture the graphs. Scribbles on page 0 and slot 0, which
        nobody holds yet.
        """
        if not self._graphs:
            return
        started = time.monotonic()
        told = _Told(progress, started)
        mark = self._mark()
        if not mark.there():
            self._compile(told)
        work = [*self._eager_work(), *self._graph_work(self._graph)]
        for done, (name, run) in enumerate(work, 1):
            run()
            told(name, done, len(work))
        self._wait()
        mark.leave()
        log.info(
            "%d graphs and %d kinds of chunks are ready after %.1f s",
            len(self._captured),
            len(work) - len(self._captured),
            time.monotonic() - started,
        )

    def _mark(self) -> Mark:
        """Of all that the launches of this runner hang on."""
        state = [(name, part.dtype, part.shape) for name, part in self._state.items()]
        card = torch.cuda.get_device_properties(self._device)
        return Mark(self._model.spec, self._model.dtype, self._limits, state, card.name, card.multi_processor_count)

    def _compile(self, told: "_Told") -> None:
        """Have the kernels of all that will be run compiled side by side."""
        started = time.monotonic()
        work = [*self._eager_work(), *self._graph_work(self._abridged)]

        def looked() -> Iterator[Callable[[], object]]:
            for done, (_, run) in enumerate(work, 1):
                yield run
                told("looked at", done, len(work))

        kernels = missing_kernels(looked())
        self._wait()
        found = time.monotonic()
        threads = compile_all(kernels, self._device, partial(told, "kernel"))
        log.info(
            "%d kernels were found in %.1f s and compiled in %.1f s by %d threads",
            len(kernels),
            found - started,
            time.monotonic() - found,
            threads,
        )

    def _eager_work(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Long chunks: each size in a short context and in the longest, each bound at the smallest size; and a layer of
        each size behind contexts whose lengths it is planned by.
        """
        eager = [size for size in self._sizes if size > GRAPH_CHUNKS[-1]]
        if not eager:
            return
        bounds = eager_bounds(self._longest)
        pairs = [(size, bound) for size in eager for bound in (self._eager_bound(size), bounds[-1])]
        pairs += [(eager[0], bound) for bound in bounds if bound >= eager[0]]
        for size, bound in dict.fromkeys(pairs):
            if size <= bound:
                yield "chunk", partial(self._rehearse, size, bound)
        for before, size in pairwise(self._sizes):
            room = self._longest - before if size in eager else 0  # shorter chunks have a smaller size
            for start in self._model.starts(room) if room > 0 else ():
                yield "shape", partial(self._begin, size, start)

    def _graph_work(self, run: Callable[[str, int, int], object]) -> Iterator[tuple[str, Callable[[], object]]]:
        """``run`` by kind, size and bound. The largest first: the smaller ones find their buffers in the pool."""
        for bound in reversed(self._bounds):
            for size in reversed([size for size in self._sizes if size <= GRAPH_CHUNKS[-1]]):
                yield "graph", partial(run, "chunk", size, bound)
        for bound in reversed(self._bounds):
            for size in reversed(self._buckets):
                yield "graph", partial(run, "rows", size, bound)

    def _rehearse(self, size: int, bound: int) -> None:
        with torch.inference_mode():
            model, state = self._model.abridged(self._state)
            self._stage_chunk((0,) * size, bound - size, 0)
            for last in (True, False):
                save = bound - size + SAVE_STEP, 0, bound - size
                ids, where = self._chunk_inputs(size, bound, (bound - size, size))
                model.chunk(ids, where, state, last, (save,))

    def _begin(self, size: int, start: int) -> None:
        """The first layer of a long chunk: the others meet the same shapes."""
        with torch.inference_mode():
            extent = start, min(size, self._longest - start)
            self._stage_chunk((0,) * extent[1], start, 0)
            ids, where = self._chunk_inputs(size, self._eager_bound(sum(extent)), extent)
            layers = self._model.chunk_layers(ids, where, self._state, False)
            next(layers, None)
            layers.close()

    def _run_rows(self, token_ids: Sequence[int], positions: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Logits of one token each of B sequences into the first rows of ``_logits``; their tables are up to date."""
        count = len(positions)
        size = self._buckets[bisect_left(self._buckets, count)]
        given = self._rows.begin()
        given["ids"][:count] = token_ids
        given["positions"][:count] = positions
        given["slots"][:count] = slots
        if count < size:
            given["ids"][count:size] = given["slots"][count:size] = 0
            given["positions"][count:size] = -1
        self._rows.send()
        self._run("rows", size, self._bounds[bisect_left(self._bounds, int(positions.max()) + 1)])

    def _await(self, rows: Sequence[Segment]) -> None:
        """Rows wait for all of their pages; later ones of the same sequences have none that are still to come."""
        for segment in rows:
            self._arrivals.touch(segment.pages)

    def _all_layers(self, batch: Batch, dropped: Set[int]) -> Work:
        """All chunks of a batch; a row of zeros where one was dropped."""
        found: dict[int, Tensor] = {}
        for segment in batch.segments:
            logits: Tensor | None = None
            steps = self._layers(batch, segment)
            while segment.slot not in dropped:
                try:
                    part = next(steps)
                except StopIteration as end:
                    logits = end.value
                    break
                yield part
            if logits is not None:  # a graph's own is overwritten by the next one
                found[segment.offset + segment.length - 1] = logits.clone()
        none = torch.zeros(1, self._limits.vocab, device=self._device)
        return torch.cat([found.get(row, none) for row in batch.logit_rows] or [none[:0]])

    def _layers(self, batch: Batch, segment: Segment) -> Parts:
        """A prompt's part, in pieces; logits [1, vocab] of its last token where wanted. Short pieces are graphs, which
        keep no ring states on the way, so they are cut there.
        """
        logits: Tensor | None = None
        wanted = segment.offset + segment.length - 1 in batch.logit_rows
        for piece in pieces(segment, GRAPH_CHUNKS[-1]):
            logits = yield from self._piece(batch, piece, wanted and piece.stop == segment.end)
            for ring in piece.saves:
                self._model.keep(segment.slot, ring, self._state)
        return logits

    def _piece(self, batch: Batch, piece: Piece, last: bool) -> Parts:
        count, segment = piece.stop - piece.start, piece.segment
        size = self._sizes[bisect_left(self._sizes, count)]
        whole = size <= GRAPH_CHUNKS[-1]
        yield Part(WHOLE if whole else 0, size)  # before it is staged: others may come in between
        first = segment.offset + piece.start - segment.start
        self._stage_chunk(batch.token_ids[first : first + count], piece.start, segment.slot)
        if whole:
            self._run("chunk", size, self._bounds[bisect_left(self._bounds, piece.stop)])
            self._arrivals.replayed()
            return self._last if last else None
        ids, where = self._chunk_inputs(size, self._eager_bound(piece.stop), (piece.start, count))
        own = replace(where, meta=where.meta.clone())  # what is staged for others must not move it
        layers = self._model.chunk_layers(ids, own, self._state, last, piece.inside)
        layers = self._arrivals.layers(layers, segment.pages)
        for launched in itertools.count(1):
            try:
                next(layers)
            except StopIteration as end:
                logits: Tensor | None = end.value
                break
            yield Part(launched, size)
        return logits

    def _eager_bound(self, tokens: int) -> int:
        return min(eager_bound(tokens), self._longest)

    def _stage_chunk(self, ids: Sequence[int], start: int, slot: int) -> None:
        given = self._chunk.begin()
        given["meta"][:] = (start, len(ids), slot, 0)
        given["ids"][: len(ids)] = ids
        self._chunk.send()

    def _chunk_inputs(self, size: int, bound: int, extent: tuple[int, int] | None = None) -> tuple[Tensor, Chunk]:
        """What was staged, padded to ``size``; made on the device. ``extent``: of what is launched once only."""
        meta, places = self._chunk.device["meta"], self._places[:size]
        inside = places < meta[1]
        positions = torch.where(inside, places + meta[0], -1)
        ids = torch.where(inside, self._chunk.device["ids"][:size], 0)
        return ids, Chunk(meta, positions, self._tables.of(meta[2:3], pages_for(bound))[0], bound, extent)

    def _run(self, kind: str, size: int, bound: int) -> None:
        graph = self._captured.get((kind, size, bound))
        if graph is not None:
            graph.replay()
        else:
            self._launch(kind, size, bound)

    def _launch(self, kind: str, size: int, bound: int, abridged: bool = False) -> None:
        """All that a graph does: from staged inputs to logits, and rows' greedy tokens, at their fixed places."""
        model, state = self._model.abridged(self._state) if abridged else (self._model, self._state)
        if kind == "chunk":
            layers = model.chunk_layers(*self._chunk_inputs(size, bound), state, True)
            logits = finished(layers if abridged else self._arrivals.layers(layers))
            assert logits is not None
            self._last.copy_(logits)
            return
        given = self._rows.device
        slots = given["slots"][:size]
        where = Rows(given["positions"][:size], slots, self._tables.of(slots, pages_for(bound)), bound)
        logits = self._logits[:size]
        logits.copy_(model.rows(given["ids"][:size], where, state))
        self._sampler.pick(logits)

    def _stage(self, kind: str, size: int, bound: int) -> None:
        """Inputs of one graph, deep in its longest context."""
        if kind == "rows":
            given = self._rows.begin()
            given["ids"][:] = given["slots"][:] = 0
            given["positions"][:] = -1
            given["positions"][0] = min(bound, self._longest) - 1
            self._rows.send()
        else:
            count = min(size, bound)
            self._stage_chunk((0,) * count, bound - count, 0)

    def _abridged(self, kind: str, size: int, bound: int) -> None:
        """All kinds of launches of one graph."""
        self._stage(kind, size, bound)
        with torch.inference_mode():
            self._launch(kind, size, bound, abridged=True)

    def _graph(self, kind: str, size: int, bound: int) -> None:
        """Capture one. A layer of each kind runs before, where libraries may choose and make what the graph uses."""
        self._stage(kind, size, bound)
        with torch.inference_mode():
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                self._launch(kind, size, bound, abridged=True)
                self._side.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Not torch.cuda.graph(): that collects garbage and empties the allocator's cache each time.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._launch(kind, size, bound)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._captured[kind, size, bound] = graph

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _Told:
    """Progress a second apart, and not of what is over soon."""

    def __init__(self, progress: Progress | None, started: float):
        self._progress, self._next = progress, started + TOLD_SECONDS

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._progress is not None and now > self._next:
            self._next = now + 1.0
            self._progress(name, done, total)


class Measured:
    """The runner as engine.calibrate sees a model: a step is over when ``forward`` returns."""

    def __init__(self, runner: DeviceRunner, device: torch.device):
        self._runner, self._device = runner, device

    def forward(self, inputs: StepInputs, state: State) -> Tensor:
        ids, positions = array("q", inputs.token_ids.tolist()), array("q", inputs.positions.tolist())
        batch = Batch(ids, positions, inputs.segments, array("q", inputs.logit_rows.tolist()), ())
        logits = self._runner.forward(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return logits


def batch_buckets(most: int) -> list[int]:
    """Powers of two up to one that holds ``most`` rows."""
    return [1 << i for i in range((most - 1).bit_length() + 1)]


def chunk_sizes(most: int) -> list[int]:
    """Sizes that chunks of up to ``most`` tokens are padded to, ascending: graphs', then four a power of two."""
    sizes = list(GRAPH_CHUNKS)
    step = GRAPH_CHUNKS[-1] // 4
    while sizes[-1] < most:
        if sizes[-1] >= 8 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    del sizes[bisect_left(sizes, most) + 1 :]
    if sizes[-1] > GRAPH_CHUNKS[-1]:
        sizes[-1] = (
            -(-most // 128) * 128
        )  # a budget is usually a size; another need not be padded beyond kernels' tiles
    return sizes


def eager_bound(tokens: int) -> int:
    """What a long chunk is told of a context of so many tokens: at most an eighth more."""
    if tokens <= EAGER_EVEN:
        return -(-tokens // EAGER_STEP) * EAGER_STEP
    step = 1 << (tokens - 1).bit_length() - 4
    return -(-tokens // step) * step


def eager_bounds(longest: int) -> list[int]:
    """All of these up to the longest context."""
    found, tokens = [], 1
    while tokens <= longest:
        found.append(min(eager_bound(tokens), longest))
        tokens = found[-1] + 1
    return found
