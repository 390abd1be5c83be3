"""A differentiable DeepSeek-V3: what the trainer optimises and what the exporter writes.

Knows the model's arithmetic over whole, right-padded sequences and the native names of its weights; knows no pages, no
data and no optimiser. ``longread.models.deepseek_v3`` is the model that serves; the tests hold the two equal. Sources:
arXiv 2412.19437 (V3), 2408.15664 (balancing without an auxiliary loss).

Weights are float32 masters. Under ``torch.autocast`` the matrix products run in bfloat16; norms, router, softmax and
the residual stream stay float32.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from longread.kernels.mla import ref as mla
from longread.kernels.rope import ref as rope
from longread.kernels.router import ref as router
from longread.spec.config_json import spec_from_config
from longread.spec.errors import MissingTensorError, TensorShapeError, UnexpectedTensorError, UnsupportedModelError
from longread.spec.loaded import is_drafter
from longread.spec.model import MLASpec, ModelSpec
from training.layers import fake_bf16, fake_fp8, linear, masked_experts, mlp, rms_norm, rotate

LATENT_EPS = 1e-6  # of the two norms inside the attention, whatever config.json says
PAD = 2  # the tokenizer's padding id: what fills the end of a row is no expert's load
EMBED_STD, SHARED_STD, HEAD_GAIN = 0.5, 0.25, 0.5


class Attention(nn.Module):
    """The weights of one MLA block, in native shapes ([out, in])."""

    NATIVE = (
        ("q_a", "self_attn.q_a_proj.weight"),
        ("q_a_norm", "self_attn.q_a_layernorm.weight"),
        ("q_b", "self_attn.q_b_proj.weight"),
        ("kv_a", "self_attn.kv_a_proj_with_mqa.weight"),
        ("kv_a_norm", "self_attn.kv_a_layernorm.weight"),
        ("kv_b", "self_attn.kv_b_proj.weight"),
        ("o", "self_attn.o_proj.weight"),
    )

    def __init__(self, spec: ModelSpec, m: MLASpec, q_rank: int):
        super().__init__()
        d, heads = spec.hidden, spec.heads
        self.q_a = _matrix(q_rank, d)
        self.q_a_norm = nn.Parameter(torch.ones(q_rank))
        self.q_b = _matrix(heads * (m.qk_nope_head_dim + m.qk_rope_head_dim), q_rank)
        self.kv_a = _matrix(m.kv_lora_rank + m.qk_rope_head_dim, d)
        self.kv_a_norm = nn.Parameter(torch.ones(m.kv_lora_rank))
        self.kv_b = _matrix(heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank)
        self.o = _matrix(d, heads * m.v_head_dim, gain=_output_gain(spec))


class Gated(nn.Module):
    """A dense or shared feed-forward network."""

    NATIVE = (("gate", "gate_proj.weight"), ("up", "up_proj.weight"), ("down", "down_proj.weight"))

    def __init__(self, spec: ModelSpec, width: int):
        super().__init__()
        self.gate = _matrix(width, spec.hidden)
        self.up = _matrix(width, spec.hidden)
        self.down = _matrix(spec.hidden, width, gain=_output_gain(spec))


class Routed(nn.Module):
    """The router and the stacked experts: gate and up [E, F, D], down [E, D, F].

    ``bias`` float32 [E] moves the choice only, so it has no gradient; ``load`` counts the tokens each expert got since
    the last ``update_bias``.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec):
        super().__init__()
        moe, d = spec.moe, spec.hidden
        self.router = _matrix(moe.routed, d)
        self.gate = _matrix(moe.routed, moe.intermediate, d)
        self.up = _matrix(moe.routed, moe.intermediate, d)
        self.down = _matrix(moe.routed, d, moe.intermediate, gain=_output_gain(spec))
        self.register_buffer("bias", torch.zeros(moe.routed))
        self.register_buffer("load", torch.zeros(moe.routed))

    @torch.no_grad()
    def update_bias(self, rate: float | Tensor) -> None:
        """One step of ``rate`` towards equal load, then count anew."""
        self.bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    """One block. ``dense`` is the feed-forward network of the first layers, the shared expert of the others."""

    def __init__(self, spec: ModelSpec, m: MLASpec, q_rank: int, index: int):
        super().__init__()
        first = index < spec.moe.first_dense
        self.norm = nn.Parameter(torch.ones(spec.hidden))
        self.attention = Attention(spec, m, q_rank)
        self.ffn_norm = nn.Parameter(torch.ones(spec.hidden))
        width = spec.moe.dense_intermediate if first else spec.moe.intermediate * spec.moe.shared
        self.dense = Gated(spec, width)
        self.routed = None if first else Routed(spec)


class TwinV3(nn.Module):
    """The whole model. ``fake_quant``: weights are rounded, straight through, as the checkpoint will store them.

    ``eager``: attention as a masked softmax in plain operations; otherwise torch's fused one, which is never slower on
    a GPU and needs no [T, T] memory. It starts as "no GPU here".
    """

    freqs: Tensor

    def __init__(self, config: Mapping[str, object], seed: int = 0):
        super().__init__()
        spec = spec_from_config(config)
        if spec.family != "deepseek_v3" or spec.mla is None or spec.mla.q_lora_rank is None or spec.moe.shared == 0:
            raise UnsupportedModelError("model_type", f"{spec.label} is no V3 with q_lora and shared experts")
        self.spec, self.mla = spec, spec.mla
        self.fake_quant = False
        self.eager = not torch.cuda.is_available()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # The part that all tokens share stands in for the bias that attention by position alone needs.
            shared = torch.randn(spec.hidden) * SHARED_STD
            self.embed = nn.Parameter(torch.randn(spec.vocab, spec.hidden) * EMBED_STD + shared)
            self.head = _matrix(spec.vocab, spec.hidden, gain=HEAD_GAIN)
            q_rank = spec.mla.q_lora_rank
            self.layers = nn.ModuleList(Layer(spec, spec.mla, q_rank, i) for i in range(spec.layers))
        self.norm = nn.Parameter(torch.ones(spec.hidden))
        self.register_buffer("freqs", rope.frequencies(spec.rope, spec.mla.qk_rope_head_dim), persistent=False)
        self.magnitude = rope.mscale(spec.rope.factor, spec.rope.mscale)
        self.magnitude /= rope.mscale(spec.rope.factor, spec.rope.mscale_all_dim)
        self.scale = mla.softmax_scale(spec.mla, spec.rope)
        self._norm, self._rotate, self._mlp, self._experts = rms_norm, rotate, mlp, masked_experts

    def compile_layers(self) -> None:
        """Compile what memory traffic bounds: norms, rotation, gating. Call it once, before the first step."""
        self._norm, self._rotate = torch.compile(rms_norm), torch.compile(rotate)
        self._mlp, self._experts = torch.compile(mlp), torch.compile(masked_experts)

    def hidden(self, ids: Tensor) -> Tensor:
        """int64 [B, T], padded on the right only -> float32 [B, T, D] after the final norm."""
        x = functional.embedding(ids, self._plain(self.embed))
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rope.cos_sin(self.freqs, positions, self.magnitude)
        cos, sin = cos[:, None], sin[:, None]  # broadcast over heads: [T, 1, rope / 2]
        counted = (ids != PAD).flatten()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = x + self._attention(layer, x, cos, sin)
            x = x + self._feed_forward(layer, x, counted)
        return self._norm(x, self._plain(self.norm), self.spec.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> float32 [..., vocab]."""
        return linear(hidden, self._plain(self.head)).float()

    def index_loss(self) -> Tensor | None:
        """V3 has no indexer."""
        return None

    def set_index_queries(self, where: Tensor | None) -> None:
        """V3 has no indexer: nothing is kept."""

    def update_router_bias(self, rate: float | Tensor) -> None:
        """After an optimiser step: overloaded experts become less likely, underloaded ones more (noaux_tc)."""
        for routed in self._routed():
            routed.update_bias(rate)

    def native(self) -> dict[str, Tensor]:
        """float32 copies on the CPU by native name, as ``write_checkpoint`` takes them; unrounded, without MTP."""
        return {name: view.detach().to("cpu", torch.float32, copy=True) for name, view in self._views()}

    @torch.no_grad()
    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what ``native`` (or the checkpoint reader) gives. MTP tensors are passed over.

        Raises MissingTensorError, TensorShapeError, UnexpectedTensorError.
        """
        views = dict(self._views())
        unknown = [name for name in tensors if name not in views and not is_drafter(name, self.spec)]
        if unknown:
            raise UnexpectedTensorError(f"{len(unknown)} tensors are not of this model, the first is {unknown[0]}")
        for name, view in views.items():
            if name not in tensors:
                raise MissingTensorError(f"{name} is not among the given weights")
            if tensors[name].shape != view.shape:
                raise TensorShapeError(f"{name}: expected {tuple(view.shape)}, given {tuple(tensors[name].shape)}")
            view.copy_(tensors[name])

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by optimiser: "muon" matrices [..., out, in], "adam" norms and routers, "embed" both ends."""
        found: dict[str, list[nn.Parameter]] = {"muon": [], "adam": [], "embed": [self.embed, self.head]}
        for name, p in self.named_parameters():
            if name in ("embed", "head"):
                continue
            # A router is a classifier over experts: a step of one size in every direction would saturate its sigmoid.
            matrix = p.ndim > 1 and not name.endswith(".router")
            found["muon" if matrix else "adam"].append(p)
        return found

    def _attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]: MLA in its expanded form, every head with its own keys and values."""
        a, m = layer.attention, self.mla
        h = self._norm(x, self._plain(layer.norm), self.spec.rms_eps)
        q = self._norm(linear(h, self._stored(a.q_a)), self._plain(a.q_a_norm), LATENT_EPS)
        q = linear(q, self._stored(a.q_b)).unflatten(-1, (self.spec.heads, -1))
        c, k_pe = linear(h, self._stored(a.kv_a)).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
        c = self._norm(c, self._plain(a.kv_a_norm), LATENT_EPS)
        kv = linear(c, self._stored(a.kv_b)).unflatten(-1, (self.spec.heads, -1))
        k_nope, v = kv.split([m.qk_nope_head_dim, m.v_head_dim], -1)
        q_nope, q_pe = q.split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
        k_pe = self._rotate(k_pe[:, :, None], cos, sin).expand(-1, -1, self.spec.heads, -1)
        q = torch.cat((q_nope, self._rotate(q_pe, cos, sin)), -1)
        k = torch.cat((k_nope, k_pe), -1)
        attend = attend_eager if self.eager else attend_fused
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.scale)
        return linear(out.transpose(1, 2).flatten(2), self._stored(a.o))

    def _feed_forward(self, layer: Layer, x: Tensor, counted: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; ``counted`` bool [B * T]: the tokens that count as load."""
        h = self._norm(x, self._plain(layer.ffn_norm), self.spec.rms_eps)
        d, r = layer.dense, layer.routed
        out = self._mlp(h, self._stored(d.gate), self._stored(d.up), self._stored(d.down), None)
        if r is None:
            return out
        flat = h.flatten(0, 1)
        gates = self._gates(r, flat, counted)
        mixed = self._experts(flat, self._stored(r.gate), self._stored(r.up), self._stored(r.down), gates, None)
        return out + mixed.view_as(out)

    def _gates(self, routed: Routed, x: Tensor, counted: Tensor) -> Tensor:
        """x [N, D] -> routing weights float32 [N, E], 0 for the experts that were not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = router.router_logits(x, self._plain(routed.router))
            chosen, weights = router.route(scores, self.spec.moe, routed.bias)
            gates = torch.zeros_like(scores).scatter(1, chosen, weights)
        if self.training:
            with torch.no_grad():
                routed.load.add_(((gates > 0) & counted[:, None]).sum(0))
        return gates

    def _stored(self, weight: Tensor) -> Tensor:
        """A projection as it is, or as the checkpoint will hold it: in FP8 tiles, or plain without quantisation."""
        quant = self.spec.quant
        if not self.fake_quant:
            return weight
        return self._plain(weight) if quant is None else fake_fp8(weight, quant.block, quant.power_of_two)

    def _plain(self, weight: Tensor) -> Tensor:
        """A tensor that is never quantised: as it is, or rounded to the checkpoint's plain type."""
        return fake_bf16(weight) if self.fake_quant and self.spec.torch_dtype == "bfloat16" else weight

    def _routed(self) -> Iterator[Routed]:
        return (m for m in self.modules() if isinstance(m, Routed))

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        """Every native tensor with the part of the parameters that holds it."""
        yield "model.embed_tokens.weight", self.embed
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            prefix = f"model.layers.{i}."
            yield f"{prefix}input_layernorm.weight", layer.norm
            yield f"{prefix}post_attention_layernorm.weight", layer.ffn_norm
            for own, name in Attention.NATIVE:
                yield prefix + name, getattr(layer.attention, own)
            shared = "" if layer.routed is None else "shared_experts."
            for own, name in Gated.NATIVE:
                yield f"{prefix}mlp.{shared}{name}", getattr(layer.dense, own)
            if layer.routed is None:
                continue
            yield f"{prefix}mlp.gate.weight", layer.routed.router
            yield f"{prefix}mlp.gate.e_score_correction_bias", layer.routed.bias
            for own, name in Gated.NATIVE:
                stack = getattr(layer.routed, own)
                for expert in range(stack.shape[0]):
                    yield f"{prefix}mlp.experts.{expert}.{name}", stack[expert]
        yield "model.norm.weight", self.norm
        yield "lm_head.weight", self.head


def attend_eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention: q, k [B, H, T, width], v [B, H, T, v] -> [B, H, T, v]; the softmax in float32."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v


def attend_fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``attend_eager`` by torch's fused kernel, whose flash backend wants values as wide as the keys."""
    width = v.shape[-1]
    common = max(width, q.shape[-1])
    q, k = (functional.pad(t, (0, common - t.shape[-1])) for t in (q, k))
    out = functional.scaled_dot_product_attention(
        q, k, functional.pad(v, (0, common - width)), is_causal=True, scale=scale
    )
    return out[..., :width]


def _matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """[..., out, in] that keeps the size of what it maps, times ``gain``."""
    return nn.Parameter(torch.randn(shape) * (gain * shape[-1] ** -0.5))


def _output_gain(spec: ModelSpec) -> float:
    """Two branches a layer add to the residual stream; together they shall not outgrow it."""
    return float((2 * spec.layers) ** -0.5)
