"""Token ids as a body, and a request's fields in its query."""

import struct
from array import array

import pytest

from longread.spec.errors import InvalidRequestError
from longread.wire.binary import query_fields, read_ids


def test_ids_are_little_endian():
    assert read_ids(struct.pack("<3i", 0, 5, 129279)) == array("i", [0, 5, 129279]).tobytes()
    assert read_ids(b"\xff" * 4) == array("i", [-1]).tobytes()


@pytest.mark.parametrize("body", [b"", b"\1", b"\1\0\0\0\2"])
def test_what_is_no_list_of_ids(body):
    with pytest.raises(InvalidRequestError, match="4 bytes"):
        read_ids(body)


def test_fields_are_json_or_text():
    query = [("max_tokens", "8"), ("stream", "true"), ("model", "reader-v4"), ("user", '"8"'), ("stop", '["a", "b"]')]
    query += [("temperature", "0.5"), ("seed", "null"), ("suffix", "")]
    assert query_fields(query) == {
        "max_tokens": 8,
        "stream": True,
        "model": "reader-v4",
        "user": "8",
        "stop": ["a", "b"],
        "temperature": 0.5,
        "seed": None,
        "suffix": "",
    }


@pytest.mark.parametrize("query", [[("prompt", "x")], [("n", "1"), ("n", "1")]])
def test_fields_that_cannot_be_there(query):
    with pytest.raises(InvalidRequestError, match=query[0][0]):
        query_fields(query)
