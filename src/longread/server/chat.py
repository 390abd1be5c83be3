"""POST /v1/chat/completions.

Knows: chat encodings, the output parser, chat's response shapes. Must not know: engines beyond the driver.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import clock_of, offload, with_body
from longread.server.clock import Clock
from longread.server.deadline import deadline_of
from longread.server.named import may_name_documents, texts_named
from longread.server.output import ChoiceText, TokenLogprobs
from longread.server.prompts import Prompt, pieces_bytes, prompt_of
from longread.server.state import ServerState, state_of
from longread.server.subscription import Subscription
from longread.server.work import engine_requests, new_id, open_call, respond, start
from longread.spec.engine import FinishEvent, TokenEvent
from longread.spec.errors import InvalidRequestError
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
    prompt: Prompt
    in_reasoning: bool

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids


class ChatChoice:
    """One choice: its text, parsed."""

    def __init__(self, index: int, state: ServerState, prompt: ChatPrompt):
        self.index = index
        self.text = ChoiceText(state.tokenizer, prompt.fields)
        names = [tool.name for tool in prompt.fields.offered_tools]
        self._parser = OutputParser(
            state.encoding,
            in_reasoning=prompt.in_reasoning,
            tools=names,
            repeat_reasoning=not prompt.fields.constrained,
        )
        self._shows_reasoning = prompt.fields.include_reasoning is not False
        self._eos_id = state.tokenizer.eos_id
        self.logprobs = TokenLogprobs(state.tokenizer) if prompt.fields.logprobs else None
        self.wants_ids = bool(prompt.fields.return_token_ids)
        self.reasoning_tokens = 0
        self.opened = False

    def token(self, event: TokenEvent) -> list[ParseEvent]:
        """What became certain with one token."""
        self.reasoning_tokens += self._parser.in_reasoning
        if self.logprobs is not None:
            self.logprobs.add(event)
        return self._visible(self._parser.feed(self.text.push(event)))

    def finish(self, event: FinishEvent, subscription: Subscription) -> list[ParseEvent]:
        """What the end made certain. Raises the error of a request that did not end by itself."""
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
        """The stop string or stop token that ended it, None for the model's own end."""
        return self.text.stop_reason(self._eos_id)

    def counts(self, prompt_tokens: int) -> Json:
        """Usage of this choice alone, so far."""
        cached = self.text.ended.cached_tokens if self.text.ended is not None else 0
        return responses.usage(
            prompt_tokens, self.text.completion_tokens, cached=cached, reasoning=self.reasoning_tokens
        )

    def whole(self) -> Json:
        """The choice in one piece, once it has ended."""
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


class ChatAnswer:
    """All choices of one call, in chat's shapes."""

    def __init__(self, answer_id: str, prompt: ChatPrompt, choices: Sequence[ChatChoice]):
        self.choices = choices
        self._id = answer_id
        self._prompt = prompt
        self._counts_always = prompt.fields.continuous_usage
        self._created = responses.now()
        self._stream = sse.ChatStream(answer_id, prompt.model, self._created)

    def chunks(self, choice: ChatChoice, found: Sequence[ParseEvent]) -> list[bytes]:
        """The role comes with the first token, so that a chunk means that the prompt was read."""
        prompt, stream = self._prompt, self._stream
        counts = choice.counts(len(prompt.ids)) if self._counts_always else None
        out = []
        if not choice.opened:
            choice.opened = True
            ids = prompt.ids if choice.wants_ids else None
            out.append(stream.role(choice.index, prompt_token_ids=ids, usage=counts))
        logprobs = choice.logprobs.take() if choice.logprobs is not None else None
        new_ids = choice.text.take_new_ids() if choice.wants_ids else None
        out += stream.deltas(choice.index, found, logprobs=logprobs or None, token_ids=new_ids or None, usage=counts)
        if choice.text.ended is not None:
            out.append(stream.finish(choice.index, choice.finish_reason, stop_reason=choice.stop_reason, usage=counts))
        return out

    def usage_chunk(self, extra: Json) -> bytes:
        """Counts of the whole answer, and ``extra``."""
        return self._stream.usage(self._counts(), extra)

    def whole(self) -> Json:
        """The answer in one piece."""
        prompt = self._prompt
        return responses.chat_response(
            self._id,
            prompt.model,
            [choice.whole() for choice in self.choices],
            self._counts(),
            created=self._created,
            prompt_token_ids=list(prompt.ids) if prompt.fields.return_token_ids else None,
        )

    def _counts(self) -> Json:
        """The prompt counts once, and what its first choice found cached."""
        ended, size = self.choices[0].text.ended, len(self._prompt.ids)
        parts = [choice.counts(size) for choice in self.choices]
        return responses.total_usage(parts, size, cached=ended.cached_tokens if ended is not None else 0)


async def create(request: Request) -> Response:
    """The route. Raises RequestError for what is refused before anything is sent."""
    state = state_of(request)
    deadline = deadline_of(request)
    state.driver.check_room(request.state.owner)
    prompt, size = await with_body(
        request,
        state.bodies,
        state.options.max_body_bytes,
        lambda body: prepare(state, body, clock_of(request)),
        may_name_documents,
    )
    answer_id = new_id("chatcmpl")
    after = state.tokenizer.id_of(END_THINK) if prompt.in_reasoning else None
    requests = await offload(
        size, lambda: engine_requests(prompt.fields, [prompt.prompt], answer_id, after, request.state.owner)
    )
    subscription = await start(state, request, prompt.fields, requests, "messages", deadline)
    call = open_call(state, request, answer_id, prompt.model, prompt.fields, requests)
    choices = [ChatChoice(i, state, prompt) for i in range(prompt.fields.choices)]
    return await respond(state, request, call, subscription, prompt.fields, ChatAnswer(answer_id, prompt, choices))


def prepare(state: ServerState, body: bytes, clock: Clock) -> ChatPrompt:
    """From bytes to prompt ids. Raises RequestError."""
    fields = validate(ChatRequest, parse_json(body))
    model = state.check_model(fields.model)
    clock.mark("parse")
    if fields.cache_salt is not None and fields.named_documents:
        raise InvalidRequestError(
            "cache_salt: stored documents were read without a salt, so that nothing of them could be reused; leave "
            "cache_salt out, or send the text in place of its id",
            "cache_salt",
        )
    documents = texts_named(state, fields)
    rendered = state.encoding.render(conversation(fields, state.encoding.abilities, state.template_defaults, documents))
    clock.mark("render")
    data = pieces_bytes(state, rendered.pieces)
    clock.mark("tokenise")
    prompt = prompt_of(state, data, fields.cache_salt)
    clock.mark("hash")
    return ChatPrompt(fields, model, prompt, rendered.in_reasoning)
