"""One record as bytes: a fixed header, the token run, the payload, under one checksum.

Knows the layout of a record in a segment file or an exported document. Must not know files.

A record describes itself wholly (kind, key, parent, depth, root, run), so the index can be built again from segments.
The checksum is xxh3-128 over the header before it, the run and the payload: a flipped bit anywhere, a record written
half, or one read at a wrong place does not match.
"""

import struct
from dataclasses import dataclass

import xxhash

from longread.kv.records import ID_BYTES, KEY_BYTES, KINDS, Kind, Record, chain_key
from longread.spec.state import PAGE_TOKENS

MAGIC = b"LRKV"
VERSION = 1  # of this layout; records of any other version are not served
RUN_BYTES_MAX = PAGE_TOKENS * ID_BYTES
# magic, version, kind, bytes of the run, depth, bytes of the payload, root, key, parent; then the checksum
_FIELDS = struct.Struct("<4sHHIIQ16s16s16s")
CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """A record's header, read back. ``payload_bytes`` and ``run_bytes`` follow it in the file, the run first."""

    kind: Kind
    key: bytes
    parent: bytes
    root: bytes
    depth: int
    run_bytes: int
    payload_bytes: int

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.run_bytes + self.payload_bytes


def record_size(record: Record) -> int:
    """Bytes that the record takes in a segment."""
    return HEADER_BYTES + len(record.run) + len(record.payload)


def pack(record: Record, root: bytes) -> bytes:
    """Header and run, to be followed by the payload. ``payload`` must be contiguous bytes."""
    fields = _fields(record, len(record.payload), root)
    return fields + _checksum(fields, record.run, record.payload) + record.run


def parse(header: bytes | bytearray | memoryview) -> Head | None:
    """The header's fields; None if these are not the first HEADER_BYTES of a record of this version."""
    if len(header) < HEADER_BYTES:
        return None
    magic, version, kind, run_bytes, depth, payload_bytes, root, key, parent = _FIELDS.unpack_from(header)
    if magic != MAGIC or version != VERSION or kind >= len(KINDS) or run_bytes > RUN_BYTES_MAX:
        return None
    return Head(KINDS[kind], key, parent, root, depth, run_bytes, payload_bytes)


def is_whole(
    header: bytes | bytearray | memoryview, run: bytes | bytearray, payload: bytes | bytearray | memoryview
) -> bool:
    """Whether the checksum in ``header`` is that of all three."""
    fields = bytes(header[: _FIELDS.size])
    return _checksum(fields, run, payload) == bytes(header[_FIELDS.size : HEADER_BYTES])


def is_record(
    header: memoryview,
    run: memoryview,
    payload: memoryview,
    identity: tuple[Kind, bytes, bytes, int],
    root: bytes,
) -> bool:
    """Whether these bytes are, whole, the record of an ``identity`` (kind, key, parent, depth) under ``root``.

    ``parse`` and ``is_whole`` for whoever knows what must be there: faster, since most is one comparison. That the run
    is the right one the key tells, which is its hash.
    """
    kind, key, parent, depth = identity
    fields = _FIELDS.pack(MAGIC, VERSION, KINDS.index(kind), len(run), depth, len(payload), root, key, parent)
    if header[: _FIELDS.size] != fields or fault(kind, key, parent, depth, bytes(run)) is not None:
        return False
    return header[_FIELDS.size :] == _checksum(fields, run, payload)


def fault(kind: Kind, key: bytes, parent: bytes, depth: int, run: bytes) -> str | None:
    """What is impossible about these identities; None if they can be."""
    if len(key) != KEY_BYTES or len(parent) != KEY_BYTES:
        return f"keys of {len(key)} and {len(parent)} bytes, not {KEY_BYTES}"
    if not 0 < depth < 2**32:
        return f"depth {depth}"
    if kind == "ring":
        return None if not run else "a ring with a run of tokens"
    tokens, rest = divmod(len(run), ID_BYTES)
    if rest or not (tokens == PAGE_TOKENS if kind == "page" else 0 < tokens < PAGE_TOKENS):
        return f"a {kind} of {len(run)} bytes of token ids"
    return None if chain_key(parent, run) == key else "the key is not the hash of parent and run"


def _fields(of: Record, payload_bytes: int, root: bytes) -> bytes:
    kind = KINDS.index(of.kind)
    return _FIELDS.pack(MAGIC, VERSION, kind, len(of.run), of.depth, payload_bytes, root, of.key, of.parent)


def _checksum(fields: bytes, run: bytes | bytearray | memoryview, payload: bytes | bytearray | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(fields)
    hasher.update(run)
    hasher.update(payload)
    return hasher.digest()
