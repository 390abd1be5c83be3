"""V4 for training: whole sequences, gradients, and a choice of how the indexed layers select.

Knows the formulas of longread.models.deepseek_v4 (a test holds the two together) in a form that suits a GPU: tokens of
all rows laid end to end, no shape that depends on data, attention over [the row's tokens | its compressed entries] in
one kernel call. Knows no documents and no optimiser. Sources: arXiv 2606.19348, DeepSeek-V4 inference/model.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from longread.kernels.hyper.ref import sinkhorn
from longread.kernels.rope.ref import cos_sin, frequencies
from longread.kernels.router.ref import affinity
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from training import attention
from training.layers import (
    fake_bf16,
    fake_fp4,
    fake_fp8,
    linear,
    masked_experts,
    mlp,
    rms_norm,
    rotate_tail,
    turned,
    weighted,
    working_dtype,
)
from training.native import Native

BLOCK = attention.BLOCK
PAD = 2  # the tokenizer's padding id: what fills the end of a row is no expert's load
SELECTIONS = ("dense", "topk", "random")


@dataclass(frozen=True, slots=True)
class Turns:
    """cos and sin, each [N, rope / 2]: of every token by the plain and the compressed table, of each window's start."""

    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    windows: dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Indexed:
    """What ``index_loss`` needs of one indexed layer: logits of the index [B, S, C] and the attention's mass there."""

    scores: Tensor
    mass: Tensor
    seen: Tensor


class TwinV4(nn.Module):
    """Parameters by native name in float32; see the training README for how it is used.

    ``fake_quant``: forward passes see the weights as the checkpoint stores them. ``selection``: what an indexed layer
    attends to beside its window: everything, its indexer's best, or as many random entries.
    """

    load: Tensor
    plain_freqs: Tensor
    compressed_freqs: Tensor

    def __init__(self, config: Mapping[str, object], seed: int = 0):
        super().__init__()
        self.spec = spec_from_config(config)
        spec = self.spec
        if spec.compressed is None or spec.indexer is None or spec.hyper is None or spec.compress_rope is None:
            raise ValueError(f"{spec.label} is not a V4 model")
        self.c, self.ix, self.hc = spec.compressed, spec.indexer, spec.hyper
        self.fake_quant, self.eager, self.selection, self.keep_selection = False, False, "dense", False
        self.selections: list[Tensor] = []
        self._queries: Tensor | None = None
        self._indexed: list[Indexed] = []
        self.names = Native(spec)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in self.names.shapes.items():
            value = _initial(name, shape, generator, spec)
            if name in self.names.buffers:
                self.register_buffer(Native.escaped(name), value)
            else:
                self.register_parameter(Native.escaped(name), nn.Parameter(value))
        self.register_buffer("load", torch.zeros(spec.layers, spec.moe.routed))
        self.register_buffer("plain_freqs", frequencies(spec.rope, self.c.rope_head_dim), persistent=False)
        self.register_buffer(
            "compressed_freqs", frequencies(spec.compress_rope, self.c.rope_head_dim), persistent=False
        )
        self._mix, self._update, self._pool, self._weighted = mix, update, pool, weighted
        self._turned, self._sunk = turned, sunk

    # The interface that train, evaluate and export use.

    def set_index_queries(self, where: Tensor | None) -> None:
        """Positions int64 [B, S] at which ``index_loss`` compares indexer and attention; None for none."""
        self._queries = where

    def hidden(self, ids: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, D] behind the final norm. Rows may be padded on the right only."""
        rows, length = ids.shape
        padded = -(-length // BLOCK) * BLOCK
        if padded != length:
            ids = functional.pad(ids, (0, padded - length), value=0)
        self.selections, self._indexed = [], []
        weights = self.weights()
        turns = self._turns(rows, padded, ids.device)
        flat = ids.reshape(-1)
        x = functional.embedding(flat, weights["embed.weight"]).float()
        streams = x[:, None].expand(-1, self.hc.mult, -1).contiguous()
        for layer in range(self.spec.layers):
            streams = self._layer(layer, streams, flat, rows, turns, weights)
        mixed = self._head(streams, weights)
        out = rms_norm(mixed, weights["norm.weight"], self.spec.rms_eps).view(rows, padded, -1)
        return out[:, :length]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> float32 [..., vocab]."""
        return linear(hidden, self.weight("head.weight")).float()

    def index_loss(self) -> Tensor | None:
        """KL(attention || indexer) over the visible entries, mean over queries and layers, weighted by the attention's
        mass on entries: a query that attends elsewhere says nothing about them. None before ``set_index_queries``.
        """
        if not self._indexed:
            return None
        total = weight = self._indexed[0].mass.new_zeros(())
        for part in self._indexed:
            mass = part.mass.sum(-1)
            target = part.mass / mass.clamp(min=1e-9)[..., None]
            log_index = part.scores.masked_fill(~part.seen, float("-inf")).log_softmax(-1)
            # Entries that are not seen have target 0; log 0 * 0 must not make NaN.
            gap = target * (target.clamp(min=1e-9).log() - log_index.masked_fill(~part.seen, 0.0))
            total = total + (gap.sum(-1) * mass).sum()
            weight = weight + mass.sum()
        return total / (weight + 1e-6)

    @torch.no_grad()
    def update_router_bias(self, rate: float | Tensor) -> None:
        """noaux_tc: experts that got less than the mean load since the last call become likelier, by ``rate``."""
        for layer in range(self.spec.moe.hash_layers, self.spec.layers):
            bias = self._value(f"layers.{layer}.ffn.gate.bias")
            bias += rate * (self.load[layer].mean() - self.load[layer]).sign()
        self.load.zero_()

    @torch.no_grad()
    def native(self) -> dict[str, Tensor]:
        """Float32 tensors by native name, experts apart; what ``weights.export.write_checkpoint`` takes."""
        return self.names.split({name: self._value(name).detach() for name in self.names.shapes})

    @torch.no_grad()
    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of ``native``."""
        for name, value in self.names.join(tensors).items():
            self._value(name).copy_(value)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by optimiser: "muon" matrices [..., out, in], "embed" embedding and head, "adam" the rest."""
        out: dict[str, list[nn.Parameter]] = {"muon": [], "adam": [], "embed": []}
        for name in self.names.shapes:
            if name not in self.names.buffers:
                value = self._value(name)
                assert isinstance(value, nn.Parameter)
                out[_group(name)].append(value)
        return out

    def compile_layers(self) -> None:
        """Compile the small functions that are bound by memory traffic; the products are fast as they are."""
        torch._dynamo.config.recompile_limit = 256  # each function meets some ten shapes, with and without gradients
        self._mix = torch.compile(mix, dynamic=False)
        self._update = torch.compile(update, dynamic=False)
        self._pool = torch.compile(pool, dynamic=False)
        self._weighted = torch.compile(weighted, dynamic=False)
        self._turned = torch.compile(turned, dynamic=False)
        self._sunk = torch.compile(sunk, dynamic=False)

    # Weights as the forward pass sees them.

    def _value(self, name: str) -> Tensor:
        value: Tensor = getattr(self, Native.escaped(name))
        return value

    def weight(self, name: str) -> Tensor:
        """One weight, rounded to its stored form if ``fake_quant``."""
        value = self._value(name)
        if not self.fake_quant:
            return value
        kind = self.names.kinds[name]
        if kind == "fp8":
            return fake_fp8(value, self.names.block, self.names.power_of_two)
        return fake_fp4(value) if kind == "fp4" else fake_bf16(value) if kind == "bfloat16" else value

    def weights(self) -> dict[str, Tensor]:
        return {name: self.weight(name) for name in self.names.shapes}

    # One layer.

    def _turns(self, rows: int, length: int, device: torch.device) -> Turns:
        def table(freqs: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
            cos, sin = cos_sin(freqs, torch.arange(0, length, ratio, device=device))
            return cos.repeat(rows, 1), sin.repeat(rows, 1)

        ratios = set(self.c.ratios) - {0}
        return Turns(
            table(self.plain_freqs, 1),
            table(self.compressed_freqs, 1),
            {ratio: table(self.compressed_freqs, ratio) for ratio in ratios},
        )

    def _layer(
        self, layer: int, streams: Tensor, ids: Tensor, rows: int, turns: Turns, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """streams [N, m, D] -> the same, after attention and experts."""
        eps = self.spec.rms_eps
        for part, run in (("attn", self._attention), ("ffn", self._experts)):
            name = f"layers.{layer}."
            fn, base, scale = (weights[f"{name}hc_{part}_{w}"] for w in ("fn", "base", "scale"))
            with torch.autocast(streams.device.type, enabled=False):
                u, post, a = self._mix(streams, fn, base, scale, self.hc.sinkhorn_iters, self.hc.eps, eps)
            u = rms_norm(u, weights[f"{name}{part}_norm.weight"], eps).to(working_dtype(u.device))
            y = run(layer, u, ids, rows, turns, weights)
            streams = self._update(streams, y, post, a)
        return streams

    def _head(self, streams: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        fn, base, scale = (weights[f"hc_head_{w}"] for w in ("fn", "base", "scale"))
        with torch.autocast(streams.device.type, enabled=False):
            pre = torch.sigmoid(_projected(streams, fn, self.spec.rms_eps) * scale + base) + self.hc.eps
            return (pre[:, :, None] * streams).sum(1)

    def _attention(
        self, layer: int, u: Tensor, ids: Tensor, rows: int, turns: Turns, weights: Mapping[str, Tensor]
    ) -> Tensor:
        c, ratio, eps = self.c, self.c.ratios[layer], self.spec.rms_eps
        heads, name = self.spec.heads, f"layers.{layer}.attn."
        cos, sin = turns.compressed if ratio else turns.plain
        c_q = rms_norm(linear(u, weights[name + "wq_a.weight"]), weights[name + "q_norm.weight"], eps).to(u.dtype)
        q = linear(c_q, weights[name + "wq_b.weight"]).unflatten(-1, (heads, c.head_dim))
        q = self._turned(q, None, cos[:, None], sin[:, None], eps, u.dtype)
        kv = self._turned(
            linear(u, weights[name + "wkv.weight"]), weights[name + "kv_norm.weight"], cos, sin, eps, u.dtype
        )
        entries = self._entries(name + "compressor.", u, rows, ratio, turns, weights) if ratio else None
        chosen = self._chosen(layer, u, c_q, rows, turns, weights) if ratio == 4 else None
        out, lse = self._attend(q, kv, entries, rows, ratio, chosen)
        sink = weights[name + "attn_sink"]
        if ratio == 4 and entries is not None and self._queries is not None:
            self._compare(layer, self._queries, u, c_q, q, entries, lse, sink, rows, turns, weights)
        out = self._sunk(out, lse, sink, cos[:, None], sin[:, None], u.dtype)
        grouped = out.reshape(-1, c.o_groups, heads * c.head_dim // c.o_groups).transpose(0, 1)
        w_oa = weights[name + "wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        z = torch.bmm(grouped, w_oa.transpose(1, 2)).transpose(0, 1).flatten(1)
        return linear(z, weights[name + "wo_b.weight"])

    def _entries(
        self, name: str, u: Tensor, rows: int, ratio: int, turns: Turns, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Compressed entries of every window: [N / ratio, d]."""
        ape = weights[name + "ape"]
        kv = linear(u, weights[name + "wkv.weight"]).float().unflatten(0, (-1, ratio))
        score = linear(u, weights[name + "wgate.weight"]).float().unflatten(0, (-1, ratio)) + ape
        first = torch.arange(kv.shape[0], device=u.device) % (kv.shape[0] // rows) == 0
        pooled = self._pool(kv, score, first) if ratio == 4 else (score.softmax(1) * kv).sum(1)
        norm = weights[name + "norm.weight"]
        return self._turned(pooled, norm, *turns.windows[ratio], self.spec.rms_eps, u.dtype)

    def _attend(
        self, q: Tensor, kv: Tensor, entries: Tensor | None, rows: int, ratio: int, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(out [N, H, d], lse [N, H]) over each row's window and visible entries, without the sink."""
        per_row = [kv.unflatten(0, (rows, -1))]
        if entries is not None:
            per_row.append(entries.unflatten(0, (rows, -1)))
        keys, queries = torch.cat(per_row, 1), q.unflatten(0, (rows, -1)).transpose(1, 2)
        run = attention.eager if self.eager else attention.flex
        out, lse = run(queries, keys, self.c.window, ratio, self.c.head_dim**-0.5, chosen)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1).float()

    # The indexer.

    def _index_query(
        self, name: str, c_q: Tensor, u: Tensor, turn: tuple[Tensor, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Index queries [n, Hi, di] and head weights [n, Hi] of some tokens."""
        ix = self.ix
        q = linear(c_q, weights[name + "indexer.wq_b.weight"]).unflatten(-1, (ix.heads, ix.head_dim))
        q = rotate_tail(q, turn[0][:, None], turn[1][:, None])
        scale = ix.head_dim**-0.5 * ix.heads**-0.5
        return q, linear(u, weights[name + "indexer.weights_proj.weight"]) * scale

    @torch.no_grad()
    def _chosen(
        self, layer: int, u: Tensor, c_q: Tensor, rows: int, turns: Turns, weights: Mapping[str, Tensor]
    ) -> Tensor | None:
        """bool [B, T, C]: the entries that each query may attend to, or None where that is every visible one."""
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection {self.selection!r} is unknown; choose one of {', '.join(SELECTIONS)}")
        length, top_k = u.shape[0] // rows, self.ix.top_k
        count = length // 4
        if self.selection == "dense" or count <= top_k:
            return None
        name = f"layers.{layer}.attn."
        keys = self._entries(name + "indexer.compressor.", u, rows, 4, turns, weights).unflatten(0, (rows, -1))
        q, head_weights = self._index_query(name, c_q, u, turns.compressed, weights)
        out = torch.empty(rows, length, count, dtype=torch.bool, device=u.device)
        entry = torch.arange(count, device=u.device)
        step = max(BLOCK, (1 << 28) // (self.ix.heads * count))
        for row in range(rows):
            for begin in range(0, length, step):
                part = slice(row * length + begin, row * length + min(begin + step, length))
                if self.selection == "random":
                    scores = torch.rand(part.stop - part.start, count, device=u.device)
                else:
                    scores = index_scores(q[part], head_weights[part], keys[row])
                position = torch.arange(begin, begin + scores.shape[0], device=u.device)
                seen = entry < ((position + 1) // 4)[:, None]
                scores = scores.masked_fill(~seen, float("-inf"))
                cut = scores.topk(top_k, -1).values[:, -1:]
                out[row, begin : begin + scores.shape[0]] = (scores >= cut) & seen
        if self.keep_selection:
            self.selections.append(out)
        return out

    def _compare(
        self,
        layer: int,
        where: Tensor,
        u: Tensor,
        c_q: Tensor,
        q: Tensor,
        entries: Tensor,
        lse: Tensor,
        sink: Tensor,
        rows: int,
        turns: Turns,
        weights: Mapping[str, Tensor],
    ) -> None:
        """Keep index scores and attention of the queries ``where``. Only the indexer's own weights get gradients."""
        length, name = u.shape[0] // rows, f"layers.{layer}.attn."
        flat = (where + torch.arange(rows, device=u.device)[:, None] * length).flatten()
        own = {key: weights[key] for key in weights if key.startswith(name + "indexer.")}
        u, c_q = u.detach(), c_q.detach()
        keys = self._entries(name + "indexer.compressor.", u, rows, 4, turns, own).unflatten(0, (rows, -1))
        turn = (turns.compressed[0][flat], turns.compressed[1][flat])
        index_q, head_weights = self._index_query(name, c_q[flat], u[flat], turn, own)
        wanted = where.shape[1]
        scores = index_scores(index_q.unflatten(0, (rows, wanted)), head_weights.unflatten(0, (rows, wanted)), keys)
        seen = torch.arange(length // 4, device=u.device) < ((where + 1) // 4)[..., None]
        with torch.no_grad():
            picked = q[flat].unflatten(0, (rows, wanted)).flatten(1, 2)
            logits = picked @ entries.unflatten(0, (rows, -1)).transpose(1, 2)
            logits = logits.unflatten(1, (wanted, -1)).float() * self.c.head_dim**-0.5
            total = torch.logaddexp(lse[flat], sink).unflatten(0, (rows, wanted))
            mass = (logits - total[..., None]).exp().sum(2) * seen
        self._indexed.append(Indexed(scores.float(), mass, seen))

    # The experts.

    def _experts(
        self, layer: int, u: Tensor, ids: Tensor, rows: int, turns: Turns, weights: Mapping[str, Tensor]
    ) -> Tensor:
        moe, name = self.spec.moe, f"layers.{layer}.ffn."
        with torch.autocast(u.device.type, enabled=False):
            scores = affinity(functional.linear(u.float(), weights[name + "gate.weight"]), moe)
            if layer < moe.hash_layers:
                chosen = weights[name + "gate.tid2eid"][ids]
            else:
                chosen = (scores + weights[name + "gate.bias"]).topk(moe.top_k, -1).indices
            picked = torch.zeros_like(scores).scatter(1, chosen, 1.0)
            kept = scores * picked
            gates = kept / (kept.sum(-1, keepdim=True) + 1e-20) * moe.scale
        with torch.no_grad():
            self.load[layer] += (picked * (ids != PAD)[:, None]).sum(0)
        w1, w3, w2 = (weights[f"{name}experts.{w}.weight"] for w in ("w1", "w3", "w2"))
        routed = masked_experts(u, w1, w3, w2, gates, moe.swiglu_limit, self._weighted)
        w1, w3, w2 = (weights[f"{name}shared_experts.{w}.weight"] for w in ("w1", "w3", "w2"))
        return routed + mlp(u, w1, w3, w2, moe.swiglu_limit)


def mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.hyper.ref.mix, written so that it compiles into few passes over ``streams``."""
    m = streams.shape[1]
    pre, post, a = _projected(streams, fn, rms_eps).split([m, m, m * m], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:m]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base[m : 2 * m])
    a = sinkhorn((a * scale[2] + base[2 * m :]).unflatten(-1, (m, m)), iters, eps)
    return (pre[:, :, None] * streams).sum(1), post, a


def update(streams: Tensor, y: Tensor, post: Tensor, a: Tensor) -> Tensor:
    """X'_k = post_k y + sum_j A[j, k] X_j."""
    mixed = (a[:, :, :, None] * streams[:, :, None, :]).sum(1)
    return mixed + post[:, :, None] * y.float()[:, None]


def pool(kv: Tensor, score: Tensor, first: Tensor) -> Tensor:
    """CSA's overlapping windows: kv, score [W, 4, 2d], first [W] marks each row's first window -> [W, d]."""
    d = kv.shape[-1] // 2
    # Each window sees the first halves of the one before; a row's first window has none.
    before_kv, before_score = kv[..., :d].roll(1, 0), score[..., :d].roll(1, 0)
    before_score = before_score.masked_fill(first[:, None, None], float("-inf"))
    scores = torch.cat((before_score, score[..., d:]), 1)
    return (scores.softmax(1) * torch.cat((before_kv, kv[..., d:]), 1)).sum(1)


def sunk(out: Tensor, lse: Tensor, sink: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """The sink takes exp(sink) of the sum and has no value; then the values' rotation is undone at the query.

    out [N, H, d], lse [N, H] without the sink, sink [H].
    """
    return rotate_tail(out * torch.sigmoid(lse - sink)[..., None], cos, -sin).to(dtype)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h weights[.., h] relu(q[.., h] . keys): [.., n, Hi, di], [.., n, Hi], [.., C, di] -> [.., n, C]."""
    heads = q.shape[-2]
    per_head = (q.flatten(-3, -2) @ keys.transpose(-1, -2)).relu().unflatten(-2, (-1, heads))
    return (weights[..., None, :].to(per_head.dtype) @ per_head).squeeze(-2).float()


def _projected(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    flat = streams.flatten(1)
    return functional.linear(flat, fn) * (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()


def _group(name: str) -> str:
    if name in ("embed.weight", "head.weight"):
        return "embed"
    small = ("norm.weight", "gate.weight", "weights_proj.weight", "attn_sink", "ape", "_fn", "_base", "_scale")
    return "adam" if name.endswith(small) else "muon"


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator, spec: ModelSpec) -> Tensor:
    """Where training starts: every stream carries the embedding on, every layer reads and writes all four."""
    noise = torch.randn(shape, generator=generator)
    rules: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        ("tid2eid", lambda: torch.rand(shape[0], spec.moe.routed, generator=generator).argsort(1)[:, : shape[1]]),
        # A part that all tokens share stands in for the bias that attention by position alone needs.
        ("embed.weight", lambda: 0.5 * noise + 0.25 * torch.randn(shape[-1], generator=generator)),
        ("head.weight", lambda: 0.3 * noise * shape[-1] ** -0.5),
        ("norm.weight", lambda: torch.ones(shape)),
        ("gate.bias", lambda: torch.zeros(shape)),
        ("attn_sink", lambda: torch.zeros(shape)),
        ("ape", lambda: noise),  # so that from the start different channels look at different places of a window
        ("_scale", lambda: torch.full(shape, 0.1)),
        ("hc_head_base", lambda: torch.full(shape, -1.1)),
        ("_base", lambda: _mixing_base(shape[0], generator)),
        ("_fn", lambda: 0.02 * noise),
        ("wo_b.weight", lambda: 0.5 * noise * shape[-1] ** -0.5),
        ("w2.weight", lambda: 0.5 * noise * shape[-1] ** -0.5),
    )
    for suffix, value in rules:
        if name.endswith(suffix):
            return value()
    return noise * shape[-1] ** -0.5


def _mixing_base(size: int, generator: torch.Generator) -> Tensor:
    """pre about 1/4 each, post about 1, the mixing matrix near the identity; noise tells the streams apart."""
    m = int((size + 1) ** 0.5) - 1  # size = m*m + 2m
    noise = torch.randn(size, generator=generator)
    near_identity = (5 * torch.eye(m)).flatten() + 0.3 * noise[2 * m :]
    return torch.cat((noise[:m] * 0.5 - 1.1, noise[m : 2 * m] * 0.5, near_identity))
