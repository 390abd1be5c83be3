"""The disk store against a dict: random writes, uses, evictions, pins and reopening, through two stores at once."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recordmaker import SMALL, chain_of, payload_of

from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Kind, Record
from longread.spec.errors import StoreFullError

LIMIT = 40_000
Key = tuple[Kind, bytes]
CHAINS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 1100))


def chain(shape: tuple[int, int, int]) -> list[Record]:
    """Chains that share their first page or two, or not."""
    first, second, length = shape
    return chain_of([first, *range(255), second, *range(1000)][:length])


class Walk(RuleBasedStateMachine):
    """``written`` is all that any store was ever given and has not been told to remove; the store may have less of it,
    never other bytes, and all of it after a write as long as nothing was evicted.
    """

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.stores = [DiskStore.open(self.path, SMALL, max_bytes=LIMIT) for _ in range(2)]
        self.written: dict[Key, bytes] = {}
        self.pinned: dict[str, list[Record]] = {}

    @rule(shape=CHAINS, who=st.integers(0, 1), pin=st.booleans())
    def write(self, shape: tuple[int, int, int], who: int, pin: bool) -> None:
        records = chain(shape)
        ids = b"".join(record.run for record in records)
        document = None
        if pin and len(self.pinned) < 2:
            name = f"doc-{records[-1].key.hex()[:8]}"
            document = DocumentInfo(name, "n", "tiny", len(ids) // 4, 1, records[-1].key, True, token_ids=ids)
        try:
            self.stores[who].write(records, document=document)
        except StoreFullError:
            assert self.pinned
            return
        self.written |= {(record.kind, record.key): record.payload for record in records}
        if document is not None:
            self.pinned[document.id] = records
        for store in self.stores:
            self._whole(store, records)

    @rule(shape=CHAINS, who=st.integers(0, 1))
    def touch(self, shape: tuple[int, int, int], who: int) -> None:
        self.stores[who].touch([record.key for record in chain(shape)])

    @rule(who=st.integers(0, 1), limit=st.integers(0, LIMIT))
    def collect(self, who: int, limit: int) -> None:
        self.stores[who].gc(limit)
        left = sum(record_bytes(records) for records in self.pinned.values())
        other = self.stores[1 - who]._writer.segment_bytes + 4000  # what its writer still holds
        assert self.stores[who].stats().file_bytes <= max(limit, left) + other

    @rule(who=st.integers(0, 1))
    def remove(self, who: int) -> None:
        for ident in sorted(self.pinned)[:1]:
            del self.pinned[ident]
            assert self.stores[who].remove(ident)

    @rule(who=st.integers(0, 1))
    def unpin(self, who: int) -> None:
        for ident in sorted(self.pinned)[:1]:
            del self.pinned[ident]
            assert self.stores[who].unpin(ident)

    @rule(who=st.integers(0, 1))
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = DiskStore.open(self.path, SMALL, max_bytes=LIMIT)

    @rule(who=st.integers(0, 1))
    def verify(self, who: int) -> None:
        report = self.stores[who].verify()
        assert not report.corrupt
        assert not report.unreachable
        assert not report.index_faults

    @rule(shape=CHAINS, who=st.integers(0, 1))
    def read(self, shape: tuple[int, int, int], who: int) -> None:
        store = self.stores[who]
        for record in chain(shape):
            into = bytearray(len(record.payload))
            known = store.get(record.kind, record.key)
            there = store.read(record.kind, record.key, memoryview(into))
            assert there == (known is not None)
            if there:
                assert self.written[record.kind, record.key] == into == payload_of(record.kind, record.key)
            elif record.kind != "ring":
                assert record.key not in {near.key for near in store.nearest(record.parent, record.run)}

    @invariant()
    def pins_hold(self) -> None:
        for records in self.pinned.values():
            self._whole(self.stores[0], records)

    @staticmethod
    def _whole(store: DiskStore, records: list[Record]) -> None:
        assert all(store.get(record.kind, record.key) is not None for record in records)

    def teardown(self) -> None:
        for store in self.stores:
            assert store.corrupt == 0
            store.close()
        shutil.rmtree(self.path)


def record_bytes(records: list[Record]) -> int:
    return sum(len(record.payload) + len(record.run) + 100 for record in records)


TestDiskStoreAgainstADict = Walk.TestCase
