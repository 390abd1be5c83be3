"""The host arena against a plain model: what is kept, what falls off, and that held bytes stay as they are."""

from hypothesis import given
from hypothesis import strategies as st

from longread.kv.host import HostArena
from longread.kv.records import Known

KEYS = [bytes([i]) * 16 for i in range(8)]


def known(kind: str, key: bytes) -> Known:
    return Known(kind, key, KEYS[0] if key != KEYS[0] else b"root", 1, b"run", False)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "hold", "release", "drop"]), st.sampled_from(["page", "ring"]), st.integers(0, 7)
        ),
        max_size=60,
    ),
    st.integers(0, 60),
)
def test_the_arena_is_an_lru_that_spares_what_is_held(actions: list[tuple[str, str, int]], size: int) -> None:
    arena = HostArena(8, 4, size)
    assert arena.nbytes <= size
    rings = size // 4 // 4
    room = {"ring": rings, "page": (size - rings * 4) // 8}
    order: dict[str, list[int]] = {"page": [], "ring": []}
    held: list[tuple[str, int]] = []
    fallen: list[tuple[str, int]] = []
    arena.dropped = lambda each: fallen.append((each.kind, each.key[0]))
    for action, kind, number in actions:
        key, mine = KEYS[number], order[kind]
        if action == "put":
            view = arena.put(known(kind, key))
            if number in mine:
                assert view is None
                mine.append(mine.pop(mine.index(number)))
            elif len(mine) < room[kind] or any((kind, other) not in held for other in mine):
                if len(mine) == room[kind]:
                    oldest = next(other for other in mine if (kind, other) not in held)
                    mine.remove(oldest)
                    assert fallen.pop() == (kind, oldest)
                assert view is not None
                view[:] = bytes([number + 1]) * len(view)
                mine.append(number)
            else:
                assert view is None
        elif action == "hold" and number in mine:
            assert bytes(arena.hold(kind, key)) == bytes([number + 1]) * (8 if kind == "page" else 4)
            held.append((kind, number))
            mine.append(mine.pop(mine.index(number)))
        elif action == "release" and (kind, number) in held:
            arena.release(kind, key)
            held.remove((kind, number))
        elif action == "drop" and number in mine and (kind, number) not in held:
            arena.drop(kind, key)
            mine.remove(number)
            fallen.pop()
        assert not arena.differences()
        assert arena.used_bytes == 8 * len(order["page"]) + 4 * len(order["ring"])
        pages = [other for other in order["page"] if other]
        assert sorted(each.key[0] for each in arena.children(KEYS[0])) == sorted(pages)
