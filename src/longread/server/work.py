"""From a checked body to running engine requests.

Knows: sampling fields, the driver, threads. Must not know: routes, response shapes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

from longread.server.driver import Subscription
from longread.server.state import ServerState
from longread.spec.engine import Event, GenerationRequest
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


async def start(state: ServerState, requests: Sequence[GenerationRequest]) -> Subscription:
    """Check and submit, all or none. Raises RequestError."""
    # The choices of one prompt differ in their seed only.
    distinct = {request.prompt: request for request in requests}.values()

    def check() -> None:
        for request in distinct:
            state.driver.validate(request)

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
