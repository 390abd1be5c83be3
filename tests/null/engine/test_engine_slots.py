"""Slots that long prompts leave to short ones: always some where short ones come, all of them where none do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_bench import Bench, numbers

from longread.engine.slots import KEPT, LATELY, most_long


@given(slots=st.integers(1, 4096), since=st.integers(0, 10_000))
def test_long_prompts_never_hold_all_slots_while_short_ones_come(slots: int, since: int) -> None:
    most = most_long(slots, since)
    assert 0 < most <= slots
    assert most == slots if since > LATELY else slots - most == slots // KEPT


def bench() -> Bench:
    return Bench(pages=200, seqs=8, budget=64)


def test_a_short_prompt_finds_a_slot_beside_any_number_of_books() -> None:
    schedule = bench()
    schedule.add("first", numbers(10, 0), output=1)
    for i in range(20):
        schedule.add(f"book{i}", numbers(400, 1 + i), output=100)
    for _ in range(5):
        schedule.step()
    assert schedule.scheduler.num_running == 7
    late = schedule.waiting("book7")
    assert late.reason == "slots" and "hold 7 of 8 slots" in late.detail and "64 tokens" in late.detail
    schedule.add("short", numbers(10, 99), output=1)
    schedule.step()
    schedule.step()
    assert "short" in schedule.done
    schedule.run()
    assert len(schedule.done) == 22


def test_books_alone_use_every_slot() -> None:
    schedule = bench()
    for i in range(12):
        schedule.add(f"book{i}", numbers(400, 1 + i), output=100)
    schedule.step()
    assert schedule.scheduler.num_running == 8


def test_a_question_about_a_book_that_is_cached_is_short() -> None:
    schedule = bench()
    document = numbers(1500, 1)
    schedule.add("reads", document, output=1)
    schedule.run()
    schedule.add("first", numbers(10, 0), output=1)
    for i in range(9):
        schedule.add(f"book{i}", numbers(400, 10 + i), output=200)
    for _ in range(3):
        schedule.step()
    question = schedule.add("question", [*document, 3, 4], output=1)
    schedule.step()
    assert question.lease is not None or "question" in schedule.done


def test_those_who_ask_for_what_is_being_read_are_not_put_off() -> None:
    schedule = bench()
    document = numbers(1500, 1)
    schedule.add("first", numbers(10, 0), output=1)
    schedule.add("reads", document, output=1)
    for i in range(9):
        schedule.add(f"book{i}", numbers(400, 10 + i), output=300)
    schedule.add("asks", [*document, 3], output=1)
    while "first" in schedule.live:
        schedule.step()
    schedule.step()
    assert schedule.waiting("asks").reason == "prefix"
    while "reads" in schedule.live:
        schedule.step()
    for _ in range(3):
        schedule.step()
    assert "asks" in schedule.done


def test_a_long_prompt_of_a_higher_class_still_takes_the_place_of_a_lower_one() -> None:
    schedule = bench()
    schedule.add("first", numbers(10, 0), output=1)
    for i in range(9):
        schedule.add(f"batch{i}", numbers(400, 1 + i), output=100, priority=1)
    schedule.step()
    book = schedule.add("book", numbers(500, 50), output=1)
    schedule.step()
    assert book.lease is not None


@given(data=st.data())
def test_long_and_short_ones_all_end_and_short_ones_soon(data: st.DataObject) -> None:
    schedule = Bench(pages=300, seqs=8, budget=48)
    count = data.draw(st.integers(5, 25))
    for i in range(count):
        long = data.draw(st.booleans())
        length = data.draw(st.integers(49, 500) if long else st.integers(1, 48))
        output = data.draw(st.integers(1, 30))
        schedule.add(f"r{i}", numbers(length, i), output, data.draw(st.sampled_from([0, 0, 1])), data.draw(owners))
        if data.draw(st.booleans()):
            schedule.step()
            assert 0 <= schedule.scheduler._long <= 8
    schedule.run()
    assert sorted(schedule.done) == sorted(f"r{i}" for i in range(count))


owners = st.sampled_from(["", "a", "b"])


@pytest.mark.parametrize("owners", [1, 5])
def test_long_ones_are_not_starved_by_a_stream_of_short_ones(owners: int) -> None:
    schedule = bench()
    for i in range(10):
        schedule.add(f"book{i}", numbers(200, 1 + i), output=5, owner=f"o{i % owners}")
    for step in range(400):
        for i in range(2):
            schedule.add(f"s{step}.{i}", numbers(10, 100 + 2 * step + i), output=2, owner=f"o{i % owners}")
        schedule.step()
    assert sum(key.startswith("book") for key in schedule.done) == 10
