"""A sweep's file: written whole after every point, and taken up again.

Knows the format and what must agree between a file and the command that goes on with it. Must not know how a point is
measured. Format 1:

- ``longread_sweep``: 1; ``axis``: concurrency, rate or context; ``partial``: whether points are missing
- ``points``, rising: ``value``, ``result`` (as ``longread bench serve`` writes it), and ``frontier`` (axis context) or
  ``probe`` (a probe of a search: ``said``, ``good``, ``judged``, ``effective``, ``share_interval``, ``rounds``,
  ``reason``), ``stopped`` (true: interrupted; measured again by --resume)
- ``anchors``: results by name that say where an automatic axis lies (``alone``, ``saturated``)
- ``knee``: ``value``, ``interval``, ``method``, ``latency``, ``throughput``, or null; ``knee_note``: how, or why none
- ``max_goodput``: ``value``, ``interval`` (largest load met, smallest missed; null: none), ``slos``, ``share``,
  ``confidence``, ``goodput``, ``ended``, ``note``, or null
- ``definitions``: what frontier figures are; ``provenance``: ``settings`` (must agree to go on), command, dates
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longread.measure.files import write_json
from longread.measure.sweep.axis import Axis
from longread.spec.errors import ConfigError

SCHEMA = 1
MOST_BYTES = 1 << 30


class Book:
    """One sweep on its way into its file."""

    def __init__(self, path: Path, axis: Axis, provenance: Mapping[str, Any], definitions: Mapping[str, str]):
        self.path = path
        self.document: dict[str, Any] = {
            "longread_sweep": SCHEMA,
            "axis": axis.name,
            "partial": True,
            "points": [],
            "anchors": {},
            "knee": None,
            "knee_note": None,
            "max_goodput": None,
            "definitions": dict(definitions),
            "provenance": dict(provenance),
        }

    @property
    def points(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["points"]
        return found

    def point(self, value: float) -> dict[str, Any] | None:
        """A point that is whole."""
        return next((p for p in self.points if math.isclose(p["value"], value) and not p.get("stopped")), None)

    def put(self, point: dict[str, Any]) -> None:
        """In place of one of the same value; the file has it when this returns."""
        kept = [each for each in self.points if not math.isclose(each["value"], point["value"])]
        self.document["points"] = sorted([*kept, point], key=lambda each: each["value"])
        self.write()

    def write(self) -> None:
        write_json(self.path, self.document)

    def resume(self) -> int:
        """Takes the file's points; returns how many. Raises ConfigError where it is not of the same sweep."""
        old = read(self.path)
        theirs, ours = old["provenance"].get("settings", {}), self.document["provenance"]["settings"]
        for name in (*ours, *theirs):
            if theirs.get(name) != ours.get(name):
                raise ConfigError(
                    f"{self.path} was measured with {name} {_short(theirs.get(name))}, this command says "
                    f"{_short(ours.get(name))}: points of both cannot stand in one sweep; give the same options or "
                    "another --output"
                )
        self.document["points"] = [point for point in old["points"] if not point.get("stopped")]
        self.document["anchors"] = old.get("anchors") or {}
        begun = old["provenance"].get("date")
        self.document["provenance"]["resumed_from"] = [*old["provenance"].get("resumed_from", []), begun]
        return len(self.points)


def read(path: Path) -> dict[str, Any]:
    """A sweep's file. Raises ConfigError where it is none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES // 2**20:,} MiB: it is no sweep's file")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); give another --output") from None
    schema = document.get("longread_sweep") if isinstance(document, dict) else None
    if schema != SCHEMA:
        known = "it is no sweep's file" if schema is None else f"its format is {str(schema)[:20]}, known is {SCHEMA}"
        raise ConfigError(f"{path}: {known}; give another --output")
    points = document.get("points")
    sound = isinstance(points, list) and isinstance(document.get("provenance"), dict)
    if not sound or not all(_sound(point) for point in points):
        raise ConfigError(f"{path}: its points are not what a sweep writes; give another --output")
    return document


def _sound(point: object) -> bool:
    if not isinstance(point, dict) or not isinstance(point.get("result"), dict):
        return False
    value = point.get("value")
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:120]
