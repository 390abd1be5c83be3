"""Which share of a card's peaks each kind of work reaches in single kernels, and what a launch costs.

The table is measured on one H200 (132 SMs, 700 W; torch 2.11 + CUDA 13.0, kernels as shipped in vLLM 0.26.0:
DeepGEMM, FlashMLA, FA3); other cards are projected. Whole engines are slower than their kernels: that is what
``calibrate`` adds from runs.

Projection: a kernel's time is its tensor-core time plus a rest (loads, softmax, epilogues) that scales with the SMs. A
card with a lower tensor rate per SM hides more of the rest. H20 against H200: tensor time x 6.7, rest x 132/78 = 1.7.
Bandwidth-bound work scales with the bandwidth. Where a user's own card was measured (``longread probe``), its shares
follow what it reached (``reached``).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from longread.plan.cards import card as table_card
from longread.plan.cards import find_card
from longread.plan.floor import peak, peak_name
from longread.plan.ops import Kind, Op
from longread.spec.hardware import Card


@dataclass(frozen=True, slots=True)
class Factor:
    """Shares of the peak FLOP rate and of the peak bandwidth, and where they come from."""

    flops: float
    bytes: float
    source: str


# Peak of the H200 sheet: 1,979 FP8 and 989 BF16 TFLOP/s, 4.8 TB/s.
STREAM_SHARE = 0.30
_H200: dict[Kind, Factor] = {
    "linear": Factor(0.68, 0.50, "DeepGEMM FP8 block, M 8192: 1,196-1,434 TFLOP/s; M 1-128: 1.1-3.0 TB/s of weights"),
    "experts": Factor(0.58, 0.50, "DeepGEMM grouped FP8, 64 experts x 256-1,024 rows: 1,029-1,301 TFLOP/s"),
    "attention": Factor(0.73, 0.60, "FA3 causal: 658 (16K, 128/128) and 795 TFLOP/s (32K, 192/128)"),
    "sparse attention": Factor(0.45, 0.60, "FlashMLA sparse prefill: 372-543 TFLOP/s"),
    "decode attention": Factor(0.60, 0.45, "FlashMLA dense decode: 0.92-2.58 TB/s of cache; 660 TFLOP/s on H800"),
    "index": Factor(0.53, 0.60, "indexer MQA logits FP8: 965-1,077 TFLOP/s"),
    "top-k": Factor(1.0, 0.31, "prefill top-k: 1.3-1.7 TB/s of scores"),
    "elementwise": Factor(1.0, STREAM_SHARE, "chunk time that products leave over: V4-Flash 32 layers, V3 4 layers"),
    "head": Factor(0.70, 0.75, "BF16 GEMM 756 TFLOP/s; device read 3.93 TB/s"),
}
# BF16 products with 4-bit weights (Marlin) on the same card: torch grouped BF16 reaches 725 of 989 TFLOP/s without the
# dequantisation; V4-Flash chunk times leave about 6 ms a layer and 8,192 tokens for Marlin.
WEIGHT_ONLY_SHARE = 0.42
_WEIGHT_ONLY = Factor(WEIGHT_ONLY_SHARE, 0.50, "V4-Flash 32 layers with Marlin against Humming experts, chunk times")
# A CPU's peaks are what a probe measured, so shares are of large products and copies of the same machine. All assumed.
_CPU: dict[Kind, Factor] = {
    "linear": Factor(0.60, 0.60, "assumed"),
    "experts": Factor(0.35, 0.50, "assumed"),
    "attention": Factor(0.25, 0.50, "assumed"),
    "sparse attention": Factor(0.20, 0.30, "assumed"),
    "decode attention": Factor(0.25, 0.50, "assumed"),
    "index": Factor(0.30, 0.50, "assumed"),
    "top-k": Factor(1.0, 0.10, "assumed"),
    "elementwise": Factor(1.0, 0.30, "assumed"),
    "head": Factor(0.60, 0.60, "assumed"),
}
LAUNCH_SECONDS = 1.4e-6  # between kernels of a CUDA graph: V4-Flash 32 layers, decode at batch 1 beyond its bytes
# Steps that no graph covers (prefill) cannot be issued faster than this, once and per layer: short suffixes of 4 to 32
# layers, one H200, vLLM 0.26.0 (V4 about 4 ms, V3 and V3.2 about 2.5 ms a layer), and 180 ms for 128 tokens of R1's 61
# layers on SGLang (tenstorrent/tt-inference-server#356). Longread's GPU step is not measured: half is assumed.
ISSUE_ONCE = 12e-3
ISSUE_SECONDS = {"v4": 4.0e-3, "mla": 2.5e-3}
OWN_ISSUE_SHARE = 0.5
STEP_SECONDS = 1.0e-3  # scheduling and sampling of a step that nothing hides; assumed


def factor(op: Op, card: Card) -> Factor:
    """Shares of this card's peaks for one op, projected from the H200 where the card is another."""
    if card.architecture == "cpu":
        return _CPU[op.kind]
    base = _H200[op.kind]
    if op.kind == "experts" and op.rate == "bf16":
        base = _WEIGHT_ONLY
    moved = min(base.bytes * reached(card, "bandwidth"), 1.0)
    if op.flops == 0.0:
        return Factor(base.flops, moved, base.source)
    worked = _projected(base.flops, *_pace(card)) * reached(card, peak_name(card, op.rate))
    return Factor(min(worked, 1.0), moved, base.source)


def _pace(card: Card) -> tuple[float, float]:
    """Tensor rate and SMs of this card, an H200's as 1."""
    bf16, sms = _h200()
    tensor = peak(card, "bf16") / bf16
    return tensor, card.sms.value / sms if card.sms is not None else min(tensor, 1.0)


@cache
def _h200() -> tuple[float, float]:
    known = table_card("H200")
    assert known.sms is not None
    return peak(known, "bf16"), known.sms.value


def _projected(share: float, tensor: float, sms: float) -> float:
    """1 / (tensor + rest), with the rest shrunk by how much less tensor rate an SM of this card has."""
    return 1.0 / (1.0 + (1.0 / share - 1.0) * tensor / sms)


def reached(card: Card, rate: str) -> float:
    """How much larger a share of its peak this very card was measured at than its kind is; 1 where it was not.

    ``rate``: a type of ``flops`` that the card has, or "bandwidth". The table's card of the same name is its kind; for
    a card that is not in the table, or not measured there, the H200's share is projected. So a throttled card plans
    slower than a healthy one, and where measured rates stand for unknown peaks, no share is taken off twice.
    """
    if card.architecture == "cpu":
        return 1.0  # its peaks are measured, and its shares are of those
    found = _share(card, rate)
    if found is None:
        return 1.0
    return found / _usual(card.name, rate, *_pace(card))


def _share(card: Card, rate: str) -> float | None:
    """What a large product or copy reached of the peak, where somebody measured it."""
    figure = card.measured_bandwidth if rate == "bandwidth" else card.measured_flops.get(rate)
    whole = card.bandwidth if rate == "bandwidth" else card.flops[rate]
    return None if figure is None else figure.value / whole.value


@lru_cache(maxsize=256)
def _usual(name: str, rate: str, tensor: float, sms: float) -> float:
    known = find_card(name)
    if known is not None and rate in (*known.flops, "bandwidth") and (share := _share(known, rate)) is not None:
        return share
    share = _share(table_card("H200"), rate if rate in ("bandwidth", "fp8", "bf16", "tf32", "fp32") else "fp8")
    assert share is not None
    return share if rate == "bandwidth" else _projected(share, tensor, sms)


def seconds(op: Op, card: Card) -> float:
    """Time of one op on one card: the larger of its work and its traffic, and a gap before each kernel."""
    share = factor(op, card)
    work = op.flops / (peak(card, op.rate) * share.flops) if op.flops else 0.0
    traffic = op.bytes / (card.bandwidth.value * share.bytes)
    gaps = op.launches * LAUNCH_SECONDS if card.architecture != "cpu" else 0.0
    return max(work, traffic) + gaps
