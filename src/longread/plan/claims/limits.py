"""The least that physics allows, taken generously: what a claim must clear whatever the engine does.

Knows rates and bytes of one model on one machine, no engine. Everything is generous to the claimant: all cards work on
one request, nothing is lost or repeated, and a card's rate is the larger of its sheet and what was measured.
"""

from dataclasses import dataclass, replace

from longread.plan.communication import host_peak
from longread.plan.deployment import Deployment, ExpertFormat, Strategy, Workload
from longread.plan.floor import Floor, cached_bytes, cold_floor, peak, suffix_floor
from longread.plan.ops import decode_ops
from longread.plan.shards import weight_bytes
from longread.plan.space import Fixed, cache_formats
from longread.spec.count import PACKINGS, kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.hardware import Card, Hardware
from longread.spec.model import ModelSpec

# Most tokens that a step can give with drafts: seven drafts, all accepted. Published means: 1.8 (V3's MTP,
# arXiv 2412.19437), 2.5 (V4), 4.83 (V3's MTP tuned for seven drafts).
MOST_A_STEP, PUBLISHED_A_STEP = 8, 4.83
# What approximate indexing saves: IndexCache (arXiv 2603.12201) scores in a quarter of the layers, HISA (2603.28458)
# is 3.75 to 4 times faster there. Neither is exact; that the gains multiply is assumed in the claim's favour.
INDEX_SAVED = 16.0
_CACHE_READERS = ("attention", "sparse attention", "decode attention", "index")


@dataclass(frozen=True, slots=True)
class Rung:
    """A floor, and what one has to grant for it (empty: the model as it was published)."""

    grant: str
    floor: Floor


def generous(hardware: Hardware) -> Hardware:
    """The same with each rate the larger of sheet and measurement, and INT8 taken for FP8 where a card lacks it."""
    card = hardware.card
    flops = dict(card.flops)
    for name, figure in card.measured_flops.items():
        if name not in flops or figure.value > flops[name].value:
            flops[name] = figure
    if "fp8" not in flops and "int8" in flops:
        flops["fp8"] = flops["int8"]
    bandwidth = card.bandwidth
    if card.measured_bandwidth is not None and card.measured_bandwidth.value > bandwidth.value:
        bandwidth = card.measured_bandwidth
    return replace(hardware, card=replace(card, flops=flops, bandwidth=bandwidth))


def cold_rungs(spec: ModelSpec, hardware: Hardware, isl: int) -> list[Rung]:
    """Floors of a prompt that nobody read before, from the model as published to all that can be granted."""
    plain = cold_floor(spec, hardware, isl)
    rungs = [Rung("", plain)]
    if spec.quant is not None:
        low = cold_floor(spec, hardware, isl, attention="fp8", experts=_fastest_experts(hardware.card))
        if low.seconds < plain.seconds * 0.999:
            rungs.append(Rung("attention in FP8 (engines take BF16)", low))
    if spec.indexer is not None:
        last = rungs[-1]
        saved = replace(last.floor, indexer=last.floor.indexer / INDEX_SAVED)
        grant = "an indexer that skips most scores (IndexCache, HISA; not exact)"
        rungs.append(Rung(f"{last.grant} and {grant}" if last.grant else grant, saved))
    return rungs


def _fastest_experts(card: Card) -> str:
    return "fp4" if "fp4" in card.flops else "fp8"


def suffix_seconds(spec: ModelSpec, hardware: Hardware, suffix: float, isl: int, *, granted: bool = False) -> float:
    """Least seconds of matrix work for ``suffix`` new tokens at the end of ``isl``; fractions of a token are allowed.

    ``granted``: attention in FP8, too. Linear in the suffix, except where dense MLA becomes cheaper by projecting the
    prefix again.
    """
    options = {"attention": "fp8", "experts": _fastest_experts(hardware.card)} if granted else {}
    linear = suffix_floor(spec, hardware, 1, max(isl - 1, 0), **options).compute * suffix
    if spec.mla is None or spec.indexer is not None or suffix < 100:
        return linear
    whole = int(suffix)
    return min(linear, suffix_floor(spec, hardware, whole, max(isl - whole, 0), **options).compute)


def largest_suffix(spec: ModelSpec, hardware: Hardware, isl: int, budget: float) -> float:
    """New tokens that ``budget`` seconds of all cards at their peak allow; below one a fraction, at most ``isl``."""
    if budget <= 0:
        return 0.0
    one = suffix_seconds(spec, hardware, 1, isl)
    low = min(budget / one, float(isl))
    if spec.mla is None or spec.indexer is not None or low < 100:
        return low
    high = float(isl)
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if suffix_seconds(spec, hardware, middle, isl) <= budget else (low, middle)
    return low


def ring_rebuild_tokens(spec: ModelSpec) -> int:
    """Tokens that rebuild V4's windows and open groups exactly where no snapshot was kept; 0 for other models.

    Each layer's window needs the layer below over the window before it: layers x window.
    """
    if spec.compressed is None:
        return 0
    layers = spec.shared_kv.kv_sources[-1] if spec.shared_kv is not None else spec.layers  # V4.1 reads prompts half-way
    return layers * spec.compressed.window


def load_rates(hardware: Hardware) -> dict[str, float]:
    """Bytes/s at most into all cards together, by tier, where the hardware says."""
    found, card = {}, hardware.card
    link = host_peak(card)
    if link is not None:
        found["host"] = link * hardware.total_gpus
    elif card.architecture == "cpu":
        found["host"] = card.bandwidth.value
    if hardware.disk_read is not None:
        found["disk"] = hardware.disk_read.value * hardware.nodes
    return found


def smallest_cache(spec: ModelSpec, packing: str | None = None) -> str:
    """The packing with the fewest bytes a token that this model has a record for, or the one that is named."""
    if packing is not None:
        return packing
    sizes = {}
    for name in PACKINGS:
        try:
            sizes[name] = sum(kv_bytes_per_token(spec, name).values())
        except ConfigError:
            continue
    return min(sizes, key=lambda name: sizes[name])


def usual_cache(spec: ModelSpec, hardware: Hardware, packing: str | None = None) -> str:
    """What engines store there, as the search takes it, or what is named."""
    return cache_formats(spec, hardware, Fixed(cache=packing))[0]


def weights_least(spec: ModelSpec, hardware: Hardware, experts: ExpertFormat | None = None) -> tuple[int, ExpertFormat]:
    """Bytes of all weights over all cards with experts of four bits, and the format's name."""
    form: ExpertFormat = experts or ("native" if spec.quant is None or spec.quant.experts == "fp4" else "int4")
    whole = Deployment(spec, hardware, Strategy(), experts=form)
    return sum(weight_bytes(whole).values()), form


def weights_native(spec: ModelSpec, hardware: Hardware) -> int:
    return sum(weight_bytes(Deployment(spec, hardware, Strategy())).values())


def usable_total(hardware: Hardware) -> float:
    return hardware.card.usable.value * hardware.total_gpus


def sessions_most(spec: ModelSpec, hardware: Hardware, context: int, packing: str | None = None) -> float:
    """Sequences of ``context`` tokens that fit beside the smallest weights, nothing else in memory, all sharded."""
    room = usable_total(hardware) - weights_least(spec, hardware)[0]
    return max(room, 0.0) / cached_bytes(spec, smallest_cache(spec, packing), max(context, 1))


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step over all cards: seconds of matrix work, and of reading weights and cache once."""

    work: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.work, self.traffic)

    def per_token(self, a_step: float) -> float:
        """Seconds per token of each stream where a step gives ``a_step`` tokens: reading is shared, work is not."""
        return max(self.work, self.traffic / a_step)


def decode_bound(
    spec: ModelSpec,
    hardware: Hardware,
    batch: int,
    context: int,
    *,
    experts: ExpertFormat = "native",
    packing: str | None = None,
    shared: bool = False,
) -> Step:
    """The least step for ``batch`` streams that see ``context`` tokens each, on all cards of ``hardware``.

    ``shared``: they see the same document, whose cache is then read once for all (no engine must do so).
    """
    d = Deployment(
        spec,
        hardware,
        Strategy(),
        experts=experts,
        cache=smallest_cache(spec, packing),
    )
    card, cards = hardware.card, hardware.total_gpus
    ops = [op for op in decode_ops(d, batch, max(context, 1)) if op.kind not in ("elementwise", "top-k")]
    # 4-bit weights are granted the fastest rate that the card has for the activations' FP8.
    rates = {"bf16": "fp8"} if spec.quant is not None else {}
    work = sum(op.flops / peak(card, rates.get(op.rate, op.rate)) for op in ops)
    readers = batch if shared else 1
    moved = sum(op.bytes / (readers if op.kind in _CACHE_READERS else 1) for op in ops)
    return Step(work / cards, moved / card.bandwidth.value / cards)


def granted_floors(
    spec: ModelSpec, hardware: Hardware, w: Workload, experts: ExpertFormat | None = None, packing: str | None = None
) -> dict[str, float]:
    """Seconds of *ttft* and *tpot* below which no engine can be, with all that can be granted: attention in FP8, an
    indexer that skips most scores, and, unless ``experts`` and ``packing`` are fixed, 4-bit experts and the smallest
    cache; every step gives eight tokens.
    """
    best, new = generous(hardware), max(w.isl - w.cached, 1)
    if w.cached:
        work = suffix_seconds(spec, best, new, w.isl, granted=True)
        first = max(work, suffix_floor(spec, best, new, w.cached).memory / 2)
    else:
        first = cold_rungs(spec, best, w.isl)[-1].floor.seconds
    form = weights_least(spec, best, experts)[1]
    step = decode_bound(spec, best, 1, w.isl + w.osl // 2, experts=form, packing=packing)
    return {"ttft": first, "tpot": step.per_token(MOST_A_STEP)}
