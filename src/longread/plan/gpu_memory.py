"""What a GPU's memory goes to under a deployment, and what fits into the rest: tokens, sessions, the longest context.

Exact: weights and cache by group. Formulas held to published runs: activations, workspaces, graphs, reserve
(``Part.source`` says what each rests on). The cache is counted ideally, as what its rows take in pages of 256 tokens;
what vLLM's and SGLang's allocators make of the same bytes is ``plan.peer_capacity``'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from longread.plan.activations import ACTIVATIONS, RESERVE, Part, step_parts
from longread.plan.deployment import Deployment
from longread.plan.figures import more_memory, too_much
from longread.plan.shards import cache_share, stage_layers, stage_weights
from longread.spec.count import fixed_bytes_per_request, kv_bytes_per_token, row_groups
from longread.spec.errors import ConfigError
from longread.spec.hardware import GIB as GIB
from longread.spec.state import PAGE_TOKENS, pages_for, state_groups

CONTEXTS = (8192, 32768, 131072, 262144, 524288, 1048576)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one card of the pipeline stage that has the least room for tokens.

    ``kv_per_token``: bytes of one token on this card, by state group; ``kv_fixed``: of one sequence, whatever its
    length; ``snapshot_bytes``: of one saved ring snapshot. ``sharing``: how each state group is spread, in words.
    ``parts``: everything else by name, with sources. ``usable``: what the engine may take. ``free``: what is left for
    the cache, negative where the rest does not fit.
    """

    weights: dict[str, int]
    kv_per_token: dict[str, float]
    kv_fixed: dict[str, int]
    snapshot_bytes: int
    sharing: dict[str, str]
    parts: dict[str, Part]
    usable: int
    stage: int = 0

    @property
    def weight_total(self) -> int:
        return sum(self.weights.values())

    @property
    def logits(self) -> dict[str, int]:
        """Bytes of index scores and of vocabulary logits."""
        names = {"indexer": "index scores", "vocabulary": "vocabulary logits"}
        return {name: self.parts[part].size for name, part in names.items() if part in self.parts}

    @property
    def activations(self) -> int:
        return sum(self.parts[name].size for name in ACTIVATIONS if name in self.parts)

    @property
    def graphs(self) -> int:
        return self.parts["graphs"].size if "graphs" in self.parts else 0

    @property
    def reserve(self) -> int:
        """What no formula of the step explains: context, communication, tables."""
        return sum(self.parts[name].size for name in RESERVE if name in self.parts)

    @property
    def beside(self) -> int:
        """Everything that is neither weights nor cache."""
        return sum(part.size for part in self.parts.values())

    @property
    def free(self) -> int:
        return self.usable - self.weight_total - self.beside

    def session_bytes(self, context: int, snapshots: int = 0) -> int:
        """Of one sequence on this card: whole pages of rows, its rings, and ``snapshots`` saved copies of them."""
        rows = pages_for(context) * PAGE_TOKENS * sum(self.kv_per_token.values())
        return int(-(-rows // 1)) + sum(self.kv_fixed.values()) + snapshots * self.snapshot_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences of ``context`` tokens that the whole deployment keeps at once.

    ``sessions`` is bytes over bytes, 0.2 where a fifth of one fits; ``whole``: none spans two caches. ``tokens`` =
    sessions * context. ``session_bytes``: on each of the ``cards_a_session`` cards that hold the sequence.
    ``caches``: independent caches (data parallel groups, replicas), ``sessions`` being over all of them.
    """

    context: int
    tokens: int
    sessions: float
    session_bytes: int
    cards_a_session: int
    caches: int

    @property
    def whole(self) -> int:
        """Sequences that fit to their end."""
        return int(self.sessions / self.caches) * self.caches


@dataclass(frozen=True, slots=True)
class Cell:
    """One corner of the triangle: bytes on the fullest card with ``concurrency`` sequences of ``context`` tokens."""

    context: int
    concurrency: int
    size: int
    fits: bool


def gpu_memory(d: Deployment, drafter: bool = False) -> GpuMemory:
    """``drafter``: MTP or DSpark is loaded as well. Raises ``ConfigError`` for a packing without a record."""
    return min(_stages(d, drafter), key=lambda m: m.free / m.session_bytes(d.max_model_len, _snapshots(d)))


def capacity(d: Deployment, context: int | None = None, drafter: bool = False) -> Capacity:
    """With every sequence ``context`` (default max_model_len) tokens long, snapshots that longread keeps included."""
    return capacity_of(d, gpu_memory(d, drafter), context or d.max_model_len)


def capacity_of(d: Deployment, memory: GpuMemory, context: int) -> Capacity:
    """The same from a memory that is known already."""
    size = memory.session_bytes(context, _snapshots(d))
    caches = d.strategy.dp * d.strategy.replicas
    sessions = sessions_in(memory.free, size, caches)
    return Capacity(context, int(sessions * context), sessions, size, d.strategy.gpus // d.strategy.dp, caches)


def sessions_in(free: int, session_bytes: float, caches: int) -> float:
    """Sessions that ``free`` bytes a card hold in all caches together."""
    return max(free, 0) / session_bytes * caches


def triangle(
    d: Deployment, contexts: Iterable[int] = CONTEXTS, concurrencies: Iterable[int] = CONCURRENCIES
) -> list[Cell]:
    """Context x concurrency x bytes on the fullest card, contexts up to the model's own.

    Workspaces that grow with the context are counted for the context of the row.
    """
    cells = []
    caches = d.strategy.dp * d.strategy.replicas
    for context in contexts:
        if context > d.spec.max_position:
            continue
        memory = gpu_memory(replace(d, max_model_len=context))
        one = memory.session_bytes(context, _snapshots(d))
        for concurrency in concurrencies:
            held = -(-concurrency // caches) * one
            size = memory.weight_total + memory.beside + held
            cells.append(Cell(context, concurrency, size, held <= memory.free))
    return cells


def max_context(d: Deployment) -> int:
    """Tokens of the longest single sequence that fits, at most the model's own limit; 0: not even one page."""

    def fits(pages: int) -> bool:
        length = min(pages * PAGE_TOKENS, d.spec.max_position)
        memory = gpu_memory(replace(d, max_model_len=length))
        return memory.session_bytes(length, _snapshots(d)) <= memory.free

    low, high = 0, pages_for(d.spec.max_position)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * PAGE_TOKENS, d.spec.max_position)


def usable_bytes(d: Deployment) -> int:
    """What the engine may take of one card: its share of the memory that tools show, at most what can be allocated."""
    card = d.hardware.card
    return int(min(d.memory_share * card.memory.value, card.usable.value))


def _snapshots(d: Deployment) -> int:
    """Saved ring snapshots a sequence: longread's; the others keep windows of old tokens in pages instead."""
    return d.snapshots if d.engine == "longread" else 0


def _stages(d: Deployment, drafter: bool) -> list[GpuMemory]:
    rows, fixed = _rows(d), _fixed(d)
    result = []
    weights = stage_weights(d, drafter)
    for index, (start, end) in enumerate(stage_layers(d.spec.layers, d.strategy.pp)):
        here = range(start, end)
        rings = {name: size * _count(layers, here) for name, (layers, size) in fixed.items()}
        result.append(
            GpuMemory(
                weights=weights[index],
                kv_per_token={
                    name: size * _count(layers, here) / cache_share(d) for name, (layers, size) in rows.items()
                },
                kv_fixed=rings,
                snapshot_bytes=sum(rings.values()),
                sharing=_sharing(d, rows, fixed),
                parts=step_parts(d, end - start),
                usable=usable_bytes(d),
                stage=index,
            )
        )
    return result


def _count(layers: Iterable[int], here: range) -> int:
    return sum(1 for layer in layers if layer in here)


def _rows(d: Deployment) -> dict[str, tuple[tuple[int, ...], float]]:
    """Growing groups: the layers that own one, and its bytes a token and layer."""
    owners = _owners(d)
    per_token = kv_bytes_per_token(d.spec, d.cache)
    return {
        g.name: (owners.get(g.name) or (int(g.name.split("_")[1]),), per_token[g.name] / g.layers)
        for g in row_groups(d.spec)
    }


def _fixed(d: Deployment) -> dict[str, tuple[tuple[int, ...], int]]:
    """Rings: the layers that own one, and its bytes a sequence and layer."""
    owners, shared, c = _owners(d), d.spec.shared_kv, d.spec.compressed
    if shared is not None and c is not None:
        owners["open_group"] = tuple(layer for layer in shared.kv_sources if c.ratios[layer] > 1)
        owners["window"] = tuple(range(d.spec.layers))
    sizes = fixed_bytes_per_request(d.spec, d.cache)
    return {name: (owners[name], size // len(owners[name])) for name, size in sizes.items()}


def _owners(d: Deployment) -> dict[str, tuple[int, ...]]:
    if d.spec.shared_kv is not None:
        return {}  # V4.1's groups are named by their one layer
    return {group.name: group.layers for group in state_groups(d.spec)}


def _sharing(d: Deployment, rows: Iterable[str], rings: Iterable[str]) -> dict[str, str]:
    """One key-value head: tensor parallelism cannot split it, so every card of an attention group keeps all of it."""
    s = d.strategy
    split = cache_share(d)
    copies = s.tp // s.dp * (s.cp // split)
    parts = [f"copied to {copies} cards" if copies > 1 else "one copy"]
    parts += [f"tokens split over {split} cards (cp)"] if split > 1 else []
    parts += [f"layers over {s.pp} stages (pp)"] if s.pp > 1 else []
    parts += [f"sequences over {s.dp} groups (dp)"] if s.dp > 1 else []
    whole = [p for p in parts if "cp" not in p] + ([f"copied to all {split} cp cards"] if split > 1 else [])
    return dict.fromkeys(rows, ", ".join(parts)) | dict.fromkeys(rings, ", ".join(whole))


def require_room(d: Deployment, context: int, drafter: bool = False) -> None:
    """Raises ``ConfigError`` unless one sequence of ``context`` tokens fits; says what is over, and by how much."""
    memory = gpu_memory(d, drafter)
    one = memory.session_bytes(context, _snapshots(d))
    if one <= memory.free:
        return
    over = too_much(one - memory.free, d.hardware)
    largest = max((size, name) for name, size in memory.weights.items())[1]
    raise ConfigError(
        f"{d.strategy.label} on {d.hardware.label}: one sequence of {context} tokens is {over} "
        f"(weights {memory.weight_total / GIB:.1f} GiB, most of it {largest}; beside them {memory.beside / GIB:.1f}; "
        f"sequence {one / GIB:.1f}; usable {memory.usable / GIB:.1f}); use {more_memory(d.hardware)}, "
        "smaller experts or less context"
    )
