"""Workloads: Mooncake traces read and written, and what is drawn from a seed."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.arrivals import (
    BLOCK_TOKENS,
    MAX_ID,
    Arrival,
    Kind,
    Mix,
    generate,
    kind_of,
    read_trace,
    write_trace,
)
from longread.spec.errors import ConfigError

PUBLISHED = [  # the head of a published trace: two requests of one document
    json.dumps(
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [*range(46, 58), 2353, 2354]}
    ),
    json.dumps({"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [*range(46, 58), 2366]}),
]


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_mooncake_trace_is_read_from_zero_in_order(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", *reversed(PUBLISHED))
    first, second = read_trace(trace, speedup=2)
    assert (first.at, first.isl, first.osl, first.kind) == (0.0, 6955, 52, "up to 8K")
    assert second.at == pytest.approx(3.053 / 2)
    assert first.blocks[:12] == second.blocks[:12]
    assert first.runs()[-1] == (2354, 6955 - 13 * BLOCK_TOKENS)
    assert sum(length for _, length in second.runs()) == 6472
    assert len(read_trace(trace, limit=1)) == 1


def test_requests_without_hash_ids_share_nothing(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 1},
        {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [7, 9]},
        {"timestamp": 5, "input_length": 1, "output_length": 1},
    ]
    read = read_trace(written(tmp_path / "t.jsonl", *map(json.dumps, rows), ""))
    seen = [block for each in read for block in each.blocks]
    assert len(seen) == len(set(seen)) == 5
    assert {7, 9} < set(seen)


GOOD = {"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"timestamp": None}, "timestamp must be a number, not None"),
        ({"timestamp": True}, "timestamp must be a number, not True"),
        ({"timestamp": math.inf}, "timestamp must be a number, not inf"),
        ({"timestamp": -1}, "timestamp must be from 0 to 1e+12 ms, not -1"),
        ({"timestamp": 1e300}, "timestamp must be from 0 to 1e+12 ms, not 1e+300"),
        (
            {"output_length": 10**18},
            "output_length must be a whole number from 1 to 1073741824, not 1000000000000000000",
        ),
        ({"input_length": 0}, "input_length must be a whole number from 1 to 1073741824, not 0"),
        ({"output_length": 2.5}, "output_length must be a whole number from 1 to 1073741824, not 2.5"),
        ({"hash_ids": [1]}, "1 hash_ids, and 600 tokens are 2 blocks of 512"),
        ({"hash_ids": [1, -2]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [1, MAX_ID + 1]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": "12"}, "hash_ids must be a list of whole numbers"),
        ({"class": 3}, "class must be a text, not 3"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"delay": 3}, "unknown key 'delay'"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, change: dict, told: str) -> None:
    trace = written(tmp_path / "t.jsonl", json.dumps(GOOD), "", json.dumps(GOOD | change))
    with pytest.raises(ConfigError, match="line 3: ") as raised:
        read_trace(trace)
    assert told in str(raised.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="no request in it"):
        read_trace(tmp_path / "t.jsonl")


def test_files_that_are_no_json_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="line 1: not a JSON object"):
        read_trace(written(tmp_path / "t.jsonl", "[1]"))
    with pytest.raises(ConfigError, match="line 1: "):
        read_trace(written(tmp_path / "t.jsonl", "[" * 100_000))
    with pytest.raises(ConfigError, match="speedup=0"):
        read_trace(written(tmp_path / "t.jsonl", *PUBLISHED), speedup=0)


SHORT, LONG = Kind("short", 0.9, 2000, 100), Kind("long", 0.1, 100_000, 50, prefix=0.9, documents=2, priority=5)


def test_what_is_drawn_follows_the_seed_and_the_mix() -> None:
    mix = Mix((SHORT, LONG), rate=4.0, count=2000, seed=3, owners=3)
    arrivals = generate(mix)
    assert arrivals == generate(mix)
    assert arrivals != generate(Mix((SHORT, LONG), rate=4.0, count=2000, seed=4, owners=3))
    assert [each.at for each in arrivals] == sorted(each.at for each in arrivals)
    assert arrivals[-1].at == pytest.approx(500, rel=0.1)
    longs = [each for each in arrivals if each.kind == "long"]
    assert len(longs) == pytest.approx(200, rel=0.25)
    assert {each.priority for each in longs} == {5}
    assert {each.owner for each in arrivals} == {"owner 0", "owner 1", "owner 2"}
    assert len({each.blocks[0] for each in longs}) == 2, "two documents"
    assert len({each.blocks[-1] for each in longs}) == len(longs), "each with a question of its own"
    assert len(longs[0].blocks) == math.ceil(100_000 / BLOCK_TOKENS)


def test_burstier_gaps_have_the_same_mean() -> None:
    def spread(burstiness: float) -> tuple[float, float]:
        times = [each.at for each in generate(Mix((Kind("a", 1.0, 10, 1),), 10.0, 4000, burstiness=burstiness))]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return mean, math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    for burstiness in (0.25, 1.0, 4.0):
        mean, variation = spread(burstiness)
        assert mean == pytest.approx(0.1, rel=0.15)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.15)


def test_an_infinite_rate_is_all_at_once_and_lengths_vary_as_asked() -> None:
    arrivals = generate(Mix((Kind("a", 1.0, 1000, 10, spread=0.5),), math.inf, 500))
    assert {each.at for each in arrivals} == {0.0}
    assert all(500 <= each.isl <= 1500 and 5 <= each.osl <= 15 for each in arrivals)
    assert sum(each.isl for each in arrivals) / 500 == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    ("kinds", "rate", "told"),
    [
        ((), 1.0, "a mix needs classes"),
        ((SHORT, SHORT), 1.0, "a name of its own"),
        ((SHORT,), 1.0, "must sum to 1"),
        ((Kind("vast", 1.0, 2**31, 1),), 1.0, "vast: 2,147,483,648 tokens; at most 1,073,741,824"),
        ((SHORT, LONG), 0.0, "rate=0"),
        ((SHORT, LONG), -1.0, "rate=-1"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(kinds: tuple[Kind, ...], rate: float, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Mix(kinds, rate, 10)


def test_a_load_that_would_fill_the_memory_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(ConfigError, match="1,000,000,000 requests of 1,536 tokens are too many to draw"):
        Mix((Kind("a", 1.0, 1024, 1),), 1.0, 10**9)


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 10**7), st.integers(1, 5000), st.integers(1, 99), st.integers(0, 9), st.integers(0, 2)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_written_is_read_again(rows: list[tuple[int, int, int, int, int]], tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    arrivals = [
        Arrival(
            at / 1000, isl, osl, tuple(range(first, first + -(-isl // BLOCK_TOKENS))), kind_of(isl), most, "me" * most
        )
        for at, isl, osl, first, most in sorted(rows)
    ]
    write_trace(path, arrivals)
    start = arrivals[0].at
    read = read_trace(path)
    assert [(each.isl, each.blocks, each.priority, each.owner) for each in read] == [
        (each.isl, each.blocks, each.priority, each.owner) for each in arrivals
    ]
    assert [each.at for each in read] == pytest.approx([each.at - start for each in arrivals])
