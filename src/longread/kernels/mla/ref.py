"""Multi-head latent attention (MLA) over a paged latent, in plain torch.

The cache row of a token is (c, k_pe): the normalised latent of ``rank`` numbers and one rotated key part shared by all
heads. Two exact ways to attend over it:

absorbed  W_k moves to the query (q~ = W_k^T q_nope), scores and values are taken from the latent itself; the prefix is
          never expanded, so a decoded token reads rank + rope numbers a key.
expanded  (k_nope, v) of the prefix are computed once per chunk; a query then costs nope + rope + v numbers a key.

Knows pages, runs and tiles; knows no weights but W_kvb, no layers. Scores and sums are float32 whatever the model's
dtype. Scratch is bounded by ``SCORES`` whatever the context. Rows outside the valid range are never read, so they may
hold anything. Sums are cut by positions (``kernels.tiles``): of a span computed by itself, every bit is the same
wherever its pages lie. Source: DeepSeek-V2 paper arXiv 2405.04434, sections 2.1 and C.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.kernels.linear.ref import linear
from longread.kernels.rope.ref import mscale
from longread.kernels.tiles import tiles
from longread.spec.batch import Segment
from longread.spec.model import MLASpec, RopeSpec
from longread.spec.state import PAGE_TOKENS

LOG2E = math.log2(math.e)  # scores are taken to base 2: exp2 costs a third of exp on a CPU
SCORES = 16 << 20  # elements of the largest score tile: 64 MiB of float32
QUERY_BLOCK, KEY_BLOCK = 256, 1024  # one head's tile in the expanded form: full matmul speed, in the cache
GATHER_BYTES = 512 << 10  # a decoding sequence of less latent is copied into a batch: cheaper than its calls
WIDE_KEYS = 1 << 14  # keys per tile of a decoded token: bounds what is copied, and cast to float32, at 36 MiB for V3
BATCH = 128  # sequences of one gathered batch: bounds its copy at 64 MiB
SPLIT_ROWS = 1024  # a long piece is offered to the threads in parts of this many rows


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
class Policy:
    """Spans of ``expand_from`` tokens or more are expanded; tokens with up to ``gather_up_to`` keys are batched."""

    expand_from: int
    gather_up_to: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Short sequences that decode one token each, as one padded batch of B sequences and S keys.

    rows: int64 [B * S]; padding repeats a sequence's first row, which is finite. bias: float32 [B, 1, S], 0 or -inf.
    """

    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Absorbed spans whose tokens are neighbours in the batch: they share the projections."""

    spans: tuple[Span, ...]
    gathered: Gathered | None

    @property
    def tokens(self) -> slice:
        last = self.spans[-1]
        return slice(self.spans[0].offset, last.offset + last.length)


@dataclass(frozen=True, slots=True)
class Reading:
    """Which queries attend to what, the same for every layer. The spans cover every query of the batch once."""

    absorbed: tuple[Group, ...]
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


def policy(mla: MLASpec) -> Policy:
    """What pays on a CPU for a model of these sizes."""
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    return Policy(crossover(mla), GATHER_BYTES // (4 * width))


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
    """The parts of ``pieces``, which are in order of position, that hold positions begin .. end-1."""
    for i in range(max(0, bisect_right(pieces, begin, key=lambda r: r.key) - 1), len(pieces)):
        r = pieces[i]
        if r.key >= end:
            return
        low, high = max(r.key, begin), min(r.key + r.count, end)
        if low < high:
            yield Run(r.row + low - r.key, low, high - low)


def spans(segments: Sequence[Segment]) -> tuple[Span, ...]:
    """Resolve a step's pages, once for all layers."""
    return tuple(Span(s.offset, s.length, s.start, runs(s.pages, s.end)) for s in segments if s.length)


def storage_rows(every: Sequence[Span]) -> Tensor:
    """int64 [T]: the storage row of each token of a step, in the order of the batch."""
    rows: list[int] = []
    for s in every:
        for r in clip(s.runs, s.start, s.start + s.length):
            rows.extend(range(r.row, r.row + r.count))
    return torch.tensor(rows, dtype=torch.int64)


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


def reading(every: Sequence[Span], how: Policy) -> Reading:
    """Sort the spans by the way in which they are computed."""
    groups: list[tuple[bool, list[Span]]] = []
    expanded: list[Span] = []
    for s in every:
        if s.length >= how.expand_from:
            expanded.append(s)
            continue
        short = s.length == 1 and s.start < how.gather_up_to
        last = groups[-1][1] if groups else None
        if last and groups[-1][0] == short and last[-1].offset + last[-1].length == s.offset and len(last) < BATCH:
            last.append(s)
        else:
            groups.append((short, [s]))
    absorbed = (Group(tuple(g), _gather(g) if short and len(g) > 1 else None) for short, g in groups)
    return Reading(tuple(absorbed), tuple(expanded))


def _gather(group: Sequence[Span]) -> Gathered:
    counts = torch.tensor([s.start + 1 for s in group])
    rows = torch.empty(len(group), int(counts.max()), dtype=torch.int64)
    for i, s in enumerate(group):
        rows[i] = s.runs[0].row
        for r in clip(s.runs, 0, s.start + 1):
            torch.arange(r.row, r.row + r.count, out=rows[i, r.key : r.key + r.count])
    hidden = torch.arange(rows.shape[1]) >= counts[:, None]
    bias = torch.zeros(rows.shape).masked_fill_(hidden, float("-inf"))
    return Gathered(rows.view(-1), bias[:, None])


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
    scale *= LOG2E
    parts: list[tuple[slice, Tensor]] = []
    for group in step.absorbed:
        parts.append((group.tokens, _absorbed(q[group.tokens], cache, kv_b, nope, group, scale)))
    for span in step.expanded:
        mine = slice(span.offset, span.offset + span.length)
        parts.append((mine, _expanded(q[mine].float(), cache, kv_b, nope, span, scale)))
    if len(parts) == 1:  # the usual step: all decode, or one chunk
        return parts[0][1].to(q.dtype)
    out = q.new_empty((*q.shape[:2], kv_b.shape[1] - nope))
    for mine, part in parts:
        out[mine] = part
    return out


def _absorbed(q: Tensor, cache: Tensor, kv_b: Tensor, nope: int, group: Group, scale: float) -> Tensor:
    """q [n, H, nope + rope] -> [n, H, v], through the latent; ``scale`` is to base 2."""
    tokens, heads = q.shape[:2]
    rank = kv_b.shape[-1]
    folded = torch.empty(tokens, heads, cache.shape[-1])
    folded[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)
    folded[..., rank:] = q[..., nope:]
    if group.gathered is not None:
        mixed = _over_batch(folded, cache, group.gathered, rank, scale)
    elif tokens == 1:
        mixed = _over_latent(folded, cache, group.spans[0], rank, scale)
    else:
        each = zip(group.spans, folded.split_with_sizes([s.length for s in group.spans]), strict=True)
        mixed = torch.cat([_over_latent(part, cache, span, rank, scale) for span, part in each])
    values = kv_b[:, nope:].transpose(1, 2)
    return torch.bmm(mixed.to(q.dtype).transpose(0, 1), values).transpose(0, 1)


def _over_batch(q: Tensor, cache: Tensor, batch: Gathered, rank: int, scale: float) -> Tensor:
    """Short decoding sequences: q float32 [B, H, rank + rope] -> [B, H, rank]."""
    keys = cache.index_select(0, batch.rows).float().view(q.shape[0], -1, q.shape[-1])
    scores = torch.baddbmm(batch.bias, q, keys.transpose(1, 2), alpha=scale / LOG2E)
    return torch.bmm(torch.softmax(scores, -1), keys[..., :rank])


def _over_latent(q: Tensor, cache: Tensor, span: Span, rank: int, scale: float) -> Tensor:
    """One segment, absorbed: q float32 [n, H, rank + rope] -> float32 [n, H, rank]."""
    length, heads, width = q.shape
    keys = min(span.start + length, SCORES // heads, KEY_BLOCK if length > 1 else WIDE_KEYS)
    queries = max(1, SCORES // (heads * keys))
    out = torch.zeros(length, heads, rank)
    for a in range(0, length, queries):
        b = min(a + queries, length)
        block, target = q[a:b].view(-1, width), out[a:b].view(-1, rank)
        last = span.start + b
        running = _Running(target[None]) if last > keys else None  # otherwise one tile is everything
        for low in range(0, last, keys):
            high = min(low + keys, last)
            pieces = [rows.float() for rows in tiles(_runs(cache, span, low, high), _piece_rows())]
            scores = torch.empty(block.shape[0], high - low)
            _scores(scores, block, pieces, scale if running else scale / LOG2E)
            if length > 1:
                _mask(scores.view(b - a, heads, -1).transpose(0, 1), span.start + a, low)
            weights = running.weigh(scores[None])[0] if running else torch.softmax(scores, -1)
            _values(target, weights, pieces)
            pieces.clear()  # what was copied goes before the next tile's copies come
        if running:
            running.finish()
    return out


def _runs(cache: Tensor, span: Span, low: int, high: int) -> Iterator[Tensor]:
    """The rows of positions low .. high-1, a view for each run."""
    return (cache[r.row : r.row + r.count] for r in clip(span.runs, low, high))


def _piece_rows() -> int:
    """Rows multiplied at once: a part for each thread; few, since a piece with a break between its pages is copied."""
    return SPLIT_ROWS * min(max(2, torch.get_num_threads()), 16)


def _split(rows: int) -> int:
    """How many parts of SPLIT_ROWS a piece is worth cutting into, so that every thread gets work."""
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


def _expanded(q: Tensor, cache: Tensor, kv_b: Tensor, nope: int, span: Span, scale: float) -> Tensor:
    """One long chunk: q float32 [n, H, nope + rope] -> float32 [n, H, v]; a few heads at a time bound the scratch."""
    length, heads = q.shape[:2]
    few = min(heads, max(2, torch.get_num_threads()), max(1, SCORES // (QUERY_BLOCK * KEY_BLOCK)))
    buffer = torch.empty(few * QUERY_BLOCK * KEY_BLOCK)
    out = torch.empty(length, heads, kv_b.shape[1] - nope)
    for h in range(0, heads, few):
        mine = slice(h, min(h + few, heads))
        result = _expanded_heads(q[:, mine].transpose(0, 1), cache, kv_b[mine], nope, span, scale, buffer)
        out[:, mine] = result.transpose(0, 1)
    return out


def _expanded_heads(
    q: Tensor, cache: Tensor, kv_b: Tensor, nope: int, span: Span, scale: float, buffer: Tensor
) -> Tensor:
    """q [h, n, nope + rope] -> [h, n, v]. Each key block is expanded once and meets the queries that may see it."""
    heads, length = q.shape[:2]
    total = torch.zeros(heads, length, kv_b.shape[1] - nope)
    running = _Running(total)
    end = span.start + length
    for low in range(0, end, KEY_BLOCK):
        high = min(low + KEY_BLOCK, end)
        (rows,) = tiles(_runs(cache, span, low, high), high - low)
        keys, values = _expand(rows, kv_b, nope)
        for a in range(max(low - span.start, 0), length, QUERY_BLOCK):
            b = min(a + QUERY_BLOCK, length)
            seen = min(high, span.start + b) - low
            scores = buffer[: heads * (b - a) * seen].view(heads, b - a, seen)
            torch.baddbmm(scores, q[:, a:b], keys[:, :seen].transpose(1, 2), beta=0, alpha=scale, out=scores)
            _mask(scores, span.start + a, low)
            weights = running.weigh(scores, a, b)
            total[:, a:b].baddbmm_(weights, values[:, :seen])
    running.finish()
    return total


def _expand(rows: Tensor, kv_b: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [h, S, nope + rope] and values [h, S, v] of latent rows [S, rank + rope], float32."""
    heads, both, rank = kv_b.shape
    count = rows.shape[0]
    keys = torch.empty(heads, count, nope + rows.shape[1] - rank)
    values = torch.empty(heads, count, both - nope)
    expanded = linear(rows[:, :rank], kv_b.reshape(-1, rank)).view(count, heads, both).transpose(0, 1)
    keys[..., :nope] = expanded[..., :nope]
    keys[..., nope:] = rows[:, rank:]
    values[:] = expanded[..., nope:]
    return keys, values


def _mask(scores: Tensor, first: int, low: int) -> None:
    """Hide later keys: scores [H, n, keys], its queries are at positions first.., its keys at low.. ."""
    queries, keys = scores.shape[1:]
    begin = max(first + 1 - low, 0)
    if begin < keys:
        later = torch.arange(low + begin, low + keys) > torch.arange(first, first + queries)[:, None]
        scores[..., begin:].masked_fill_(later, float("-inf"))


class _Running:
    """Softmax to base 2 over keys that arrive in tiles: running maxima and sums of ``total`` [B, M, width].

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
        shrink = peak.sub(raised).exp2_()
        weights = scores.sub_(raised).exp2_()
        self.sum[:, a:b].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        total.mul_(shrink)
        peak.copy_(raised)
        return weights

    def finish(self) -> None:
        """Divide by the sums."""
        self.total.div_(self.sum)
