"""Multi-head latent attention (MLA) over a paged latent, in plain torch.

The cache row of a token is (c, k_pe): the normalised latent of ``rank`` numbers and one rotated key part shared by all
heads. Two exact ways to attend over it:

absorbed  W_k moves to the query (q~ = W_k^T q_nope), scores and values are taken from the latent itself; the prefix is
          never expanded, so a decoded token reads rank + rope numbers a key.
expanded  (k_nope, v) of the prefix are computed once per chunk; a query then costs nope + rope + v numbers a key.

Knows pages, runs and tiles; knows no weights but W_kvb, no layers. Scores and sums are float32 whatever the model's
dtype. Scratch is bounded by ``SCORES`` whatever the context. Rows outside the valid range are never read, so they may
hold anything. Source: DeepSeek-V2 paper arXiv 2405.04434, sections 2.1 and C.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.kernels.rope.ref import mscale
from longread.spec.batch import Segment
from longread.spec.model import MLASpec, RopeSpec
from longread.spec.state import PAGE_TOKENS

SCORES = 4 << 20  # elements of one score tile: 16 MiB of float32
QUERY_BLOCK, KEY_BLOCK = 512, 1024  # one head's tile in the expanded form: large enough for full matmul speed
WIDE_KEYS = 1 << 14  # keys per tile that are cast to float32 when the latent is of lower precision: bounds the copy
SPLIT_ROWS = 1024  # a long run is offered to the threads in pieces of this many rows


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` cache rows that are neighbours in storage: rows row.. hold the keys at positions key.."""

    row: int
    key: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """One segment: its tokens offset .. offset+length-1 are at positions start.., ``runs`` cover 0 .. end-1."""

    offset: int
    length: int
    start: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Which queries attend to what, the same for every layer.

    absorbed: groups of spans whose tokens are neighbours in the batch (they share the projections); expanded: the long
    chunks. Together they cover every query of the batch once.
    """

    absorbed: tuple[tuple[Span, ...], ...]
    expanded: tuple[Span, ...]


def softmax_scale(mla: MLASpec, rope: RopeSpec) -> float:
    """(nope + rope)^-0.5 times the square of YaRN's m over mscale_all_dim."""
    m = mscale(rope.factor, rope.mscale_all_dim)
    return float((mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * m * m)


def crossover(mla: MLASpec) -> int:
    """Shortest chunk for which expanding the prefix costs fewer multiplications than absorbing (171 for V3).

    Per head and key: absorbed n (2 rank + rope); expanded n (nope + rope + v) + rank (nope + v). The latter is less
    when n (2 rank - nope - v) > rank (nope + v).
    """
    gain = 2 * mla.kv_lora_rank - mla.qk_nope_head_dim - mla.v_head_dim
    if gain <= 0:
        return sys.maxsize
    return mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) // gain + 1


def runs(pages: Sequence[int], end: int) -> tuple[Run, ...]:
    """Positions 0 .. end-1 as stretches of neighbouring storage rows."""
    found: list[Run] = []
    needed = -(-end // PAGE_TOKENS)
    first = 0
    for i in range(1, needed + 1):
        if i == needed or pages[i] != pages[i - 1] + 1:
            key = first * PAGE_TOKENS
            found.append(Run(pages[first] * PAGE_TOKENS, key, min(i * PAGE_TOKENS, end) - key))
            first = i
    return tuple(found)


def clip(pieces: Sequence[Run], begin: int, end: int) -> Iterator[Run]:
    """The parts of ``pieces`` that hold positions begin .. end-1."""
    for r in pieces:
        low, high = max(r.key, begin), min(r.key + r.count, end)
        if low < high:
            yield Run(r.row + low - r.key, low, high - low)


def spans(segments: Sequence[Segment]) -> tuple[Span, ...]:
    """Resolve a step's pages, once for all layers."""
    return tuple(Span(s.offset, s.length, s.start, runs(s.pages, s.end)) for s in segments if s.length)


def storage_rows(every: Sequence[Span]) -> Tensor:
    """int64 [T]: the storage row of each token of a step, in the order of the batch."""
    parts = [torch.arange(r.row, r.row + r.count) for s in every for r in clip(s.runs, s.start, s.start + s.length)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def select(every: Sequence[Span], wanted: Sequence[int]) -> tuple[Span, ...]:
    """Spans of a smaller batch that holds only the rows ``wanted``, in their order: neighbours stay together."""
    picked: list[Span] = []
    for place, row in enumerate(wanted):
        s = next(s for s in every if s.offset <= row < s.offset + s.length)
        start = s.start + row - s.offset
        last = picked[-1] if picked else None
        if last is not None and last.runs is s.runs and last.start + last.length == start:
            picked[-1] = Span(last.offset, last.length + 1, last.start, s.runs)
        else:
            picked.append(Span(place, 1, start, s.runs))
    return tuple(picked)


def reading(every: Sequence[Span], threshold: int) -> Reading:
    """Spans of ``threshold`` tokens or more are expanded, shorter ones absorbed."""
    absorbed: list[list[Span]] = []
    expanded: list[Span] = []
    for s in every:
        if s.length >= threshold:
            expanded.append(s)
        elif absorbed and absorbed[-1][-1].offset + absorbed[-1][-1].length == s.offset:
            absorbed[-1].append(s)
        else:
            absorbed.append([s])
    return Reading(tuple(tuple(group) for group in absorbed), tuple(expanded))


def write(latent: Tensor, rows: Tensor, c: Tensor, k_pe: Tensor) -> None:
    """Store a step's rows. latent: [pages, 256, rank + rope]; c: [T, rank] normalised; k_pe: [T, rope] rotated."""
    latent.view(-1, latent.shape[-1]).index_copy_(0, rows, torch.cat((c, k_pe), -1))


def attend(q: Tensor, latent: Tensor, kv_b: Tensor, step: Reading, scale: float) -> Tensor:
    """Causal attention of every span over its own rows, the step's own included (``write`` comes first).

    q: [T, H, nope + rope], the last ``rope`` channels rotated; latent: [pages, 256, rank + rope]; kv_b:
    [H, nope + v, rank] (a view of the native weight). Returns [T, H, v] in q's dtype.
    """
    cache = latent.view(-1, latent.shape[-1])
    nope = q.shape[-1] - (cache.shape[-1] - kv_b.shape[-1])
    out = q.new_empty((*q.shape[:2], kv_b.shape[1] - nope))
    for group in step.absorbed:
        mine = slice(group[0].offset, group[-1].offset + group[-1].length)
        _absorbed(out[mine], q[mine], cache, kv_b, group, scale)
    for span in step.expanded:
        mine = slice(span.offset, span.offset + span.length)
        _expanded(out[mine], q[mine].float(), cache, kv_b, span, scale)
    return out


def _absorbed(out: Tensor, q: Tensor, cache: Tensor, kv_b: Tensor, group: Sequence[Span], scale: float) -> None:
    tokens, heads = q.shape[:2]
    rank = kv_b.shape[-1]
    nope = kv_b.shape[1] - out.shape[-1]
    folded = torch.empty(tokens, heads, cache.shape[-1])
    folded[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)
    folded[..., rank:] = q[..., nope:]
    mixed = torch.zeros(tokens, heads, rank)
    for span in group:
        mine = slice(span.offset - group[0].offset, span.offset - group[0].offset + span.length)
        _over_latent(mixed[mine], folded[mine], cache, span, scale)
    values = kv_b[:, nope:].transpose(1, 2)
    out.copy_(torch.bmm(mixed.to(out.dtype).transpose(0, 1), values).transpose(0, 1))


def _over_latent(out: Tensor, q: Tensor, cache: Tensor, span: Span, scale: float) -> None:
    """One segment, absorbed: q float32 [n, H, rank + rope] -> out float32 [n, H, rank], given as zeros."""
    length, heads, width = q.shape
    keys = min(span.start + length, SCORES // heads, KEY_BLOCK if length > 1 else SCORES)
    if cache.dtype != torch.float32:
        keys = min(keys, WIDE_KEYS)
    queries = max(1, SCORES // (heads * keys))
    for a in range(0, length, queries):
        b = min(a + queries, length)
        block = q[a:b].view(-1, width)
        target = out[a:b].view(block.shape[0], -1)
        running = _Running(target[None])
        last = span.start + b
        for low in range(0, last, keys):
            high = min(low + keys, last)
            pieces = [_piece(cache, r) for r in clip(span.runs, low, high)]
            scores = torch.empty(block.shape[0], high - low)
            _scores(scores, block, pieces, scale)
            _mask(scores.view(b - a, heads, -1).transpose(0, 1), span.start + a, low)
            if last <= keys:  # one tile is everything: no running maximum to keep
                _values(target, torch.softmax(scores, -1), pieces)
            else:
                _values(target, running.weigh(scores[None])[0], pieces)
        if last > keys:
            running.finish()


def _piece(cache: Tensor, run: Run) -> Tensor:
    """A run's rows as float32: a view if they are float32 already."""
    return cache[run.row : run.row + run.count].float()


def _split(rows: int) -> int:
    """How many pieces of SPLIT_ROWS a run is worth cutting into, so that every thread gets work."""
    return rows // SPLIT_ROWS if rows >= 2 * SPLIT_ROWS and torch.get_num_threads() > 1 else 0


def _scores(out: Tensor, q: Tensor, pieces: Sequence[Tensor], scale: float) -> None:
    """out [M, keys] = scale * q [M, W] x the pieces' rows [keys, W]."""
    at = 0
    for rows in pieces:
        split = _split(rows.shape[0])
        body = split * SPLIT_ROWS
        if body:
            batch = rows[:body].view(split, SPLIT_ROWS, -1).transpose(1, 2)
            place = out[:, at : at + body].view(-1, split, SPLIT_ROWS).transpose(0, 1)
            torch.baddbmm(place, q.expand(split, *q.shape), batch, beta=0, alpha=scale, out=place)
        if body < rows.shape[0]:
            place = out[:, at + body : at + rows.shape[0]]
            torch.addmm(place, q, rows[body:].t(), beta=0, alpha=scale, out=place)
        at += rows.shape[0]


def _values(out: Tensor, weights: Tensor, pieces: Sequence[Tensor]) -> None:
    """out [M, rank] += weights [M, keys] x the pieces' latents."""
    rank = out.shape[1]
    at = 0
    for rows in pieces:
        split = _split(rows.shape[0])
        body = split * SPLIT_ROWS
        if body:
            batch = weights[:, at : at + body].view(-1, split, SPLIT_ROWS).transpose(0, 1)
            out.add_(torch.bmm(batch, rows[:body, :rank].view(split, SPLIT_ROWS, rank)).sum(0))
        if body < rows.shape[0]:
            out.addmm_(weights[:, at + body : at + rows.shape[0]], rows[body:, :rank])
        at += rows.shape[0]


def _expanded(out: Tensor, q: Tensor, cache: Tensor, kv_b: Tensor, span: Span, scale: float) -> None:
    """One long chunk: q float32 [n, H, nope + rope] -> out [n, H, v]; a few heads at a time bound the scratch."""
    heads = q.shape[1]
    few = max(1, SCORES // (QUERY_BLOCK * KEY_BLOCK))
    buffer = torch.empty(min(few, heads) * QUERY_BLOCK * KEY_BLOCK)
    for h in range(0, heads, few):
        mine = slice(h, min(h + few, heads))
        _expanded_heads(out[:, mine], q[:, mine].transpose(0, 1), cache, kv_b[mine], span, scale, buffer)


def _expanded_heads(
    out: Tensor, q: Tensor, cache: Tensor, kv_b: Tensor, span: Span, scale: float, buffer: Tensor
) -> None:
    """q [h, n, nope + rope]; out [n, h, v]. Each key block is expanded once and meets the queries that may see it."""
    heads, length, width = q.shape
    total = torch.zeros(heads, length, out.shape[-1])
    running = _Running(total)
    end = span.start + length
    for low in range(0, end, KEY_BLOCK):
        high = min(low + KEY_BLOCK, end)
        keys, values = _expand(cache, list(clip(span.runs, low, high)), kv_b, width)
        for a in range(max(low - span.start, 0), length, QUERY_BLOCK):
            b = min(a + QUERY_BLOCK, length)
            seen = min(high, span.start + b) - low
            scores = buffer[: heads * (b - a) * seen].view(heads, b - a, seen)
            torch.baddbmm(scores, q[:, a:b], keys[:, :seen].transpose(1, 2), beta=0, alpha=scale, out=scores)
            _mask(scores, span.start + a, low)
            weights = running.weigh(scores, a, b)
            total[:, a:b].baddbmm_(weights, values[:, :seen])
    running.finish()
    out.copy_(total.transpose(0, 1))


def _expand(cache: Tensor, pieces: Sequence[Run], kv_b: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys [h, S, nope + rope] and values [h, S, v] of the pieces' rows, float32."""
    heads, both, rank = kv_b.shape
    nope = width - (cache.shape[-1] - rank)
    count = sum(r.count for r in pieces)
    keys, values = torch.empty(heads, count, width), torch.empty(heads, count, both - nope)
    weight = kv_b.reshape(-1, rank).t()
    at = 0
    for r in pieces:
        rows = cache[r.row : r.row + r.count]
        expanded = torch.mm(rows[:, :rank], weight).view(r.count, heads, both).transpose(0, 1)
        keys[:, at : at + r.count, :nope] = expanded[..., :nope]
        keys[:, at : at + r.count, nope:] = rows[:, rank:]
        values[:, at : at + r.count] = expanded[..., nope:]
        at += r.count
    return keys, values


def _mask(scores: Tensor, first: int, low: int) -> None:
    """Hide later keys: scores [H, n, keys], its queries are at positions first.., its keys at low.. ."""
    queries, keys = scores.shape[1:]
    begin = max(first + 1 - low, 0)
    if begin < keys:
        later = torch.arange(low + begin, low + keys) > torch.arange(first, first + queries)[:, None]
        scores[..., begin:].masked_fill_(later, float("-inf"))


class _Running:
    """Softmax over keys that arrive in tiles: a running maximum and sum for each row of ``total`` [B, M, width].

    ``total`` starts at zero and holds the weighted values, relative to the running maximum. The first tile must hold a
    visible key for every row, otherwise the maximum would still be -inf.
    """

    def __init__(self, total: Tensor):
        self.total = total
        self.peak = torch.full((*total.shape[:2], 1), float("-inf"))
        self.sum = torch.zeros_like(self.peak)

    def weigh(self, scores: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Scores [B, b - a, keys] of rows a .. b-1 to weights, in place; rescales what was summed before."""
        peak, total = self.peak[:, a:b], self.total[:, a:b]
        raised = torch.maximum(scores.amax(-1, keepdim=True), peak)
        shrink = peak.sub(raised).exp_()
        weights = scores.sub_(raised).exp_()
        self.sum[:, a:b].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        total.mul_(shrink)
        peak.copy_(raised)
        return weights

    def finish(self) -> None:
        """Divide by the sums."""
        self.total.div_(self.sum)
