"""POST /v1/completions: text or token ids in, text out. Ids may also be the body itself (``wire.binary``).

Knows: the older response shapes. Must not know: chat. ``echo``, ``suffix`` and ``best_of`` are refused by the wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import clock_of, media_type, offload, with_body
from longread.server.clock import Clock
from longread.server.deadline import deadline_of
from longread.server.output import ChoiceText, TokenLogprobs
from longread.server.prompts import Prompt, check_count, prompt_of, prompt_of_ids, text_bytes
from longread.server.state import ServerState, state_of
from longread.server.subscription import Subscription
from longread.server.work import engine_requests, new_id, open_call, respond, start
from longread.spec.engine import FinishEvent, TokenEvent
from longread.spec.errors import InvalidRequestError
from longread.wire import responses, sse
from longread.wire.binary import MEDIA_TYPE, query_fields, read_ids
from longread.wire.body import parse_json
from longread.wire.responses import Json
from longread.wire.types import CompletionRequest, validate

MAX_CHOICES = 2048  # of one call: what a body of many short prompts can ask for is bounded before it is tokenised


@dataclass(frozen=True, slots=True)
class CompletionPrompts:
    """A checked request and its prompts."""

    fields: CompletionRequest
    model: str
    prompts: tuple[Prompt, ...]


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
        """The text that one token made certain."""
        if self._logprobs is not None:
            self._logprobs.add(event)
        return self._keep(self.text.push(event))

    def finish(self, event: FinishEvent, subscription: Subscription) -> list[str]:
        """The last text. Raises the error of a request that did not end by itself."""
        return self._keep(self.text.finish(event, subscription))

    def _keep(self, text: str) -> list[str]:
        if not text:
            return []
        self._parts.append(text)
        return [text]

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it, None for the model's own end."""
        return self.text.stop_reason(self._eos_id)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 until the choice has ended."""
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
        """Usage of this choice alone, so far."""
        return responses.usage(self.prompt_tokens, self.text.completion_tokens, cached=self.cached_tokens)

    def whole(self) -> Json:
        """The choice in one piece, once it has ended."""
        return responses.completion_choice(
            self.index,
            "".join(self._parts),
            self.text.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.take_logprobs(),
            token_ids=self.text.token_ids if self.wants_ids else None,
        )


class CompletionAnswer:
    """All choices of one call, in the older shapes."""

    def __init__(self, answer_id: str, prompts: CompletionPrompts, choices: Sequence[CompletionChoice]):
        self.choices = choices
        self._id = answer_id
        self._prompts = prompts
        self._counts_always = prompts.fields.continuous_usage
        self._created = responses.now()
        self._stream = sse.CompletionStream(answer_id, prompts.model, self._created)

    def chunks(self, choice: CompletionChoice, found: Sequence[str]) -> list[bytes]:
        """A chunk of text where there is any, or its logprobs or ids; the end is a chunk of its own."""
        counts = choice.counts() if self._counts_always else None
        text, index, logprobs = "".join(found), choice.index, choice.take_logprobs()
        new_ids = choice.text.take_new_ids() if choice.wants_ids else None
        out = []
        if text or logprobs or new_ids:
            out.append(self._stream.text(index, text, logprobs=logprobs, token_ids=new_ids, usage=counts))
        if choice.text.ended is not None:
            reason = choice.text.finish_reason
            out.append(self._stream.finish(index, reason, stop_reason=choice.stop_reason, usage=counts))
        return out

    def usage_chunk(self, extra: Json) -> bytes:
        """Counts of the whole answer, and ``extra``."""
        return self._stream.usage(self._counts(), extra)

    def whole(self) -> Json:
        """The answer in one piece."""
        prompts = self._prompts
        return responses.completion_response(
            self._id,
            prompts.model,
            [choice.whole() for choice in self.choices],
            self._counts(),
            created=self._created,
            prompt_token_ids=[list(prompt.ids) for prompt in prompts.prompts]
            if prompts.fields.return_token_ids
            else None,
        )

    def _counts(self) -> Json:
        """Each prompt counts once, and what its first choice found cached."""
        firsts = self.choices[:: self._prompts.fields.choices]
        return responses.total_usage(
            [choice.counts() for choice in self.choices],
            sum(choice.prompt_tokens for choice in firsts),
            cached=sum(choice.cached_tokens for choice in firsts),
        )


async def create(request: Request) -> Response:
    """The route. Raises RequestError for what is refused before anything is sent."""
    state = state_of(request)
    clock = clock_of(request)

    def read(body: bytes) -> CompletionPrompts:
        if media_type(request) == MEDIA_TYPE:
            return prepare_ids(state, body, query_fields(request.query_params.multi_items()), clock)
        return prepare(state, body, clock)

    deadline = deadline_of(request)
    state.driver.check_room(request.state.owner)
    prompts, size = await with_body(request, state.bodies, state.options.max_body_bytes, read, binary=True)
    fields, answer_id, owner = prompts.fields, new_id("cmpl"), request.state.owner
    requests = await offload(size, lambda: engine_requests(fields, prompts.prompts, answer_id, owner=owner))
    subscription = await start(state, request, fields, requests, "prompt", deadline)
    call = open_call(state, request, answer_id, prompts.model, fields, requests)
    choices = [
        CompletionChoice(i * fields.choices + n, state, fields, len(prompt.ids))
        for i, prompt in enumerate(prompts.prompts)
        for n in range(fields.choices)
    ]
    return await respond(state, request, call, subscription, fields, CompletionAnswer(answer_id, prompts, choices))


def prepare(state: ServerState, body: bytes, clock: Clock) -> CompletionPrompts:
    """From bytes to prompt ids. A text prompt may hold markup and gets BOS unless told otherwise, as in vLLM."""
    fields = validate(CompletionRequest, parse_json(body))
    model = state.check_model(fields.model)
    texts = fields.prompts
    if len(texts) * fields.choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt: {len(texts)} prompts times n={fields.choices} exceed {MAX_CHOICES} choices; send less at once",
            param="prompt",
        )
    clock.mark("parse")
    clock.mark("render")  # nothing to render: a prompt is what it is
    bos = fields.add_special_tokens is not False
    data = [text_bytes(state, prompt, bos) if isinstance(prompt, str) else prompt for prompt in texts]
    clock.mark("tokenise")
    salt = fields.cache_salt
    prompts = tuple(prompt_of(state, d, salt) if isinstance(d, bytes) else prompt_of_ids(state, d, salt) for d in data)
    clock.mark("hash")
    return CompletionPrompts(fields, model, prompts)


def prepare_ids(state: ServerState, body: bytes, query: Mapping[str, object], clock: Clock) -> CompletionPrompts:
    """The same for a body of ids. Nothing is put before them, as before ids in JSON."""
    fields = validate(CompletionRequest, {**query, "prompt": [0]})  # stands for the body, which is read below
    model = state.check_model(fields.model)
    data = read_ids(body)
    check_count(state, len(data) // 4, "prompt")
    clock.mark("parse")
    clock.mark("render")
    clock.mark("tokenise")
    prompt = prompt_of(state, data, fields.cache_salt)
    clock.mark("hash")
    return CompletionPrompts(fields, model, (prompt,))
