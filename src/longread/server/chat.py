"""POST /v1/chat/completions.

Knows: chat encodings, the output parser, chat's response shapes. Must not know: engines beyond the driver.
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
from longread.spec.errors import RequestError
from longread.wire import responses, sse
from longread.wire.body import parse_json
from longread.wire.encoding.conversation import conversation
from longread.wire.encoding.pieces import END_THINK
from longread.wire.parsing import OutputParser, ParseEvent, ReasoningDelta
from longread.wire.responses import Json
from longread.wire.types import ChatRequest, validate


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A checked request and its prompt. ``in_reasoning``: the output begins inside ``<think>``."""

    fields: ChatRequest
    model: str
    ids: tuple[int, ...]
    in_reasoning: bool


class ChatChoice:
    """One choice: its text, parsed."""

    def __init__(self, index: int, state: ServerState, prompt: ChatPrompt):
        self.index = index
        self.text = ChoiceText(state.tokenizer, prompt.fields)
        names = [tool.name for tool in prompt.fields.offered_tools]
        self._parser = OutputParser(state.encoding, in_reasoning=prompt.in_reasoning, tools=names)
        self._shows_reasoning = prompt.fields.include_reasoning is not False
        self._eos_id = state.tokenizer.eos_id
        self.logprobs = TokenLogprobs(state.tokenizer) if prompt.fields.logprobs else None
        self.wants_ids = bool(prompt.fields.return_token_ids)
        self.reasoning_tokens = 0
        self.opened = False

    def token(self, event: TokenEvent) -> list[ParseEvent]:
        self.reasoning_tokens += self._parser.in_reasoning
        if self.logprobs is not None:
            self.logprobs.add(event)
        return self._visible(self._parser.feed(self.text.push(event)))

    def finish(self, event: FinishEvent, subscription: Subscription) -> list[ParseEvent]:
        rest = self.text.finish(event, subscription)
        truncated = self.text.matched is not None or self.text.finish_reason == "length"
        return self._visible([*self._parser.feed(rest), *self._parser.finish(truncated=truncated)])

    def _visible(self, events: list[ParseEvent]) -> list[ParseEvent]:
        return events if self._shows_reasoning else [e for e in events if not isinstance(e, ReasoningDelta)]

    @property
    def finish_reason(self) -> str:
        """ "tool_calls" only where every call is whole: a client runs what is announced so."""
        reason, calls = self.text.finish_reason, self._parser.calls
        return "tool_calls" if reason == "stop" and calls and all(call.complete for call in calls) else reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.text.stop_reason(self._eos_id)

    def counts(self, prompt_tokens: int) -> Json:
        cached = self.text.ended.cached_tokens if self.text.ended is not None else 0
        return responses.usage(
            prompt_tokens, self.text.completion_tokens, cached=cached, reasoning=self.reasoning_tokens
        )

    def whole(self) -> Json:
        return responses.chat_choice(
            self.index,
            self._parser.content,
            self._parser.reasoning if self._shows_reasoning else None,
            self._parser.calls,
            self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs.take() if self.logprobs is not None else None,
            token_ids=self.text.token_ids if self.wants_ids else None,
        )


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, state.options.max_body_bytes)
    prompt = await offload(len(body), lambda: prepare(state, body))
    answer_id = new_id("chatcmpl")
    after = state.tokenizer.id_of(END_THINK) if prompt.in_reasoning else None
    subscription = await start(
        state, engine_requests(prompt.fields, [prompt.ids], answer_id, grammar_after=after), "messages"
    )
    choices = [ChatChoice(i, state, prompt) for i in range(prompt.fields.choices)]
    if prompt.fields.stream:
        chunks = stream(state, subscription, choices, prompt, answer_id)
        return EventStream(chunks, state.driver, subscription)
    await run_to_end(state, request.receive, subscription, choices)
    answer = responses.chat_response(
        answer_id,
        prompt.model,
        [choice.whole() for choice in choices],
        total_counts(choices, len(prompt.ids)),
        created=responses.now(),
        prompt_token_ids=list(prompt.ids) if prompt.fields.return_token_ids else None,
    )
    return json_response(answer | timings_of(choice.text for choice in choices))


def prepare(state: ServerState, body: bytes) -> ChatPrompt:
    """From bytes to prompt ids. Raises RequestError."""
    fields = validate(ChatRequest, parse_json(body))
    model = state.check_model(fields.model)
    rendered = state.encoding.render(conversation(fields, state.encoding.abilities, state.template_defaults))
    ids = state.tokenizer.encode_prompt(rendered.pieces)
    return ChatPrompt(fields, model, tuple(ids), rendered.in_reasoning)


async def stream(
    state: ServerState, subscription: Subscription, choices: Sequence[ChatChoice], prompt: ChatPrompt, answer_id: str
) -> AsyncIterator[bytes]:
    """One block of events a step. An error after the start is an event, since the status is sent by then."""
    chunks = sse.ChatStream(answer_id, prompt.model, responses.now())
    try:
        async for events in batches(subscription):
            block = [] if events else [sse.KEEP_ALIVE]
            for choice, deltas in feed(state, subscription, choices, events):
                block += choice_chunks(chunks, choice, deltas, prompt)
            if block:
                yield b"".join(block)
    except RequestError as error:
        yield sse.error_event(error) + sse.DONE
        return
    if prompt.fields.include_usage:
        yield chunks.usage(total_counts(choices, len(prompt.ids)), timings_of(choice.text for choice in choices))
    yield sse.DONE


def choice_chunks(
    chunks: sse.ChatStream, choice: ChatChoice, deltas: Sequence[ParseEvent], prompt: ChatPrompt
) -> list[bytes]:
    """The chunks of one event; the role comes with the first token, so that a chunk means that the prompt was read."""
    counts = choice.counts(len(prompt.ids)) if prompt.fields.continuous_usage else None
    out = []
    if not choice.opened:
        choice.opened = True
        ids = prompt.ids if choice.wants_ids else None
        out.append(chunks.role(choice.index, prompt_token_ids=ids, usage=counts))
    logprobs = choice.logprobs.take() if choice.logprobs is not None else None
    new_ids = choice.text.take_new_ids() if choice.wants_ids else None
    out += chunks.deltas(choice.index, deltas, logprobs=logprobs or None, token_ids=new_ids or None, usage=counts)
    if choice.text.ended is not None:
        out.append(chunks.finish(choice.index, choice.finish_reason, stop_reason=choice.stop_reason, usage=counts))
    return out


def total_counts(choices: Sequence[ChatChoice], prompt_tokens: int) -> Json:
    """Usage of the whole answer: the prompt counts once, and what its first choice found cached."""
    ended = choices[0].text.ended
    parts = [choice.counts(prompt_tokens) for choice in choices]
    return responses.total_usage(parts, prompt_tokens, cached=ended.cached_tokens if ended is not None else 0)
