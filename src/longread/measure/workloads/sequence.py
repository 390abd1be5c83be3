"""Asks that are made when they are taken, and what a workload is known by afterwards.

Knows how long things are kept; not what is asked.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.counting import Counter
from longread.measure.workloads.lengths import Lengths
from longread.measure.workloads.options import Settings

GENERATOR = 1  # changes with every change of what a seed gives
HASHED_PROMPTS, HASHED_CHARACTERS = 16, 4_000_000  # the first so many are hashed, and no more text than that
KEPT_CHARACTERS = 16_000_000  # of documents that several asks share

Item = TypeVar("Item")


class Asks(Sequence[Ask]):
    """``count`` asks; each is made anew when it is taken, always the same, and not kept."""

    def __init__(self, count: int, make: Callable[[int], Ask]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Ask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Ask]: ...
    def __getitem__(self, index: int | slice) -> Ask | Sequence[Ask]:
        places = range(self._count)[index]  # raises IndexError
        if isinstance(places, int):
            return self._make(places)
        return Asks(len(places), lambda place: self._make(places[place]))


class Kept(Generic[Item]):
    """Things made by key, those used last kept up to a size in characters; one at least."""

    def __init__(self, make: Callable[[Any], Item], size: Callable[[Item], int], limit: int = KEPT_CHARACTERS):
        self._make, self._size, self._limit = make, size, limit
        self._kept: OrderedDict[Hashable, Item] = OrderedDict()
        self._held = 0

    def take(self, key: Hashable) -> Item:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        item = self._make(key)
        self._kept[key] = item
        self._held += self._size(item)
        while self._held > self._limit and len(self._kept) > 1:
            self._held -= self._size(self._kept.popitem(last=False)[1])
        return item


def workload(name: str, settings: Settings, asks: Sequence[Ask], counter: Counter, **more: object) -> Workload:
    """With what a result's provenance says of it."""
    described: dict[str, Any] = {
        "workload": name,
        "generator": GENERATOR,
        "seed": settings.get("seed", 0),
        "num_prompts": len(asks),
        "options": {key: _told(value) for key, value in settings.items() if key not in ("seed", "tokenizer")},
        "lengths_by": counter.label,
        **more,
        **fingerprint(asks),
    }
    return Workload(name, settings.get("seed", 0), asks, described)


def fingerprint(asks: Sequence[Ask]) -> dict[str, object]:
    """The sha256 over the first prompts, and how many those are."""
    digest, hashed, size = hashlib.sha256(), 0, 0
    for index in range(min(len(asks), HASHED_PROMPTS)):
        if size > HASHED_CHARACTERS:
            break
        ask = asks[index]
        said = list(ask.messages) if ask.messages is not None else ask.prompt
        data = json.dumps(said, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(errors="replace")
        digest.update(len(data).to_bytes(8, "little") + data)
        hashed, size = hashed + 1, size + len(data)
    return {"prompts_sha256": digest.hexdigest(), "prompts_hashed": hashed}


def _told(value: object) -> object:
    if isinstance(value, Lengths):
        return value.text
    if isinstance(value, Path):
        return value.name
    if isinstance(value, tuple):
        return [_told(each) for each in value]
    return value
