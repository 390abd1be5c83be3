"""DeepSeek-V4 on a device: weights in their stored formats, paged state, nothing read back while a step runs.

Knows a ``ModelSpec``, native tensors (scales included) and where a step's tokens lie as device tensors. ``rows``
(decode) and ``chunk`` (prefill) are launches only, so they can be captured in CUDA graphs; ``forward`` runs any ragged
batch through them. With plain weights nothing is quantised and the sums are those of deepseek_v4.py.
Sources: arXiv 2606.19348, DeepSeek-V4 inference/model.py.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.dispatch import kernel
from longread.kernels.experts import ref as experts
from longread.kernels.fp8 import ref as fp8
from longread.kernels.hyper import ref as hyper
from longread.kernels.hyper.ref import Entered, HyperWeights
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import frequencies
from longread.models.inputs import StepInputs
from longread.models.native_step import (
    Block,
    Layers,
    Rotation,
    Save,
    chunk_of,
    finished,
    last_query,
    pieces,
    query_blocks,
    rows_of,
    up_to,
)
from longread.models.native_v4_attention import NativeV4Attention, State
from longread.models.native_weights import Loader
from longread.spec.batch import Segment
from longread.spec.model import HyperSpec, ModelSpec
from longread.spec.state import state_groups

Given = TypeVar("Given")


class NativeV4:
    """A loaded V4 model. ``weights``: stored tensors by native name (Checkpoint.native, random_native).

    ``dtype``: of activations, plain weights and unpacked rows: bfloat16, or with plain weights float32. Streams have it
    too; routing, mixing, pooling and softmax are float32. ``state``: groups of spec/state.py, plain or packed.
    """

    def __init__(
        self, spec: ModelSpec, weights: Callable[[str], Tensor], dtype: torch.dtype, device: str | torch.device
    ):
        if spec.compressed is None or spec.compress_rope is None or spec.hyper is None:
            raise ValueError(f"{spec.label} is not a V4 model")
        self.spec, self.dtype, self.device, self.hyper = spec, dtype, torch.device(device), spec.hyper
        load = Loader(weights, dtype, self.device)
        rope = spec.compressed.rope_head_dim
        self.rotation = Rotation(frequencies(spec.rope, rope), frequencies(spec.compress_rope, rope), self.device)
        self.embed, self.lm_head = load.plain("embed.weight"), load.plain("head.weight")
        self.norm, self.head_mix = load.plain("norm.weight"), mix_weights(load, "hc_head")
        self.layers = [NativeV4Layer(spec, i, load) for i in range(spec.layers)]
        self._rings = tuple(group.name for group in state_groups(spec) if group.kind == "ring")
        self._leave = kernel(hyper.leave, self.device.type)
        self._linear = kernel(fp8.linear, self.device.type)

    @torch.inference_mode()
    def rows(self, token_ids: Tensor, where: Rows, state: State) -> Tensor:
        """One token of each of B sequences. token_ids: int64 [B] (padding: any id). Returns float32 [B, vocab]."""
        turns, streams = self.rotation.of_rows(where.positions), self._streams(token_ids)
        last: Output | None = None
        for layer in self.layers:
            given = layer.enter_attention(streams, last)
            last = Output(layer.attention.rows(given, where, turns, state), given.post, given.a)
            last = layer.feed_forward(streams, last, where.positions, token_ids)
        return self._logits(streams, last)

    def chunk(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool, saves: Sequence[Save] = ()
    ) -> Tensor | None:
        """A chunk of one sequence. token_ids: int64 [T] (padding: any id). Float32 [1, vocab] of its last token."""
        return finished(self.chunk_layers(token_ids, where, state, last, saves))

    @torch.inference_mode()
    def chunk_layers(
        self, token_ids: Tensor, where: Chunk, state: State, last: bool | Tensor, saves: Sequence[Save] = ()
    ) -> Layers:
        """``chunk`` in steps: yields after each layer but the last, so that other sequences' rows can run in between.

        Returns the logits. ``last``: whether those of the chunk's last token are wanted; a tensor: int64 [R], the rows
        whose logits are. ``saves``: ring states to be kept on the way. Raises ValueError where that cannot be.
        """
        turns, streams = self.rotation.of_chunk(where), self._streams(token_ids)
        blocks, kept = query_blocks(where), [up_to(where, save) for save in saves]
        out: Output | None = None
        for layer in self.layers[:-1]:
            given = layer.enter_attention(streams, out)
            y = layer.attention.chunk(given, where, turns, state, blocks, kept)
            out = Output(_there(y), given.post, given.a)
            del given, y  # T x D each, and not wanted by the experts
            out = layer.feed_forward(streams, out, where.positions, token_ids)
            yield
        # Of the last layer only the state is always wanted, and queries and experts of rows that bring logits.
        final = self.layers[-1]
        given = final.enter_attention(streams, out)
        if last is False:
            final.attention.chunk(given, where, turns, state, (), kept)
            return None
        if last is True:
            wanted = last_query(where)
            y = _there(final.attention.chunk(given, where, turns, state, (wanted,), kept))
        else:
            wanted = Block(last, where)
            y = wanted.of(_there(final.attention.chunk(given, where, turns, state, blocks, kept)))
        output = Output(y, wanted.of(given.post), wanted.of(given.a))
        streams, positions = wanted.of(streams), wanted.of(where.positions)
        output = final.feed_forward(streams, output, positions, wanted.of(token_ids))
        return self._logits(streams, output)

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
        """Copy what a sequence's slot holds in every ring group to another ring row (``Segment.saves``)."""
        for name in self._rings:
            state[name][:, ring].copy_(state[name][:, slot])

    def starts(self, end: int) -> tuple[int, ...]:
        """No kernel of a chunk plans by the keys before it."""
        return ()

    def abridged(self, state: State) -> "tuple[NativeV4, State]":
        """The first layer of each kind that stands before the last one, and the last; a layer knows its place in the
        state, which stays whole. Of 32 layers of V4-Flash five.
        """
        few, kinds = copy(self), dict[object, NativeV4Layer]()
        for layer in self.layers[:-1]:
            kinds.setdefault(layer.kind, layer)
        few.layers = [*kinds.values(), self.layers[-1]]
        return few, state

    def _segment(self, ids: Tensor, s: Segment, rows: Sequence[int], state: State) -> Iterator[Tensor]:
        """Logits of the given rows of the batch, ascending; cut where ring states cannot be kept on the way."""
        for piece in pieces(s):
            first, end = s.offset + piece.start - s.start, s.offset + piece.stop - s.start
            own = [row - first for row in rows if first <= row < end]
            last: bool | Tensor = bool(own)
            if own and own != [end - first - 1]:
                last = torch.tensor(own, device=self.device)
            where = chunk_of(s, piece.start, piece.stop, self.device)
            logits = finished(self.chunk_layers(ids[first:end], where, state, last, piece.inside))
            if logits is not None:
                yield logits
            for ring in piece.saves:
                self.keep(s.slot, ring, state)

    def _streams(self, token_ids: Tensor) -> Tensor:
        x = functional.embedding(token_ids, self.embed)
        return x[:, None].expand(-1, self.hyper.mult, -1).contiguous()

    def _logits(self, streams: Tensor, last: "Output | None") -> Tensor:
        out = _there(last)
        rows = torch.arange(streams.shape[0], device=self.device)
        eps = self.hyper.eps, self.spec.rms_eps
        x = self._leave(streams, out.y, out.post, out.a, rows, self.head_mix, self.norm, *eps)
        return self._linear(x, self.lm_head, torch.float32)


@dataclass(frozen=True, slots=True)
class Output:
    """A sublayer's output y [T, D] and what takes it into the streams (hyper.Entered): post [T, m], a [T, m, m]."""

    y: Tensor
    post: Tensor
    a: Tensor


class NativeV4Layer:
    """Attention, then experts, each entered through its own hyper-connection."""

    def __init__(self, spec: ModelSpec, layer: int, load: Loader):
        if spec.hyper is None:
            raise ValueError(f"{spec.label} has no hyper-connections")
        name, device = f"layers.{layer}.", load.device.type
        self.hyper, self.eps, self.moe = spec.hyper, spec.rms_eps, spec.moe
        self.shared_in = load.matrix(*(f"{name}ffn.shared_experts.{w}" for w in ("w1", "w3")))
        self.shared_out = load.matrix(f"{name}ffn.shared_experts.w2")
        self.quantised = not isinstance(self.shared_out, Tensor)
        self.attention = NativeV4Attention(spec, layer, load, self.quantised)
        self.attn_norm, self.ffn_norm = (load.plain(f"{name}{part}_norm.weight") for part in ("attn", "ffn"))
        self.attn_mix, self.ffn_mix = (mix_weights(load, f"{name}hc_{part}") for part in ("attn", "ffn"))
        hashed = layer < spec.moe.hash_layers
        self.gate = load.plain(name + "ffn.gate.weight")
        self.table = load.plain(name + "ffn.gate.tid2eid", torch.int64) if hashed else None
        self.bias = None if hashed else load.plain(name + "ffn.gate.bias", torch.float32)
        self.experts = load.experts(name + "ffn.experts.", spec.moe.routed)
        self._enter, self._route = kernel(hyper.enter, device), kernel(experts.route, device)
        self._linear, self._gated = kernel(fp8.linear, device), kernel(fp8.gated, device)
        self._experts = kernel(experts.experts, device)

    @property
    def kind(self) -> tuple[int, bool, bool, str]:
        """What its launches hang on, beside a step's sizes: layers of one kind launch the same."""
        return self.attention.ratio, self.table is not None, self.quantised, self.experts.kind

    def enter_attention(self, streams: Tensor, last: Output | None) -> Entered:
        """streams [T, m, D] take in the last sublayer's output; the attention's input."""
        return self._entered(streams, last, self.attn_mix, self.attn_norm)

    def feed_forward(self, streams: Tensor, last: Output, positions: Tensor, token_ids: Tensor) -> Output:
        """The same, then the experts. positions: int32 [T], -1 for padding; token_ids: int64 [T]."""
        given, limit = self._entered(streams, last, self.ffn_mix, self.ffn_norm), self.moe.swiglu_limit
        u, q = given.u, given.q
        hidden = self._gated(self._linear(u if q is None else q, self.shared_in), limit, self.quantised)
        shared = self._linear(hidden, self.shared_out)
        ids, weights = self._route(u, self.gate, self.bias, self.moe, positions, self.table, token_ids)
        y = self._experts(u, q, ids, weights, self.experts, limit, shared)
        return Output(y, given.post, given.a)

    def _entered(self, streams: Tensor, last: Output | None, mix: HyperWeights, gain: Tensor) -> Entered:
        y, post, a = (None, None, None) if last is None else (last.y, last.post, last.a)
        h: HyperSpec = self.hyper
        return self._enter(streams, y, post, a, mix, gain, h.sinkhorn_iters, h.eps, self.eps, self.quantised)


def mix_weights(load: Loader, name: str) -> HyperWeights:
    """fn, base and scale of one hyper-connection, in the device's form."""
    fn, base, scale = (load.plain(f"{name}_{part}", torch.float32) for part in ("fn", "base", "scale"))
    return kernel(hyper.weights, load.device.type)(fn, base, scale)


def _there(value: Given | None) -> Given:
    if value is None:
        raise RuntimeError("a model without layers, or a chunk whose queries were not asked for")
    return value
