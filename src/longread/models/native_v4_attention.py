"""One V4 attention sublayer over native weights and paged device tensors, for decode rows and for chunks.

Knows one layer's weights and its part of the state; knows no residual streams and no experts. The same sums as
v4_attention.py, in the operations that a device has kernels for. Inside a chunk the rows of windows that it closes are
written before its own later queries look for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.kernels.compressor import device_ref as compressor
from longread.kernels.compressor.device_ref import Part
from longread.kernels.dispatch import kernel
from longread.kernels.fp8 import ref as fp8
from longread.kernels.fp8.ref import Quantised
from longread.kernels.hyper.ref import Entered
from longread.kernels.indexer import ref as indexer
from longread.kernels.places import Chunk, Rows
from longread.kernels.sparse_attention import device_ref as sparse_attention
from longread.kernels.window import ref as window
from longread.models.beside import NEVER, Beside
from longread.models.native_step import Block, Turns
from longread.models.native_weights import Loader, first_rows
from longread.spec.model import ModelSpec

State = Mapping[str, Tensor]


class NativeV4Attention:
    """Attention of layer ``layer``; reads and writes ``state`` (spec/state.py), plain or packed."""

    def __init__(self, spec: ModelSpec, layer: int, load: Loader, quantised: bool):
        c, ix = spec.compressed, spec.indexer
        if c is None or ix is None:
            raise ValueError(f"{spec.label} has no compressed attention")
        self.c, self.ix, self.heads, self.eps, self.dtype = c, ix, spec.heads, spec.rms_eps, load.dtype
        self.layer, self.ratio, self.quantised = layer, c.ratios[layer], quantised
        self.rank = sum(r == self.ratio for r in c.ratios[:layer])  # this layer's place in the groups of its ratio
        self.scale = c.head_dim**-0.5
        own = f"layers.{layer}.attn."
        self.w_in = load.matrix(own + "wq_a", own + "wkv")
        self.q_norm, self.kv_norm = load.plain(own + "q_norm.weight"), load.plain(own + "kv_norm.weight")
        self.sink = load.plain(own + "attn_sink", torch.float32)
        self.width = spec.heads * c.head_dim
        query = [own + "wq_b"] + ([own + "indexer.wq_b"] if self.ratio == 4 else [])
        self.w_query = load.matrix(*query)
        self.w_q = first_rows(self.w_query, self.width)  # for contexts in which every row is taken: no index queries
        self.w_oa = _grouped(load.matrix(own + "wo_a"), c.o_groups)
        self.w_ob = load.matrix(own + "wo_b")
        self.compressors = _compressors(spec, own, self.ratio, load)
        if self.ratio:
            names = [own + part + w for part in ("compressor.", "indexer.compressor.") for w in ("wkv", "wgate")]
            names = [*names, own + "indexer.weights_proj"] if self.ratio == 4 else names[:2]
            self.w_pool = load.matrix(*names)
        self.index_scale = ix.head_dim**-0.5 * ix.heads**-0.5
        self._give_kernels(load.device.type)

    def _give_kernels(self, device: str) -> None:
        self._linear, self._grouped_linear = kernel(fp8.linear, device), kernel(fp8.grouped_linear, device)
        self._quantise, self._latents = kernel(fp8.quantise, device), kernel(fp8.latents, device)
        self._layer_rows = kernel(compressor.layer_rows, device)
        self._pool_chunk, self._pool_keep = kernel(compressor.chunk, device), kernel(compressor.keep, device)
        self._index_queries, self._index_keys = kernel(indexer.queries, device), kernel(indexer.keys, device)
        self._choose_rows = kernel(indexer.choose_rows, device)
        self._choose_chunk = kernel(indexer.choose_chunk, device)
        self._window_slab, self._window_keep = kernel(window.slab, device), kernel(window.keep, device)
        self._entries = kernel(sparse_attention.entries, device)
        self._attend_rows = kernel(sparse_attention.rows_turned, device)
        self._attend_chunk = kernel(sparse_attention.chunk_turned, device)

    def rows(self, given: Entered, where: Rows, turns: Turns, state: State, beside: Beside = NEVER) -> Tensor:
        """One token of each of B sequences: given.u [B, D]. Returns [B, D]."""
        ring, (cos, sin) = state["window"][self.layer], turns.compressed if self.ratio else turns.plain
        parts, weights = self._parts(given.u, turns, state, beside)
        c_q, kv = self._latent_vectors(given, cos, sin, state)
        with beside.fork():
            self._layer_rows(parts, kv, ring, self.eps, where)
        selects = self._selects(where.bound)
        queries = self._linear(c_q, self.w_query if selects else self.w_q)
        beside.join()
        store, chosen = self._store(state), None
        if selects and weights is not None:
            index = self._index(queries, weights, cos, sin, state)
            chosen = self._choose_rows(*index, state["index"][self.rank], where, self.ix.top_k)
        q = queries[:, : self.width].unflatten(1, (self.heads, self.c.head_dim))
        seen = ring, store, chosen, self.ratio, where, self.c.rope_head_dim
        o = self._attend_rows(q, self.eps, cos, sin, self.sink, self.scale, *seen, self.quantised)
        return self._output(o)

    def chunk(
        self,
        given: Entered,
        where: Chunk,
        turns: Turns,
        state: State,
        blocks: tuple[Block, ...],
        kept: Sequence[Chunk] = (),
    ) -> Tensor | None:
        """A chunk of one sequence: given.u [T, D]. Returns [rows, D] of the queries in ``blocks``, None without any.

        ``kept``: states on the way that ring rows keep (native_step.up_to).
        """
        ring, (cos, sin) = state["window"][self.layer], turns.compressed if self.ratio else turns.plain
        c, size = self.c, self.c.window
        c_q, kv = self._latent_vectors(given, cos, sin, state)
        parts, weights = self._parts(given.u, turns, state)
        for part in parts:
            self._pool_chunk(*part[:5], self.eps, *part[5:8], where, part.ratio, part.index_keys)
            for there in kept:
                self._pool_keep(*part[:4], there, part.ratio)
        slab = self._window_slab(ring, kv, where, c.rope_head_dim)
        for there in (*kept, where):
            self._window_keep(ring, kv, there)
        if not blocks:
            return None
        rows, store = None, self._store(state)
        if store is not None:
            rows = self._entries(store, where, self.ratio, c.head_dim, c.rope_head_dim, self.dtype)
        keys = None
        if self._selects(where.bound):
            keys = self._index_keys(state["index"][self.rank], where, self.ix.head_dim)
        out = []
        for block in blocks:
            place = block.of(cos), block.of(sin)
            queries = self._linear(block.quantised(c_q), self.w_q if keys is None else self.w_query)
            chosen = None
            if keys is not None and weights is not None:
                index = self._index(queries, block.of(weights), *place, state)
                chosen = self._choose_chunk(*index, keys, block.where, self.ix.top_k)
            q = queries[:, : self.width].unflatten(1, (self.heads, c.head_dim))
            recent, at = block.slab(slab, size), block.where
            o = self._attend_chunk(
                q, self.eps, *place, self.sink, self.scale, recent, rows, chosen, self.ratio, at, self.quantised
            )
            del queries, q  # a block's queries and outputs are the largest buffers of a chunk
            out.append(self._output(o))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _latent_vectors(
        self, given: Entered, cos: Tensor, sin: Tensor, state: State
    ) -> tuple[Quantised | Tensor, Tensor]:
        packed = state["window"].dtype == torch.uint8
        joined = self._linear(given.u if given.q is None else given.q, self.w_in)
        return self._latents(joined, self.q_norm, self.kv_norm, self.eps, cos, sin, self.quantised, packed)

    def _parts(self, u: Tensor, turns: Turns, state: State, beside: Beside = NEVER) -> tuple[list[Part], Tensor | None]:
        """What each compressor is given of u [T, D]; raw index weights [T, Hi] where there are."""
        parts: list[Part] = []
        if not self.ratio:
            return parts, None
        with beside.fork():
            pooled = self._linear(u, self.w_pool, torch.float32)
        at = 0
        for c in self.compressors:
            kv, gate = pooled[:, at : at + c.width], pooled[:, at + c.width : at + 2 * c.width]
            at += 2 * c.width
            store, rings = state[c.group][self.rank], c.rings(state, self.rank)
            turn = turns.windows[self.ratio]
            parts.append(Part(kv, gate, c.ape, rings, c.gain, *turn, store, self.ratio, c.group == "index"))
        return parts, pooled[:, at:] if self.ratio == 4 else None

    def _index(self, queries: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, state: State) -> tuple[Tensor, Tensor]:
        packed = state["index"].dtype == torch.uint8
        return self._index_queries(queries[:, self.width :], weights, cos, sin, self.index_scale, packed)

    def _output(self, o: Quantised | Tensor) -> Tensor:
        """o: [T, H * d] as attention leaves it. Returns [T, D]."""
        low = self._grouped_linear(o, self.w_oa)
        return self._linear(self._quantise(low) if self.quantised else low, self.w_ob)

    def _store(self, state: State) -> Tensor | None:
        return state["csa" if self.ratio == 4 else "hca"][self.rank] if self.ratio else None

    def _selects(self, bound: int) -> bool:
        """Whether a context below ``bound`` can have more closed rows than are chosen: else all are taken."""
        return self.ratio == 4 and bound // 4 > self.ix.top_k


@dataclass(frozen=True, slots=True)
class Compressor:
    """One compressor's position bias and norm, and the names of its state. ``width``: of kv and of gate."""

    group: str
    parts: tuple[str, ...]
    width: int
    ape: Tensor
    gain: Tensor

    def rings(self, state: State, rank: int) -> tuple[Tensor, ...]:
        """Ratio 4: [slots, 8, width]; ratio 128: [slots, width], one layer's."""
        every = (state[self.group + part][rank] for part in self.parts)
        return tuple(ring[:, 0] if ring.shape[1] == 1 else ring for ring in every)


def _compressors(spec: ModelSpec, own: str, ratio: int, load: Loader) -> tuple[Compressor, ...]:
    def made() -> Iterator[Compressor]:
        parts = ("_kv", "_score") if ratio == 4 else ("_max", "_sum", "_acc")
        for group, inner in (("csa" if ratio == 4 else "hca", ""), ("index", "indexer.")):
            name = own + inner + "compressor."
            ape = load.plain(name + "ape", torch.float32)
            gain = load.plain(name + "norm.weight", torch.float32)
            yield Compressor(group, parts, ape.shape[1], ape, gain)
            if ratio != 4:
                return

    return tuple(made()) if ratio else ()


def _grouped(w: fp8.Weight, groups: int) -> fp8.Weight:
    """[G * N, K] as [G, N, K]; N is a multiple of 128 where the weight is in FP8."""
    if isinstance(w, Tensor):
        return w.unflatten(0, (groups, -1))
    return fp8.Fp8Weight(w.values.unflatten(0, (groups, -1)), w.scales.unflatten(0, (groups, -1)))
