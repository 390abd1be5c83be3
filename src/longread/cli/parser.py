"""The argument parser: one line an error, the nearest valid name, no abbreviations.

Knows: argparse. Must not know: any command.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

QUOTED = 200  # characters


class UsageError(ConfigError):
    """The command line cannot be understood."""


EXAMPLE = "    "  # what an example's lines begin with


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults are shown, except those that say nothing (None, False, empty). Indented paragraphs are examples: they
    keep their lines.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            each if each.startswith(EXAMPLE) else super(HelpFormatter, self)._fill_text(each, width, indent)
            for each in paragraphs
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ([], {})
        if silent or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print a page and exit.

    ``elsewhere``: options that other programs have, without their dashes, and what there is here instead.
    """

    elsewhere: Mapping[str, str] = {}

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
        instead = parser.elsewhere.get(first.lstrip("-").replace("_", "-").removeprefix("no-"))
        if instead is not None:
            raise UsageError(f"{parser.prog} has no {first}: {instead}")
        raise UsageError(
            f"{parser.prog}: unknown option {first}{nearest(first, parser.option_names())} (all: {parser.prog} --help)"
        )
    raise UsageError(f"{parser.prog}: unexpected argument {first!r}; see {parser.prog} --help")


def shorten(text: str) -> str:
    """What a message quotes of a text that may be very long."""
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}... ({len(text):,} characters)"


def count(text: str) -> int:
    """Whole numbers >= 1; 8K is 8192 and 8k is 8000, as in the engine's options."""
    try:
        value = parse_tokens("value", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def whole(text: str) -> int:
    """Whole numbers >= 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value
