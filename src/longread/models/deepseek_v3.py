"""DeepSeek V2-Lite, V2, V3, R1 and V3.1: latent attention, routed experts, YaRN.

Knows native weight names and the order of operations; knows no pages beyond what ``kernels.mla`` resolves, no
scheduling and no files. Sources: arXiv 2405.04434 (V2), 2412.19437 (V3); deepseek-ai/DeepSeek-V3 inference/model.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.dispatch import kernel
from longread.kernels.linear import ref as linear
from longread.kernels.mla import ref as mla
from longread.kernels.moe import ref as moe
from longread.kernels.norm import ref as norm
from longread.kernels.rope import ref as rope
from longread.kernels.router import ref as router
from longread.models.inputs import StepInputs
from longread.spec.errors import MissingTensorError, UnsupportedModelError
from longread.spec.model import MLASpec, ModelSpec

FAMILIES = ("deepseek_v2", "deepseek_v3")
# The two norms inside the attention keep this epsilon whatever config.json says: the published code never passes it on.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Attention:
    """q_a None: ``q_b`` is the one full query projection. With q_a, ``down`` holds q_a and kv_a in one matrix, of which
    ``q_a`` and ``kv_a`` are views.
    """

    norm: Tensor
    down: Tensor | None
    q_a: Tensor | None
    q_a_norm: Tensor | None
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    kv_b: Tensor
    o: Tensor


@dataclass(frozen=True, slots=True)
class Gated:
    """A dense (or shared-expert) feed-forward network."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Routed:
    """Expert weights stay the tensors they were given as: never copied, they may be views of a mapped file."""

    router: Tensor
    bias: Tensor | None
    gate: Sequence[Tensor]
    up: Sequence[Tensor]
    down: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    ffn_norm: Tensor
    dense: Gated | None
    routed: Routed | None


class DeepseekV3:
    """``forward`` over a ragged batch. Weights by native name; small ones are fused or cast once, experts never."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], dtype: torch.dtype):
        if spec.family not in FAMILIES or spec.mla is None:
            raise UnsupportedModelError("model_type", f"{spec.family} is not one of {', '.join(FAMILIES)}")
        self.spec = spec
        self.mla = spec.mla
        self.dtype = dtype
        source = _Source(weights, dtype)
        self.embed = source("model.embed_tokens.weight")
        self.norm = source("model.norm.weight")
        self.head = self.embed if spec.tie_embeddings else source("lm_head.weight")
        self.layers = [_layer(spec, spec.mla, source, i) for i in range(spec.layers)]
        self.freqs = rope.frequencies(spec.rope, spec.mla.qk_rope_head_dim)
        self.magnitude = rope.mscale(spec.rope.factor, spec.rope.mscale)
        self.magnitude /= rope.mscale(spec.rope.factor, spec.rope.mscale_all_dim)
        self.scale = mla.softmax_scale(spec.mla, spec.rope)
        self.policy = mla.policy(spec.mla)
        device = self.embed.device.type
        self._rms_norm = kernel(norm.rms_norm, device)
        self._rotate = kernel(rope.rotate_, device)
        self._router_logits = kernel(router.router_logits, device)
        self._route = kernel(router.route, device)
        self._linear = kernel(linear.linear, device)
        self._mlp = kernel(moe.mlp, device)
        self._experts = kernel(moe.experts, device)
        self._write = kernel(mla.write, device)
        self._attend = kernel(mla.attend, device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        """Run one step and write its latents into ``state["latent"]`` [layers, pages, 256, kv_lora + rope].

        Returns float32 logits [R, vocab] of ``inputs.logit_rows``. Behind the last layer's latents only those rows
        are computed: a prompt chunk that is not the last needs no more of that layer.
        """
        latent = state["latent"]
        x = functional.embedding(inputs.token_ids, self.embed)
        turns = rope.turn(*rope.cos_sin(self.freqs, inputs.positions, self.magnitude))
        every = mla.spans(inputs.segments)
        rows = mla.storage_rows(every)
        step = mla.reading(every, self.policy)
        wanted = inputs.logit_rows.tolist()
        narrow = None if wanted == list(range(x.shape[0])) else inputs.logit_rows
        for i, layer in enumerate(self.layers[:-1]):
            x = self._attention(layer.attention, x, latent[i], turns, rows, step, None)
            x = self._feed_forward(layer, x)
        if narrow is not None:
            step = mla.reading(mla.select(every, wanted), self.policy)
        x = self._attention(self.layers[-1].attention, x, latent[-1], turns, rows, step, narrow)
        if x.shape[0] == 0:
            return torch.empty(0, self.spec.vocab)
        x = self._feed_forward(self.layers[-1], x)
        x = self._rms_norm(x, self.norm, self.spec.rms_eps)
        return self._linear(x, self.head).float()

    def _attention(
        self,
        layer: Attention,
        x: Tensor,
        latent: Tensor,
        turns: Tensor,
        rows: Tensor,
        step: mla.Reading,
        wanted: Tensor | None,
    ) -> Tensor:
        """x plus attention: [T, D] -> [T, D], or of the rows ``wanted`` only."""
        m = self.mla
        h = self._rms_norm(x, layer.norm, self.spec.rms_eps)
        if wanted is None and layer.down is not None:
            q, c, k_pe = self._linear(h, layer.down).split_with_sizes(
                (layer.down.shape[0] - layer.kv_a.shape[0], m.kv_lora_rank, m.qk_rope_head_dim), -1
            )
        else:
            c, k_pe = self._linear(h, layer.kv_a).split_with_sizes((m.kv_lora_rank, m.qk_rope_head_dim), -1)
            q = h
        self._write(latent, rows, self._rms_norm(c, layer.kv_a_norm, LATENT_EPS), self._rotate(k_pe, turns))
        if wanted is not None:
            x, q, turns = x[wanted], h[wanted], turns[wanted]
            if x.shape[0] == 0:
                return x
            if layer.q_a is not None:
                q = self._linear(q, layer.q_a)
        if layer.q_a_norm is not None:
            q = self._rms_norm(q, layer.q_a_norm, LATENT_EPS)
        q = self._linear(q, layer.q_b).view(x.shape[0], self.spec.heads, -1)
        self._rotate(q[..., m.qk_nope_head_dim :], turns[:, None])
        mixed = self._attend(q, latent, layer.kv_b, step, self.scale)
        return x + self._linear(mixed.flatten(1), layer.o)

    def _feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        h = self._rms_norm(x, layer.ffn_norm, self.spec.rms_eps)
        if layer.routed is not None:
            r = layer.routed
            ids, weights = self._route(self._router_logits(h, r.router), self.spec.moe, r.bias)
            x = x + self._experts(h, r.gate, r.up, r.down, ids, weights)
        if layer.dense is not None:
            x = x + self._mlp(h, layer.dense.gate, layer.dense.up, layer.dense.down)
        return x


class _Source:
    """Weights by native name in one dtype; a missing one is named."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype):
        self.weights = weights
        self.dtype = dtype

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.weights:
            raise MissingTensorError(f"{name} is not among the loaded weights; check the checkpoint's index")
        return self.weights[name].to(dtype or self.dtype)


def _layer(spec: ModelSpec, m: MLASpec, source: _Source, index: int) -> Layer:
    name = f"model.layers.{index}."
    attention = _attention_weights(spec, m, source, name + "self_attn.", source(name + "input_layernorm.weight"))
    ffn_norm = source(name + "post_attention_layernorm.weight")
    if index < spec.moe.first_dense:
        return Layer(attention, ffn_norm, _gated(source, name + "mlp."), None)
    experts = [_gated(source, f"{name}mlp.experts.{e}.") for e in range(spec.moe.routed)]
    biased = spec.moe.method == "noaux_tc"
    routed = Routed(
        router=source(name + "mlp.gate.weight", torch.float32),
        bias=source(name + "mlp.gate.e_score_correction_bias", torch.float32) if biased else None,
        gate=[e.gate for e in experts],
        up=[e.up for e in experts],
        down=[e.down for e in experts],
    )
    return Layer(attention, ffn_norm, _gated(source, name + "mlp.shared_experts.") if spec.moe.shared else None, routed)


def _attention_weights(spec: ModelSpec, m: MLASpec, source: _Source, name: str, norm_weight: Tensor) -> Attention:
    kv_a = source(name + "kv_a_proj_with_mqa.weight")
    down = q_a = q_a_norm = None
    if m.q_lora_rank is not None:
        down = torch.cat((source(name + "q_a_proj.weight"), kv_a))
        q_a, kv_a = down[: m.q_lora_rank], down[m.q_lora_rank :]
        q_a_norm = source(name + "q_a_layernorm.weight")
    return Attention(
        norm=norm_weight,
        down=down,
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=source(name + ("q_proj.weight" if m.q_lora_rank is None else "q_b_proj.weight")),
        kv_a=kv_a,
        kv_a_norm=source(name + "kv_a_layernorm.weight"),
        kv_b=source(name + "kv_b_proj.weight").view(spec.heads, -1, m.kv_lora_rank),
        o=source(name + "o_proj.weight"),
    )


def _gated(source: _Source, name: str) -> Gated:
    return Gated(source(name + "gate_proj.weight"), source(name + "up_proj.weight"), source(name + "down_proj.weight"))
