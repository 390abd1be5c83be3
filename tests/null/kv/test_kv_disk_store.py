"""The disk store: what was written comes back, or does not come at all."""

import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from recordmaker import ROOT, SMALL, chain_of, payload_of, record_of, ring_of

from longread.kv.chain import common_tokens, encode
from longread.kv.disk import segments
from longread.kv.disk.store import DiskStore
from longread.kv.disk.transfer import write_file
from longread.kv.records import CONTENT_ROOT, DocumentInfo, Layout, Record, chain_key
from longread.spec.documents import document_id
from longread.spec.errors import DocumentFileError, StoreError, StoreFullError, StoreReadOnlyError, StoreVersionError

BIG = 2**30
OTHER = Layout(bytes(range(16, 32)), "other", "bfloat16", page_bytes=300, ring_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    yield opened
    opened.close()


def read(store: DiskStore, record: Record) -> bytes | None:
    into = bytearray(len(record.payload))
    return bytes(into) if store.read(record.kind, record.key, memoryview(into)) else None


def all_there(store: DiskStore, records: list[Record]) -> bool:
    return all(read(store, record) == record.payload for record in records)


def named(records: list[Record], called: str = "novel", **fields: object) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    info = DocumentInfo(
        f"doc-{called}", called, "tiny", len(ids) // 4, 12, records[-1].key, token_ids=ids, text="some text é"
    )
    return replace(info, **fields)  # type: ignore[arg-type]


def exportable(records: list[Record], **fields: object) -> DocumentInfo:
    """With the id that its tail gives it, as a shelf enters it."""
    return named(records, **({"id": document_id(records[-1].key)} | fields))


def test_what_is_written_is_known_and_read_back(store: DiskStore) -> None:
    records = chain_of(range(700))
    written = store.write(records)
    assert written > sum(len(record.payload) + len(record.run) for record in records)
    assert store.write(records) == 0
    for record in records:
        known = store.get(record.kind, record.key)
        assert known is not None
        assert (known.kind, known.parent, known.depth, known.run) == (
            record.kind,
            record.parent,
            record.depth,
            record.run,
        )
        assert read(store, record) == record.payload
    assert [known.key for known in store.nearest(ROOT, records[0].run)] == [records[0].key]
    tail = store.tails({ROOT: records[0].run, records[1].key: records[2].run})[records[1].key][0]
    assert (tail.kind, tail.key, tail.has_ring) == ("tail", records[2].key, True)
    assert store.get("page", records[2].key) is None
    assert not store.get("page", records[0].key).has_ring  # type: ignore[union-attr]
    assert set(store.known("page", [record.key for record in records])) == {records[0].key, records[1].key}


@pytest.mark.parametrize("count", [3, 400])
def test_of_many_runs_after_one_page_the_one_that_shares_most_is_found(store: DiskStore, count: int) -> None:
    """However many there are and however long ago the right one was used: it was written first."""
    page = record_of("page", ROOT, 1, chain_of(range(256))[0].run)
    runs = [encode([number, 7, *range(number % 40)]) for number in range(count)]
    tails = [record_of("tail", page.key, 2, run) for run in runs]
    store.write([page, *(each for tail in tails for each in (tail, ring_of(tail)))])
    bare = record_of("tail", page.key, 2, encode([0, 7, 99]))
    store.write([bare])
    for asked in (encode([0, 7, 5, 5]), encode([2, 9]), encode([1, 7, 0, 1, 2]), encode([256, 1]), runs[-1]):
        best = max(common_tokens(run, asked) for run in [*runs, bare.run])
        nearest = store.nearest(page.key, asked)
        assert len(nearest) <= 2 and max(common_tokens(each.run, asked) for each in nearest) == best
        found = store.tails({page.key: asked, bytes(16): asked}).get(page.key, [])
        assert sorted(each.run for each in found) == sorted(run for run in runs if asked.startswith(run))


def test_a_chain_is_asked_for_in_one_query(store: DiskStore) -> None:
    records = chain_of(range(700))
    store.write(records)
    ahead = {bytes([n, *bytes(15)]): records[-2].run for n in range(1, 200)} | {records[1].key: records[-2].run}
    asked: list[str] = []
    store._catalogue._reader.set_trace_callback(asked.append)
    assert list(store.tails(ahead)) == [records[1].key]
    assert sum("asked" in sql for sql in asked) == 1


def test_it_survives_closing_and_is_seen_by_others(tmp_path: Path) -> None:
    first = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    second = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    records, more = chain_of(range(300)), chain_of(range(1, 900))
    first.write(records)
    assert all_there(second, records)
    second.write(more)
    assert all_there(first, more)
    assert len(first.nearest(ROOT, more[0].run[:8])) == 2
    second.gc(0)
    assert first.get("page", more[0].key) is None
    assert first.known("page", [more[0].key]) == {}
    assert not any(read(first, record) for record in more)
    assert first.corrupt == 0
    first.write(records + more)
    first.close()
    first.close()
    second.close()
    again = DiskStore.open(tmp_path, None, max_bytes=BIG, read_only=True)
    assert all_there(again, records + more)
    assert again.verify().sound
    with pytest.raises(StoreReadOnlyError):
        again.gc()
    again.close()


def test_records_that_contradict_themselves_are_refused(store: DiskStore) -> None:
    page, tail, ring = chain_of(range(300))
    wrong = [
        replace(page, key=bytes(16)),
        replace(page, payload=b"short"),
        replace(page, kind="tail"),
        replace(tail, kind="page"),
        replace(page, depth=0),
        replace(ring, run=page.run),
        replace(ring, payload=page.payload),
    ]
    for record in wrong:
        with pytest.raises(StoreError):
            store.write([page, tail, record])
    assert store.get("page", page.key) is None
    assert store.stats().file_bytes == 0
    store.write([page, tail, ring])
    assert all_there(store, [page, tail, ring])


def test_models_do_not_see_each_other_but_the_same_text_can_be_told(tmp_path: Path) -> None:
    tokens = range(600)
    ours, theirs = chain_of(tokens), chain_of(tokens, OTHER, rings=False)
    with_ours = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    with_theirs = DiskStore.open(tmp_path, OTHER, max_bytes=BIG)
    with_ours.write(ours)
    with_theirs.write(theirs[:1])
    with_theirs.write(theirs)
    assert {record.key for record in ours}.isdisjoint(record.key for record in theirs)
    content = CONTENT_ROOT
    for record in theirs:
        content = chain_key(content, record.run)
        assert with_ours.other_roots(content) == ["other bfloat16"]
        assert with_theirs.other_roots(content) == ["tiny float32"]
    assert with_ours.other_roots(chain_key(content, b"")) == []
    with pytest.raises(StoreError, match="pages of 600"):
        DiskStore.open(tmp_path, replace(SMALL, page_bytes=601), max_bytes=BIG)
    assert {(each.layout, each.records) for each in with_ours.models()} == {(SMALL, 4), (OTHER, 3)}
    with_ours.close()
    with_theirs.close()


def test_the_chains_used_last_stay(tmp_path: Path) -> None:
    limit = 70_000
    store = DiskStore.open(tmp_path, SMALL, max_bytes=limit)
    chains = [chain_of([first, *range(1500)]) for first in range(12)]
    store.write(chains[0])
    for chain in chains[1:]:
        store.touch([record.key for record in chains[0]])
        store.write(chain)
    stats = store.stats()
    assert stats.file_bytes <= limit
    assert all_there(store, chains[0])
    assert all_there(store, chains[-1])
    gone = [chain for chain in chains if store.get(chain[-2].kind, chain[-2].key) is None]
    assert 0 < len(gone) < 11
    for chain in chains:  # children go before their parents: what is left of a chain can be used
        there = [read(store, record) is not None for record in chain[:-1]]
        assert there == sorted(there, reverse=True)
    assert store.verify().sound
    assert store.verify().unreachable == 0
    files = sum(path.stat().st_size for path in (tmp_path / "segments").iterdir())
    assert files == stats.file_bytes
    store.close()


def test_pinned_documents_stay_and_a_full_store_refuses(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=66_000)
    chains = [chain_of([first, *range(2000)]) for first in range(4)]
    assert store.write(chains[0][:-1]) > 0
    store.write(chains[0], document=named(chains[0], pinned=True))
    store.write(chains[1])
    store.write(chains[2])
    store.write(chains[3])
    assert all_there(store, chains[0])
    store.write(chains[3], document=named(chains[3], "second", pinned=True))
    store.write(chains[2])
    store.write(chains[2], document=named(chains[2], "third", pinned=True))
    big = chain_of([9, *range(5000)])
    with pytest.raises(StoreFullError, match="unpin"):
        store.write(big)
    with pytest.raises(StoreFullError, match="--store-size"):
        store.write(chain_of([9, *range(50_000)]))
    assert all(all_there(store, chain) for chain in (chains[0], chains[2], chains[3]))
    assert store.unpin("doc-third")
    assert not store.unpin("doc-fourth")
    store.gc(45_000)
    assert store.get("page", chains[2][0].key) is None
    assert all_there(store, chains[0] + chains[3])
    assert store.verify().broken_documents == ["doc-third"]
    assert store.gc(29_000).documents == 1  # nothing else is left to go
    assert {each.id for each in store.documents()} == {"doc-novel", "doc-second"}
    assert all_there(store, chains[0] + chains[3])
    store.close()


def lone(number: int, size: int = 4000, **fields: object) -> DocumentInfo:
    """Without any record: its state was evicted long ago."""
    text = "".join(random.Random(number).choices("abcdefghijklmnop", k=size))
    records = chain_of([number, *range(700)])
    return replace(named(records, f"{number}", text_bytes=size, text=text), **fields)  # type: ignore[arg-type]


def test_texts_count_against_the_limit_and_go_by_age(tmp_path: Path) -> None:
    """Those without state that were named longest ago; a pin, a text named lately and one with state stay."""
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=60_000)) as store:
        kept = chain_of([1, *range(1500)])
        store.write(kept, document=named(kept, "kept"))
        store.write([], document=lone(0, pinned=True))
        for number in range(1, 12):
            store.write([], document=lone(number))
            store.use_document("doc-1")
            store.touch([record.key for record in kept])
        for number in range(12, 60):
            store.use_document("doc-1")
            store.touch([record.key for record in kept])
            store.write([], document=lone(number))
            stats = store.stats()
            assert stats.file_bytes + stats.document_bytes <= 60_000
        left = {each.id for each in store.documents()}
        assert {"doc-kept", "doc-0", "doc-1", "doc-59"} <= left and "doc-2" not in left and 10 < len(left) < 30
        assert all_there(store, kept) and store.document("doc-1") is not None
        with pytest.raises(StoreFullError):
            store.write([], document=lone(99, 70_000))
        assert {each.id for each in store.documents()} == left  # which is known before anything goes
        assert store.gc(0).documents == len(left) - 1
        assert [each.id for each in store.documents()] == ["doc-0"]


def test_texts_below_a_page_go_by_age_too(tmp_path: Path) -> None:
    """They have no state that could go before them."""
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=60_000)) as store:
        for number in range(200):
            store.write([], document=lone(number, 300, tokens=50, token_ids=bytes(200)))
        left = {each.id for each in store.documents()}
        assert "doc-199" in left and "doc-0" not in left and 60 < len(left) < 150


def test_a_new_text_costs_the_state_used_longest_ago_not_its_own(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=60_000)) as store:
        chains = [chain_of([number, *range(1000)]) for number in range(6)]
        for number, chain in enumerate(chains):
            store.write(chain)
            store.write([], document=named(chain, f"{number}", text="x" * 9000, text_bytes=9000))
            assert store.document_state(store.document(f"doc-{number}")).whole  # type: ignore[arg-type]
        assert not store.document_state(store.documents()[-1]).whole


@pytest.mark.parametrize("rings", [True, False])
def test_what_is_whole_is_told_alike_of_one_and_of_all(tmp_path: Path, rings: bool) -> None:
    layout = SMALL if rings else replace(SMALL, ring_bytes=0)
    with closing(DiskStore.open(tmp_path, layout, max_bytes=BIG)) as store:
        shared = [*range(600)]
        texts = [[*shared, *range(number * 300)] for number in range(4)] + [[*range(100)], [*range(512)]]
        for number, ids in enumerate(texts):
            records = chain_of(ids, layout, rings=rings)
            store.write(records if len(ids) > 255 else [], document=named(records, f"{number}"))
        infos, seen = store.documents(), set()
        rows = store._catalogue.query("SELECT id FROM records")
        assert len(store.whole_documents()) == 6
        for (number,) in rows:
            with store._catalogue.transaction() as write:
                row = write.execute("SELECT * FROM records WHERE id = ?", (number,)).fetchone()
                write.execute("DELETE FROM records WHERE id = ?", (number,))
            whole = {(info.id, info.root) for info in infos if store.document_state(info).whole}
            assert store.whole_documents() == whole
            seen.add(len(whole))
            with store._catalogue.transaction() as write:
                write.execute(f"INSERT INTO records VALUES ({','.join('?' * len(row))})", row)
        assert {1, 5} <= seen


def test_documents_are_listed_and_removed_with_what_is_theirs_alone(store: DiskStore) -> None:
    shared = chain_of(range(512), rings=False)
    long = chain_of(range(1300))
    other = chain_of([*range(512), *range(9, 700)])
    store.write(long, document=named(long))
    store.write(other, document=named(other, "other", pinned=True))
    question = chain_of([*range(1300), 5, 6, 7])
    store.write(question)
    assert {info.id for info in store.documents()} == {"doc-novel", "doc-other"}
    info = store.document("doc-novel")
    assert info is not None
    assert info.text == "some text é"
    assert info.token_ids == b"".join(record.run for record in long)
    assert info.root == ROOT
    state = store.document_state(info)
    assert state.whole
    assert (state.pages, state.rings) == (6, 1)
    store.write([], document=named(other, "other", name="renamed"))
    assert [info.name for info in store.documents() if info.pinned] == ["renamed"]
    assert store.remove("doc-novel")
    assert not store.remove("doc-novel")
    assert store.document("doc-novel") is None
    assert all_there(store, other)
    assert all_there(store, shared)
    assert store.get("page", long[2].key) is None
    assert store.get("tail", question[-2].key) is None
    assert store.verify().sound
    assert store.verify().unreachable == 0


def test_a_document_goes_from_store_to_store_in_a_file(store: DiskStore, tmp_path: Path) -> None:
    records = chain_of(range(1400))
    middle = ring_of(records[3])
    early = ring_of(records[0])
    novel = exportable(records)
    store.write([*records, middle, early], document=novel)
    size = store.export(novel.id, tmp_path / "novel.longread")
    assert (tmp_path / "novel.longread").stat().st_size == size
    target = DiskStore.open(tmp_path / "other", None, max_bytes=BIG)
    info = target.import_(tmp_path / "novel.longread")
    assert (info.id, info.root, info.label) == (novel.id, ROOT, "tiny")
    assert all_there(target, [*records, middle])
    assert target.get("ring", early.key) is None
    assert target.import_(tmp_path / "novel.longread").id == novel.id
    assert target.document_state(target.documents()[0]).whole
    assert target.verify().sound
    target.close()
    with pytest.raises(StoreError, match="there is no document"):
        store.export("doc-none", tmp_path / "none")
    store.remove(novel.id)
    store.write(records[:2], document=novel)
    with pytest.raises(StoreError, match="ingest it again"):
        store.export(novel.id, tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_a_damaged_document_file_changes_nothing(store: DiskStore, tmp_path: Path) -> None:
    records = chain_of(range(600))
    store.write(records, document=exportable(records))
    file = tmp_path / "novel"
    store.export(exportable(records).id, file)
    whole, draw = file.read_bytes(), random.Random(5)
    target = DiskStore.open(tmp_path / "other", SMALL, max_bytes=BIG)
    damaged = [whole[:cut] for cut in draw.sample(range(len(whole)), 60)] + [whole + b"x", b"", whole[20:]]
    for bit in draw.sample(range(8 * len(whole)), 300):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(StoreError):
            target.import_(file)
    assert target.stats().file_bytes == 0
    assert target.documents() == []
    file.write_bytes(whole)
    target.import_(file)
    assert all_there(target, records)
    target.close()


def test_a_document_file_that_is_whole_but_of_other_text_is_refused(store: DiskStore, tmp_path: Path) -> None:
    records = chain_of(range(600), rings=False)
    other = chain_of([1, *range(599)])
    wrong = [
        (exportable(records, tail=records[0].key), records),
        (exportable(records, token_ids=exportable(other).token_ids), records),
        (exportable(records), records[:-1]),
        (exportable(records), [records[1], records[0], records[2]]),
        (exportable(records), [records[0], ring_of(records[1]), *records[1:]]),
        (exportable(other), [*other, *records]),
    ]
    for number, (info, some) in enumerate(wrong):
        write_file(tmp_path / str(number), SMALL, info, len(some), iter(some))
        with pytest.raises(DocumentFileError):
            store.import_(tmp_path / str(number))
    write_file(tmp_path / "right", SMALL, exportable(records), len(records), iter(records))
    store.import_(tmp_path / "right")
    write_file(tmp_path / "model", OTHER, exportable(records), len(records), iter(records))
    with pytest.raises(DocumentFileError, match="another model"):
        store.import_(tmp_path / "model")


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "OPEN_FILES", 3)
    store = DiskStore.open(tmp_path, SMALL, max_bytes=400_000)
    store._writer.segment_bytes = 2000
    records = chain_of(range(20_000))
    for record in records:
        store.write([record])
    assert len(list((tmp_path / "segments").iterdir())) > 70
    assert all_there(store, records)
    open_segments = [
        each for each in Path("/proc/self/fd").iterdir() if str(tmp_path / "segments") in os.path.realpath(each)
    ]
    assert len(open_segments) <= 3 + 1  # and the one that is written to
    store.close()
    assert not [each for each in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(each)]


def test_foreign_folders_and_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("x")
    with pytest.raises(StoreVersionError, match=r"dear\.txt"):
        DiskStore.open(tmp_path / "letters", SMALL, max_bytes=BIG)
    with pytest.raises(StoreError, match="no store"):
        DiskStore.open(tmp_path / "nothing", SMALL, max_bytes=BIG, read_only=True)
    DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG).close()
    for pragma, says in (("user_version = 7", "format 7"), ("application_id = 5", "not a Longread store")):
        database = sqlite3.connect(tmp_path / "store" / "index.sqlite")
        database.execute(f"PRAGMA {pragma}")
        database.close()
        for read_only in (False, True):
            with pytest.raises(StoreVersionError, match=says):
                DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG, read_only=read_only)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        DiskStore.open(tmp_path / "file", SMALL, max_bytes=BIG)


def test_two_writers_and_readers_at_once(tmp_path: Path) -> None:
    stores = [DiskStore.open(tmp_path, SMALL, max_bytes=40_000) for _ in range(2)]
    failures: list[str] = []

    def work(store: DiskStore, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            chain = chain_of([draw.randrange(8), *range(draw.randrange(40, 1200))])
            store.write(chain)
            for record in chain_of([draw.randrange(8), *range(draw.randrange(40, 1200))]):
                found = read(store, record)
                if found is not None and found != payload_of(record.kind, record.key):
                    failures.append(record.key.hex())

    threads = [threading.Thread(target=work, args=(stores[n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [store.corrupt for store in stores] == [0, 0]
    for store in stores:
        assert store.verify().sound
        store.gc()
        store.close()
    files = sum(path.stat().st_size for path in (tmp_path / "segments").iterdir())
    assert files <= 40_000


def test_a_record_without_its_parent_is_collected(store: DiskStore) -> None:
    lost = record_of("page", bytes(15) + b"x", 7, chain_of(range(256))[0].run)
    records = chain_of(range(300))
    store.write([lost, ring_of(lost), *records])
    assert store.verify().unreachable == 2
    assert store.gc().unreachable == 2
    assert store.get("page", lost.key) is None
    assert all_there(store, records)


def test_a_pinned_document_with_a_gap_keeps_the_rest_until_it_is_removed(store: DiskStore) -> None:
    """A damaged page costs that page: reading the document again goes on from what is left."""
    records = chain_of(range(1400))
    store.write(records, document=named(records, pinned=True))
    with store._catalogue.transaction() as write:
        write.execute("DELETE FROM records WHERE key IN (?, ?)", (records[3].key, records[-1].key))
    store.gc(0)
    assert all_there(store, records[:3])
    assert store.get("page", records[4].key) is None
    assert store.remove("doc-novel")
    assert store.stats().records == {}


def test_a_document_need_not_have_ids(store: DiskStore) -> None:
    records = chain_of(range(1400))
    store.write(records, document=named(records, pinned=True, token_ids=b"", text=None))
    store.gc(0)
    assert all_there(store, records)
    info = store.document("doc-novel")
    assert info is not None
    assert (info.token_ids, info.text) == (b"", None)
    with pytest.raises(StoreError):
        store.export("doc-novel", store.path / "novel")
    store.unpin("doc-novel")
    store.gc(0)
    assert store.stats().file_bytes == 0


def test_room_for_a_page_is_not_made_of_the_pages_before_it(tmp_path: Path) -> None:
    """A chain written in parts, its first part by now the oldest there is."""
    store = DiskStore.open(tmp_path, SMALL, max_bytes=46_000)
    chain = chain_of(range(3000))
    store.write(chain[:6])
    store.write(chain_of([1, *range(2500)]))
    store.write(chain_of([2, *range(2500)]))
    store.write(chain[4:])
    assert all_there(store, chain)
    assert store.verify().unreachable == 0
    store.close()


def test_only_the_ring_that_was_landed_on_counts_as_used(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    chain = chain_of(range(1100))
    middle = ring_of(chain[1])
    store.write([*chain[:-1], middle, chain[-1]])
    newer = chain_of([1, *range(1100)])
    store.write(newer)
    store.touch([record.key for record in chain[:-1]])
    store.gc(store.stats().live_bytes - 1)
    assert store.get("ring", middle.key) is None
    assert all_there(store, chain)
    store.close()


def test_what_is_read_counts_as_used(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path, SMALL, max_bytes=BIG)
    older, newer = chain_of(range(1100)), chain_of([1, *range(1100)])
    store.write(older)
    store.write(newer)
    assert read(store, older[-2]) is not None  # the tail; what leads to it is in use with it
    store.verify()  # looks at everything, which is no use
    store.gc(store.stats().live_bytes - 1)
    assert store.get("tail", newer[-2].key) is None
    assert all_there(store, older[:-1])
    store.close()


def test_a_segment_deleted_while_it_is_read_is_closed_afterwards(store: DiskStore) -> None:
    records = chain_of(range(300))
    store.write(records)
    [path] = (store.path / "segments").iterdir()
    reader = store._segments
    with reader._file(path.name) as file:
        reader.forget(path.name)
        assert os.fstat(file).st_size > 0
        with reader._file(path.name) as again:
            assert again != file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert all_there(store, records)
