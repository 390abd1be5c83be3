"""``longread doctor --json`` of another machine, back into Facts.

Knows: how Facts become JSON. Must not know: a single field of them. Findings in the file are not taken over: this
version's checks look again. Fields that this version does not know are left out, as newer reports may have them.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from longread.plan.doctor.facts import Facts
from longread.plan.doctor.finding import SCHEMA
from longread.plan.doctor.saved.text import LINE_CHARACTERS, Saved, clean
from longread.spec.errors import ConfigError

ITEMS = 100_000  # of one list or object
LARGEST = 2**63  # NaN and infinity are not below it either


def read_report(saved: Saved) -> Facts:
    try:
        document = json.loads(saved.data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--from {saved.name}: broken JSON: {clean(str(error), 200)}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = clean(str(document.get("schema") if isinstance(document, dict) else type(document).__name__), 80)
        raise ConfigError(f"--from {saved.name}: schema {schema!r}; this version reads {SCHEMA!r}")
    if not isinstance(document.get("facts"), dict):
        raise ConfigError(f"--from {saved.name}: the report holds no facts; save all of `longread doctor --json`")
    facts = _build(Facts, document["facts"], "facts", saved.name)
    assert isinstance(facts, Facts)
    _check_matrices(facts, saved.name)
    return facts


def _check_matrices(facts: Facts, name: str) -> None:
    """The checks rely on the shape that Topology promises."""
    size = len(facts.gpus or ())
    for what, matrix in (
        ("links", facts.topology.links if facts.topology else None),
        ("peer", facts.topology.peer if facts.topology else None),
    ):
        if matrix is not None and (len(matrix) != size or any(len(row) != size for row in matrix)):
            raise ConfigError(f"--from {name}: facts.topology.{what} is not a matrix of {size} x {size} GPUs")


def _build(kind: Any, found: object, where: str, name: str) -> Any:
    """``found`` as ``kind``; ConfigError with the place where it is not."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _either(arguments, found, where, name)
    if origin is typing.Literal:
        if found not in arguments:
            raise _wrong(where, found, " or ".join(map(repr, arguments)), name)
        return found
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(found, dict):
            raise _wrong(where, found, "an object", name)
        types_of = typing.get_type_hints(kind)
        known = {field.name for field in fields(kind)} & found.keys()
        try:
            return kind(**{key: _build(types_of[key], found[key], f"{where}.{key}", name) for key in sorted(known)})
        except TypeError as error:
            raise ConfigError(f"--from {name}: {where}: {clean(str(error), 200)}") from None
    if origin in (tuple, frozenset):
        return _several(origin, arguments, found, where, name)
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(found, dict) or len(found) > ITEMS:
            raise _wrong(where, found, "an object", name)
        return {
            clean(key, 400): _build(arguments[1], item, f"{where}.{clean(key, 80)}", name)
            for key, item in found.items()
        }
    return _plain(kind, found, where, name)


def _either(arguments: tuple[Any, ...], found: object, where: str, name: str) -> Any:
    if found is None and type(None) in arguments:
        return None
    others = [argument for argument in arguments if argument is not type(None)]
    return _build(others[0], found, where, name)


def _several(origin: Any, arguments: tuple[Any, ...], found: object, where: str, name: str) -> Any:
    if not isinstance(found, list) or len(found) > ITEMS:
        raise _wrong(where, found, "a list", name)
    if origin is frozenset or arguments[-1] is Ellipsis:
        items = [_build(arguments[0], item, f"{where}[{at}]", name) for at, item in enumerate(found)]
        return frozenset(items) if origin is frozenset else tuple(items)
    if len(found) != len(arguments):
        raise _wrong(where, found, f"a list of {len(arguments)}", name)
    return tuple(
        _build(kind, item, f"{where}[{at}]", name) for at, (kind, item) in enumerate(zip(arguments, found, strict=True))
    )


def _plain(kind: Any, found: object, where: str, name: str) -> Any:
    if kind is str and isinstance(found, str):
        return clean(found, LINE_CHARACTERS)
    if isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < LARGEST:
        if kind is float:
            return float(found)
        if kind is int and isinstance(found, int):
            return found
    if kind is bool and isinstance(found, bool):
        return found
    raise _wrong(
        where, found, {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}[kind], name
    )


def _wrong(where: str, found: object, wanted: str, name: str) -> ConfigError:
    return ConfigError(f"--from {name}: {where} is {clean(repr(found)[:200], 80)}, not {wanted}")
