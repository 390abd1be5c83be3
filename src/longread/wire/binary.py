"""A completion's prompt as raw token ids: the body is the prompt, its fields are in the query.

    POST /v1/completions?max_tokens=64&temperature=0&stream=true
    Content-Type: application/octet-stream
    <ids as little-endian int32, 4 bytes each>

Knows bytes and the query's form; not what the fields mean. As JSON a list of a million ids costs a hundred times what
the bytes cost.
"""

from collections.abc import Iterable

import numpy as np
import orjson

from longread.spec.errors import InvalidRequestError

MEDIA_TYPE = "application/octet-stream"


def read_ids(body: bytes) -> bytes:
    """The ids as int32 bytes of this machine, in the order of ``array("i")``.

    Raises InvalidRequestError: not whole ids, or none. What an id may be is the engine's to say.
    """
    if len(body) % 4:
        raise InvalidRequestError(
            f"the body has {len(body)} bytes, which is no whole number of ids: send 4 bytes each, little-endian int32",
            param="prompt",
        )
    if not body:
        raise InvalidRequestError("the body is empty: send at least one id, 4 bytes, little-endian int32", "prompt")
    return np.frombuffer(body, "<i4").astype(np.intc).tobytes()


def query_fields(query: Iterable[tuple[str, str]]) -> dict[str, object]:
    """The request's fields. Each value is JSON (``8``, ``true``, ``"8"``, ``["a"]``), and a text where it is none.

    Raises InvalidRequestError for a name that comes twice, and for ``prompt``, which is the body.
    """
    fields: dict[str, object] = {}
    for name, value in query:
        if name == "prompt":
            raise InvalidRequestError("prompt cannot be in the query: the body holds its ids", param="prompt")
        if name in fields:
            raise InvalidRequestError(f"the query has {name[:64]!r} twice", param=name[:64])
        try:
            fields[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            fields[name] = value
    return fields
