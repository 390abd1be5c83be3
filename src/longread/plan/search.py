"""Finds the deployments of a model on hardware that hold a load and meet its targets, and says why others do not.

Every strategy, format and engine in ``space`` is placed in memory; what fits is sorted by a quick estimate, and the
most promising of each engine are predicted whole. Knows no card, engine flag or screen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from longread.plan.asked import HOST_MAX, beyond_release, require_possible, require_sense
from longread.plan.calibrate import Factors, default_factors
from longread.plan.candidate import Candidate, SearchResult
from longread.plan.deployment import Deployment, EngineName, ExpertFormat, Strategy, Workload
from longread.plan.engine_limits import engine_limit
from longread.plan.evaluate import Glance, glance, times
from longread.plan.figures import gib, seconds
from longread.plan.floor import cached_bytes
from longread.plan.frontend import load_seconds
from longread.plan.gpu_memory import GpuMemory, capacity_of, gpu_memory
from longread.plan.judging import RULE, binding, dominant, lost, missed, ranked, verdicts
from longread.plan.peer_capacity import PeerCapacity, peer_capacity
from longread.plan.published_memory import against
from longread.plan.refusals import Refused, grouped, memory_refusal, session_refusal
from longread.plan.shards import check_strategy, weight_bytes
from longread.plan.space import (
    CHUNK,
    LARGER_SHARES,
    OTHER_CHUNKS,
    SHARE,
    SMALLER_CHUNKS,
    Fixed,
    as_run,
    cache_formats,
    expert_formats,
    lossy,
    other_checkpoint,
    runs_today,
    strategies,
)
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

ENGINES: tuple[EngineName, ...] = ("longread", "vllm", "sglang")
_DECODED = "on a CPU longread decodes the checkpoint's weights to float32, and is planned so"
_BY_RATE, _BY_FIRST, _BY_BETWEEN = 6, 3, 2  # of each engine, how many of the quick estimate's best are predicted whole
_TRIED = (
    3  # of the best and of the quickest, how many are asked for fewer requests at once where the targets are missed
)
SEATS_MAX = 1024  # sequences at once of one cache, vLLM's largest default: more are never planned
_CHUNKED = 2  # of each engine, how many of the best are tried with other chunk sizes


@dataclass(frozen=True, slots=True)
class _Placed:
    """A deployment that fits, and how many requests of the load run at once."""

    deployment: Deployment
    memory: GpuMemory
    peer: PeerCapacity | None
    sessions: int


def search(
    spec: ModelSpec,
    hardware: Hardware,
    workload: Workload,
    *,
    engines: Sequence[EngineName] = ENGINES,
    experts: ExpertFormat | None = None,
    chunks: Sequence[int] | None = None,
    fixed: Fixed | None = None,
    factors: Factors | None = None,
) -> SearchResult:
    """Rank the deployments of ``spec`` on ``hardware`` for ``workload``.

    ``experts`` and ``fixed``: what the user decided. ``chunks``: sizes to try (the first is the base). ``factors``:
    calibrated ones, else those of published runs. ``workload.tier`` is where read prefixes lie at best: where not all
    requests fit at once, those of the waiting ones are planned on the host. Raises ``ConfigError``: the load is
    impossible or contradictory (it names limit and floor), or what was fixed can be run in no way.
    """
    spec, decoded = as_run(spec, hardware), hardware.card.architecture == "cpu"
    decided = fixed or Fixed()
    decided = replace(decided, experts=experts or decided.experts)
    floors = require_possible(spec, hardware, workload, decided)
    require_sense(spec, hardware, decided, workload)
    if workload.tier != "device" and workload.cached:
        load_seconds(Deployment(spec, hardware, Strategy()), workload.cached, workload.tier)  # raises without a rate
    known = factors or default_factors()
    given = (CHUNK, *OTHER_CHUNKS) if decided.chunk is None else (decided.chunk,)
    sizes = tuple(chunks) if chunks else given
    placed, refused, considered = _place_all(spec, hardware, workload, engines, decided, sizes[0])
    unsplit = [r for r in refused if r.kind == "strategy"]
    if not placed and decided.splits and unsplit and all(r.kind in ("strategy", "engine") for r in refused):
        raise ConfigError(max(unsplit, key=lambda r: r.deployment.strategy.gpus).limit)
    candidates: list[Candidate] = []
    for engine in engines:  # each by itself: what one engine holds says nothing of what the user can start
        own = _chosen([p for p in placed if p.deployment.engine == engine], workload, refused)
        candidates += _predict(own, workload, known, refused, sizes[1:], decided)
    order = ranked(candidates)
    if order:
        order = [order[0], *(replace(c, lost=lost(order[0], c)) for c in order[1:])]
    return SearchResult(
        spec,
        hardware,
        workload,
        tuple(order),
        grouped(refused, min((p.deployment.strategy.gpus for p in placed), default=0)),
        floors,
        RULE,
        (*((_DECODED,) if decoded else ()), *beyond_release(workload, floors), *_notes(workload, order, placed, known)),
        considered,
    )


def _place_all(
    spec: ModelSpec,
    hardware: Hardware,
    w: Workload,
    engines: Iterable[EngineName],
    fixed: Fixed,
    chunk: int,
) -> tuple[list[_Placed], list[Refused], int]:
    placed: list[_Placed] = []
    refused: list[Refused] = []
    considered = 0
    for engine in engines:
        for strategy in strategies(spec, hardware, engine, fixed):
            for form in expert_formats(spec, fixed):
                for cache in cache_formats(spec, hardware, fixed):
                    considered += 1
                    d = _deployment(spec, hardware, strategy, w, engine, form, cache, fixed, chunk)
                    found = _place(d, w, fixed)
                    if isinstance(found, Refused):
                        refused.append(found)
                        continue
                    placed.append(found)
                    if found.sessions >= w.concurrency:
                        break  # the next cache type would only hold more than was asked for, or be lossy
    return placed, refused, considered


def _deployment(
    spec: ModelSpec,
    hardware: Hardware,
    strategy: Strategy,
    w: Workload,
    engine: EngineName,
    form: ExpertFormat,
    cache: str,
    fixed: Fixed,
    chunk: int,
) -> Deployment:
    seats = min(-(-w.concurrency // max(strategy.dp * strategy.replicas, 1)), SEATS_MAX)
    return Deployment(
        spec,
        hardware,
        strategy,
        engine,
        form,
        cache,
        max(chunk, seats),
        seats,
        w.isl + w.osl if fixed.context is None else fixed.context,
        SHARE if fixed.memory_share is None else fixed.memory_share,
        fixed.host_cache or 0,
    )


def _place(d: Deployment, w: Workload, fixed: Fixed) -> _Placed | Refused:
    """The deployment with the largest chunk and the smallest memory share that hold all requests, else the most."""
    problem = engine_limit(d, tier=w.tier if w.cached else "device")
    if problem is not None:
        return Refused("engine", d, problem)
    try:
        check_strategy(d)
    except ConfigError as error:
        return Refused("strategy", d, str(error))
    best: _Placed | None = None
    first: Refused | None = None
    while True:
        for option in _relaxed(d, fixed):
            memory = gpu_memory(option)
            if memory.free > 0:
                found = _seated(option, memory, w)
                if best is None or found.sessions > best.sessions:
                    best = found
                if best.sessions >= w.concurrency:
                    return best
            elif first is None:
                first = memory_refusal(option, memory, w)
                if memory.weight_total > LARGER_SHARES[-1] * d.hardware.card.memory.value:
                    return first  # no chunk and no share makes room for the weights
        if (best is not None and best.sessions >= 1) or d.max_num_seqs == 1:
            break
        d = replace(d, max_num_seqs=max(d.max_num_seqs // 4, 1))  # the scratch of so many seats takes the cache's room
    if best is None:
        return first or memory_refusal(d, gpu_memory(d), w)
    return best if best.sessions >= 1 else session_refusal(best.deployment, 0, w)


def _relaxed(d: Deployment, fixed: Fixed) -> Iterable[Deployment]:
    yield d
    chunks = [d.chunk] if fixed.chunk is not None else [d.chunk, *(max(c, d.max_num_seqs) for c in SMALLER_CHUNKS)]
    shares = [d.memory_share] if fixed.memory_share is not None else [d.memory_share, *LARGER_SHARES]
    for share in shares:
        for chunk in chunks:
            if (share, chunk) != (d.memory_share, d.chunk) and not (share != shares[0] and chunk == chunks[0] > 4096):
                yield replace(d, memory_share=share, chunk=chunk)


def _seated(d: Deployment, memory: GpuMemory, w: Workload) -> _Placed:
    context, caches = w.isl + w.osl, d.strategy.dp * d.strategy.replicas
    peer = None if d.engine == "longread" else peer_capacity(d, context, pool=max(memory.free, 0))
    held = capacity_of(d, memory, context).whole if peer is None else int(peer.sessions / caches) * caches
    seats = d.max_num_seqs * caches
    return _Placed(d, memory, peer, min(held, seats) if seats < w.concurrency else held)


def _chosen(placed: list[_Placed], w: Workload, refused: list[Refused]) -> list[_Placed]:
    """Of one engine, those that hold all requests; where none does, those that hold half as many as the best."""
    whole = [p for p in placed if p.sessions >= w.concurrency]
    if whole:
        short = [p for p in placed if p.sessions < w.concurrency]
        refused += [session_refusal(p.deployment, p.sessions, w) for p in short]
        return whole
    most = max((p.sessions for p in placed), default=0)
    return [p for p in placed if 2 * p.sessions >= most]


def _predict(
    placed: list[_Placed], w: Workload, factors: Factors, refused: list[Refused], chunks: Sequence[int], fixed: Fixed
) -> list[Candidate]:
    """The promising ones of one engine, predicted whole; the best two with other chunks where these fit."""
    found = [
        c for c in (_candidate(p, w, factors, refused, fixed) for p in _promising(placed, w, factors)) if c is not None
    ]
    found = ranked(found)
    improved = []
    for c in found[:_CHUNKED]:
        options = [c]
        for chunk in chunks:
            if chunk == c.deployment.chunk or chunk < c.deployment.max_num_seqs or chunk > 2 * c.workload.isl:
                continue
            d = replace(c.deployment, chunk=chunk)
            memory = gpu_memory(d)
            p = _seated(d, memory, w)
            if memory.free > 0 and p.sessions >= min(c.sessions, w.concurrency):
                other = _candidate(p, w, factors, [], fixed)
                options += [other] if other is not None else []
        improved.append(ranked(options)[0])
    return improved + found[_CHUNKED:]


def _promising(placed: list[_Placed], w: Workload, factors: Factors) -> list[_Placed]:
    looks: list[tuple[Glance, _Placed]] = [(glance(p.deployment, w, p.sessions, factors), p) for p in placed]
    exact = [(g, p) for g, p in looks if not lossy(p.deployment)] or looks
    chosen: dict[int, _Placed] = {}
    for _, p in sorted(exact, key=lambda pair: -pair[0].rate)[:_BY_RATE]:
        chosen[id(p)] = p
    for _, p in sorted(exact, key=lambda pair: pair[0].first)[:_BY_FIRST]:
        chosen[id(p)] = p
    for _, p in sorted(exact, key=lambda pair: pair[0].between)[:_BY_BETWEEN]:
        chosen[id(p)] = p
    for _, p in sorted(looks, key=lambda pair: -pair[0].rate)[:2]:
        chosen[id(p)] = p
    return list(chosen.values())


def _hosted(d: Deployment, w: Workload, fixed: Fixed) -> tuple[Deployment, str] | Refused:
    """With main memory for all that the requests had read, and a note of how much; or why there is not so much."""
    needed = int(w.concurrency * cached_bytes(d.spec, d.cache, w.cached) / d.hardware.nodes)
    if fixed.host_cache is not None and fixed.host_cache < needed:
        what = f"the given host cache for the read prefixes of {w.concurrency:,} requests"
        return Refused(
            "memory", d, what, needed, fixed.host_cache, f"host_cache_size of {gib(needed)}, or fewer documents"
        )
    known = d.hardware.host_memory
    most = HOST_MAX if known is None else known.value
    if w.tier == "host" and needed > most:
        what = f"host memory for the read prefixes of {w.concurrency:,} requests"
        return Refused("memory", d, what, needed, most, "more host memory, a disk tier, or fewer documents")
    d = replace(d, host_cache=needed if fixed.host_cache is None else fixed.host_cache)
    return d, f"{gib(needed)} a machine for what {w.concurrency:,} requests had read"


def _candidate(p: _Placed, w: Workload, factors: Factors, refused: list[Refused], fixed: Fixed) -> Candidate | None:
    d, notes = p.deployment, []
    if p.sessions < w.concurrency:  # more than fit would only throw each other out
        d = replace(d, max_num_seqs=max(p.sessions // (d.strategy.dp * d.strategy.replicas), 1))
    if p.sessions < w.concurrency and w.cached and w.tier == "device":
        w = replace(w, tier="host")  # whoever waits has been evicted meanwhile
        notes.append(f"{p.sessions} of {w.concurrency} run at once; what the others had read is kept on the host")
    if w.tier != "device" and w.cached:
        hosted = _hosted(d, w, fixed)
        if isinstance(hosted, Refused):
            refused.append(hosted)
            return None
        d, said = hosted
        notes.append(said)
    try:
        t = times(d, w, p.sessions, factors)
    except ConfigError as error:
        refused.append(Refused("engine", d, str(error)))
        return None
    if d.memory_share > SHARE:
        notes.append(f"fits only with {d.memory_share:.0%} of the memory: leave nothing else on the cards")
    if d.strategy.cp > 1 and d.engine == "sglang":
        notes.append(
            "published with context parallelism are machines that only read prompts; that the same cards decode so is "
            "assumed"
        )
    if other_checkpoint(d):
        notes.append(other_checkpoint(d))
    return Candidate(
        d,
        w,
        p.memory,
        capacity_of(d, p.memory, w.isl + w.osl),
        p.peer,
        p.sessions,
        t,
        verdicts(w, t, p.sessions),
        binding(w, t, p.sessions),
        t.rate.centre,
        lossy(d),
        tuple(notes),
        runs_today(d),
    )


def _notes(w: Workload, order: list[Candidate], placed: list[_Placed], factors: Factors) -> Iterable[str]:
    today = [p for p in placed if runs_today(p.deployment)] or placed
    most = max((p.sessions for p in today), default=0)
    if order and most < w.concurrency:
        yield f"nothing here holds {w.concurrency:,} requests at once (at most {most:,}): the rest waits for a seat"
    if order and not other_checkpoint(order[0].deployment):
        converted = [c for c in order if other_checkpoint(c.deployment) and c.runs_today]
        better = [c for c in converted if missed(order[0]) and not missed(c)]
        if better:
            d = better[0].deployment
            yield f"{d.engine} {d.strategy.label} is likely to meet the targets, and {other_checkpoint(d)}"
    if order and missed(order[0]):
        yield _instead(w, order, placed, factors)
    if order:
        yield from _of_memory(order[0], w)
    if any(not c.runs_today for c in order):
        yield (
            "longread on GPUs is a prediction that does not know its kernels, so it ranks behind engines whose runs "
            "are known; V2 to V4 run on one Hopper card (longread serve --device cuda)"
        )
    if order and not any(c.runs_today for c in order):
        yield "no engine that runs on this hardware today is among them"


def _of_memory(best: Candidate, w: Workload) -> Iterable[str]:
    """What others report that speaks against this plan, and what a drafter would take: none is loaded."""
    d = best.deployment
    for fact in against(d.spec, d.hardware, w.isl + w.osl, min(best.sessions, w.concurrency)):
        yield fact.words
    drafter = weight_bytes(d, drafter=True).get("drafter", 0)
    if drafter and best.runs_today and d.hardware.card.architecture != "cpu":
        name = "DSpark" if d.spec.dspark is not None else "MTP"
        yield f"no drafter is loaded or counted: {name}'s weights would take {gib(drafter)} a card, and its cache more"


def _instead(w: Workload, order: list[Candidate], placed: list[_Placed], factors: Factors) -> str:
    """How many requests at once some deployment is likely to serve within the targets that the best one misses."""
    named = " and ".join(name.upper() for name in order[0].meets if name != "concurrency")
    today = [p for p in placed if runs_today(p.deployment)]
    quick = sorted(today, key=lambda p: glance(p.deployment, w, p.sessions, factors).first)[:_TRIED]
    tried = [(c.deployment, c.sessions) for c in order[:_TRIED]] + [(p.deployment, p.sessions) for p in quick]
    most, d = max(((most_at_once(d, w, seats, factors), d) for d, seats in tried), key=lambda pair: pair[0])
    if most:
        return (
            f"no plan is likely to meet {named} with {w.concurrency:,} at once; {d.engine} {d.strategy.label} "
            f"(chunk {d.chunk:,}) is with up to {most:,}"
        )
    d, seats = min(tried, key=lambda pair: times(pair[0], replace(w, concurrency=1), pair[1], factors).load.centre)
    alone = times(d, replace(w, concurrency=1), seats, factors)
    return (
        f"no plan is likely to meet {named}, even for one request at a time: the soonest first token is "
        f"{seconds(alone.load.centre)} ({d.engine} {d.strategy.label}; {dominant(alone.first.parts)}), "
        f"{seconds(alone.steady.centre)} a token"
    )


def most_at_once(d: Deployment, w: Workload, seats: int, factors: Factors) -> int:
    """How many requests at once ``d`` is likely to serve within all targets; 0: not even one."""

    def fine(number: int) -> bool:
        t = times(d, replace(w, concurrency=number), seats, factors)
        return not any(grade in ("no", "unlikely") for grade in verdicts(w, t, w.concurrency).values())

    low, high = 0, min(w.concurrency, seats)
    while low < high:
        middle = (low + high + 1) // 2 if low else 1
        low, high = (middle, high) if fine(middle) else (low, middle - 1)
    return low
