"""The context frontier: how long the first token takes as a context grows, for the price of one prefill.

Knows the asks of a point and what their outcomes say. Must not know files or the order of points.

One document of the longest length is cut at each length; a point asks for its first L tokens, as ids, so each prompt is
exactly the beginning of the next. What the point before left in the prefix cache is not computed again: the first
request of a point prefills the newest interval of tokens only, with all tokens before it as context. The same prompt
again is warm: all but its end comes from the cache.
"""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any, Final

from longread.measure.load.outcome import Outcome
from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.counting import Counter
from longread.measure.workloads.random_ids import drawn
from longread.measure.workloads.texts import compose
from longread.spec.errors import ConfigError

NEWEST, WARM, COLD = "newest interval", "warm", "cold"
DATASETS: Final = ("random", "documents")
NEAR = 1024  # tokens by which a cache may end before the last prompt did (its pages, its landing points)
DEFINITIONS: Final = {
    "newest_ttft_ms": "measured: time to the first token of a prompt of context_tokens whose first cached_tokens were "
    "in the prefix cache: the prefill of new_tokens, with a request's overhead and the loading of what was cached",
    "warm_ttft_ms": "measured: the same prompt again, median of the repeats: overhead, loading, and the last tokens",
    "tpot_ms": "measured: (E2E - TTFT) / (output tokens - 1) of this point's answers, alone on the server, median",
    "cold_ttft_ms": "derived, not measured: of a prompt of context_tokens with nothing cached. high: the sum of "
    "newest_ttft_ms up to here, which counts a request's overhead once a point; low: the same with warm_ttft_ms taken "
    "off each point but this one, which takes off a little work as well. The span is of that overhead only: an "
    "interval shorter than a step's token budget fills its step less than a cold prompt would, which makes both ends "
    "too high. "
    "measured: by a document of its own (--cold-at), where wanted: how far the derived ones can be trusted",
}


@dataclass(frozen=True, slots=True)
class Source:
    """The document, as the ids of its longest length."""

    ids: array
    described: dict[str, Any]


def source(dataset: str, seed: int, length: int, counter: Counter, vocabulary: int | None, language: str) -> Source:
    """A document of ``length`` tokens. Raises ConfigError where there is neither a tokenizer nor a vocabulary."""
    if dataset not in DATASETS:
        raise ConfigError(f"a context sweep cuts one document: --dataset-name {' or '.join(DATASETS)}, not {dataset}")
    described = {"workload": f"frontier of {dataset}", "seed": seed, "tokens": length, "lengths_by": counter.label}
    if dataset == "random":
        ids = range(vocabulary) if vocabulary else counter.vocabulary
        if ids is None:
            raise ConfigError("random token ids need --tokenizer PATH or --dataset-option vocab_size=N")
        return Source(array("q", drawn(Random(seed << 24), length, ids)), described)
    if counter.ids is None:
        raise ConfigError("a context sweep of documents needs the server's tokenizer, to cut them: give --tokenizer")
    text = compose("manual", language, seed, length + length // 64 + NEAR, counter).text
    found = array("q", counter.ids(text))
    if len(found) < length:
        raise ConfigError(f"the document has {len(found):,} tokens, not {length:,}: this is a fault of its length")
    return Source(found[:length], described)


def workload(found: Source, length: int, osl: int, repeats: int, extra: dict[str, object]) -> Workload:
    """The asks of a point, one after the other: its prompt, and that again ``repeats`` times."""
    prompt = tuple(found.ids[:length])
    kinds = [NEWEST, *[WARM] * repeats]
    asks = [
        Ask(f"{length}/{i}", None, prompt, osl, session="frontier", kind=kind, isl=length, extra=extra)
        for i, kind in enumerate(kinds)
    ]
    return Workload("frontier", int(found.described["seed"]), asks, {**found.described, "context": length})


def single(found: Source, length: int, osl: int, kind: str, extra: dict[str, object]) -> Workload:
    """One ask of the document's first ``length`` tokens."""
    ask = Ask(f"{kind}-{length}", None, tuple(found.ids[:length]), osl, kind=kind, isl=length, extra=extra)
    return Workload("frontier", int(found.described["seed"]), [ask], {**found.described, "context": length})


@dataclass(slots=True)
class Cold:
    """TTFT in ms of a prompt of which nothing is cached."""

    low: float | None = None
    high: float | None = None
    measured: float | None = None


@dataclass(slots=True)
class Step:
    """One point. ``reused``: None where the server does not tell cached tokens. ``base``: the earlier length whose
    prompt was in the cache, 0 for none, None where it cannot be said. ``note``: what is missing and why.
    """

    context_tokens: int
    cached_tokens: int | None
    new_tokens: int | None
    reused: bool | None
    base: int | None
    newest_ttft_ms: float | None
    warm_ttft_ms: float | None
    warm_samples_ms: list[float]
    warm_cached_tokens: int | None
    tpot_ms: float | None
    tpot_samples_ms: list[float]
    cold_ttft_ms: Cold
    note: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def step(length: int, outcomes: Sequence[Outcome], before: Sequence[dict[str, Any]]) -> Step:
    """What a point says. ``before``: the frontier blocks of the points before it, rising."""
    rows = [each for each in outcomes if each.status == "ok"]
    first = next((each for each in rows if each.kind == NEWEST), None)
    again = [each for each in rows if each.kind == WARM]
    size = first.prompt_tokens if first is not None and first.prompt_tokens is not None else length
    cached = first.cached_tokens if first is not None else None
    base = _base(cached, size, [each["context_tokens"] for each in before])
    warms, tpots = _milliseconds(again, "ttft"), _milliseconds(rows, "tpot")
    found = Step(
        size,
        cached,
        None if cached is None else size - cached,
        None if cached is None else bool(before) and base == before[-1]["context_tokens"],
        base,
        _one(first),
        median(warms) if warms else None,
        warms,
        next((each.cached_tokens for each in again), None),
        median(tpots) if tpots else None,
        tpots,
        Cold(),
        None,
    )
    found.cold_ttft_ms, found.note = _cold(found, before)
    return found


def _base(cached: int | None, size: int, lengths: Sequence[int]) -> int | None:
    """The longest earlier prompt that was cached but for its end; 0 where nothing was."""
    if cached is None:
        return None
    nothing = cached <= min(NEAR, size // 8)  # what all prompts have in common, a first page at most
    near = (n for n in lengths if abs(cached - n) <= min(NEAR, n // 4))
    return max(near, default=0 if nothing else None)


def _cold(found: Step, before: Sequence[dict[str, Any]]) -> tuple[Cold, str | None]:
    ttft = found.newest_ttft_ms
    if ttft is None:
        return Cold(), "the prompt was not answered"
    if not before and not found.cached_tokens:
        return Cold(ttft, ttft), None  # nothing was sent before it
    if found.cached_tokens is None:
        return Cold(), "the server does not tell cached tokens, so what was prefilled is not known"
    if found.base is None:
        cached = f"{found.cached_tokens:,} tokens were cached, which is no earlier point's prompt"
        return Cold(), f"{cached}: cold cannot be derived; were they read before? Then take another --seed"
    if found.base == 0:
        return Cold(ttft, ttft), "nothing was reused: this is the whole prefill"
    earlier = next(each for each in before if each["context_tokens"] == found.base)
    told = None if found.base == before[-1]["context_tokens"] else "more than the newest interval was prefilled"
    cold, warm = earlier["cold_ttft_ms"], earlier["warm_ttft_ms"]
    if cold["high"] is None or cold["low"] is None:
        return Cold(), "the cold time of the point before is not known"
    low = None if warm is None else max(cold["low"] - warm, 0.0) + ttft
    return Cold(low, cold["high"] + ttft), told


def _milliseconds(outcomes: Sequence[Outcome], name: str) -> list[float]:
    values = [getattr(each, name) for each in outcomes]
    return [value * 1000 for value in values if value is not None]


def _one(outcome: Outcome | None) -> float | None:
    return None if outcome is None or outcome.ttft is None else outcome.ttft * 1000


def seconds_left(steps: Sequence[dict[str, Any]], lengths: Sequence[int]) -> float | None:
    """Of the newest intervals of ``lengths`` that follow: a prefill takes a + b L seconds a token at length L, both
    from the last two points (one point: b is 0, and it is a lower bound). None before any point.
    """
    spans = [(each["base"] or 0, each["context_tokens"], each["newest_ttft_ms"]) for each in steps]
    known = [(low, high, ms / 1000) for low, high, ms in spans if ms is not None and high > low]
    if not known or not lengths:
        return 0.0 if not lengths else None
    rates = [((low + high) / 2, seconds / (high - low)) for low, high, seconds in known[-2:]]
    slope = 0.0
    if len(rates) == 2 and rates[1][0] > rates[0][0]:
        slope = max((rates[1][1] - rates[0][1]) / (rates[1][0] - rates[0][0]), 0.0)
    middle, rate = rates[-1]
    at, total = known[-1][1], 0.0
    for length in lengths:
        total += max(length - at, 0) * max(rate + slope * ((length + at) / 2 - middle), 0.0)
        at = length
    return total
