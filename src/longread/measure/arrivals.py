"""What requests arrive when: Mooncake traces read and written, and workloads drawn from a seed.

Knows arrivals and their prompts as blocks of tokens with identities, which is how prefixes are shared. Knows nothing of
who serves them.

Format (Mooncake, FAST '25; read by other load tools too): JSON lines with ``timestamp`` in ms, ``input_length``,
``output_length`` and ``hash_ids``, one for each 512 tokens of the prompt: equal ids at equal places are equal text.
Own additions, optional: ``class``, ``priority``, ``owner``.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longread.spec.errors import ConfigError

BLOCK_TOKENS = 512
MAX_ID = (1 << 30) - 1  # ids become token ids; those above are the simulator's
MAX_TOKENS = 1 << 30  # of one prompt or answer
MAX_BLOCKS = 1 << 26  # of a drawn load: half a gigabyte of identities
MAX_TIMESTAMP = 1e12  # ms, 31 years: far above, a step would not move the clock
LENGTHS = ((8192, "up to 8K"), (65536, "up to 64K"), (262144, "up to 256K"))
LONGEST = "above 256K"
_NUMBERS = ("timestamp", "input_length", "output_length")
_KEYS = (*_NUMBERS, "hash_ids", "class", "priority", "owner")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives ``at`` seconds. ``blocks``: identity of each 512 tokens of its ``isl``, the last one
    shorter. ``kind``: what it is counted as.
    """

    at: float
    isl: int
    osl: int
    blocks: tuple[int, ...]
    kind: str
    priority: int = 0
    owner: str = ""

    def runs(self) -> list[tuple[int, int]]:
        """(id, tokens) of each block."""
        last = len(self.blocks) - 1
        return [
            (number, BLOCK_TOKENS if i < last else self.isl - last * BLOCK_TOKENS)
            for i, number in enumerate(self.blocks)
        ]


@dataclass(frozen=True, slots=True)
class Kind:
    """A share of generated requests: ``isl`` and ``osl`` tokens, of which ``prefix`` (0..1) of the prompt is one of
    ``documents`` that the class asks about again and again. ``spread``: lengths are even within that part of the mean
    up and down (vLLM's random-range-ratio).
    """

    name: str
    share: float
    isl: int
    osl: int
    prefix: float = 0.0
    documents: int = 1
    spread: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """What is generated. ``burstiness``: shape of the gamma distribution of the gaps, 1 is Poisson, as in vLLM."""

    kinds: tuple[Kind, ...]
    rate: float
    count: int
    seed: int = 0
    burstiness: float = 1.0
    owners: int = 1
    names: Mapping[str, Kind] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {kind.name: kind for kind in self.kinds})
        if not self.kinds or len(self.names) < len(self.kinds):
            raise ConfigError("a mix needs classes, each with a name of its own")
        if not abs(sum(kind.share for kind in self.kinds) - 1) < 1e-6:
            told = " + ".join(f"{kind.share:g}" for kind in self.kinds)
            raise ConfigError(f"the shares of a mix must sum to 1 (100%): {told}")
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"{name}={value:g}; it must be above 0")
        for kind in self.kinds:
            if max(kind.isl, kind.osl) > MAX_TOKENS:
                raise ConfigError(f"{kind.name}: {max(kind.isl, kind.osl):,} tokens; at most {MAX_TOKENS:,}")
        blocks = self.count * sum(kind.share * (kind.isl // BLOCK_TOKENS + 1) for kind in self.kinds)
        if blocks > MAX_BLOCKS:
            raise ConfigError(
                f"{self.count:,} requests of {blocks / self.count * BLOCK_TOKENS:,.0f} tokens are too many to draw: at "
                f"most {MAX_BLOCKS * BLOCK_TOKENS:,} tokens in all"
            )


def kind_of(isl: int) -> str:
    """The class of a request that names none: by the length of its prompt."""
    return next((name for most, name in LENGTHS if isl <= most), LONGEST)


def generate(mix: Mix) -> list[Arrival]:
    """The same arrivals for the same ``mix``. An infinite rate: all at once."""
    draw, fresh = random.Random(mix.seed), _Fresh(0)
    documents = {kind.name: [fresh.blocks(kind.isl) for _ in range(kind.documents)] for kind in mix.kinds}
    at, arrivals = 0.0, []
    weights = [kind.share for kind in mix.kinds]
    for _ in range(mix.count):
        if mix.rate < math.inf:
            at += draw.gammavariate(mix.burstiness, 1 / (mix.rate * mix.burstiness))
        kind = draw.choices(mix.kinds, weights)[0]
        isl, osl = _spread(draw, kind.isl, kind.spread), _spread(draw, kind.osl, kind.spread)
        shared = draw.choice(documents[kind.name])[: int(isl * kind.prefix) // BLOCK_TOKENS]
        own = fresh.blocks(isl - len(shared) * BLOCK_TOKENS)
        owner = f"owner {draw.randrange(mix.owners)}" if mix.owners > 1 else ""
        arrivals.append(Arrival(at, isl, osl, (*shared, *own), kind.name, kind.priority, owner))
    return arrivals


def _spread(draw: random.Random, mean: int, spread: float) -> int:
    return max(round(mean * draw.uniform(1 - spread, 1 + spread)), 1) if spread else mean


class _Fresh:
    """Identities that nobody has had."""

    def __init__(self, first: int):
        self._next = first

    def blocks(self, tokens: int) -> tuple[int, ...]:
        start, self._next = self._next, self._next + max(-(-tokens // BLOCK_TOKENS), 0)
        if self._next > MAX_ID:
            raise ConfigError(f"a workload of more than {MAX_ID * BLOCK_TOKENS:,} different tokens; ask for fewer")
        return tuple(range(start, self._next))


def read_trace(path: Path, *, speedup: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """A Mooncake trace in order of arrival, the first request at 0. ``speedup`` 2: in half the time. ``limit``: of the
    file's first requests.

    Raises ConfigError with the line's number for anything that is not such a request.
    """
    if not speedup > 0:
        raise ConfigError(f"speedup={speedup:g}; it must be above 0")
    try:
        with path.open(encoding="utf-8") as lines:
            read = list(_requests(path, lines, limit))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error}") from None
    if not read:
        raise ConfigError(f"{path}: no request in it")
    first = min(request.at for request in read)
    known = {block for request in read for block in request.blocks}
    fresh = _Fresh(max(known, default=-1) + 1)
    return sorted((_placed(request, first, speedup, fresh) for request in read), key=lambda request: request.at)


def _placed(request: Arrival, first: float, speedup: float, fresh: _Fresh) -> Arrival:
    return Arrival(
        (request.at - first) / speedup,
        request.isl,
        request.osl,
        request.blocks or fresh.blocks(request.isl),
        request.kind,
        request.priority,
        request.owner,
    )


def _requests(path: Path, lines: Iterable[str], limit: int | None) -> Iterator[Arrival]:
    count = 0
    for number, line in enumerate(lines, 1):
        if limit is not None and count >= limit:
            return
        if line.strip():
            count += 1
            try:
                yield _request(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _request(row: object) -> Arrival:
    """Without ``hash_ids`` the blocks stay empty. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(set(row) - set(_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0][:40]!r} (known: {', '.join(_KEYS)})")
    for name in _NUMBERS:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, not {_told(value)}")
    if not 0 <= row["timestamp"] <= MAX_TIMESTAMP:
        raise ValueError(f"timestamp must be from 0 to {MAX_TIMESTAMP:g} ms, not {_told(row['timestamp'])}")
    isl, osl = (_positive(row, name) for name in ("input_length", "output_length"))
    kind, owner, priority = row.get("class", kind_of(isl)), row.get("owner", ""), row.get("priority", 0)
    for name, value, type_ in (("class", kind, str), ("owner", owner, str), ("priority", priority, int)):
        if not isinstance(value, type_) or isinstance(value, bool):
            raise ValueError(f"{name} must be {'a text' if type_ is str else 'a whole number'}, not {_told(value)}")
    return Arrival(row["timestamp"] / 1000, isl, osl, _blocks(row.get("hash_ids", []), isl), kind, priority, owner)


def _positive(row: Mapping[str, float], name: str) -> int:
    value = row[name]
    if value != int(value) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be a whole number from 1 to {MAX_TOKENS}, not {_told(value)}")
    return int(value)


def _blocks(ids: object, isl: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(each, int) and 0 <= each <= MAX_ID for each in ids):
        raise ValueError(f"hash_ids must be a list of whole numbers from 0 to {MAX_ID}")
    wanted = -(-isl // BLOCK_TOKENS)
    if ids and len(ids) != wanted:
        raise ValueError(
            f"{len(ids)} hash_ids, and {isl} tokens are {wanted} blocks of {BLOCK_TOKENS}: one id a block is wanted"
        )
    return tuple(ids)


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """As Mooncake JSON lines with our additions, so that others can replay what was simulated."""
    with path.open("w", encoding="utf-8") as out:
        for each in arrivals:
            row: dict[str, object] = {
                "timestamp": round(each.at * 1000, 3),
                "input_length": each.isl,
                "output_length": each.osl,
                "hash_ids": list(each.blocks),
                "class": each.kind,
            }
            row |= {"priority": each.priority} if each.priority else {}
            row |= {"owner": each.owner} if each.owner else {}
            out.write(json.dumps(row) + "\n")
