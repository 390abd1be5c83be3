"""POST /v1/completions: text or token ids in, text out.

Knows: the older response shapes. Must not know: chat. ``echo``, ``suffix`` and ``best_of`` are refused by the wire.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import offload, read_body
from longread.server.driver import Subscription
from longread.server.errors import json_response
from longread.server.output import ChoiceText, TokenLogprobs, timings_of
from longread.server.state import ServerState, state_of
from longread.server.streaming import EventStream
from longread.server.work import batches, engine_requests, feed, new_id, run_to_end, start
from longread.spec.engine import FinishEvent, TokenEvent
from longread.spec.errors import InvalidRequestError, RequestError
from longread.wire import responses, sse
from longread.wire.body import parse_json
from longread.wire.responses import Json
from longread.wire.types import CompletionRequest, validate

MAX_CHOICES = 2048  # of one call: what a body of many short prompts can ask for is bounded before it is tokenised


@dataclass(frozen=True, slots=True)
class CompletionPrompts:
    """A checked request and its prompts."""

    fields: CompletionRequest
    model: str
    ids: tuple[tuple[int, ...], ...]


class CompletionChoice:
    """One choice: its text as it is."""

    def __init__(self, index: int, state: ServerState, fields: CompletionRequest, prompt_tokens: int):
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.text = ChoiceText(state.tokenizer, fields)
        self._eos_id = state.tokenizer.eos_id
        self._logprobs = TokenLogprobs(state.tokenizer) if fields.logprobs is not None else None
        self.wants_ids = bool(fields.return_token_ids)
        self._parts: list[str] = []
        self._offset = 0

    def token(self, event: TokenEvent) -> list[str]:
        if self._logprobs is not None:
            self._logprobs.add(event)
        return self._keep(self.text.push(event))

    def finish(self, event: FinishEvent, subscription: Subscription) -> list[str]:
        return self._keep(self.text.finish(event, subscription))

    def _keep(self, text: str) -> list[str]:
        if not text:
            return []
        self._parts.append(text)
        return [text]

    @property
    def stop_reason(self) -> str | int | None:
        return self.text.stop_reason(self._eos_id)

    @property
    def cached_tokens(self) -> int:
        return self.text.ended.cached_tokens if self.text.ended is not None else 0

    def take_logprobs(self) -> Json | None:
        """Entries since the last call, in the older shape; None where there are none."""
        entries = self._logprobs.take() if self._logprobs is not None else []
        if not entries:
            return None
        offset = self._offset
        self._offset += sum(len(str(entry["token"])) for entry in entries)
        return responses.completion_logprobs(entries, offset)

    def counts(self) -> Json:
        return responses.usage(self.prompt_tokens, self.text.completion_tokens, cached=self.cached_tokens)

    def whole(self) -> Json:
        return responses.completion_choice(
            self.index,
            "".join(self._parts),
            self.text.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.take_logprobs(),
            token_ids=self.text.token_ids if self.wants_ids else None,
        )


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes)
    prompts = await offload(len(body), lambda: prepare(state, body))
    fields, answer_id = prompts.fields, new_id("cmpl")
    subscription = await start(state, engine_requests(fields, prompts.ids, answer_id), "prompt")
    choices = [
        CompletionChoice(i * fields.choices + n, state, fields, len(ids))
        for i, ids in enumerate(prompts.ids)
        for n in range(fields.choices)
    ]
    if fields.stream:
        chunks = stream(state, subscription, choices, prompts, answer_id)
        return EventStream(chunks, state.driver, subscription)
    await run_to_end(state, request.receive, subscription, choices)
    answer = responses.completion_response(
        answer_id,
        prompts.model,
        [choice.whole() for choice in choices],
        total_counts(choices, fields.choices),
        created=responses.now(),
        prompt_token_ids=[list(ids) for ids in prompts.ids] if fields.return_token_ids else None,
    )
    return json_response(answer | timings_of(choice.text for choice in choices))


def prepare(state: ServerState, body: bytes) -> CompletionPrompts:
    """From bytes to prompt ids. A text prompt may hold markup and gets BOS unless told otherwise, as in vLLM."""
    fields = validate(CompletionRequest, parse_json(body))
    model = state.check_model(fields.model)
    texts = fields.prompts
    if len(texts) * fields.choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt: {len(texts)} prompts times n={fields.choices} exceed {MAX_CHOICES} choices; send less at once",
            param="prompt",
        )
    bos = () if fields.add_special_tokens is False else (state.tokenizer.bos_id,)
    ids = tuple(
        (*bos, *state.tokenizer.encode(prompt, special=True)) if isinstance(prompt, str) else prompt for prompt in texts
    )
    return CompletionPrompts(fields, model, ids)


async def stream(
    state: ServerState,
    subscription: Subscription,
    choices: Sequence[CompletionChoice],
    prompts: CompletionPrompts,
    answer_id: str,
) -> AsyncIterator[bytes]:
    """One block of events a step; an error after the start is an event."""
    chunks = sse.CompletionStream(answer_id, prompts.model, responses.now())
    fields = prompts.fields
    try:
        async for events in batches(subscription):
            block = [] if events else [sse.KEEP_ALIVE]
            for choice, texts in feed(state, subscription, choices, events):
                block += choice_chunks(chunks, choice, "".join(texts), fields.continuous_usage)
            if block:
                yield b"".join(block)
    except RequestError as error:
        yield sse.error_event(error) + sse.DONE
        return
    if fields.include_usage:
        yield chunks.usage(total_counts(choices, fields.choices), timings_of(choice.text for choice in choices))
    yield sse.DONE


def choice_chunks(chunks: sse.CompletionStream, choice: CompletionChoice, text: str, counted: bool) -> list[bytes]:
    counts = choice.counts() if counted else None
    logprobs = choice.take_logprobs()
    new_ids = choice.text.take_new_ids() if choice.wants_ids else None
    out = []
    if text or logprobs or new_ids:
        out.append(chunks.text(choice.index, text, logprobs=logprobs, token_ids=new_ids, usage=counts))
    if choice.text.ended is not None:
        out.append(chunks.finish(choice.index, choice.text.finish_reason, stop_reason=choice.stop_reason, usage=counts))
    return out


def total_counts(choices: Sequence[CompletionChoice], per_prompt: int) -> Json:
    """Usage of the whole answer: each prompt counts once, and what its first choice found cached."""
    firsts = choices[::per_prompt]
    return responses.total_usage(
        [choice.counts() for choice in choices],
        sum(choice.prompt_tokens for choice in firsts),
        cached=sum(choice.cached_tokens for choice in firsts),
    )
