"""What may be set for a workload: names, limits and defaults, checked before any text is made.

Knows the shape of an option, not any workload. The command line prints the same tables.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longread.measure.workloads.lengths import FORMS, lengths
from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

MAX_PROMPTS = 1_000_000
MAX_TOKENS = 1 << 20  # of one prompt
MAX_OUTPUT = 1 << 17
MAX_SEED = 2**32 - 1

Parse = Callable[[str, object], Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """``parse``: from a text or a value to what is used; raises ConfigError with the limit. ``default`` is parsed too,
    None stays None.
    """

    name: str
    parse: Parse
    default: object
    help: str


def settings(workload: str, options: Sequence[Option], given: Mapping[str, object]) -> dict[str, Any]:
    """Every option's value. Names may be spelled with ``-`` or ``_``. Raises ConfigError, for an unknown name with the
    nearest known one.
    """
    known = {option.name: option for option in options}
    found: dict[str, object] = {}
    for written, value in given.items():
        name = written.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"workload {workload} has no option {written[:60]!r}{hint} (all: {', '.join(known)})")
        found[name] = value
    wanted = {name: found.get(name, option.default) for name, option in known.items()}
    return {name: None if value is None else known[name].parse(name, value) for name, value in wanted.items()}


def whole(low: int, high: int) -> Parse:
    """Whole numbers; 8K is 8192."""

    def parse(name: str, value: object) -> int:
        if isinstance(value, str):
            value = parse_tokens(name, value.strip())
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r:.60}; it must be a whole number")
        if not low <= value <= high:
            raise ConfigError(f"{name}={value:,}; it must be from {low:,} to {high:,}")
        return value

    return parse


def number(low: float, high: float, below: bool = False) -> Parse:
    """Numbers from low to high; ``below``: high itself is left out."""

    def parse(name: str, value: object) -> float:
        try:
            found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            found = None
        if found is None or not low <= found <= high or (below and found == high):
            limit = f"from {low:g} to {'below ' if below else ''}{high:g}"
            raise ConfigError(f"{name}={value!r:.60}; it must be a number {limit}")
        return found

    return parse


def choice(*names: str) -> Parse:
    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ConfigError(f"{name}={value!r:.60}; it must be one of {', '.join(names)}")
        return value

    return parse


def several(*names: str) -> Parse:
    """Names with commas between them, or a sequence of them; each at most once."""

    def parse(name: str, value: object) -> tuple[str, ...]:
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not listed:
            raise ConfigError(f"{name}={value!r:.60}; it must be some of {', '.join(names)}")
        found = tuple(str(each).strip() for each in listed)
        wrong = [each for each in found if each not in names]
        if wrong or len(set(found)) < len(found):
            raise ConfigError(f"{name}: {(wrong or found)[0]!r:.60}; it must be some of {', '.join(names)}, each once")
        return found

    return parse


def tokens(low: int, high: int) -> Parse:
    """A distribution of lengths."""
    return lambda name, value: lengths(name, value, low, high)


def yes(name: str, value: object) -> bool:
    known = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in known:
        raise ConfigError(f"{name}={value!r:.60}; it must be true or false")
    return known[value]


def anything(name: str, value: object) -> object:
    """Checked where it is used."""
    return value


SEED = Option("seed", whole(0, MAX_SEED), 0, "what everything is drawn from")
TOKENIZER = Option(
    "tokenizer", anything, None, "folder with the server's tokenizer.json: exact lengths (default: estimated)"
)
RANGE_RATIO = Option(
    "range_ratio", number(0, 1, below=True), 0.0, "lengths even from N*(1-R) to N*(1+R), as in vLLM's bench"
)
LANGUAGE = Option("language", choice("en", "zh", "mixed"), "en", "en, zh, or mixed: in turn")


def prompts(default: int, what: str = "requests") -> Option:
    return Option("num_prompts", whole(1, MAX_PROMPTS), default, f"how many {what}")


def isl(default: str, low: int, high: int = MAX_TOKENS) -> Option:
    return Option("isl", tokens(low, high), default, f"tokens of a prompt: {FORMS}")


def osl(default: str) -> Option:
    return Option("osl", tokens(1, MAX_OUTPUT), default, f"tokens of an answer at most: {FORMS}")
