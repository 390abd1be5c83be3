"""A request body from bytes to plain Python values, or a refusal that says where it went wrong.

Knows JSON only. orjson finds malformed bytes with their position in one fast pass; what orjson lets through and a
client cannot have meant (duplicate keys, nesting that would exhaust a recursive renderer) is refused here. Both parsers
hold the interpreter lock, and with it every open stream, so what would keep them long is refused before the first.
"""

import json
import re

import numpy as np
import orjson

from longread.spec.errors import InvalidRequestError

MAX_DEPTH = 128
MAX_CONTAINERS = 100_000  # objects and arrays; a message is one, a parsed one costs a hundred times its two bytes
MAX_COMMAS = 4_000_000  # several prompts of a million token ids

_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)
_CONTAINERS = frozenset((dict, list))


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return out


def parse_json(body: bytes) -> object:
    """The value of a JSON body. Raises InvalidRequestError: malformed JSON, NaN, Infinity, a lone surrogate (with line
    and column), bytes that are not UTF-8 (with their offset), a duplicate key, more than ``MAX_DEPTH`` levels,
    ``MAX_CONTAINERS`` objects and arrays, or ``MAX_COMMAS`` commas between values.
    """
    if not body.strip():
        raise InvalidRequestError("the request body is empty; a JSON object is needed")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the request body is not UTF-8 at byte {error.start} of {len(body)}") from None
    _check_size(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}, "
            f"of {len(body)} bytes)"
        ) from None
    _check_depth(value)
    _check_keys(body)
    return value


def _check_size(body: bytes) -> None:
    """Bounds what both parses cost. Counting bytes is an upper bound at memory speed; only where it exceeds a limit
    (a long text full of braces, or an attack) are the strings told from the structure.
    """
    data = np.frombuffer(body, np.uint8)  # several times as fast as bytes.count where there is much to count
    opened, separated = (sum(int(np.count_nonzero(data == ord(c))) for c in kind) for kind in ("{[", ","))
    if opened <= MAX_CONTAINERS and separated <= MAX_COMMAS:
        return
    containers = commas = 0
    for match in _STRUCTURE.finditer(body):
        first = body[match.start()]
        if first == 0x2C:
            commas += 1
        elif first != 0x22:
            containers += 1
        if containers > MAX_CONTAINERS:
            raise InvalidRequestError(
                f"the request body has more than {MAX_CONTAINERS} objects and arrays, the {containers}th at byte "
                f"{match.start()} of {len(body)}: send less in one request"
            )
        if commas > MAX_COMMAS:
            raise InvalidRequestError(
                f"the request body has more than {MAX_COMMAS} values, the limit is passed at byte {match.start()} of "
                f"{len(body)}: send less in one request"
            )


def _check_keys(body: bytes) -> None:
    """orjson keeps the last of two equal keys, and which one a client meant cannot be known.

    Only the key test is wanted of this second pass; the bytes are known to be valid and shallow.
    """
    try:
        json.loads(body, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        key = str(error)[:64]
        raise InvalidRequestError(f"the request body has the key {key!r} twice in one object", key) from None


def _check_depth(value: object) -> None:
    """Level by level, so that no recursion depends on the input. Costs one pass over the containers' items."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[object] = []
        for node in level:
            items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            if not _CONTAINERS.isdisjoint(map(type, items)):  # a million token ids are passed over quickly
                below.extend(item for item in items if isinstance(item, dict | list))
        level = below
    if level:
        raise InvalidRequestError(f"the request body is nested deeper than {MAX_DEPTH} levels")
