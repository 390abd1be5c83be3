"""Frames and messages between a server and its engine's process: nothing is lost, and nonsense is only refused."""

import json
import socket
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.server.worker import messages
from longread.server.worker.frames import HEAD, MAX_TEXT, Channel, ChannelError, Frame, FrameCutter, pair
from longread.spec.engine import (
    EngineInfo,
    EngineStats,
    Event,
    FinishEvent,
    FirstToken,
    GenerationRequest,
    GrammarSpec,
    RequestTimes,
    SamplingParams,
    TokenEvent,
)
from longread.spec.errors import EngineFailedError, InvalidRequestError
from longread.spec.reuse import Excerpt, Reuse
from longread.spec.state import HashedTokens, hash_pages

ROOT = bytes(range(16))


def packed(frame: Frame) -> bytes:
    return HEAD.pack(frame.kind, len(frame.text), len(frame.blob)) + frame.text + frame.blob


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.binary(max_size=40), st.binary(max_size=40))), st.data())
def test_however_a_stream_is_cut_its_frames_come_whole(
    parts: list[tuple[bytes, bytes, bytes]], data: st.DataObject
) -> None:
    frames = [Frame(*part) for part in parts]
    stream = b"".join(map(packed, frames))
    cutter, got, at = FrameCutter(b"ab", 100), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 60))
        got += cutter.cut(stream[at : at + size])
        at += size
    assert got == frames


@given(st.lists(st.binary(max_size=100)))
def test_noise_is_refused_or_incomplete(pieces: list[bytes]) -> None:
    cutter = FrameCutter(b"s", 0)
    try:
        for piece in pieces:
            assert all(frame.kind == b"s" and not frame.blob for frame in cutter.cut(piece))
    except ChannelError:
        pass


@pytest.mark.parametrize("head", [(b"x", 0, 0), (b"s", MAX_TEXT + 1, 0), (b"s", 0, 2**63), (b"s", 1, 1)])
def test_a_head_that_no_frame_has_is_refused_before_its_content(head: tuple[bytes, int, int]) -> None:
    with pytest.raises(ChannelError, match="not a frame"):
        FrameCutter(b"s", 0).cut(HEAD.pack(*head))


def test_a_side_that_does_not_read_is_given_up_and_one_that_is_gone_is_found() -> None:
    here, there = pair()
    channel = Channel(here, b"s", 0)

    def waiting() -> None:
        raise ChannelError("it does not read")

    with pytest.raises(ChannelError, match="does not read"):
        channel.send(b"R", b"x" * MAX_TEXT, waiting=waiting)
    there.close()
    with pytest.raises(ChannelError, match="gone"):
        channel.send(b"R", b"x")
    assert channel.receive(1.0) is None
    channel.close()


def test_what_is_kept_crosses_whole_and_in_order() -> None:
    here, there = socket.socketpair()
    sender, receiver, later = Channel(here, b"", 0), Channel(there, b"R", 2**32), []
    sender.keep_unsent(lambda: later.append(True))
    sent = [Frame(b"R", b"%d" % i, bytes([i]) * 300_000) for i in range(9)]
    for frame in sent:
        sender.send(frame.kind, frame.text, [frame.blob])
    assert later == [True]  # told once, and nothing has waited
    got: list[Frame] = []
    while not sender.flush():
        got += receiver.receive(0.0) or []
    while len(got) < len(sent):
        got += receiver.receive(5.0) or []
    assert got == sent
    there.close()
    receiver.close()
    with pytest.raises(ChannelError, match="gone"):
        sender.send(b"R", b"x")
    sender.close()


def test_a_large_frame_crosses_whole() -> None:
    here, there = socket.socketpair()
    blob = bytes(range(256)) * 8192  # more than a socket holds
    sender, receiver = Channel(here, b"", 0), Channel(there, b"R", 2**32)
    got: list[Frame] = []

    def read_on() -> None:
        got.extend(receiver.receive(0.0) or ())

    sender.send(b"R", b"{}", [blob, memoryview(blob)], waiting=read_on)
    while not got:
        read_on()
    assert got == [Frame(b"R", b"{}", blob + blob)]
    sender.close()
    receiver.close()


def hashed(prompt: tuple[int, ...], count: int) -> HashedTokens:
    data = array("i", prompt[:count]).tobytes()
    return HashedTokens(ROOT, data, hash_pages(ROOT, data), min(prompt[:count]), max(prompt[:count]))


TEXTS = st.text(st.characters() | st.just("\ud800"), max_size=20)  # a lone surrogate is legal JSON
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100))).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 99)).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    ignore_eos=st.booleans(),
    grammar=st.none() | st.builds(GrammarSpec, st.sampled_from(["regex", "json_schema"]), TEXTS),
    grammar_after=st.none() | st.integers(0, 99),
)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=600).map(tuple),
    SAMPLINGS,
    st.none() | TEXTS,
    st.integers(-5, 500),
    st.floats(0, 1),
)
def test_a_request_arrives_as_it_was_sent(
    prompt: tuple[int, ...], sampling: SamplingParams, salt: str | None, priority: int, share: float
) -> None:
    count = round(share * len(prompt))  # whoever hashed may have known a beginning only
    request = GenerationRequest(
        "r", prompt, sampling, hashed(prompt, count) if count else None, salt, priority=priority, owner="o"
    )
    text, blobs = messages.encode_submit(7, request, None)
    assert messages.decode_submit(text, b"".join(blobs), None) == (7, request)


def test_the_choices_of_one_prompt_send_it_once() -> None:
    prompt = tuple(range(1000))
    one = GenerationRequest("a", prompt, SamplingParams(seed=1), hashed(prompt, 1000))
    two = GenerationRequest("b", prompt, SamplingParams(seed=2), one.hashed)
    other = GenerationRequest("c", tuple(range(1000)), SamplingParams(seed=2), hashed(prompt, 1000))
    text, blobs = messages.encode_submit(2, two, one)
    assert blobs == [] and len(text) < 200
    number, got = messages.decode_submit(text, b"", one)
    assert (number, got) == (2, two) and got.prompt is one.prompt
    assert messages.encode_submit(3, other, one)[1]


FIRST = FirstToken(
    RequestTimes(1.5, 2.5, 3.5), Reuse(9, device_tokens=4, reason="differs", at=4, excerpt=Excerpt(2, (1,), (2,)))
)
EVENTS: list[Event] = [
    TokenEvent("a", 5, first=FIRST),
    TokenEvent("b", 6, -0.5, ((6, -0.5), (7, float("-inf")))),
    TokenEvent("a", 8),
    FinishEvent("a", "stop", 9, 2, 4, stop_token=1, times=RequestTimes(1.0), reuse=FIRST.reuse),
    FinishEvent("c", "failed", 3, 0, 0, error="bad \ud800 text"),
]
NUMBERS = {"a": 10, "b": 11, "c": 12}
NAMES = {number: name for name, number in NUMBERS.items()}


def test_a_step_arrives_as_it_was() -> None:
    stats = EngineStats(num_requests_running=2, kv_cache_usage_perc=float("nan"), misses=(("complete", 3),))
    step = messages.decode_step(messages.encode_step(EVENTS, NUMBERS, stats, [(10, 256)]), NAMES)
    assert step.computed == [(10, 256)]
    assert step.stats is not None and step.stats.misses == stats.misses
    for name in NUMBERS:
        got = [event for number, event in step.events if number == NUMBERS[name]]
        wanted = [event for event in EVENTS if event.request_id == name]
        if name == "c":
            assert isinstance(got[0], FinishEvent) and got[0].error == "bad ? text"
        else:
            assert got == wanted
    assert messages.decode_step(messages.encode_step([], {}, None, []), {}).stats is None


@pytest.mark.parametrize(
    ("events", "names", "says"),
    [
        ([TokenEvent("a", 5)], {}, "not in flight"),
        ([FinishEvent("a", "stop", 1, 1, 0)] * 2, NAMES, "ended twice"),
        ([FinishEvent("a", "stop", 1, 1, 0)], {10: "b"}, "came as that of 'b'"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Event], names: dict[int, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        messages.decode_step(messages.encode_step(events, NUMBERS, None, []), names)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_nonsense_raises_nothing_but_value_error(text: bytes) -> None:
    for decode in (
        lambda: messages.decode_step(text, NAMES),
        lambda: messages.decode_loaded(text),
        lambda: messages.decode_failed(text),
        lambda: messages.decode_checked(text),
        lambda: messages.decode_explained(text),
    ):
        try:
            decode()
        except ValueError:
            continue
        assert text.strip()[:1] == b"["  # pydantic takes nothing but the tuples that were asked for


def test_an_engines_description_keeps_its_bytes() -> None:
    info = EngineInfo("m", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, cache_root=b"\xff\x00")
    told = {"layout": {"root": "ff"}, "pid": 3}
    assert messages.decode_loaded(messages.encode_loaded(info, EngineStats(), told)) == (info, EngineStats(), told)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("no", "response_format", "x"), EngineFailedError("broken"), None]
)
def test_a_refusal_keeps_its_kind(error: InvalidRequestError | EngineFailedError | None) -> None:
    number, got = messages.decode_checked(messages.encode_checked(4, error))
    assert number == 4 and type(got) is type(error)
    if error is not None and got is not None:
        assert (got.message, got.param, got.code) == (error.message, error.param, error.code)
