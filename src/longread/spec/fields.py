"""Typed reading of one JSON object that was written by somebody else.

Every key is read by type and range; a key that nobody read is an error. There are no defaults: what a
file does not say is refused, with what DeepSeek's own file says there. Knows nothing about models.
"""

import difflib
import math
from collections.abc import Iterable, Mapping

from longread.spec.errors import UnsupportedModelError

INT_MAX = 2**31 - 1


class Fields:
    """One object of a config.json. ``own`` is DeepSeek's object of the same kind, for messages only.

    All methods raise ``UnsupportedModelError`` naming the dotted field.
    """

    def __init__(self, data: Mapping[str, object], own: Mapping[str, object], origin: str, path: str = ""):
        self._data = data
        self._own = own
        self._origin = origin
        self._path = path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._data

    def refuse(self, key: str, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._path}{key}", message)

    def value(self, key: str) -> object:
        self._read.add(key)
        if key not in self._data:
            own = f"; {self._origin} has {self._own[key]!r}" if key in self._own else ""
            raise self.refuse(key, f"is missing, and no default is assumed{own}")
        return self._data[key]

    def integer(self, key: str, low: int = 1, high: int = INT_MAX) -> int:
        return self._integer(key, self.value(key), low, high)

    def number(self, key: str, low: float = 0.0, positive: bool = True) -> float:
        """A finite float (an int is taken too) above ``low``, or equal to it when not ``positive``."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"must be a number, not {_shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            raise self.refuse(key, "is too large for a float") from None
        if not math.isfinite(number) or number < low or (positive and number == low):
            raise self.refuse(key, f"must be finite and {'>' if positive else '>='} {low}, not {number!r}")
        return number

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value, known = self.value(key), tuple(choices)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(key, f"{_shown(value)} is not implemented; known: {', '.join(known)}")
        return value

    def exactly(self, key: str, wanted: object) -> None:
        """Refuse any other value; ``True`` and ``1`` are different values."""
        value = self.value(key)
        if type(value) is not type(wanted) or value != wanted:
            raise self.refuse(key, f"{_shown(value)} is not implemented, only {wanted!r}")

    def exactly_if_there(self, key: str, wanted: object) -> None:
        if self.has(key):
            self.exactly(key, wanted)

    def integers(self, key: str, low: int = 0, high: int = INT_MAX, most: int = 4096) -> tuple[int, ...]:
        value = self.value(key)
        if not isinstance(value, list | tuple) or len(value) > most:
            raise self.refuse(key, f"must be a list of at most {most} integers, not {_shown(value)}")
        return tuple(self._integer(f"{key}[{i}]", item, low, high) for i, item in enumerate(value))

    def is_null(self, key: str) -> bool:
        return self.value(key) is None

    def section(self, key: str) -> "Fields":
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise self.refuse(key, f"must be an object, not {_shown(value)}")
        own = self._own.get(key)
        return Fields(value, own if isinstance(own, Mapping) else {}, self._origin, f"{self._path}{key}.")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse every key that was neither read nor listed as harmless."""
        known = self._read | set(harmless)
        for key in self._data:
            if key in known:
                continue
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"; the nearest known key is {near[0]}" if near else ""
            raise self.refuse(_shown(key) if not isinstance(key, str) else key[:80], f"is not a known key{hint}")

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"must be an integer, not {_shown(value)}")
        if not low <= value <= high:
            raise self.refuse(key, f"must be between {low} and {high}, not {_shown(value)}")
        return value


def _shown(value: object) -> str:
    """``value`` for a message: never long, whatever the file holds."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} items"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "an integer beyond 10^18"  # repr of a huge int is quadratic, and capped by Python
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
