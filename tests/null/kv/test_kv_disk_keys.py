"""Which keys have a record: by guesses from their neighbours, kept and forgotten, what a plain look-up says."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordmaker import SMALL, chain_of, streamed

from longread.kv.disk import keys
from longread.kv.disk.catalogue import delete
from longread.kv.disk.store import DiskStore
from longread.kv.records import KINDS

CHAIN = [*chain_of(range(256 * 12 + 7)), *chain_of([9, *range(256 * 5 + 3)])]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_present_is_what_is_known(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also behind another process's writes and deletions, and whatever was asked for before."""
    folder = tmp_path_factory.mktemp("keys") / "store"
    store, other = (DiskStore.open(folder, SMALL, max_bytes=2**30) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name, values in (("GUESSED_LEAST", (1, 3, 100)), ("KEPT", (4, 10_000)), ("BATCH", (2, 500))):
            patch.setattr(keys, name, data.draw(st.sampled_from(values)))
        for _ in range(data.draw(st.integers(1, 4))):
            other.write(data.draw(st.permutations(CHAIN))[: data.draw(st.integers(0, len(CHAIN)))])
            gone = data.draw(st.lists(st.sampled_from(CHAIN), max_size=3))
            rows = [other._catalogue.get(each.kind, each.key) for each in gone]
            with other._catalogue.transaction() as write:
                delete(write, [row.id for row in rows if row is not None])
            for kind in KINDS:
                asked = [each.key for each in data.draw(st.lists(st.sampled_from(CHAIN), max_size=30))]
                assert store.present(kind, asked) == set(store.known(kind, asked))
                spots = {spot.key: spot for spot in store._catalogue.spots(kind, asked)}
                rows_of = store._catalogue.get_many(kind, asked)
                assert set(spots) == set(rows_of)
                for key, spot in spots.items():
                    known, place = rows_of[key].known, rows_of[key].place
                    assert (spot.parent, spot.depth, spot.place) == (known.parent, known.depth, place)
    store.close()
    other.close()


def test_a_row_that_cannot_be_is_a_miss_once_it_was_to_be_read(tmp_path: Path) -> None:
    """And not before: nothing of it is looked at but its key."""
    store = DiskStore.open(tmp_path / "store", SMALL, max_bytes=2**30)
    store.write(CHAIN)
    key, wanted = CHAIN[2].key, [(each.kind, each.key) for each in CHAIN]
    with store._catalogue.transaction() as write:
        write.execute("UPDATE records SET offset = -1 WHERE key = ?", (key,))
    assert key in store.present("page", [key])
    verdicts = [verdict for verdict, _ in streamed(store, wanted)]
    assert verdicts == ["absent" if each is CHAIN[2] else "whole" for each in CHAIN]
    assert key not in store.present("page", [key])
    store.write(CHAIN)
    assert [verdict for verdict, _ in streamed(store, wanted)] == ["whole"] * len(CHAIN)
    store.close()


def test_a_record_that_was_found_damaged_is_not_present(tmp_path: Path) -> None:
    """Also where its row could not be deleted."""
    store = DiskStore.open(tmp_path / "store", SMALL, max_bytes=2**30)
    store.write(CHAIN)
    row = store._catalogue.get("page", CHAIN[2].key)
    assert row is not None
    store.close()
    with (store.path / "segments" / row.place.segment).open("r+b") as file:
        file.seek(row.place.offset + row.place.size - 1)
        file.write(b"\x00" if CHAIN[2].payload[-1] else b"\x01")
    reader = DiskStore.open(tmp_path / "store", SMALL, max_bytes=2**30, read_only=True)
    assert CHAIN[2].key in reader.present("page", [CHAIN[2].key])
    assert [verdict for verdict, _ in streamed(reader, [("page", CHAIN[2].key)])] == ["corrupt"]
    assert reader.present("page", [CHAIN[2].key]) == set()
    reader.close()
