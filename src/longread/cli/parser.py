"""The argument parser: one line an error, the nearest valid name, no abbreviations.

Knows: argparse. Must not know: any command.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from longread.spec.errors import ConfigError


class UsageError(ConfigError):
    """The command line cannot be understood."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults are shown, except those that say nothing (None, False, empty)."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ([], {})
        if silent or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print a page and exit."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def nearest(name: str, valid: Sequence[str]) -> str:
    """``"; did you mean X?"``, or nothing when no name is near."""
    found = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def refuse_unknown(unknown: Sequence[str], parser: Parser) -> None:
    """Raises UsageError for the first argument that ``parser`` did not know."""
    if not unknown:
        return
    first = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
    if first.startswith("-"):
        raise UsageError(
            f"{parser.prog}: unknown option {first}{nearest(first, parser.option_names())} (all: {parser.prog} --help)"
        )
    raise UsageError(f"{parser.prog}: unexpected argument {first!r}; see {parser.prog} --help")


def size(text: str) -> int:
    """Bytes: a whole number, or one with K, M, G or T for powers of 1024 (``4G``, ``512MiB``)."""
    units = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
    bare = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (bare[:-1], bare[-1]) if bare and bare[-1].isalpha() else (bare, "")
    try:
        value = float(number) * (1 << units[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or 512M, 4G") from None
    if not 0 < value < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0")
    return int(value)


def count(text: str) -> int:
    """Whole numbers >= 1, with K and M for 1024s as in ``--max-model-len 128K``."""
    units = {"k": 1 << 10, "m": 1 << 20}
    unit = units.get(text[-1:].lower(), 1)
    try:
        value = int(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (128K means 131072)") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def whole(text: str) -> int:
    """Whole numbers >= 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value
