"""Cards and models by the names that people write in a sentence."""

import difflib
import re
from functools import cache
from typing import Protocol

from longread.plan.cards import card, card_names, parse_hardware
from longread.plan.claims.phrases import COUNTS_EN, COUNTS_ZH
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release, release_names

_COUNT = rf"(?:\d{{1,5}}|{'|'.join(sorted(COUNTS_ZH, key=len, reverse=True))}|{'|'.join(COUNTS_EN)})"
_EACH = r"(?:\s*(?:x|\*|卡|张|块|个|gpus?|cards?|[- ])\s*|\s*)"
_NODES = r"(?:\s*(?:x|\*|台|节点|机|nodes?(?:\s+of)?|machines?(?:\s+of)?)\s*)"
_SIZE = (
    r"(?:[\s(-]*(\d{2,3})\s*(?:gb?|g)?\)?"
    r"(?![\dkmKM万%.]|\s*(?:路|个|并发|concurren|tok|streams?|users?|requests?|ms|s\b)))?"
)
_MODEL = re.compile(
    r"(?<![a-z0-9])(?:deepseek[-_ /]?(?:ai/)?)*(?:deepseek[-_ ]?)?"
    r"((?:v\d+(?:\.\d+)?|r\d+)(?:[-_ ]?(?:flash|pro|lite|exp|terminus|\d{4}))*)(?![a-z0-9])"
)
_OTHERS = re.compile(r"(?<![a-z0-9])(qwen|llama|glm|kimi|gpt|mixtral|mistral|minimax|gemma|claude|gemini)[\w.-]*")


class Text(Protocol):
    rest: str
    understood: list[str]
    assumed: list[str]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None: ...

    def blank(self, start: int, end: int) -> None: ...


@cache
def _cards() -> re.Pattern[str]:
    """Node count, card count, card, memory, and a count behind."""
    names = {alias.lower() for name in card_names() if name != "cpu" for alias in (name, *card(name).aliases)}
    names -= {"4090", "5090"}
    either = "|".join(
        re.escape(name).replace(r"\-", r"[-\s]?").replace(r"\ ", r"[-\s]?")
        for name in sorted(names, key=len, reverse=True)
    )
    return re.compile(
        rf"(?:(?<![a-z\d.])(?:({_COUNT}){_NODES})?({_COUNT}){_EACH})?(?:nvidia\s*|英伟达\s*|geforce\s*)?(?<![a-wyz])({either}|(?:rtx\s*)?[45]090)(?![a-z0-9])"
        rf"{_SIZE}(?:\s*(?:x|\*)\s*(\d{{1,4}})|\s*(\d{{1,4}}|{'|'.join(COUNTS_ZH)})\s*(?:卡|张|块))?"
    )


def find_hardware(t: Text) -> tuple[Hardware, ...]:
    """The machines that the words fit; none where no card is named. Raises ``ConfigError``: two different ones."""
    match = t.take(_cards())
    if match is None:
        return ()
    nodes, gpus, name, size, *behind = match.groups()
    count = _number(gpus) * (_number(behind[0] or behind[1]) if behind[0] or behind[1] else 1)
    names = _sizes(t, name, size)
    again = _cards().search(t.rest)
    if again is not None:
        raise ConfigError(
            f"the claim names two machines, {match[0].strip()!r} and {again[0].strip()!r}; judge them one by one"
        )
    machines = tuple(_machine(_number(nodes), count, one) for one in names)
    t.understood.append(" or ".join(machine.label for machine in machines))
    if gpus is None and not any(behind):
        t.assumed.append("one card, since no number is given")
    return machines


def _sizes(t: Text, name: str, size: str | None) -> list[str]:
    """H20 alone is either of two cards."""
    if re.fullmatch(r"h20", name) and size is None:
        t.assumed.append("H20 is either the 96 GB or the 141 GB card: both are judged")
        return ["H20-96", "H20-141"]
    if size is None:
        return [name]
    for one in card_names():
        base, _, memory = one.partition("-")
        if card(name).name.partition("-")[0] == base and memory in (size, "") and _fits(one, size):
            return [one]
    raise ConfigError(f"{name.upper()} with {size} GB is not a known card (known: {', '.join(card_names())})")


def _fits(name: str, size: str) -> bool:
    return abs(card(name).memory.value / 1e9 / int(size) - 1) < 0.15


def _machine(nodes: int, gpus: int, name: str) -> Hardware:
    """16xH20 are two machines of eight."""
    if nodes == 1 and gpus > 8 and gpus % 8 == 0:
        nodes, gpus = gpus // 8, 8
    return parse_hardware(f"{nodes}x{gpus}x{name}" if nodes > 1 else f"{gpus}x{name}")


def _number(word: str | None) -> int:
    if word is None:
        return 1
    return int(word) if word.isdecimal() else COUNTS_ZH.get(word) or COUNTS_EN[word]


def machines_named(name: str) -> tuple[Hardware, ...]:
    """Machines of an option: as ``parse_hardware`` takes them, and both memory sizes for a bare H20."""
    bare = re.fullmatch(r"(.*?)h20", name.strip().lower())
    if bare is not None and re.fullmatch(r"[\dx×* ]*", bare[1]):
        return tuple(parse_hardware(f"{bare[1]}{card}") for card in ("H20-96", "H20-141"))
    return (parse_hardware(name),)


def find_models(t: Text) -> tuple[ModelSpec, ...]:
    """The releases that the words fit; none where no model is named. Raises ``ConfigError`` for an unknown one."""
    other = _OTHERS.search(t.rest)
    if other is not None:
        raise ConfigError(f"{other[0]!r} is not a DeepSeek model; known are {', '.join(release_names())}")
    match = t.take(_MODEL)
    if match is None:
        return ()
    again = _MODEL.search(t.rest)
    if again is not None:
        raise ConfigError(f"the claim names two models, {match[1]!r} and {again[1]!r}; judge them one by one")
    specs = models_named(match[1])
    labels = " or ".join(spec.label for spec in specs)
    t.understood.append(labels)
    if len(specs) > 1 or _short(match[1]) != _short(specs[0].label):
        t.assumed.append(f"{match[1].upper()} read as {labels}")
    return specs


def models_named(name: str) -> tuple[ModelSpec, ...]:
    """One release by its name, or all whose name begins with it ("V4": Flash and Pro; "V4.1": V4.1-Flash)."""
    wanted = _short(name)
    known = {_short(full): full for full in release_names()}
    if wanted in known:
        return (release(known[wanted]),)
    begun = [
        full for short, full in known.items() if short.startswith(f"{wanted}-") and not re.search(r"-\d{4}$", short)
    ]
    if not begun:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(known[n] for n in near)}?" if near else ""
        raise ConfigError(f"{name!r} is not a known model{hint} (known: {', '.join(release_names())})")
    return tuple(dict.fromkeys(release(full) for full in begun))


def _short(name: str) -> str:
    plain = re.sub(r"[-_ ]+", "-", name.lower()).removeprefix("deepseek-ai/").removeprefix("deepseek-")
    return re.sub(r"^((?:v|r)\d+(?:\.\d+)?)(?=[a-z])", r"\1-", plain)
