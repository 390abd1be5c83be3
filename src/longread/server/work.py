"""From a checked body to running engine requests.

Knows: sampling fields, the driver, threads. Must not know: routes, response shapes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from longread.server.driver import Subscription
from longread.server.output import ChoiceText
from longread.server.state import ServerState
from longread.server.streaming import while_connected
from longread.spec.engine import Event, FinishEvent, GenerationRequest, TokenEvent
from longread.spec.errors import ContextLengthError
from longread.wire.sampling import to_sampling
from longread.wire.types import ChatRequest, CompletionRequest

# A proxy between us and the client may close a silent connection while a long prompt is read.
KEEPALIVE_SECONDS = 15.0

OFFLOAD_TOKENS = 16 * 1024


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def engine_requests(
    fields: ChatRequest | CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    answer_id: str,
    grammar_after: int | None = None,
) -> list[GenerationRequest]:
    """``n`` requests a prompt, in OpenAI's order of choices: all of the first prompt, then the second's."""
    return [
        GenerationRequest(f"{answer_id}-{i * fields.choices + choice}", prompt, sampling)
        for i, prompt in enumerate(prompts)
        for choice in range(fields.choices)
        for sampling in (to_sampling(fields, grammar_after=grammar_after, choice=choice),)
    ]


async def start(state: ServerState, requests: Sequence[GenerationRequest], prompt_field: str) -> Subscription:
    """Check and submit, all or none. Raises RequestError; a prompt that is too long is ``prompt_field``'s fault."""
    # The choices of one prompt differ in their seed only.
    distinct = {request.prompt: request for request in requests}.values()

    def check() -> None:
        try:
            for request in distinct:
                state.driver.validate(request)
        except ContextLengthError as error:
            raise ContextLengthError(error.message, param=prompt_field) from None

    if any(request.sampling.grammar is not None or len(request.prompt) > OFFLOAD_TOKENS for request in distinct):
        await asyncio.to_thread(check)  # compiling a schema, or looking at a million ids, takes long
    else:
        check()
    return state.driver.submit(requests)


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

    def token(self, event: TokenEvent) -> Sequence[Any]: ...

    def finish(self, event: FinishEvent, subscription: Subscription) -> Sequence[Any]: ...


AnyChoice = TypeVar("AnyChoice", bound=Choice)


def feed(
    state: ServerState, subscription: Subscription, choices: Sequence[AnyChoice], events: Iterable[Event]
) -> Iterator[tuple[AnyChoice, Sequence[Any]]]:
    """Each event's choice and what became certain with it. A matched stop string ends the request in the engine.

    Raises the RequestError of a request that did not end by itself.
    """
    for event in events:
        choice = choices[subscription.choice[event.request_id]]
        if isinstance(event, FinishEvent):
            yield choice, choice.finish(event, subscription)
        elif choice.text.matched is None:
            yield choice, choice.token(event)
            if choice.text.matched is not None:
                state.driver.stop(event.request_id)


async def run_to_end(
    state: ServerState, receive: Receive, subscription: Subscription, choices: Sequence[AnyChoice]
) -> None:
    """For answers in one piece. Whatever way it ends, nothing of it goes on in the engine."""

    async def run() -> None:
        async for events in batches(subscription):
            for _ in feed(state, subscription, choices, events):
                pass

    try:
        await while_connected(receive, run())
    finally:
        state.driver.cancel(subscription)
