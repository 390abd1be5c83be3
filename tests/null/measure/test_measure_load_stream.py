"""Event streams read into outcomes: cut anywhere, foreign in their details, broken."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.load.outcome import Outcome
from longread.measure.load.stream import EVENT_BYTES, Events, Reader, StreamError, header_timing

CHAT = [
    {"id": "a", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"id": "a", "choices": [{"index": 0, "delta": {"reasoning_content": "hm, 中文"}, "finish_reason": None}]},
    {"id": "a", "choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]},
    {
        "id": "a",
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    },
]


def stream(documents: list[dict], end: str = "\n\n") -> bytes:
    return "".join(f"data: {json.dumps(d, ensure_ascii=False)}{end}" for d in documents).encode() + (
        f"data: [DONE]{end}".encode()
    )


def read(*pieces: bytes) -> Outcome:
    outcome = Outcome("k", "chat")
    reader = Reader(outcome)
    try:
        for number, piece in enumerate(pieces):
            reader.feed(piece, float(number))
        reader.close()
    finally:
        reader.keep()
    return outcome


def test_instants_belong_to_the_first_of_each_kind() -> None:
    pieces = [f"data: {json.dumps(d)}\n\n".encode() for d in CHAT]
    outcome = read(*pieces, b"data: [DONE]\n\n")
    assert (outcome.first_chunk, outcome.first_reasoning, outcome.first_answer, outcome.last) == (0.0, 1.0, 2.0, 2.0)
    assert list(outcome.chunk_times) == [1.0, 2.0]
    assert (outcome.ttfc, outcome.ttft, outcome.ttfrt, outcome.ttfat) == (0.0, 1.0, 1.0, 2.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.tokens_from) == (9, 4, "usage")
    assert (outcome.cached_tokens, outcome.reasoning_tokens) == (0, 3)  # a 0 that was told is a 0
    assert (outcome.text, outcome.reasoning, outcome.finish_reason) == ("yes", "hm, 中文", "stop")


def test_the_last_event_of_all_is_not_the_end_of_the_answer() -> None:
    reader = Reader(Outcome("k", "chat"))
    for number, piece in enumerate((*CHAT, "[DONE]")):
        reader.feed(f"data: {piece if isinstance(piece, str) else json.dumps(piece)}\n\n".encode(), float(number))
    assert (reader.outcome.last, reader.heard) == (2.0, 4.0)


@given(st.lists(st.integers(0, 700), max_size=12), st.sampled_from(["\n\n", "\r\n\r\n", "\n: a comment\n\n"]))
def test_where_the_bytes_are_cut_changes_no_text(cuts: list[int], end: str) -> None:
    whole = stream(CHAT, end)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    outcome = read(*(whole[a:b] for a, b in pairwise(edges)))
    assert (outcome.text, outcome.reasoning, outcome.output_tokens) == ("yes", "hm, 中文", 4)
    assert len(outcome.chunk_times) == 2


def test_fields_of_an_event_other_than_data_are_skipped_and_lines_of_data_joined() -> None:
    events = Events()
    assert events.feed(b"event: x\nid: 7\nretry: 3\ndata:one\ndata: two\n\n\n\n") == [b"one\ntwo"]


def test_completions_and_the_other_name_of_reasoning() -> None:
    rows = [
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
    ]
    assert read(stream(rows)).text == "ab"
    assert read(stream([{"choices": [{"delta": {"reasoning": "r"}, "finish_reason": "stop"}]}])).reasoning == "r"


def test_tokens_of_a_chunk_from_running_usage_or_log_probabilities() -> None:
    def chunk(text: str, total: int | None, entries: int | None) -> dict:
        logprobs = None if entries is None else {"content": [{"token": "t"}] * entries}
        usage = {} if total is None else {"usage": {"prompt_tokens": 1, "completion_tokens": total}}
        return {"choices": [{"delta": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}], **usage}

    assert list(read(stream([chunk("a", 1, None), chunk("bcd", 4, None)])).chunk_tokens) == [1, 3]
    assert list(read(stream([chunk("a", None, 2), chunk("bcd", None, 3)])).chunk_tokens) == [2, 3]
    assert list(read(stream([chunk("a", None, 2), chunk("bcd", None, None)])).chunk_tokens) == []  # not all told


def test_a_tool_call_is_answer() -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]}
    outcome = read(stream([call]))
    assert outcome.first_answer == 0.0
    assert outcome.text == ""


def test_timings_of_servers_are_kept_under_their_own_names() -> None:
    told = {
        "choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}],
        "timings": {"ttft_ms": 12.5, "note": "x"},
        "longread": {"timing": {"ttft_ms": 13.0, "parts_ms": {"queue": 1.0, "prefill": None}}},
    }
    assert read(stream([told])).server_timing == {"ttft_ms": 13.0, "queue": 1.0}
    assert header_timing('queue;dur=1.5, miss, prefill;desc="x";dur=2') == {"queue": 1.5, "prefill": 2.0}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n', "half a stream"),
        (b"", "half a stream"),
        (b"data: [DONE]\n\n", "empty answer"),
        (b"data: {not json\n\n", "malformed stream"),
        (b"data: [1, 2]\n\n", "malformed stream"),
        (b'data: {"object": "something"}\n\n', "malformed stream"),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "error in the stream"),
    ],
)
def test_what_is_no_answer_is_told_by_kind(data: bytes, kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        read(data)
    assert caught.value.kind == kind


def test_an_answer_with_a_finish_reason_is_whole_without_done() -> None:
    assert read(b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n').text == "x"


def test_an_event_without_end_is_not_buffered_for_ever() -> None:
    events = Events()
    piece = b"data: " + b"x" * 2**20
    with pytest.raises(StreamError, match="16 MiB"):
        for _ in range(2 * EVENT_BYTES // len(piece)):
            events.feed(piece)


@pytest.mark.parametrize("wrong", [{"completion_tokens": -1}, {"completion_tokens": True}, {"completion_tokens": "7"}])
def test_a_count_that_is_none_stays_missing(wrong: dict) -> None:
    rows = [{"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}], "usage": wrong}]
    outcome = read(stream(rows))
    assert outcome.output_tokens is None
    assert outcome.tokens_from is None


@pytest.mark.parametrize("count", [-5, 2**31 + 1, 2**63, 2**64 - 1, 10**30, 2.5, "12", True, None, [1], {}])
def test_a_count_that_is_none_reaches_no_figure(count: object) -> None:
    told = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    running = [{**CHAT[1], "usage": told}, {**CHAT[2], "usage": told}, {"choices": [], "usage": told}]
    outcome = read(stream(running))
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (None, None, None)
    assert not outcome.chunk_tokens and outcome.tokens_from is None


def test_running_usage_that_falls_tells_no_tokens_of_chunks() -> None:
    usages = [{"completion_tokens": 5}, {"completion_tokens": 2}]
    outcome = read(stream([{**CHAT[1], "usage": usages[0]}, {**CHAT[2], "usage": usages[1]}]))
    assert not outcome.chunk_tokens and outcome.output_tokens == 2


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_not_answered(reason: str) -> None:
    given_up = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    with pytest.raises(StreamError) as caught:
        read(stream([CHAT[2] | {"choices": [{"index": 0, "delta": {"content": "yes"}}]}, given_up]))
    assert caught.value.kind == f"finish reason {reason}"


def test_a_second_choice_is_no_part_of_the_answer() -> None:
    with pytest.raises(StreamError, match="choice 1 where one was asked for"):
        read(stream([CHAT[2], {"choices": [{"index": 1, "delta": {"content": "no"}}]}]))


def test_what_stands_behind_done_in_the_same_piece_counts_for_nothing() -> None:
    assert read(stream(CHAT) + b'data: {"error": {"message": "late"}}\n\n').text == "yes"
