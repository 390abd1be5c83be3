"""What a request costs before the engine steps: body, tokens, hashes, and bringing a cache back from its tier.

Rates of CPU work per token are measured; the parts have the names under which Longread's server reports them.
"""

from dataclasses import dataclass

from longread.plan.communication import host_rate
from longread.plan.deployment import Deployment, EngineName, Tier
from longread.plan.floor import cached_bytes
from longread.plan.shards import cache_share
from longread.spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Seconds a token, and of block-wise work a block of ``block`` tokens (V4, V3.2, others)."""

    parse: float
    tokenise: float
    hash_token: float
    hash_block: float
    block: tuple[int, int, int]
    source: str


_TOKENIZERS = 1.69 / 528952  # s a token: ``tokenizers``, plain, 2 cores
_PARSE = 0.0052 / 528952
RATES: dict[EngineName, FrontEnd] = {
    "longread": FrontEnd(
        _PARSE, 0.034 / 528952, 0.0124 / 528952, 0.0, (256, 256, 256), "results/frontend-cpu.json, 2 cores, new text"
    ),
    "vllm": FrontEnd(
        _PARSE,
        _TOKENIZERS,
        0.0,
        5.0e-6,
        (4, 64, 16),
        "one H200's host: 3-4 us a block to hash and about 1.5 us to look up (vLLM 0.26.0); tokenizers on 2 cores",
    ),
    "sglang": FrontEnd(
        _PARSE, _TOKENIZERS, 0.224 / 524288, 0.0, (1, 1, 1), "radix comparison of 512K ids in 224 ms; tokenizers"
    ),
}


def front_end(d: Deployment, tokens: int, *, text: bool = True) -> dict[str, float]:
    """Seconds by part for a prompt of ``tokens`` tokens. ``text``: it comes as text over HTTP, else as ids."""
    rates = RATES[d.engine]
    parts: dict[str, float] = {}
    if text:
        parts |= {"receive": 1e-3 + tokens * 4 / 10e9, "parse": tokens * rates.parse, "render": 1e-4}
        parts["tokenise"] = tokens * rates.tokenise
    kind = 0 if d.spec.mla is None else (1 if d.spec.indexer is not None else 2)
    parts["hash and lookup"] = tokens * rates.hash_token + tokens / rates.block[kind] * rates.hash_block
    return parts


def load_seconds(d: Deployment, tokens: int, tier: Tier) -> dict[str, float]:
    """Seconds to bring the cache of ``tokens`` tokens to the cards, by tier; nothing for *device*.

    Every TP rank holds the whole cache, so each loads all of it over its own link; pp splits it, and cp where it splits
    the cache (``shards.cache_share``). From disk a machine reads once, and the links work meanwhile. Raises
    ``ConfigError`` where a needed rate is not known.
    """
    if tier == "device":
        return {}
    card, s = d.hardware.card, d.strategy
    nbytes = cached_bytes(d.spec, d.cache, tokens)
    if card.architecture == "cpu":
        over_link = nbytes / (card.bandwidth.value / 2)  # a copy reads and writes
    elif (rate := host_rate(card)) is None:
        raise ConfigError(f"{card.name} has no PCIe rate: give `pcie` in the hardware file to plan loads from {tier}")
    else:
        over_link = nbytes / (cache_share(d) * s.pp) / rate
    if tier == "host":
        return {"load host": over_link}
    if d.hardware.disk_read is None:
        raise ConfigError("the disk's read rate is not known: give `disk_read` in the hardware file, or run the probe")
    return {"load disk": max(nbytes / d.hardware.disk_read.value, over_link)}
