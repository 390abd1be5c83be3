"""Documents over the disk store: what comes back, under which id, and from whom."""

import contextlib
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of

from longread.kv import shelf as kv_shelf
from longread.kv.disk.store import DiskStore
from longread.kv.records import Layout
from longread.kv.shelf import DiskShelf, LateShelf
from longread.spec.documents import document_id, landing_key
from longread.spec.errors import StoreError, StoreReadOnlyError

TEXT = "Clause 1. 中文\r\n" * 50
IDS = tuple(range(1000))
OTHER = Layout(bytes(range(16, 32)), "other", "float32", page_bytes=600, ring_bytes=0)


def opened(path: Path, layout: Layout | None = SMALL, **options: bool) -> DiskStore:
    return DiskStore.open(path, layout, max_bytes=2**24, **options)


def test_a_document_is_kept_across_processes(tmp_path):
    store = opened(tmp_path)
    document = DiskShelf(store).add(TEXT, name="lease.txt", tokens=IDS, pinned=False)
    assert document.id == document_id(landing_key(SMALL.root, IDS))
    assert (document.name, document.tokens, document.size) == ("lease.txt", 1000, len(TEXT.encode()))
    assert document.model == "tiny"
    store.close()
    store = opened(tmp_path)
    shelf = DiskShelf(store)
    assert shelf.get(document.id) == document
    assert shelf.text(document.id) == TEXT
    assert shelf.list() == [document]
    assert shelf.remove(document.id)
    assert not shelf.remove(document.id)
    assert (shelf.get(document.id), shelf.text(document.id), shelf.list()) == (None, None, [])
    store.close()


def test_a_text_that_was_asked_for_goes_with_its_document(tmp_path):
    store, other = opened(tmp_path), opened(tmp_path)
    shelf = DiskShelf(store)
    document = shelf.add(TEXT, name="a", tokens=IDS, pinned=False)
    assert shelf.text(document.id) is shelf.text(document.id)
    other.remove(document.id)  # by another process
    assert shelf.text(document.id) is None
    store.close()
    other.close()


def test_texts_are_kept_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_shelf, "KEPT_CHARACTERS", 2 * len(TEXT))
    store = opened(tmp_path)
    shelf = DiskShelf(store)
    ids = [shelf.add(TEXT, name="a", tokens=IDS[i:], pinned=False).id for i in range(3)]
    first = shelf.text(ids[0])
    assert shelf.text(ids[1]) == TEXT and shelf.text(ids[0]) is first
    assert shelf.text(ids[2]) == TEXT and shelf.text(ids[0]) is first  # the second one went
    assert sum(map(len, shelf._texts.values())) == 2 * len(TEXT)
    store.close()


def test_what_is_on_the_disk(tmp_path):
    store = opened(tmp_path)
    shelf, records = DiskShelf(store), chain_of(range(1000))
    assert not shelf.holds(range(1000))
    store.write(records[:-1])
    assert not shelf.holds(range(1000))  # the ring is missing
    store.write(records)
    assert shelf.holds(range(1000))
    assert not shelf.holds(range(999))
    assert not shelf.holds(range(768))
    store.close()


def test_the_id_is_that_of_the_last_record(tmp_path):
    """For a prefix that ends inside a page and for one that ends with it."""
    store = opened(tmp_path)
    for count in (1000, 1024):
        records = chain_of(range(count))
        store.write(records)
        document = DiskShelf(store).add("x", name="x", tokens=range(count), pinned=False)
        listed = next(info for info in store.documents() if info.id == document.id)
        assert listed.tail == records[-1].key
        assert store.document_state(listed).whole
    store.close()


def test_entered_again_it_is_renamed_and_never_unpinned(tmp_path):
    store = opened(tmp_path)
    shelf = DiskShelf(store)
    first = shelf.add(TEXT, name="a", tokens=IDS, pinned=True)
    again = shelf.add(TEXT, name="b", tokens=IDS, pinned=False)
    assert (again.id, again.created) == (first.id, first.created)
    assert (again.name, again.pinned) == ("b", True)
    assert len(shelf.list()) == 1
    store.close()


def test_another_models_document_can_be_read_but_has_another_id(tmp_path):
    store = opened(tmp_path)
    document = DiskShelf(store).add(TEXT, name="a", tokens=IDS, pinned=False)
    store.close()
    store = opened(tmp_path, OTHER)
    shelf = DiskShelf(store)
    assert shelf.text(document.id) == TEXT
    found = shelf.get(document.id)
    assert found is not None and found.model == "tiny"
    assert shelf.add(TEXT, name="a", tokens=IDS, pinned=False).id != document.id
    assert len(shelf.list()) == 2
    assert shelf.remove(document.id)
    assert [each.model for each in shelf.list()] == ["other"]
    store.close()


def test_what_cannot_be_entered(tmp_path):
    opened(tmp_path).close()
    with pytest.raises(StoreError, match="without a model"):
        DiskShelf(opened(tmp_path, None))
    store = opened(tmp_path, read_only=True)
    with pytest.raises(StoreReadOnlyError):
        DiskShelf(store).add("x", name="x", tokens=IDS, pinned=False)
    store.close()


def test_a_late_shelf(tmp_path):
    shelf = LateShelf(tmp_path)
    for call in (shelf.list, lambda: shelf.get("x"), lambda: shelf.text("x"), lambda: shelf.remove("x")):
        with pytest.raises(StoreError, match="not open"):
            call()
    store = opened(tmp_path)
    shelf.attach(store)
    document = shelf.add(TEXT, name="a", tokens=IDS, pinned=False)
    assert (shelf.text(document.id), shelf.list(), shelf.get(document.id)) == (TEXT, [document], document)
    assert shelf.remove(document.id)
    shelf.attach(None)
    with pytest.raises(StoreError, match="not open"):
        shelf.list()
    store.close()


@pytest.mark.parametrize("layout", [SMALL, OTHER])
def test_a_document_below_a_page_is_whole_without_records(tmp_path, layout):
    store = opened(tmp_path / "store", layout)
    shelf, file = DiskShelf(store), tmp_path / "short.lrd"
    short, long = (shelf.add(TEXT, name="x", tokens=range(count), pinned=False).id for count in (255, 256))
    assert shelf.holds(range(255)) and not shelf.holds(range(256))
    whole = {info.id: store.document_state(info).whole for info in store.documents()}
    assert whole == {short: True, long: False}
    assert store.verify().broken_documents == [long]
    store.remove(long)
    assert store.verify().sound
    store.export(short, file)
    store.close()
    other = opened(tmp_path / "other", layout)
    assert other.import_(file).id == short and DiskShelf(other).text(short) == TEXT
    other.close()


def test_a_document_tells_whether_its_state_is_here(tmp_path):
    store = opened(tmp_path)
    shelf, records = DiskShelf(store), chain_of(IDS)
    store.write(records)
    document = shelf.add(TEXT, name="a", tokens=IDS, pinned=False)
    assert document.whole and shelf.list() == [document]
    for record in records:
        into = bytearray(len(record.payload))
        assert store.fetch(record.kind, record.key, memoryview(into)) == "whole"
        with store._catalogue.transaction() as write:
            write.execute("DELETE FROM records WHERE key = ? AND (kind = 2) = ?", (record.key, record.kind == "ring"))
        assert not shelf.get(document.id).whole and not shelf.list()[0].whole
        store.write(records)
        assert shelf.get(document.id).whole and shelf.list()[0].whole
    store.close()


def test_a_text_that_is_asked_for_is_used(tmp_path):
    store = opened(tmp_path)
    shelf = DiskShelf(store)
    document = shelf.add(TEXT, name="a", tokens=IDS, pinned=False)
    with store._catalogue.transaction() as write:
        write.execute("UPDATE documents SET used = 5.0")
    assert shelf.get(document.id).last_used == 5.0
    assert shelf.text(document.id) == TEXT
    store.close()
    with contextlib.closing(opened(tmp_path)) as again:
        assert again.document(document.id).used > 5.0
