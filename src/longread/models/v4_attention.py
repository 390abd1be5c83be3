"""One V4 attention sublayer: projections, compressors, window ring, selection, attention, grouped output.

Knows one layer's weights and its part of the state; knows no residual streams and no experts. Ratio 0 sees the last 128
tokens; ratio 4 (CSA) adds the best ``top_k`` of all closed windows of 4; ratio 128 (HCA) adds every closed window.
Sources: DeepSeek-V4 inference/model.py; the incremental state is described in spec/state.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.kernels.compressor import ref as compressor
from longread.kernels.dispatch import kernel
from longread.kernels.indexer import ref as indexer
from longread.kernels.linear import ref as linear
from longread.kernels.norm import ref as norm
from longread.kernels.rope import ref as rope
from longread.kernels.sparse_attention import ref as sparse_attention
from longread.kernels.tiles import tiles
from longread.models.v4_step import Runs, Saves, Step, spans
from longread.spec.batch import Segment
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS

# Scores of one query block, in floats: 8 MB stay near the cache. A block has at least MIN_BLOCK queries, which at
# 128 heads and 1M tokens of HCA (8192 rows) makes 34 MB: scratch is bounded whatever the context.
SCORE_FLOATS = 1 << 21
MIN_BLOCK, MAX_BLOCK = 8, 128
INDEX_FLOATS = 1 << 22  # index scores of one block: 16 MB, 16 queries at 1M tokens
GATHER_FLOATS = 1 << 22  # rows gathered for one block: 16 MB
TILE = 1024  # rows of the store multiplied at once; a tile with a break between its pages is copied: 2 MB
COPY_HEADS = 20  # gathering a selected row costs about as much as this many heads' products with it (measured)


@dataclass(frozen=True, slots=True)
class Rotations:
    """RoPE as complex64 turns for ``rotate_``: [T, rope / 2] of the step's tokens by the plain and by the compressed
    table, each with its inverse, and [W, rope / 2] of each ratio's closing windows.
    """

    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    closing: Mapping[int, Tensor]


class V4Attention:
    """Attention of layer ``layer``. Calling it reads and writes ``state`` (spec/state.py) for the step's segments."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Mapping[str, Tensor], dtype: torch.dtype):
        c, ix = spec.compressed, spec.indexer
        if c is None or ix is None:
            raise ValueError(f"{spec.label} has no compressed attention")
        self.c, self.ix, self.heads, self.eps = c, ix, spec.heads, spec.rms_eps
        self.layer, self.ratio = layer, c.ratios[layer]
        self.rank = sum(r == self.ratio for r in c.ratios[:layer])  # this layer's place in the groups of its ratio
        self.scale = c.head_dim**-0.5
        own = f"layers.{layer}.attn."

        def get(name: str, kind: torch.dtype = dtype) -> Tensor:
            return weights[own + name].to(kind)

        # Everything that reads the sublayer's input is one product, and everything that reads c_q another.
        names, sizes = ["wq_a.weight", "wkv.weight"], [c.q_lora_rank, c.head_dim]
        query, self.q_sizes = [get("wq_b.weight")], [spec.heads * c.head_dim]
        if self.ratio:
            width = c.head_dim * (2 if self.ratio == 4 else 1)
            names += ["compressor.wkv.weight", "compressor.wgate.weight"]
            sizes += [width, width]
            self.ape = get("compressor.ape", torch.float32)
            self.entry_norm = get("compressor.norm.weight", torch.float32)
        if self.ratio == 4:
            inner = "indexer.compressor."
            names += [inner + "wkv.weight", inner + "wgate.weight", "indexer.weights_proj.weight"]
            sizes += [2 * ix.head_dim, 2 * ix.head_dim, ix.heads]
            self.index_ape = get(inner + "ape", torch.float32)
            self.index_norm = get(inner + "norm.weight", torch.float32)
            self.index_scale = ix.head_dim**-0.5 * ix.heads**-0.5
            query.append(get("indexer.wq_b.weight"))
            self.q_sizes.append(ix.heads * ix.head_dim)
        self.w_in, self.in_sizes = torch.cat([get(n) for n in names]), sizes
        self.w_query = torch.cat(query) if len(query) > 1 else query[0]
        self.q_norm, self.kv_norm = get("q_norm.weight"), get("kv_norm.weight")
        self.sink = get("attn_sink", torch.float32)
        group = spec.heads * c.head_dim // c.o_groups
        self.w_oa = get("wo_a.weight").view(c.o_groups, c.o_lora_rank, group).unbind(0)
        self.w_ob = get("wo_b.weight")
        device = self.w_ob.device.type
        self._linear = kernel(linear.linear, device)
        self._rms_norm, self._rotate = kernel(norm.rms_norm, device), kernel(rope.rotate_, device)
        self._overlap_step = kernel(compressor.overlap_step, device)
        self._overlap_chunk = kernel(compressor.overlap_chunk, device)
        self._online_step = kernel(compressor.online_step, device)
        self._online_chunk = kernel(compressor.online_chunk, device)
        self._scores, self._chosen = kernel(indexer.scores, device), kernel(indexer.chosen, device)
        self._chosen_rows = kernel(indexer.chosen_rows, device)
        self._softmax = kernel(sparse_attention.attend, device)
        self._decode = kernel(sparse_attention.decode, device)

    def __call__(self, u: Tensor, step: Step, rotations: Rotations, state: Mapping[str, Tensor]) -> Tensor:
        """u: [T, D] in the model's dtype, the normalised input. Returns [T, D]."""
        c, tokens = self.c, u.shape[0]
        turns, back = rotations.compressed if self.ratio else rotations.plain
        parts = torch.split_with_sizes(self._linear(u, self.w_in), self.in_sizes, -1)
        c_q = self._rms_norm(parts[0], self.q_norm, self.eps)
        queries = torch.split_with_sizes(self._linear(c_q, self.w_query), self.q_sizes, -1)
        q = self._rms_norm(queries[0].view(tokens, self.heads, c.head_dim), None, self.eps)
        self._turn(q, turns[:, None])
        kv = self._rms_norm(parts[1], self.kv_norm, self.eps)
        self._turn(kv, turns)
        index: tuple[Tensor, Tensor] | None = None
        if self.ratio:
            self._compress(parts, step, rotations, state)
        if self.ratio == 4:
            iq = queries[1].reshape(tokens, self.ix.heads, self.ix.head_dim)
            self._turn(iq, turns[:, None])
            index = iq, parts[6].float() * self.index_scale
        out = self._attend(q, kv, index, step, state)
        self._turn(out, back[:, None])
        groups = out.to(u.dtype).view(tokens, c.o_groups, -1).unbind(1)
        low = [self._linear(part, w) for part, w in zip(groups, self.w_oa, strict=True)]
        return self._linear(torch.cat(low, -1), self.w_ob)

    def _turn(self, x: Tensor, turns: Tensor) -> None:
        """RoPE in place on the last channels of each vector."""
        self._rotate(x[..., -self.c.rope_head_dim :], turns)

    def _compress(
        self, parts: tuple[Tensor, ...], step: Step, rotations: Rotations, state: Mapping[str, Tensor]
    ) -> None:
        """Feed the open windows with the step's tokens and write the rows of those that close."""
        name = "csa" if self.ratio == 4 else "hca"
        done = step.closing[self.ratio]
        turns = rotations.closing[self.ratio]
        jobs = [(name, name, parts[2], parts[3], self.ape, self.entry_norm)]
        if self.ratio == 4:
            jobs.append(("index", "index", parts[4], parts[5], self.index_ape, self.index_norm))
        for group, ring, kv, gate, ape, gain in jobs:
            pooled = self._pool(ring, kv.float(), gate.float() + ape[step.phase[self.ratio]], step, state)
            if pooled.shape[0]:
                entries = self._rms_norm(pooled, gain, self.eps)
                self._turn(entries, turns)
                store = state[group][self.rank].flatten(0, 1)
                store.index_copy_(0, done.rows, entries.to(store.dtype))

    def _pool(self, ring: str, kv: Tensor, score: Tensor, step: Step, state: Mapping[str, Tensor]) -> Tensor:
        singles, rank = step.singles, self.rank
        pooled = []
        closing = step.closing[self.ratio].singles
        if singles.segments:
            own_kv, own_score = (kv, score) if singles.rows is None else (kv[singles.rows], score[singles.rows])
            if self.ratio == 4:
                rings = state[ring + "_kv"][rank], state[ring + "_score"][rank]
                pooled.append(self._overlap_step(*rings, own_kv, own_score, singles.slots, singles.ring_rows, closing))
            else:
                top, total, acc = (state[ring + part][rank][:, 0] for part in ("_max", "_sum", "_acc"))
                pooled.append(self._online_step(top, total, acc, own_kv, own_score, singles.slots, closing))
        if step.saves is not None:
            self._save_open_windows(ring, kv, score, step.saves, state)
        for s in step.chunks:
            rows = slice(s.offset, s.offset + s.length)
            if self.ratio == 4:
                rings = state[ring + "_kv"][rank][s.slot], state[ring + "_score"][rank][s.slot]
                pooled.append(self._overlap_chunk(*rings, kv[rows], score[rows], s.start))
            else:
                top, total, acc = (state[ring + part][rank][s.slot, 0] for part in ("_max", "_sum", "_acc"))
                pooled.append(self._online_chunk(top, total, acc, kv[rows], score[rows], s.start))
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled)

    def _save_open_windows(
        self, ring: str, kv: Tensor, score: Tensor, saves: Saves, state: Mapping[str, Tensor]
    ) -> None:
        """What the rings of open windows hold at positions inside the chunks; before these overwrite them."""
        if self.ratio == 4:
            save_recent(state[ring + "_kv"][self.rank], kv, saves)
            save_recent(state[ring + "_score"][self.rank], score, saves)
            return
        top, total, acc = (state[ring + part][self.rank][:, 0] for part in ("_max", "_sum", "_acc"))
        # A window that began with the chunk or in it starts empty; only one that was open before goes on.
        top[saves.empty], total[saves.empty], acc[saves.empty] = compressor.NEG_INF, 0.0, 0.0
        for s, position, kept in saves.open:
            begin = max(s.start, position // compressor.LONG * compressor.LONG)
            if begin % compressor.LONG:
                top[kept], total[kept], acc[kept] = top[s.slot], total[s.slot], acc[s.slot]
            rows = slice(s.offset + begin - s.start, s.offset + position - s.start)
            self._online_chunk(top[kept], total[kept], acc[kept], kv[rows], score[rows], begin)

    def _attend(
        self, q: Tensor, kv: Tensor, index: tuple[Tensor, Tensor] | None, step: Step, state: Mapping[str, Tensor]
    ) -> Tensor:
        """float32 [T, H, d], before the inverse rotation."""
        if not step.chunks and step.singles.rows is None:
            return self._attend_singles(q, kv, index, step, state)
        out = torch.empty(q.shape, dtype=torch.float32)
        rows = step.singles.rows
        if rows is not None and step.singles.segments:
            own = None if index is None else (index[0][rows], index[1][rows])
            out[rows] = self._attend_singles(q[rows], kv[rows], own, step, state)
        if step.saves is not None:
            save_recent(state["window"][self.layer], kv, step.saves)
        for s, runs in zip(step.chunks, step.chunk_runs, strict=True):
            part = slice(s.offset, s.offset + s.length)
            own = None if index is None else (index[0][part], index[1][part])
            self._attend_chunk(out[part], q[part], kv[part], own, s, runs, state)
        return out

    def _attend_singles(
        self, q: Tensor, kv: Tensor, index: tuple[Tensor, Tensor] | None, step: Step, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Decode: every row is the newest token of its sequence, so the whole ring is its window."""
        singles, window = step.singles, state["window"][self.layer]
        window[singles.slots, singles.window_rows] = kv
        if not self.ratio:
            return self._decode(q, self.sink, self.scale, window, singles.slots, singles.held)
        store = state["csa" if self.ratio == 4 else "hca"][self.rank].flatten(0, 1)
        gathered = step.visible[self.ratio]
        if gathered is None:
            rows, counts = self._select_singles(index, step, state)
        elif gathered.spans:  # a lone sequence
            n = singles.segments[0].end
            shared = [window[singles.segments[0].slot, :n], *_tiles(store, gathered.spans)]
            return self._softmax(q, self.sink, self.scale, [(rows, None) for rows in shared])
        else:
            rows, counts = gathered.rows, gathered.counts
        return self._decode(q, self.sink, self.scale, window, singles.slots, singles.held, store, rows, counts)

    def _select_singles(
        self, index: tuple[Tensor, Tensor] | None, step: Step, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The best rows of each single: flat row ids int64 [B, top_k] and how many of them count, int64 [B]."""
        if index is None or step.table is None:
            raise RuntimeError("a layer without an indexer cannot select rows")
        per_page = PAGE_TOKENS // 4
        keys = state["index"][self.rank].flatten(0, 1)
        counts = [s.end // 4 for s in step.singles.segments]
        visible, scores = torch.tensor(counts), torch.full((len(counts), max(counts)), float("-inf"))
        for b, (count, runs) in enumerate(zip(counts, step.single_runs, strict=True)):
            if count > self.ix.top_k:  # below, all are taken whatever their score
                places = [keys[first:end] for first, end in spans(runs, per_page, count)]
                scores[b, :count] = self._scores(index[0][b : b + 1], index[1][b : b + 1], places)[0]
            else:
                scores[b, :count] = 0.0
        rows, _ = self._chosen_rows(scores, visible, self.ix.top_k)
        return step.table.gather(1, rows // per_page) * per_page + rows % per_page, visible.clamp(max=self.ix.top_k)

    def _attend_chunk(
        self,
        out: Tensor,
        q: Tensor,
        kv: Tensor,
        index: tuple[Tensor, Tensor] | None,
        s: Segment,
        runs: Runs,
        state: Mapping[str, Tensor],
    ) -> None:
        """Prefill of one segment in query blocks; then its last tokens replace the ring."""
        size, ring = self.c.window, state["window"][self.layer][s.slot]
        held = min(size - 1, s.start)
        past = torch.arange(s.start - held, s.start) % size
        slab = torch.cat((ring[past], kv))  # keys of positions start - held .. end - 1
        begin = 0
        while begin < s.length:
            end = min(s.length, begin + self._block(s.start + begin, s.length - begin))
            low = max(0, begin + held - size + 1)  # the first query's oldest key, as a row of the slab
            keys = slab[low : held + end]
            distance = torch.arange(begin, end)[:, None] + held - torch.arange(low, held + end)
            window = (keys, (distance >= 0) & (distance < size))
            self._attend_block(out, q, index, slice(begin, end), s.start, window, runs, state)
            begin = end
        kept = min(s.length, size)
        ring[torch.arange(s.end - kept, s.end) % size] = kv[s.length - kept :]

    def _attend_block(
        self,
        out: Tensor,
        q: Tensor,
        index: tuple[Tensor, Tensor] | None,
        block: slice,
        start: int,
        window: tuple[Tensor, Tensor],
        runs: Runs,
        state: Mapping[str, Tensor],
    ) -> None:
        shared: list[tuple[Tensor, Tensor | None]] = [window]
        own: list[tuple[Tensor, Tensor | None]] = []
        count = (start + block.stop) // self.ratio if self.ratio else 0
        if count:
            per_page = PAGE_TOKENS // self.ratio
            places = spans(runs, per_page, count)
            store = state["csa" if self.ratio == 4 else "hca"][self.rank].flatten(0, 1)
            visible = torch.arange(start + block.start + 1, start + block.stop + 1) // self.ratio
            if self.ratio == 4 and count > self.ix.top_k and index is not None:
                keys = state["index"][self.rank].flatten(0, 1)
                scores = self._scores(index[0][block], index[1][block], [keys[a:b] for a, b in places])
                if self._dense(count):
                    shared += _masked(store, places, self._chosen(scores, visible, self.ix.top_k))
                else:
                    rows, valid = self._chosen_rows(scores, visible, self.ix.top_k)
                    own.append((_rows(store, _flat(rows, places)), valid))
            else:
                shared += _masked(store, places, torch.arange(count) < visible[:, None])
        out[block] = self._softmax(q[block], self.sink, self.scale, shared, own)

    def _dense(self, count: int) -> bool:
        """Whether products with all ``count`` rows cost less than gathering and using top_k rows for each query."""
        return self.heads * count <= (self.heads + COPY_HEADS) * self.ix.top_k

    def _block(self, start: int, left: int) -> int:
        """Queries of the next block, beginning at position ``start``."""
        longest = min(left, MAX_BLOCK)
        if not self.ratio:
            return max(MIN_BLOCK, min(longest, SCORE_FLOATS // (self.heads * (self.c.window + MAX_BLOCK))))
        count = (start + longest) // self.ratio
        selects = self.ratio == 4 and count > self.ix.top_k
        gathers = selects and not self._dense(count)
        keys = self.c.window + MAX_BLOCK + (self.ix.top_k if gathers else count)
        size = max(MIN_BLOCK, SCORE_FLOATS // (self.heads * keys))
        if selects:
            size = min(size, INDEX_FLOATS // count)
        if gathers:
            size = min(size, GATHER_FLOATS // (self.ix.top_k * self.c.head_dim))
        return max(1, min(longest, size))


def save_recent(rings: Tensor, new: Tensor, saves: Saves) -> None:
    """Keep what rings of the last tokens hold at positions inside the chunks. rings: [slots + snapshots, size, width],
    which the chunks have not changed yet; new: [T, width], the step's tokens.
    """
    rows, tokens = saves.recent[rings.shape[1]]
    rings[saves.rings] = rings[saves.slots]
    rings.flatten(0, 1)[rows] = new[tokens]


def _tiles(store: Tensor, places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """The rows at ``places`` of the store, cut by positions: the same sums wherever a sequence's pages lie."""
    return tiles((store[first:end] for first, end in places), TILE)


def _masked(store: Tensor, places: Sequence[tuple[int, int]], mask: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Tiles of the store with their columns of ``mask`` (None where every query sees the whole tile)."""
    out: list[tuple[Tensor, Tensor | None]] = []
    at = 0
    for rows in _tiles(store, places):
        part = mask[:, at : at + rows.shape[0]]
        out.append((rows, None if bool(part.all()) else part))
        at += rows.shape[0]
    return out


def _rows(store: Tensor, rows: Tensor) -> Tensor:
    """store [n, d], rows int64 [Q, k] -> [Q, k, d]. (index_select copies whole rows, indexing number by number.)"""
    return store.index_select(0, rows.flatten()).view(*rows.shape, -1)


def _flat(rows: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Row numbers of a sequence -> rows of the flat store."""
    if len(places) == 1:
        return rows + places[0][0]
    lengths = torch.tensor([end - first for first, end in places])
    begins = lengths.cumsum(0) - lengths
    run = torch.searchsorted(begins, rows, right=True) - 1
    return rows + (torch.tensor([first for first, _ in places]) - begins)[run]
