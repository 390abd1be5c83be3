"""DeepSeek V2 and V3 on a device: weights in their stored formats, a paged latent, decode as launches only.

Knows a ``ModelSpec``, native tensors (scales included) and where a step's tokens lie as device tensors. ``rows``, and
``chunk`` up to ``ABSORBED`` tokens, can be captured in CUDA graphs. A longer chunk expands the latents of its whole
context, which needs its place on the host (``Chunk.extent``; without that it is read back, once a chunk). With plain
weights nothing is quantised and the sums are those of deepseek_v3.py. Sources: arXiv 2405.04434 (V2), 2412.19437 (V3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.dispatch import kernel
from longread.kernels.experts import ref as experts
from longread.kernels.experts.ref import ExpertWeights
from longread.kernels.fp8 import ref as fp8
from longread.kernels.fp8.ref import BLOCK, FP8, Fp8Weight, Quantised, Weight
from longread.kernels.mla import device_ref as mla
from longread.kernels.mla.ref import softmax_scale
from longread.kernels.norm import device_ref as norm
from longread.kernels.norm.device_ref import Normed
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import frequencies, mscale
from longread.models.deepseek_v3 import FAMILIES, LATENT_EPS
from longread.models.inputs import StepInputs
from longread.models.native_step import Block, Layers, Save, chunk_of, finished, last_query, rows_of
from longread.models.native_weights import Loader
from longread.spec.batch import Segment
from longread.spec.errors import UnsupportedModelError
from longread.spec.model import MLASpec, ModelSpec, MoESpec

# Longest chunk in the absorbed form. From 171 tokens on expanding costs less, at 512 a third, but not in a graph.
ABSORBED = 512
SHORT = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}  # what Loader asks for, and V3's names
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """A step's tokens: positions int32 [T]; (cos, sin) float32 [T, rope / 2]; where they lie. ``extent``: start and
    length of a chunk that is expanded.
    """

    where: Rows | Chunk
    cos: Tensor
    sin: Tensor
    extent: tuple[int, int] | None

    @property
    def positions(self) -> Tensor:
        return self.where.positions


class NativeV3:
    """A loaded V2 or V3 model. ``weights``: stored tensors by native name (Checkpoint.native, random_native).

    ``dtype``: of activations, plain weights and unpacked rows: bfloat16, or with plain weights float32. The residual
    stream has it too; routing, norms and softmax are float32. ``state``: "latent" of spec/state.py, plain or packed.
    """

    def __init__(
        self, spec: ModelSpec, weights: Callable[[str], Tensor], dtype: torch.dtype, device: str | torch.device
    ):
        if spec.family not in FAMILIES or spec.mla is None:
            raise UnsupportedModelError("model_type", f"{spec.family} is not one of {', '.join(FAMILIES)}")
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        load = Loader(_renamed(weights), dtype, self.device)
        self._freqs = frequencies(spec.rope, spec.mla.qk_rope_head_dim).to(self.device)
        factor = spec.rope.factor
        self._magnitude = mscale(factor, spec.rope.mscale) / mscale(factor, spec.rope.mscale_all_dim)
        self.embed, self.norm = load.plain("model.embed_tokens.weight"), load.plain("model.norm.weight")
        self.lm_head = self.embed if spec.tie_embeddings else load.plain("lm_head.weight")
        self.layers = [NativeV3Layer(spec, i, load) for i in range(spec.layers)]
        self._add_norm, self._linear = kernel(norm.add_norm, self.device.type), kernel(fp8.linear, self.device.type)

    @torch.inference_mode()
    def rows(self, token_ids: Tensor, where: Rows, state: State) -> Tensor:
        """One token of each of B sequences. token_ids: int64 [B] (padding: any id). Returns float32 [B, vocab]."""
        place, x = self._place(where, None), functional.embedding(token_ids, self.embed)
        y: Tensor | None = None
        for layer, latent in zip(self.layers, state["latent"], strict=True):
            y = layer.attention.all(layer.enter_attention(x, y), latent, place)
            y = layer.feed_forward(x, y, where.positions, token_ids)
        return self._logits(x, y)

    def chunk(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool, saves: Sequence[Save] = ()
    ) -> Tensor | None:
        """A chunk of one sequence. token_ids: int64 [T] (padding: any id). Float32 [1, vocab] of its last token.

        ``saves``: there are no rings to keep.
        """
        return finished(self.chunk_layers(token_ids, where, state, last))

    @torch.inference_mode()
    def chunk_layers(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool | Tensor, saves: Sequence[Save] = ()
    ) -> Layers:
        """``chunk`` in steps: yields after each layer but the last, so that other sequences' rows can run in between.

        Returns the logits. ``last``: whether those of the chunk's last token are wanted; a tensor: int64 [R], the rows
        whose logits are.
        """
        extent = where.extent
        if token_ids.shape[0] <= ABSORBED:
            extent = None
        elif extent is None:
            start, length, *_ = where.meta.tolist()
            extent = start, length
        place, x = self._place(where, extent), functional.embedding(token_ids, self.embed)
        y: Tensor | None = None
        for layer, latent in zip(self.layers[:-1], state["latent"][:-1], strict=True):
            y = layer.attention.all(layer.enter_attention(x, y), latent, place)
            y = layer.feed_forward(x, y, where.positions, token_ids)
            yield
        # Of the last layer only the latents are always wanted, and queries and experts of rows that bring logits.
        final = self.layers[-1]
        given = final.enter_attention(x, y)
        if last is False:
            final.attention.keep(given, state["latent"][-1], place)
            return None
        wanted = last_query(where) if last is True else Block(last, where)
        y = final.attention.some(given, state["latent"][-1], place, wanted)
        x = wanted.of(x)
        y = final.feed_forward(x, y, wanted.of(where.positions), wanted.of(token_ids))
        return self._logits(x, y)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, state: State) -> Tensor:
        """Any ragged batch (engine.runner.Model): float32 logits [R, vocab] of ``logit_rows``, on the device."""
        ids, wanted = inputs.token_ids.to(self.device), inputs.logit_rows.tolist()
        places: list[int] = []  # row of the batch of each row in ``parts``
        parts: list[Tensor] = []
        singles = [s for s in inputs.segments if s.length == 1]
        if singles:
            places += [s.offset for s in singles]
            offsets = torch.tensor(places, device=self.device)
            parts.append(self.rows(ids[offsets], rows_of(singles, self.device), state))
        for s in inputs.segments:
            if s.length > 1:
                rows = sorted({row for row in wanted if s.offset <= row < s.offset + s.length})
                places += rows
                parts += self._segment(ids, s, rows, state)
        found = {row: i for i, row in enumerate(places)}
        order = torch.tensor([found[row] for row in wanted], dtype=torch.int64, device=self.device)
        if not wanted:
            return torch.empty(0, self.spec.vocab, device=self.device)
        return torch.cat(parts)[order]

    def keep(self, slot: int, ring: int, state: State) -> None:
        """A model of rows alone has no rings to keep."""

    def starts(self, end: int) -> tuple[int, ...]:
        """Where chunks of more than ``ABSORBED`` tokens begin that between them meet every number of keys that is
        expanded at once (kernels/mla), at a page's start and within a page: each is planned for once.
        """
        most = min(mla.KEYS, 1 << max(end - 1, 1).bit_length() - 1)
        pages = sorted({max(most - mla.LEAST_KEYS, 0), most})  # all smaller powers of two, and the largest
        return tuple(start for page in pages for start in (page, page + 1) if start < end)

    def abridged(self, state: State) -> "tuple[NativeV3, State]":
        """A layer of each kind (dense, experts) that stands before the last one, and the last; with state of as many.

        Deep in a context a long chunk of all layers takes seconds, and these launch all that it launches.
        """
        few = copy(self)
        few.layers = [*{layer.routed is None: layer for layer in self.layers[:-1]}.values(), self.layers[-1]]
        return few, {**state, "latent": state["latent"][: len(few.layers)]}

    def _segment(self, ids: Tensor, s: Segment, rows: Sequence[int], state: State) -> Iterator[Tensor]:
        """Logits of the given rows of the batch, ascending."""
        own = [row - s.offset for row in rows]
        last: bool | Tensor = bool(own)
        if own and own != [s.length - 1]:
            last = torch.tensor(own, device=self.device)
        where = chunk_of(s, s.start, s.end, self.device)
        logits = finished(self.chunk_layers(ids[s.offset : s.offset + s.length], where, state, last))
        if logits is not None:
            yield logits

    def _place(self, where: Rows | Chunk, extent: tuple[int, int] | None) -> Place:
        angles = where.positions.float()[:, None] * self._freqs  # padding (-1) gets some finite angle
        cos, sin = angles.cos(), angles.sin()
        if self._magnitude != 1.0:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return Place(where, cos, sin, extent)

    def _logits(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self._linear(self._add_norm(x, y, self.norm, self.spec.rms_eps, False).u, self.lm_head, torch.float32)


class NativeV3Layer:
    """Attention, then a dense network or experts; x [T, D] takes in each output when the next sublayer is entered."""

    def __init__(self, spec: ModelSpec, layer: int, load: Loader):
        name, device = f"model.layers.{layer}.", load.device.type
        self.eps, self.moe = spec.rms_eps, spec.moe
        self.attention = NativeV3Attention(spec, spec.mla, f"{name}self_attn.", load)
        self.quantised = self.attention.quantised
        self.attn_norm, self.ffn_norm = (
            load.plain(f"{name}{part}_layernorm.weight") for part in ("input", "post_attention")
        )
        self.routed = Routed.loaded(spec.moe, name + "mlp.", load) if layer >= spec.moe.first_dense else None
        prefix = name + "mlp." + ("shared_experts." if self.routed is not None else "")
        self.dense = gated_weights(load, prefix) if self.routed is None or spec.moe.shared else None
        self._add_norm, self._route = kernel(norm.add_norm, device), kernel(experts.route, device)
        self._linear, self._gated = kernel(fp8.linear, device), kernel(fp8.gated, device)
        self._experts = kernel(experts.experts, device)

    def enter_attention(self, x: Tensor, y: Tensor | None) -> Normed:
        """x takes in the last sublayer's output; the attention's input."""
        return self._add_norm(x, y, self.attn_norm, self.eps, self.quantised)

    def feed_forward(self, x: Tensor, y: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """The same, then the network. positions: int32 [T], -1 for padding; token_ids: int64 [T]. Returns [T, D]."""
        u, q = self._add_norm(x, y, self.ffn_norm, self.eps, self.quantised)
        out: Tensor | None = None
        if self.dense is not None:
            hidden = self._gated(self._linear(u if q is None else q, self.dense[0]), None, self.quantised)
            out = self._linear(hidden, self.dense[1])
        if self.routed is not None:
            r = self.routed
            ids, weights = self._route(u, r.router, r.bias, self.moe, positions, None, token_ids)
            out = torch.zeros_like(u) if out is None else out
            out = self._experts(u, q, ids, weights, r.weights, self.moe.swiglu_limit, out)
        assert out is not None  # a layer is dense or routed
        return out


@dataclass(frozen=True, slots=True)
class Routed:
    """A layer's router and routed experts."""

    router: Tensor
    bias: Tensor | None
    weights: ExpertWeights

    @classmethod
    def loaded(cls, moe: MoESpec, prefix: str, load: Loader) -> "Routed":
        biased = moe.method == "noaux_tc"
        bias = load.plain(prefix + "gate.e_score_correction_bias", torch.float32) if biased else None
        weights = whole_blocks(load.experts(prefix + "experts.", moe.routed))
        return cls(load.plain(prefix + "gate.weight"), bias, weights)


class NativeV3Attention:
    """Latent attention of one layer. ``latent``: [pages, 256, W], its rows of the state, plain or packed."""

    def __init__(self, spec: ModelSpec, m: MLASpec | None, name: str, load: Loader):
        if m is None:
            raise ValueError(f"{spec.label} has no latent attention")
        self.m, self.heads, self.scale = m, spec.heads, softmax_scale(m, spec.rope)
        self.has_q_lora = m.q_lora_rank is not None
        down = [name + "q_a_proj"] if self.has_q_lora else []
        self.w_down, self.kv_at = joined(load, *down, name + "kv_a_proj_with_mqa")
        self.q_norm = load.plain(name + "q_a_layernorm.weight") if self.has_q_lora else None
        self.kv_norm = load.plain(name + "kv_a_layernorm.weight")
        self.w_q = load.matrix(name + ("q_b_proj" if self.has_q_lora else "q_proj"))
        kv_b = fp8.widened(load.matrix(name + "kv_b_proj")).to(load.dtype)
        self.kv_b = kv_b.view(spec.heads, -1, m.kv_lora_rank)
        self.w_o = load.matrix(name + "o_proj")
        self.quantised = not isinstance(self.w_o, Tensor)
        device = load.device.type
        self._linear, self._quantise = kernel(fp8.linear, device), kernel(fp8.quantise, device)
        self._latents, self._rotate = kernel(mla.latents, device), kernel(mla.rotate, device)
        self._attend_rows, self._attend_chunk = kernel(mla.attend_rows, device), kernel(mla.attend_chunk, device)

    def all(self, given: Normed, latent: Tensor, place: Place) -> Tensor:
        """Every token's query: given.u [T, D] -> [T, D]. The step's latents are written first."""
        q = self._queries(self.keep(given, latent, place), place)
        where = place.where
        if isinstance(where, Chunk) and place.extent is not None:
            return self._output(self._attend_chunk(q, latent, self.kv_b, self.scale, where, *place.extent))
        return self._output(self._attend_rows(q, latent, self.kv_b, self.scale, _as_rows(where)))

    def some(self, given: Normed, latent: Tensor, place: Place, wanted: Block) -> Tensor:
        """The latents of every token, and the queries of the rows ``wanted``: [rows, D]."""
        c_q = wanted.quantised(self.keep(given, latent, place))
        own = _as_rows(replace(wanted.where, positions=wanted.of(place.positions)))
        few = Place(own, wanted.of(place.cos), wanted.of(place.sin), None)
        return self._output(self._attend_rows(self._queries(c_q, few), latent, self.kv_b, self.scale, own))

    def keep(self, given: Normed, latent: Tensor, place: Place) -> Quantised | Tensor:
        """Write the step's latents. Returns what queries are made of: [T, q_lora], or the input itself."""
        rows = given.u if given.q is None else given.q
        down, m = self._linear(rows, self.w_down), self.m
        q = down[:, : m.q_lora_rank] if self.has_q_lora else None
        kv = down[:, self.kv_at : self.kv_at + m.kv_lora_rank + m.qk_rope_head_dim]
        norms = self.q_norm, self.kv_norm
        turn = place.cos, place.sin
        c_q = self._latents(q, kv, *norms, LATENT_EPS, *turn, self.quantised, latent, place.where)
        return rows if c_q is None else c_q

    def _queries(self, c_q: Quantised | Tensor, place: Place) -> Tensor:
        q = self._linear(c_q, self.w_q).unflatten(1, (self.heads, -1))
        self._rotate(q, place.cos, place.sin)
        return q

    def _output(self, o: Tensor) -> Tensor:
        mixed = o.flatten(1)
        return self._linear(self._quantise(mixed) if self.quantised else mixed, self.w_o)


def joined(load: Loader, *names: str) -> tuple[Weight, int]:
    """Matrices of equal inputs, one under another, and the row at which the last one begins.

    In FP8 each but the last is filled up with zero rows to whole scale blocks.
    """
    parts = [load.matrix(name) for name in names]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if plain:
        return torch.cat(plain), sum(part.shape[0] for part in plain[:-1])
    packed = [part for part in parts if isinstance(part, Fp8Weight)]
    whole = [_filled(part.values, -2) for part in packed[:-1]]
    values = torch.cat([*whole, packed[-1].values.view(torch.uint8)]).view(FP8)
    scales = torch.cat([part.scales for part in packed])
    return Fp8Weight(values, scales), sum(part.shape[0] for part in whole)


def gated_weights(load: Loader, prefix: str) -> tuple[Weight, Weight]:
    """(gate over up [2F, D], down [D, F]) of a dense network; in FP8 F is filled up with zeros to whole blocks."""
    gate, up, down = (load.matrix(prefix + part) for part in ("gate_proj", "up_proj", "down_proj"))
    if isinstance(gate, Tensor) or isinstance(up, Tensor) or isinstance(down, Tensor):
        assert isinstance(gate, Tensor) and isinstance(up, Tensor) and isinstance(down, Tensor)  # one format a model
        return torch.cat((gate, up)), down
    both = torch.cat((_filled(gate.values, -2), _filled(up.values, -2))).view(FP8)
    into = Fp8Weight(both, torch.cat((gate.scales, up.scales)))
    return into, Fp8Weight(_filled(down.values, -1).view(FP8), down.scales)


def whole_blocks(w: ExpertWeights) -> ExpertWeights:
    """Experts with F filled up likewise, in any format: kernels need it, and silu(0) * 0 times 0 adds nothing."""
    if w.w2.shape[2] % BLOCK == 0:
        return w
    halves = [_filled(half, -2) for half in w.w13.chunk(2, dim=1)]
    w13, w2 = torch.cat(halves, 1), _filled(w.w2, -1)
    return w._replace(w13=w13.view(w.w13.dtype), w2=w2.view(w.w2.dtype))


def _filled(values: Tensor, axis: int) -> Tensor:
    """With zeros up to a multiple of 128 along ``axis``: -2 (rows) or -1; FP8 codes as bytes."""
    missing = -values.shape[axis] % BLOCK
    plain = values.view(torch.uint8) if values.dtype == FP8 else values
    return functional.pad(plain, (0, missing) if axis == -1 else (0, 0, 0, missing))


def _as_rows(where: Rows | Chunk) -> Rows:
    """A chunk's tokens as rows that share a table."""
    if isinstance(where, Rows):
        return where
    table = where.table.expand(where.positions.shape[0], -1)
    return Rows(where.positions, where.positions, table, where.bound)


def _renamed(weights: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """V3's tensors by the names that Loader asks for."""

    def tensor(name: str) -> Tensor:
        for short, own in SHORT.items():
            name = name.replace(short, own)
        if name.endswith(".scale"):
            name = name.removesuffix("scale") + "weight_scale_inv"
        return weights(name)

    return tensor
