"""The outbox against a plain list of what is taken: stretches never overlap, and room is not lost."""

from hypothesis import given
from hypothesis import strategies as st

from longread.kv.outbox import Outbox


@given(st.integers(1, 40), st.lists(st.one_of(st.integers(1, 20), st.none()), max_size=80))
def test_what_was_taken_stays_as_it_is(size: int, actions: list[int | None]) -> None:
    """None gives the oldest back, a number takes as many bytes where they fit."""
    box = Outbox(memoryview(bytearray(size)))
    taken: list[tuple[memoryview, int]] = []
    for number, wanted in enumerate(actions, 1):
        if wanted is None:
            if taken:
                box.give_back(1)
                taken.pop(0)
        elif box.fits(wanted):
            view = box.take(wanted)
            view[:] = bytes([number]) * wanted
            taken.append((view, number))
        else:  # in one piece: either side of the oldest, or nothing is taken and it is larger than all there is
            used = sum(len(view) for view, _ in taken)
            assert wanted > size if not taken else 2 * wanted > size - used
        assert all(view == bytes([number]) * len(view) for view, number in taken)


def test_it_is_used_to_the_last_byte() -> None:
    box = Outbox(memoryview(bytearray(12)))
    box.take(6)
    box.take(6)
    assert not box.fits(1)
    box.give_back(1)
    box.take(6)
    assert not box.fits(1)
    box.give_back(2)
    assert box.fits(12)
