"""Chains of small records whose bytes follow from their keys, so that any served byte can be checked."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from longread.kv.disk.store import DiskStore
from longread.kv.records import ID_BYTES, Kind, Layout, Record, Verdict, chain_key
from longread.spec.state import PAGE_TOKENS

ROOT = bytes(range(16))
SMALL = Layout(ROOT, "tiny", "float32", page_bytes=600, ring_bytes=250)


def payload_of(kind: Kind, key: bytes, layout: Layout = SMALL) -> bytes:
    """Without any byte's highest bit: then it is finite as float32 and as bfloat16."""
    size = layout.payload_bytes(kind)
    return bytes(byte & 0x7F for byte in hashlib.shake_128(kind.encode() + key).digest(size))


def record_of(kind: Kind, parent: bytes, depth: int, run: bytes, layout: Layout = SMALL) -> Record:
    key = chain_key(parent, run)
    return Record(kind, key, parent, depth, run, payload_of(kind, key, layout))


def ring_of(record: Record, layout: Layout = SMALL) -> Record:
    return Record("ring", record.key, record.parent, record.depth, b"", payload_of("ring", record.key, layout))


def chain_of(tokens: Sequence[int], layout: Layout = SMALL, rings: bool = True) -> list[Record]:
    """All pages of the tokens, the tail if there is one, and the ring behind the last of them."""
    data, parent, records = array("i", tokens).tobytes(), layout.root, []
    for depth, run in enumerate(_runs(data), 1):
        kind: Kind = "page" if len(run) == PAGE_TOKENS * ID_BYTES else "tail"
        records.append(record_of(kind, parent, depth, run, layout))
        parent = records[-1].key
    return [*records, ring_of(records[-1], layout)] if rings else records


def streamed(store: DiskStore, wanted: Sequence[tuple[Kind, bytes]]) -> Iterator[tuple[Verdict, memoryview]]:
    """A chain as the store reads it ahead, one after the other."""
    for batch in store.batches(wanted):
        yield from batch


def served(store: DiskStore, records: Sequence[Record]) -> int:
    """How many of the records are served; that each of those is right is checked."""
    found = 0
    for record in records:
        into = bytearray(len(record.payload))
        if store.read(record.kind, record.key, memoryview(into)):
            assert into == record.payload, f"a wrong {record.kind} was served"
            known = store.get(record.kind, record.key)
            assert known is not None
            assert (known.parent, known.depth, known.run) == (record.parent, record.depth, record.run)
            found += 1
    return found


def _runs(data: bytes) -> Iterator[bytes]:
    step = PAGE_TOKENS * ID_BYTES
    for start in range(0, len(data), step):
        yield data[start : start + step]
