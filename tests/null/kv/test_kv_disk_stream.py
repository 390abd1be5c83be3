"""A chain read as one stream gives what each record alone gives, whatever lies between its records."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from errno import EIO, EMFILE, ENOMEM
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordmaker import ROOT, SMALL, chain_of, payload_of, streamed

from longread.kv.disk import ahead, segments
from longread.kv.disk import format as record_format
from longread.kv.disk.catalogue import delete
from longread.kv.disk.store import DiskStore
from longread.kv.records import Kind, Record, Verdict
from longread.spec.errors import StoreError

BIG = 2**30
CHAIN = chain_of(range(256 * 12 + 7))
Ref = tuple[Kind, bytes]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    made.write(CHAIN)
    yield made
    made.close()


def refs(records: Sequence[Record]) -> list[Ref]:
    return [(record.kind, record.key) for record in records]


def read(store: DiskStore, wanted: Sequence[Ref]) -> list[Verdict]:
    """Verdicts; the bytes of what is whole are compared at once."""
    verdicts = []
    for (kind, key), (verdict, payload) in zip(wanted, streamed(store, wanted), strict=True):
        assert verdict != "whole" or payload == payload_of(kind, key)
        verdicts.append(verdict)
    return verdicts


def rooms_of(count: int, size: int) -> list[memoryview]:
    return [memoryview(bytearray(b"\xa5" * size)) for _ in range(count)]


def read_batches(store: DiskStore, wanted: Sequence[Ref], rooms: Sequence[memoryview]) -> list[Verdict]:
    """``read`` by batches: the payloads of each lie one behind the other in one room."""
    verdicts: list[Verdict] = []
    for batch in store.batches(wanted, rooms):
        kinds = [kind for kind, _ in wanted[len(verdicts) : len(verdicts) + len(batch)]]
        whole = b"".join(bytes(payload) for _, payload in batch)
        assert [len(payload) for _, payload in batch] == [SMALL.payload_bytes(kind) for kind in kinds]
        assert any(room.obj is batch[0][1].obj and room[: len(whole)] == whole for room in rooms)
        for (verdict, payload), (kind, key) in zip(batch, wanted[len(verdicts) :], strict=False):
            assert verdict != "whole" or payload == payload_of(kind, key)
            verdicts.append(verdict)
    return verdicts


def place(store: DiskStore, record: Record) -> segments.Place:
    row = store._catalogue.get(record.kind, record.key)
    assert row is not None
    return row.place


def flip(store: DiskStore, record: Record, byte: int) -> None:
    where = place(store, record)
    with (store.path / "segments" / where.segment).open("r+b") as file:
        file.seek(where.offset + byte)
        [old] = file.read(1)
        file.seek(where.offset + byte)
        file.write(bytes([old ^ 1]))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads from now on."""
    sizes, preadv = [], os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        sizes.append(sum(len(each) for each in buffers))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return sizes


def test_neighbours_are_read_by_one_call(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = counted(monkeypatch)
    assert read(store, refs(CHAIN)) == ["whole"] * len(CHAIN)
    assert len(sizes) == 1


def test_a_stretch_is_bounded(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what a buffer holds, or one record, if that is larger."""
    size = place(store, CHAIN[0]).size
    sizes = counted(monkeypatch)
    for limit, most in ((3 * size, 3 * size), (1, size)):
        sizes.clear()
        monkeypatch.setattr(ahead, "STRETCH_BYTES", limit)
        assert read(store, refs(CHAIN)) == ["whole"] * len(CHAIN)
        assert max(sizes) == most


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_and_any_gaps(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over several segments, with records that are not there or twice asked for."""
    limit = data.draw(st.sampled_from([3000, 20_000, BIG]))
    written = data.draw(st.permutations(CHAIN))[: data.draw(st.integers(0, len(CHAIN)))]
    wanted = refs(data.draw(st.lists(st.sampled_from(CHAIN), max_size=20)))
    there = set(refs(written))
    store = DiskStore.open(tmp_path_factory.mktemp("stream"), SMALL, max_bytes=BIG)
    store._writer.segment_bytes = limit
    for start in range(0, len(written), 4):
        store.write(written[start : start + 4])
    expected = ["whole" if ref in there else "absent" for ref in wanted]
    assert read(store, wanted) == expected
    rooms = rooms_of(data.draw(st.integers(1, 5)), data.draw(st.integers(SMALL.page_bytes, 8 * SMALL.page_bytes)))
    assert read_batches(store, wanted, rooms) == expected
    assert store.corrupt == 0
    store.close()


@pytest.mark.parametrize("byte", [0, 5, 30, 85, 100, 1500], ids=["magic", "kind", "root", "checksum", "run", "payload"])
def test_damage_in_the_middle_costs_one_record(store: DiskStore, byte: int) -> None:
    flip(store, CHAIN[5], byte)
    verdicts = ["corrupt" if each is CHAIN[5] else "whole" for each in CHAIN]
    assert read(store, refs(CHAIN)) == verdicts
    assert store.corrupt == 1
    assert read(store, refs(CHAIN)) == [{"corrupt": "absent"}.get(each, each) for each in verdicts]
    store.write(CHAIN)
    assert read(store, refs(CHAIN)) == ["whole"] * len(CHAIN)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_damage_while_others_read_ahead(store: DiskStore, count: int) -> None:
    rooms = rooms_of(count, 2 * SMALL.page_bytes)
    for number in (2, 3, 9):
        flip(store, CHAIN[number], 1500)
    verdicts = ["corrupt" if number in (2, 3, 9) else "whole" for number in range(len(CHAIN))]
    assert read_batches(store, refs(CHAIN), rooms) == verdicts
    assert store.corrupt == 3
    assert read_batches(store, refs(CHAIN), rooms) == [{"corrupt": "absent"}.get(each, each) for each in verdicts]


def test_rooms_are_their_owners_again_once_a_load_is_let_go(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that were slow do not write behind his back, and none is left."""
    rooms, preadv = rooms_of(4, SMALL.page_bytes), os.preadv
    slow = threading.Event()

    def waiting(file: int, buffers: Any, offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            slow.wait(0.02)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", waiting)
    batches = store.batches(refs(CHAIN), rooms)
    assert [verdict for verdict, _ in next(batches)] == ["whole"]
    batches.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("longread-read")]
    before = [bytes(room) for room in rooms]
    slow.wait(0.1)
    assert before == [bytes(room) for room in rooms]


def test_what_was_read_before_a_shortage_is_given(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    where, preadv = place(store, CHAIN[5]), os.preadv

    def failing(file: int, buffers: Any, offset: int) -> int:
        if offset == where.offset:
            raise OSError(ENOMEM, os.strerror(ENOMEM))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    seen: list[Verdict] = []
    with pytest.raises(StoreError, match="cannot be read now"):
        for batch in store.batches(refs(CHAIN), rooms_of(3, SMALL.page_bytes)):
            seen += [verdict for verdict, _ in batch]
    assert seen == ["whole"] * 5
    assert store.corrupt == 0


def test_a_room_must_hold_a_record(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="larger"):
        next(store.batches(refs(CHAIN), rooms_of(2, SMALL.page_bytes - 1)))


def test_a_segment_that_was_cut_costs_what_is_behind_the_cut(store: DiskStore) -> None:
    where = place(store, CHAIN[5])
    os.truncate(store.path / "segments" / where.segment, where.offset + where.size - 1)
    assert read(store, refs(CHAIN)) == ["whole"] * 5 + ["corrupt"] * (len(CHAIN) - 5)


def test_a_place_that_the_disk_cannot_read_costs_its_record(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    where, preadv = place(store, CHAIN[5]), os.preadv

    def failing(file: int, buffers: Any, offset: int) -> int:
        if offset < where.offset + where.size and offset + sum(len(each) for each in buffers) > where.offset:
            raise OSError(EIO, os.strerror(EIO))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert read(store, refs(CHAIN)) == ["corrupt" if each is CHAIN[5] else "whole" for each in CHAIN]


@pytest.mark.parametrize("error", [EMFILE, ENOMEM])
@pytest.mark.parametrize(("owner", "name"), [(segments, "open_own"), (os, "preadv")])
def test_a_shortage_ends_the_stream_and_drops_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: int
) -> None:
    def failing(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(StoreError, match="cannot be read now"):
            read(store, refs(CHAIN))
    assert store.corrupt == 0
    assert read(store, refs(CHAIN)) == ["whole"] * len(CHAIN)


def test_records_that_another_process_moves_meanwhile(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were looked up, then the collector puts the records elsewhere and deletes their segment."""
    monkeypatch.setattr(ahead, "STRETCH_BYTES", 1)
    dead = chain_of([1, *range(256 * 12 + 7)])
    store.write(dead)
    rows = [store._catalogue.get(record.kind, record.key) for record in dead]
    with store._catalogue.transaction() as write:
        delete(write, [row.id for row in rows if row is not None])
    store._writer.finish()
    other = DiskStore.open(store.path, SMALL, max_bytes=BIG)
    stream = (found for batch in store.batches(refs(CHAIN), rooms_of(2, SMALL.page_bytes)) for found in batch)
    assert next(stream)[0] == "whole"
    old = place(store, CHAIN[0])
    other.gc(other.stats().live_bytes)
    assert place(store, CHAIN[0]).segment != old.segment
    store._segments.forget(old.segment)
    assert [verdict for verdict, _ in stream] == ["whole"] * (len(CHAIN) - 1)
    other.close()


def test_streams_at_the_same_time_and_streams_that_are_left(store: DiskStore) -> None:
    """Each has memory of its own; what one leaves behind the next one may use."""
    wrong: list[list[Verdict]] = []

    def many() -> None:
        for _ in range(50):
            left = streamed(store, refs(CHAIN))
            assert next(left)[0] == "whole"
            verdicts = read(store, refs(CHAIN))
            if verdicts != ["whole"] * len(CHAIN):
                wrong.append(verdicts)

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_stream_counts_as_a_use(store: DiskStore) -> None:
    other = chain_of([1, *range(256 * 12 + 7)])
    store.write(other)
    read(store, refs(CHAIN))
    store.gc(store.stats().live_bytes - 1)
    assert store.get("ring", CHAIN[-1].key) is not None
    assert store.get("tail", other[-2].key) is None


def test_without_a_model_no_chain_is_loaded(store: DiskStore) -> None:
    with pytest.raises(StoreError, match="without a model"):
        read(DiskStore.open(store.path, None, max_bytes=BIG, read_only=True), refs(CHAIN))


def is_record(data: bytes | bytearray, record: Record, root: bytes = ROOT) -> bool:
    view, head = memoryview(data), record_format.HEADER_BYTES
    payload = head + len(record.run)
    identity = (record.kind, record.key, record.parent, record.depth)
    return record_format.is_record(view[:head], view[head:payload], view[payload:], identity, root)


@settings(max_examples=200)
@given(st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(CHAIN))
    whole = record_format.pack(record, ROOT) + record.payload
    assert is_record(whole, record)
    bad = bytearray(whole)
    bad[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not is_record(bad, record)


@pytest.mark.parametrize("other", ["key", "parent", "depth", "kind", "root"])
def test_a_whole_record_that_is_another_one(other: str) -> None:
    record, next_one = CHAIN[3], CHAIN[4]
    packed = record_format.pack(record, ROOT) + record.payload
    changed = {
        "key": replace(record, key=next_one.key),
        "parent": replace(record, parent=next_one.parent),
        "depth": replace(record, depth=record.depth + 1),
        "kind": replace(record, kind="tail"),
    }
    assert not is_record(packed, changed.get(other, record), bytes(16) if other == "root" else ROOT)


def test_a_sound_checksum_over_a_run_that_is_not_the_keys() -> None:
    """Written so by somebody: key and run are told apart by the key, which is the run's hash."""
    forged = replace(CHAIN[3], run=CHAIN[4].run)
    assert not is_record(record_format.pack(forged, ROOT) + forged.payload, forged)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_chain_is_read_where_there_are_no_threads_to_have(
    store: DiskStore, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, plain, left = rooms_of(4, SMALL.page_bytes), threading.Thread.start, [threads]

    def start(self: threading.Thread) -> None:
        if self.name.startswith("longread-read"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert read_batches(store, refs(CHAIN), rooms) == ["whole"] * len(CHAIN)
    assert left[0] < 0
    assert not [each for each in threading.enumerate() if each.name.startswith("longread-read")]
