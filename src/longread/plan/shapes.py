"""The matrices of a model by layer kind, and how much each query position reads: what ``ops`` multiplies with tokens.

Knows a ``ModelSpec`` only; no strategy, card or engine. The tests hold the sums to ``spec.count``.
"""

from dataclasses import dataclass
from functools import lru_cache

from longread.spec.count import kv_bytes_per_token, row_groups
from longread.spec.model import MLASpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Matrices:
    """Numbers over all layers that a prompt token is multiplied with.

    ``split``: attention matrices cut by heads under TP; ``whole``: those that every TP rank holds and computes
    (down-projections, the indexer's). ``plain``: the part of ``whole`` that stays in bfloat16 (V4's compressors).
    ``dense``: dense and shared-expert FFNs; ``router``; ``expert``: one routed expert of one layer; ``head``.
    """

    split: float
    whole: float
    plain: float
    dense: float
    router: float
    expert: float
    moe_layers: int
    head: float
    hyper: float
    engram: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One kind of attention over all its layers. ``ratio`` tokens make one row; ``limit`` rows at most are read.

    ``limit`` None: all. ``flops``: of one head and one row; ``bytes``: one stored row. ``heads``: of that kind.
    """

    name: str
    layers: int
    ratio: float
    limit: int | None
    flops: float
    bytes: float
    heads: int

    def rows(self, start: int, tokens: int) -> float:
        """Rows read by the queries at ``start`` ... ``start + tokens - 1``, over all layers, a query seeing itself."""
        whole = _triangle(start, start + tokens) / self.ratio
        if self.limit is None:
            return self.layers * whole
        edge = self.limit * self.ratio  # positions below it see fewer rows than the limit
        free = max(min(edge, start + tokens) - start, 0)
        return self.layers * (_triangle(start, start + free) / self.ratio + (tokens - free) * self.limit)

    def rows_at(self, context: float) -> float:
        """Rows that one query behind ``context`` tokens reads, over all layers."""
        rows = context / self.ratio
        return self.layers * (rows if self.limit is None else min(rows, self.limit))


def _triangle(start: float, end: float) -> float:
    """Sum of (position + 1) for positions start ... end - 1: pairs of a causal query and key."""
    return (end - start) * (start + end + 1) / 2


@lru_cache(maxsize=64)
def matrices(spec: ModelSpec, prompt: bool = True) -> Matrices:
    """The matrices that a token meets; ``prompt``: one whose logits are not wanted (V4.1 stops half-way up)."""
    split, whole, plain = _attention_matrices(spec, prompt)
    m, d = spec.moe, spec.hidden
    layers = _layers_run(spec, prompt)
    dense_layers = min(m.first_dense, layers)
    moe_layers = layers - dense_layers
    dense = 3.0 * d * (dense_layers * m.dense_intermediate + moe_layers * m.shared * m.intermediate)
    hyper = layers * 2.0 * (spec.hyper.mult + 2) * spec.hyper.mult * spec.hyper.mult * d if spec.hyper else 0.0
    engram = 0.0
    if spec.engram is not None and spec.hyper is not None:
        width = (spec.engram.max_ngram - 1) * spec.engram.heads * spec.engram.head_dim
        engram = sum(1 for i in spec.engram.layers if i < layers) * (spec.hyper.mult + 1.0) * d * width
    return Matrices(
        split,
        whole,
        plain,
        dense,
        float(moe_layers * m.routed * d),
        3.0 * d * m.intermediate,
        moe_layers,
        float(spec.vocab * d),
        hyper,
        engram,
    )


def _layers_run(spec: ModelSpec, prompt: bool) -> int:
    return spec.shared_kv.kv_sources[-1] if prompt and spec.shared_kv is not None else spec.layers


def _attention_matrices(spec: ModelSpec, prompt: bool) -> tuple[float, float, float]:
    if spec.mla is not None:
        return _mla_matrices(spec, spec.mla)
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None  # ModelSpec: without mla both are set
    d, layers = spec.hidden, _layers_run(spec, prompt)
    split = layers * float(c.q_lora_rank * spec.heads * c.head_dim + c.o_lora_rank * spec.heads * c.head_dim)
    split += layers * float(d * c.o_groups * c.o_lora_rank)
    whole = layers * float(d * (c.q_lora_rank + c.head_dim))
    plain = index = 0.0
    query = c.q_lora_rank * ix.heads * ix.head_dim + d * ix.heads
    if spec.shared_kv is None:
        csa, hca = c.ratios[:layers].count(4), c.ratios[:layers].count(128)
        plain = csa * 4.0 * d * (c.head_dim + ix.head_dim) + hca * 2.0 * d * c.head_dim
        index = float(csa * query)
    else:
        for layer in spec.shared_kv.kv_sources:
            plain += (1 if c.ratios[layer] == 1 else 2) * c.head_dim * d + ix.head_dim * c.head_dim
        index = float(query * sum(1 for layer in spec.shared_kv.index_sources if layer < layers))
        whole += d * c.head_dim if prompt else 0.0  # the last source's own key-value projection fills its window
    return split, whole + plain + index, plain


def _mla_matrices(spec: ModelSpec, mla: MLASpec) -> tuple[float, float, float]:
    d, h = spec.hidden, spec.heads
    query = h * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    split = h * (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.v_head_dim * d)
    whole = d * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        split += d * query
    else:
        split += mla.q_lora_rank * query
        whole += d * mla.q_lora_rank
    if spec.indexer is not None:
        ix = spec.indexer
        whole += (mla.q_lora_rank or d) * ix.heads * ix.head_dim + d * (ix.head_dim + ix.heads)
    return float(spec.layers * split), float(spec.layers * whole), 0.0


@lru_cache(maxsize=64)
def readings(spec: ModelSpec, packing: str, prompt: bool = True) -> tuple[Reading, ...]:
    """What attention reads, by layer kind. MLA is absorbed here (2 * (2 * kv_lora + rope) a head and key)."""
    if spec.mla is not None:
        limit = spec.indexer.top_k if spec.indexer is not None else None
        per = 2.0 * (2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
        name = "dense" if limit is None else "chosen"
        return (Reading(name, spec.layers, 1, limit, per, _row_bytes(spec, packing, "latent"), spec.heads),)
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None
    layers = _layers_run(spec, prompt)
    per, row = 4.0 * c.head_dim, _row_bytes(spec, packing, "entry")
    found = [Reading("window", layers, 1, c.window, per, row, spec.heads)]
    if spec.shared_kv is None:
        csa, hca = c.ratios[:layers].count(4), c.ratios[:layers].count(128)
        found.append(Reading("chosen", csa, 4, ix.top_k, per, row, spec.heads))
        found.append(Reading("compressed", hca, 128, None, per, row, spec.heads))
        return tuple(r for r in found if r.layers)
    for ratio in sorted({r for r in c.ratios[:layers] if r}):
        count = sum(1 for r in c.ratios[:layers] if r == ratio)
        found.append(Reading(f"chosen {ratio}", count, ratio, ix.top_k, per, row, spec.heads))
    return tuple(found)


@lru_cache(maxsize=64)
def scorings(spec: ModelSpec, packing: str, prompt: bool = True) -> tuple[Reading, ...]:
    """What the indexer scores: ``flops`` a row for all index heads (``heads`` is 1), never cut by TP."""
    ix = spec.indexer
    if ix is None:
        return ()
    per, row = 2.0 * ix.heads * ix.head_dim, _row_bytes(spec, packing, "index")
    if spec.mla is not None:
        return (Reading("all", spec.layers, 1, None, per, row, 1),)
    c, shared = spec.compressed, spec.shared_kv
    assert c is not None
    if shared is None:
        return (Reading("all", c.ratios.count(4), 4, None, per, row, 1),)
    found = []
    for layer in shared.index_sources:
        if layer >= _layers_run(spec, prompt):
            continue
        ratio = c.ratios[max(s for s in shared.kv_sources if s <= layer)]
        limit = shared.candidate_blocks * shared.candidate_block if layer > shared.candidate_source else None
        found.append(Reading(f"layer {layer}", 1, ratio, limit, per, row, 1))
    return tuple(found)


def _row_bytes(spec: ModelSpec, packing: str, kind: str) -> float:
    per_token = kv_bytes_per_token(spec, packing)
    for group in row_groups(spec):
        if group.kind == kind:
            return per_token[group.name] * group.tokens_per_row / group.layers
    return 0.0


def is_sparse(spec: ModelSpec) -> bool:
    """Whether attention reads rows that an indexer chose (V3.2, V4) instead of all."""
    return spec.indexer is not None
