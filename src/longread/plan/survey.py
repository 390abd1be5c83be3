"""A model on hardware without a load: where the memory goes, and how many tokens and sessions the rest holds.

One deployment, the plainest that fits or the user's. Knows no screen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longread.plan.asked import require_sense
from longread.plan.deployment import Deployment, EngineName, Strategy
from longread.plan.engine_limits import engine_limit
from longread.plan.gpu_memory import (
    CONTEXTS,
    Capacity,
    Cell,
    GpuMemory,
    capacity_of,
    gpu_memory,
    max_context,
    triangle,
)
from longread.plan.peer_capacity import PeerCapacity, peer_capacity
from longread.plan.published_memory import MemoryFact, memory_facts
from longread.plan.shards import check_strategy
from longread.plan.space import CHUNK, SHARE, Fixed, as_run, cache_formats, expert_formats, strategies
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS

_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Survey:
    """``deployment`` with max_model_len at the longest context that fits (``longest``; 0: nothing fits, and it is the
    model's own). ``capacities``: of an ideal cache (what rows take), by context. ``peers``: what vLLM and SGLang
    report and hold when they are started for each of these contexts, and ``peer_longest`` the longest that they hold
    once; ``refused``: engines that cannot run it, and why. ``chosen``: why this split. ``published``: what
    others report of such a model on this machine, whatever its split.
    """

    deployment: Deployment
    memory: GpuMemory
    longest: int
    capacities: tuple[Capacity, ...]
    triangle: tuple[Cell, ...]
    peers: tuple[PeerCapacity, ...]
    peer_longest: dict[EngineName, int]
    refused: dict[EngineName, str]
    chosen: str
    published: tuple[MemoryFact, ...]

    @property
    def fits(self) -> bool:
        return self.longest > 0


def survey(
    spec: ModelSpec,
    hardware: Hardware,
    *,
    engines: Sequence[EngineName] = ("vllm", "sglang"),
    fixed: Fixed | None = None,
) -> Survey:
    """Raises ``ConfigError`` where what was fixed can be run in no way."""
    spec, decided = as_run(spec, hardware), fixed or Fixed()
    require_sense(spec, hardware, decided, None)
    d, chosen = _plainest(spec, hardware, engines, decided)
    longest = max_context(d) if decided.context is None else min(max_context(d), decided.context)
    d = replace(d, max_model_len=longest or d.max_model_len)
    memory = gpu_memory(d)
    contexts = [n for n in CONTEXTS if n <= longest] if longest else []
    if longest and longest not in contexts:
        contexts.append(longest)
    peers: list[PeerCapacity] = []
    refused: dict[EngineName, str] = {}
    reached: dict[EngineName, int] = {}
    for engine in engines:
        if engine == "longread":
            continue
        other = replace(d, engine=engine)
        limit = engine_limit(other)
        if limit is not None:
            refused[engine] = limit
        elif longest:
            peers += [_peer(other, context) for context in contexts]
            reached[engine] = _peer_longest(other, longest)
    return Survey(
        d,
        memory,
        longest,
        tuple(capacity_of(d, memory, context) for context in contexts),
        tuple(triangle(d)),
        tuple(peers),
        reached,
        refused,
        chosen,
        tuple(fact for fact in memory_facts() if fact.concerns(spec, hardware)),
    )


def _peer(d: Deployment, context: int) -> PeerCapacity:
    return peer_capacity(replace(d, max_model_len=context), context)


def _peer_longest(d: Deployment, most: int) -> int:
    """Tokens of the longest context, in whole pages, of which ``d.engine`` holds one sequence when started for it."""
    if _peer(d, most).sessions >= 1:
        return most
    low, high = 0, most // PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _peer(d, middle * PAGE_TOKENS).sessions >= 1 else (low, middle - 1)
    return low * PAGE_TOKENS


def _plainest(
    spec: ModelSpec, hardware: Hardware, engines: Sequence[EngineName], fixed: Fixed
) -> tuple[Deployment, str]:
    """The split that fits with the fewest things to run: tensor parallelism over as many cards as can share.

    Of the first of ``engines`` that can run it, longread on GPUs last.
    """
    found: list[tuple[tuple[int, ...], Deployment]] = []
    problems = []
    for turn, engine in enumerate(sorted(engines, key=lambda name: name == "longread")):
        for strategy in strategies(spec, hardware, engine, fixed):
            d = _deployment(spec, hardware, strategy, engine, fixed)
            try:
                check_strategy(d)
            except ConfigError as error:
                problems.append(error)
                continue
            s = strategy
            fits = gpu_memory(d).free > 0
            limited = engine_limit(d) is not None
            # One replica over everything holds the longest context; then plain tp before stages, groups and copies.
            key = (not fits, limited, turn, s.dp > 1, s.cp > 1, s.ep, s.replicas, s.pp)
            found.append((tuple(int(k) for k in key), d))
    if not found:
        raise problems[0] if problems else ConfigError(f"{spec.label} on {hardware.label}: no strategy to look at")
    best = min(found, key=lambda pair: pair[0])[1]
    return best, "as asked" if fixed.splits else "the plainest split that fits: tensor parallelism first, then stages"


def _deployment(
    spec: ModelSpec, hardware: Hardware, strategy: Strategy, engine: EngineName, fixed: Fixed
) -> Deployment:
    return Deployment(
        spec,
        hardware,
        strategy,
        engine,
        expert_formats(spec, fixed)[0],
        cache_formats(spec, hardware, fixed)[0],
        CHUNK if fixed.chunk is None else fixed.chunk,
        _SEQUENCES,
        spec.max_position if fixed.context is None else fixed.context,
        SHARE if fixed.memory_share is None else fixed.memory_share,
        fixed.host_cache or 0,
    )
