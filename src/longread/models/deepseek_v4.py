"""DeepSeek-V4 (Flash and Pro): embedding, hyper-connected layers of attention and experts, head.

Knows a ``ModelSpec`` and native weights; the state's layout is spec/state.py's. Runs any ragged batch: one-token rows
and chunks of several sequences side by side, each beginning and ending anywhere. The drafter (``mtp.*``) is not run.
Sources: arXiv 2606.19348, DeepSeek-V4 inference/model.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.dispatch import kernel
from longread.kernels.hyper import ref as hyper
from longread.kernels.linear import ref as linear
from longread.kernels.moe import ref as moe
from longread.kernels.norm import ref as norm
from longread.kernels.rope.ref import cos_sin, frequencies, turn
from longread.kernels.router import ref as router
from longread.models.inputs import StepInputs
from longread.models.v4_attention import Rotations, V4Attention
from longread.models.v4_step import Step, plan_step
from longread.spec.model import ModelSpec


class DeepseekV4:
    """A loaded V4 model. ``weights``: native names, dequantised; ``dtype``: compute type, float32 or bfloat16.

    Residual streams, mixing weights, routing, compressor states and softmax are float32 whatever ``dtype`` is.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], dtype: torch.dtype):
        if spec.compressed is None or spec.indexer is None or spec.compress_rope is None or spec.hyper is None:
            raise ValueError(f"{spec.label} is not a V4 model")
        self.spec, self.dtype, self.hyper = spec, dtype, spec.hyper
        self.window, self.top_k = spec.compressed.window, spec.indexer.top_k
        self.ratios = tuple(sorted(set(spec.compressed.ratios) - {0}))
        self.plain_freqs = frequencies(spec.rope, spec.compressed.rope_head_dim)
        self.compressed_freqs = frequencies(spec.compress_rope, spec.compressed.rope_head_dim)
        self.embed = weights["embed.weight"].to(dtype)
        self.lm_head = weights["head.weight"].to(dtype)
        self.norm = weights["norm.weight"].to(dtype)
        self.head_mix = _mix_weights(weights, "hc_head")
        device = self.embed.device.type
        self._rms_norm, self._collapse = kernel(norm.rms_norm, device), kernel(hyper.head, device)
        self._linear = kernel(linear.linear, device)
        self.layers = [V4Layer(spec, i, weights, dtype) for i in range(spec.layers)]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        """Run one step: reads and writes ``state``, returns float32 logits [R, vocab] of ``logit_rows``."""
        step = plan_step(inputs.segments, inputs.positions, self.ratios, self.top_k, self.window)
        rotations = self._rotations(inputs.positions, step)
        mult, hidden = self.hyper.mult, self.spec.hidden
        x = functional.embedding(inputs.token_ids, self.embed).float()
        streams = x[:, None].expand(-1, mult, hidden).contiguous()
        token_ids = inputs.token_ids
        for layer in self.layers[:-1]:
            layer.attend(streams, step, rotations, state)
            layer.feed_forward(streams, token_ids)
        # Nothing reads the last layer's experts but the head: only the wanted rows go through them.
        self.layers[-1].attend(streams, step, rotations, state)
        streams, token_ids = streams[inputs.logit_rows], token_ids[inputs.logit_rows]
        self.layers[-1].feed_forward(streams, token_ids)
        last = self._collapse(streams, *self.head_mix, self.hyper.eps, self.spec.rms_eps)
        return self._linear(self._rms_norm(last.to(self.dtype), self.norm, self.spec.rms_eps), self.lm_head).float()

    def _rotations(self, positions: Tensor, step: Step) -> Rotations:
        def turns(freqs: Tensor, at: Tensor) -> Tensor:
            return turn(*cos_sin(freqs, at))

        plain, compressed = turns(self.plain_freqs, positions), turns(self.compressed_freqs, positions)
        return Rotations(
            (plain, plain.conj().resolve_conj()),
            (compressed, compressed.conj().resolve_conj()),
            {ratio: turns(self.compressed_freqs, done.positions) for ratio, done in step.closing.items()},
        )


class V4Layer:
    """Attention, then experts, each wrapped in its own hyper-connection."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Mapping[str, Tensor], dtype: torch.dtype):
        if spec.hyper is None:
            raise ValueError(f"{spec.label} has no hyper-connections")
        name = f"layers.{layer}."
        self.hyper, self.eps, self.dtype = spec.hyper, spec.rms_eps, dtype
        self.attention, self.ffn = V4Attention(spec, layer, weights, dtype), V4Experts(spec, layer, weights, dtype)
        self.attn_norm = weights[name + "attn_norm.weight"].to(dtype)
        self.ffn_norm = weights[name + "ffn_norm.weight"].to(dtype)
        self.attn_mix, self.ffn_mix = _mix_weights(weights, name + "hc_attn"), _mix_weights(weights, name + "hc_ffn")
        device = self.attn_norm.device.type
        self._rms_norm = kernel(norm.rms_norm, device)
        self._mixed, self._update = kernel(hyper.mix, device), kernel(hyper.update, device)

    def attend(self, streams: Tensor, step: Step, rotations: Rotations, state: Mapping[str, Tensor]) -> None:
        """streams: float32 [T, m, D], overwritten."""
        u, post, a = self._mix(streams, self.attn_mix)
        y = self.attention(self._rms_norm(u, self.attn_norm, self.eps), step, rotations, state)
        self._update(streams, y, post, a)

    def feed_forward(self, streams: Tensor, token_ids: Tensor) -> None:
        """streams: float32 [T, m, D], overwritten. token_ids: int64 [T]."""
        if streams.shape[0]:
            u, post, a = self._mix(streams, self.ffn_mix)
            y = self.ffn(self._rms_norm(u, self.ffn_norm, self.eps), token_ids)
            self._update(streams, y, post, a)

    def _mix(self, streams: Tensor, mix: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        h = self.hyper
        u, post, a = self._mixed(streams, *mix, h.sinkhorn_iters, h.eps, self.eps)
        return u.to(self.dtype), post, a


class V4Experts:
    """Routed experts plus the shared one. The first layers take their experts from a token-id table."""

    def __init__(self, spec: ModelSpec, layer: int, weights: Mapping[str, Tensor], dtype: torch.dtype):
        self.moe = spec.moe
        name = f"layers.{layer}.ffn."
        self.gate = weights[name + "gate.weight"].float()
        hashed = layer < spec.moe.hash_layers
        self.table = weights[name + "gate.tid2eid"] if hashed else None
        self.bias = None if hashed else weights[name + "gate.bias"].float()
        parts = ("w1", "w3", "w2")
        self.w1, self.w3, self.w2 = (
            [weights[f"{name}experts.{e}.{w}.weight"].to(dtype) for e in range(spec.moe.routed)] for w in parts
        )
        self.s1, self.s3, self.s2 = (weights[f"{name}shared_experts.{w}.weight"].to(dtype) for w in parts)
        device = self.gate.device.type
        self._logits, self._route = kernel(router.router_logits, device), kernel(router.route, device)
        self._route_hash = kernel(router.route_hash, device)
        self._experts, self._mlp = kernel(moe.experts, device), kernel(moe.mlp, device)

    def __call__(self, u: Tensor, token_ids: Tensor) -> Tensor:
        """u: [T, D]; token_ids: int64 [T]. Returns [T, D]."""
        logits = self._logits(u, self.gate)
        if self.table is None:
            ids, weights = self._route(logits, self.moe, self.bias)
        else:
            ids, weights = self._route_hash(logits, self.moe, self.table[token_ids])
        limit = self.moe.swiglu_limit
        return self._experts(u, self.w1, self.w3, self.w2, ids, weights, limit).add_(
            self._mlp(u, self.s1, self.s3, self.s2, limit)
        )


def _mix_weights(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """fn, base and scale of one hyper-connection, float32."""
    fn, base, scale = (weights[f"{name}_{part}"].float() for part in ("fn", "base", "scale"))
    return fn, base, scale
