"""From a checked body to running engine requests, and from their events to an answer, streamed or whole.

Knows: sampling fields, the driver, threads, how a stream begins and ends. Must not know: routes, response shapes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from longread.server.body import clock_of
from longread.server.calls import Call
from longread.server.errors import json_response
from longread.server.gate import TIMING_HEADER
from longread.server.output import ChoiceText, timings_of
from longread.server.prompts import Prompt
from longread.server.protocol import PIECES, PieceWriter
from longread.server.state import ServerState
from longread.server.streaming import EventStream, while_connected
from longread.server.subscription import Subscription
from longread.spec.engine import Event, FinishEvent, GenerationRequest, TokenEvent
from longread.spec.errors import ContextLengthError, InvalidRequestError, RequestError
from longread.wire import sse
from longread.wire.responses import Json
from longread.wire.sampling import for_choice, to_sampling
from longread.wire.types import ChatRequest, CompletionRequest, GenerateFields

# A proxy between us and the client may close a silent connection while a long prompt is read.
KEEPALIVE_SECONDS = 15.0

OFFLOAD_TOKENS = 16 * 1024
MAX_TRACEPARENT = 128  # characters; https://www.w3.org/TR/trace-context/ has 55


def new_id(prefix: str) -> str:
    """An answer's id, as unique as a UUID."""
    return f"{prefix}-{uuid.uuid4().hex}"


def choice_id(answer_id: str, index: int) -> str:
    """What the engine knows one of an answer's choices by."""
    return f"{answer_id}-{index}"


def engine_requests(
    fields: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    answer_id: str,
    grammar_after: int | None = None,
    owner: str = "",
) -> list[GenerationRequest]:
    """``n`` requests a prompt, in OpenAI's order of choices: all of the first prompt, then the second's. ``owner``: who
    asks, as the engine shares its time among them.

    Raises InvalidRequestError where the grammar is too long or no JSON.
    """
    first = to_sampling(fields, grammar_after=grammar_after)
    return [
        GenerationRequest(
            choice_id(answer_id, i * fields.choices + choice),
            prompt.ids,
            for_choice(first, choice),
            prompt.hashed,
            fields.cache_salt,
            fields.priority or 0,
            owner,
        )
        for i, prompt in enumerate(prompts)
        for choice in range(fields.choices)
    ]


async def start(
    state: ServerState,
    request: Request,
    fields: ChatRequest | CompletionRequest,
    requests: Sequence[GenerationRequest],
    prompt_field: str,
    deadline: float | None,
) -> Subscription:
    """Check and submit, all or none. Raises RequestError; a prompt that is too long is ``prompt_field``'s fault."""
    # The choices of one prompt differ in their seed only. They share its ids: hashing a million for each takes seconds.
    distinct = {id(request.prompt): request for request in requests}.values()

    grammar_field = "response_format" if fields.structured_outputs is None else "structured_outputs"

    def check() -> None:
        try:
            for request in distinct:
                state.driver.validate(request)
        except InvalidRequestError as error:  # the engine knows one name for both
            param = grammar_field if error.param == "response_format" else error.param
            raise InvalidRequestError(error.message, param, error.code) from None
        except ContextLengthError as error:
            raise ContextLengthError(error.message, param=prompt_field) from None

    if any(request.sampling.grammar is not None or len(request.prompt) > OFFLOAD_TOKENS for request in distinct):
        await asyncio.to_thread(check)  # compiling a schema, or looking at a million ids, takes long
    else:
        check()
    clock_of(request).mark("check")
    return state.driver.submit(requests, deadline)


def open_call(
    state: ServerState,
    request: Request,
    answer_id: str,
    model: str,
    fields: ChatRequest | CompletionRequest,
    requests: Sequence[GenerationRequest],
) -> Call:
    """The record of a call whose ``requests`` the engine was given."""
    call = Call(
        request_id=request.state.request_id,
        answer_id=answer_id,
        route=request.url.path,
        model=model,
        stream=bool(fields.stream),
        choices=len(requests),
        choices_per_prompt=fields.choices,
        clock=clock_of(request),
        key=request.state.key,
        shared=state.options.shared,
        prompt_tokens=sum(len(each.prompt) for each in requests[:: fields.choices]),
        traceparent=request.headers.get("traceparent", "")[:MAX_TRACEPARENT] or None,
    )
    state.calls.add(call)
    return call


async def batches(subscription: Subscription) -> AsyncIterator[list[Event]]:
    """The events of each step; an empty list where nothing came for ``KEEPALIVE_SECONDS`` before the first token."""
    first = True
    while True:
        try:
            events = await (asyncio.wait_for(subscription.take(), KEEPALIVE_SECONDS) if first else subscription.take())
        except TimeoutError:
            yield []
            continue
        if not events:
            return
        first = False
        yield events


class Choice(Protocol):
    """One of an answer's choices, as ``feed`` drives it."""

    @property
    def text(self) -> ChoiceText: ...

    def token(self, event: TokenEvent) -> Sequence[Any]:
        """What became certain with one token."""
        ...

    def finish(self, event: FinishEvent, subscription: Subscription) -> Sequence[Any]:
        """What the end made certain. Raises the error of a request that did not end by itself."""
        ...


AnyChoice = TypeVar("AnyChoice", bound=Choice)


class Answer(Protocol[AnyChoice]):
    """One HTTP call's answer in its route's shapes."""

    @property
    def choices(self) -> Sequence[AnyChoice]: ...

    def chunks(self, choice: AnyChoice, found: Sequence[Any]) -> list[bytes]:
        """The stream's events for what became certain of one choice."""
        ...

    def usage_chunk(self, extra: Json) -> bytes:
        """The stream's last event, for a client that asked for usage; ``extra``: fields beside it."""
        ...

    def whole(self) -> Json:
        """The answer in one piece, once every choice has ended."""
        ...


async def respond(
    state: ServerState,
    request: Request,
    call: Call,
    subscription: Subscription,
    fields: GenerateFields,
    answer: Answer[AnyChoice],
) -> Response:
    """Run to the end and answer, or answer with a stream that runs. Raises RequestError before anything is sent."""
    if fields.stream:
        pieces: PieceWriter | None = request.scope.get("extensions", {}).get(PIECES)
        chunks = _stream(state, call, subscription, answer, fields.include_usage, pieces)
        known = {TIMING_HEADER: call.timing.header()}
        return EventStream(chunks, state.driver, subscription, known, lambda: state.calls.end(call))
    try:
        await run_to_end(state, request.receive, call, subscription, answer.choices)
    finally:
        state.calls.end(call)
    told = answer.whole() | _told(call, answer)
    return json_response(told, headers={TIMING_HEADER: call.timing.header()})


def _told(call: Call, answer: Answer[AnyChoice]) -> Json:
    """What stands beside the usage."""
    return timings_of(choice.text for choice in answer.choices) | call.extension()


async def _stream(
    state: ServerState,
    call: Call,
    subscription: Subscription,
    answer: Answer[AnyChoice],
    with_usage: bool,
    pieces: PieceWriter | None,
) -> AsyncIterator[bytes]:
    """One block of events a step. An error after the start is an event, since the status is sent by then.

    From the second block on, blocks are written through ``pieces`` as the tokens come, as long as that takes them.
    """

    def block(events: Iterable[Event]) -> bytes:
        chunks: list[bytes] = []
        for choice, found in feed(state, call, subscription, answer.choices, events):
            chunks += answer.chunks(choice, found)
        return b"".join(chunks)

    def direct(events: Sequence[Event]) -> bool:
        assert pieces is not None
        if not pieces.ready:
            return False
        if told := block(events):
            pieces.write(told)
        return True

    try:
        async for events in batches(subscription):
            told = block(events) if events else sse.KEEP_ALIVE
            if told:
                yield told
                if events and call.clock.first_byte is None:
                    call.clock.sent()  # the generator goes on when the block is with the socket
                    subscription.direct = direct if pieces is not None else None
    except RequestError as error:
        call.failed(error)
        yield sse.error_event(error) + sse.DONE
        return
    call.state = "finished"
    if with_usage:
        yield answer.usage_chunk(_told(call, answer))
    yield sse.DONE


def feed(
    state: ServerState, call: Call, subscription: Subscription, choices: Sequence[AnyChoice], events: Iterable[Event]
) -> Iterator[tuple[AnyChoice, Sequence[Any]]]:
    """Each event's choice and what became certain with it. A matched stop string ends the request in the engine.

    Raises the RequestError of a request that did not end by itself.
    """
    for event in events:
        index = subscription.choice[event.request_id]
        choice = choices[index]
        if isinstance(event, FinishEvent):
            call.ended(index, event)
            yield choice, choice.finish(event, subscription)
        elif choice.text.matched is None:
            call.produced += 1
            if event.first is not None:
                call.began(index, event.first)
            yield choice, choice.token(event)
            if choice.text.matched is not None:
                state.driver.stop(event.request_id)


async def run_to_end(
    state: ServerState, receive: Receive, call: Call, subscription: Subscription, choices: Sequence[AnyChoice]
) -> None:
    """For answers in one piece. Whatever way it ends, nothing of it goes on in the engine."""

    def take(events: Iterable[Event]) -> bool:
        for _ in feed(state, call, subscription, choices, events):
            pass
        return True

    async def run() -> None:
        subscription.direct = take
        async for events in batches(subscription):
            take(events)

    try:
        await while_connected(receive, run())
        call.state = "finished"
    except RequestError as error:
        call.failed(error)
        raise
    finally:
        state.driver.cancel(subscription)
