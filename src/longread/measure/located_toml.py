"""A TOML file of the user's, and in which line each of its keys stands, so that an error can say where.

Knows syntax only. tomllib parses; the lines are found beside it, for keys written one a line (an inline table's keys
are where the table begins).
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longread.spec.errors import ConfigError

MOST_BYTES = 2**20
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*("[^"]*"|'[^']*'|[A-Za-z0-9_-]+)((?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_PART = re.compile(r""""[^"]*"|'[^']*'|[A-Za-z0-9_-]+""")

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LocatedToml:
    """``lines``: of tables and keys, by their path: ("step", 0, "options")."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[Place, int]
    text: str

    def error(self, place: Sequence[str | int], said: str) -> ConfigError:
        """For what stands at ``place``, or at the nearest table around it."""
        for size in range(len(place), 0, -1):
            line = self.lines.get(tuple(place[:size]))
            if line is not None:
                return ConfigError(f"{self.path}, line {line}: {said}")
        return ConfigError(f"{self.path}: {said}")

    def only(self, place: Sequence[str | int], table: Mapping[str, Any], known: Collection[str]) -> None:
        """Raises ConfigError for a key of ``table``, which stands at ``place``, that is none of ``known``."""
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise self.error((*place, key), f"unknown key {key[:60]!r}{hint} (all: {', '.join(known)})")


def read(path: Path) -> LocatedToml:
    """Raises ConfigError where the file cannot be read, is too large, or is no TOML."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes; a file of settings has at most {MOST_BYTES:,}")
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is no TOML: nested too deep") from None
    return LocatedToml(path, data, _lines(text), text)


def _lines(text: str) -> dict[Place, int]:
    found: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    inside = ""  # the quotes of a text of several lines
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if line.count(inside) % 2 else inside
            continue
        header = _HEADER.match(line)
        if header is not None:
            table = _names(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                found.setdefault(table, number)
            table = _numbered(table, counts)
            found.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            found.setdefault((*table, *_names(key[0].rstrip("= \t"))), number)
        inside = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), "")
    return found


def _names(text: str) -> Place:
    return tuple(part.strip("\"'") for part in _PART.findall(text))


def _numbered(names: Place, counts: Mapping[Place, int]) -> Place:
    """("step", "env") as ("step", 2, "env") where the step is the third one of its kind."""
    found: Place = ()
    for size, name in enumerate(names, 1):
        found = (*found, name)
        if tuple(names[:size]) in counts:
            found = (*found, counts[names[:size]])
    return found
