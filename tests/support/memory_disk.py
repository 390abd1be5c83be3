"""A disk in memory: the interface of the disk store without files, and the model that the tiers are tested against.

``fail``: method names that raise StoreError. ``gate``: cleared, reads wait until it is set. ``flip`` damages a record.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from longread.kv.records import CONTENT_ROOT, Kind, Known, Layout, Record, Verdict, chain_key
from longread.spec.errors import StoreError


class MemoryDisk:
    def __init__(self, layout: Layout | None = None, records: dict[tuple[Kind, bytes], Record] | None = None):
        self.records: dict[tuple[Kind, bytes], Record] = {} if records is None else records  # shared by "processes"
        self.layout = layout
        self.corrupt = 0
        self.fail: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.damaged: set[tuple[Kind, bytes]] = set()
        self.touched: list[bytes] = []
        self.reads = 0
        self.writes: list[list[tuple[Kind, bytes]]] = []
        self.closed = False

    def _enter(self, name: str) -> None:
        if self.closed:
            raise AssertionError(f"{name} after close")
        if name in self.fail:
            raise StoreError(f"{name} was told to fail")

    def _known(self, record: Record) -> Known:
        ring = ("ring", record.key) in self.records
        return Known(record.kind, record.key, record.parent, record.depth, record.run, ring)

    def get(self, kind: Kind, key: bytes) -> Known | None:
        return self.known(kind, [key]).get(key)

    def known(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, Known]:
        self._enter("known")
        return {key: self._known(self.records[kind, key]) for key in keys if (kind, key) in self.records}

    def present(self, kind: Kind, keys: Sequence[bytes]) -> set[bytes]:
        return set(self.known(kind, keys))

    def nearest(self, parent: bytes, ahead: bytes) -> list[Known]:
        self._enter("nearest")
        runs = [each for each in list(self.records.values()) if each.parent == parent and each.kind != "ring"]
        below = sorted((each for each in runs if each.run <= ahead), key=lambda each: each.run)[-1:]
        above = sorted((each for each in runs if each.run > ahead), key=lambda each: each.run)[:1]
        return [self._known(each) for each in below + above]

    def tails(self, ahead: Mapping[bytes, bytes]) -> dict[bytes, list[Known]]:
        self._enter("tails")
        found: dict[bytes, list[Known]] = {}
        for each in map(self._known, list(self.records.values())):
            if each.kind == "tail" and each.has_ring and ahead.get(each.parent, b"").startswith(each.run):
                found.setdefault(each.parent, []).append(each)
        return found

    def other_roots(self, content_key: bytes) -> list[str]:
        self._enter("other_roots")
        first = [each for each in list(self.records.values()) if each.kind == "page" and each.depth == 1]
        return ["another model"] if any(chain_key(CONTENT_ROOT, each.run) == content_key for each in first) else []

    def fetch(self, kind: Kind, key: bytes, into: memoryview) -> Verdict:
        self.gate.wait()
        self._enter("fetch")
        self.reads += 1
        record = self.records.get((kind, key))
        if record is None:
            return "absent"
        if (kind, key) in self.damaged:
            self.corrupt += 1
            del self.records[kind, key]
            self.damaged.discard((kind, key))
            return "corrupt"
        into[:] = record.payload
        return "whole"

    def batches(
        self, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview] = ()
    ) -> Generator[Sequence[tuple[Verdict, memoryview]], None, None]:
        """Three at a time; what the last batch lay in is overwritten, as a room would be."""
        for first in range(0, len(wanted), 3):
            batch: list[tuple[Verdict, memoryview]] = []
            for kind, key in wanted[first : first + 3]:
                record = self.records.get((kind, key))
                into = memoryview(bytearray(len(record.payload) if record is not None else 0))
                batch.append((self.fetch(kind, key, into), into))
            yield batch
            for _, payload in batch:
                payload[:] = b"\xa5" * len(payload)

    def write(self, records: Sequence[Record]) -> int:
        self._enter("write")
        fresh = [each for each in records if (each.kind, each.key) not in self.records]
        for each in fresh:
            if self.layout is not None and len(each.payload) != self.layout.payload_bytes(each.kind):
                raise AssertionError(f"a {each.kind} of {len(each.payload)} bytes")
            self.records[each.kind, each.key] = replace(each, payload=bytes(each.payload))  # lent for this call
        self.writes.append([(each.kind, each.key) for each in fresh])
        return sum(len(each.payload) for each in fresh)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._enter("touch")
        self.touched.extend(keys)

    def close(self) -> None:
        self.closed = True
