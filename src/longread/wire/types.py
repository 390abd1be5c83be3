"""Requests as they arrive: OpenAI's fields, vLLM's extensions, nothing else.

Types are strict (a bool is no int, "1" is no number) and every range is checked with the limit and the value in the
message. A field that is not in a model here is looked up in ``fields``: ignored, neutral, renamed, or unknown; the last
three raise ``InvalidRequestError``. ``validate`` is the only way in; it never raises pydantic's own error.
Checks that need the model (context length, vocabulary, which efforts exist) are made elsewhere.
"""

import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from longread.spec.documents import MAX_NAME
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, MIN_REPETITION_PENALTY
from longread.wire.fields import (
    FUNCTION_IGNORED,
    IGNORED,
    JSON_SCHEMA_IGNORED,
    MESSAGE_IGNORED,
    MESSAGE_NEUTRAL,
    NEUTRAL,
    RENAMED,
)

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOOLS = 1024
MAX_SALT = 1024  # characters
INT64 = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class WireModel(BaseModel):
    """Base of everything read from a client. Validators are built at first use: importing stays cheap."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class TextPart(WireModel):
    """One text of a content list."""

    type: Literal["text"]
    text: str


class DocumentPart(WireModel):
    """A stored document, in place of its text (an extension of Longread's)."""

    type: Literal["document"]
    document_id: str


_PART_TEXT = {"text": "text", "document": "document_id"}  # where each kind of part has its one text


def _known_parts(value: object) -> object:
    """Refuse images, audio and files by name, and say what a part lacks: a union's own error would only say that a list
    is no text.
    """
    for i, part in enumerate(value if isinstance(value, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"part {i} must be an object with a type, got {_show(part)}")
        if kind not in _PART_TEXT:
            raise ValueError(
                f"content part of type {kind!r} is not supported; this server reads text only, sent as "
                "{'type': 'text', 'text': ...} or stored before, as {'type': 'document', 'document_id': ...}"
            )
        field = _PART_TEXT[kind]
        if not isinstance(part.get(field), str):
            raise ValueError(f"part {i} of type {kind!r} needs {field}, a text; got {_show(part.get(field))}")
        if len(part) > 2:
            more = next(name for name in part if name not in ("type", field))
            raise ValueError(f"part {i} of type {kind!r} has no field {more[:64]!r}")
    return value


Part = Annotated[TextPart | DocumentPart, Field(discriminator="type")]
Content = Annotated[str | list[Part] | None, BeforeValidator(_known_parts)]


class FunctionCall(WireModel):
    """``arguments`` is the JSON text that the model wrote, not checked: a model may have written it badly."""

    name: str = Field(min_length=1)
    arguments: str


class ToolCall(WireModel):
    """A call in an earlier assistant message. ``index`` comes back from clients that glued stream deltas together."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(WireModel):
    """One message. ``reasoning`` and ``reasoning_content`` are two names of one thing; ``thoughts`` is the value."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object) -> object:
        return _sift(data, cls, MESSAGE_IGNORED, MESSAGE_NEUTRAL) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _fits_role(self) -> "Message":
        if self.role != "assistant" and (self.tool_calls or self.thoughts):
            raise ValueError(f"tool_calls and reasoning belong to assistant messages, not to role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool message needs the tool_call_id that it answers")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thoughts)):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    @property
    def thoughts(self) -> str | None:
        """The reasoning, under whichever of its names it came."""
        return self.reasoning if self.reasoning is not None else self.reasoning_content

    def texts(self, documents: Mapping[str, str]) -> tuple[str, ...]:
        """The content's texts, a named document's its text in ``documents``; none where content is null."""
        if self.content is None:
            return ()
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part.text if isinstance(part, TextPart) else documents[part.document_id] for part in self.content)


def _function_schema(value: dict[str, Any]) -> dict[str, Any]:
    """A tool goes into the prompt exactly as the client wrote it, key order included, so it stays a plain dict."""
    name = value.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ValueError(f"name must be 1 to 128 of the characters A-Z a-z 0-9 _ . : -, got {_show(name)}")
    if not isinstance(value.get("description"), str | None):
        raise ValueError(f"description must be a text, got {_show(value['description'])}")
    for field in FUNCTION_IGNORED:
        if not isinstance(value.get(field), bool | None):
            raise ValueError(f"{field} must be true or false, got {_show(value[field])}")
    if not isinstance(value.get("parameters"), dict | None):
        raise ValueError(f"parameters must be a JSON schema object, got {_show(value['parameters'])}")
    return value


class Tool(WireModel):
    """A callable function: its name, description and JSON schema."""

    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AfterValidator(_function_schema)]

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function["name"])


class StreamOptions(WireModel):
    """``continuous_usage_stats`` is vLLM's: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(WireModel):
    """A named schema; OpenAI's other fields do nothing (``fields.JSON_SCHEMA_IGNORED``)."""

    name: str = Field(min_length=1)
    json_schema: dict[str, Any] | bool = Field(alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in JSON_SCHEMA_IGNORED}


class ResponseFormat(WireModel):
    """OpenAI's constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_present(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed for type 'json_schema', and only for that")
        return self


class StructuredOutputs(WireModel):
    """vLLM's ``structured_outputs``; exactly one of the four."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    choice: list[str] | None = Field(default=None, min_length=1)
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [v for v in (self.json_, self.regex, self.choice, self.json_object) if v is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of json, regex, choice, json_object must be given, {len(given)} are")
        return self


class ChatTemplateKwargs(WireModel):
    """vLLM's spelling of the thinking switch. An integer effort (1-100) exists in V4.1 only."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | None = None
    drop_thinking: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatTemplateKwargs":
        if None not in (self.thinking, self.enable_thinking) and self.thinking != self.enable_thinking:
            raise ValueError("thinking and enable_thinking contradict each other")
        return self


_ID_TEXT = re.compile(r"0|[1-9][0-9]{0,9}")


def _logit_bias(value: object) -> object:
    """Keys are token ids as text (JSON has no integer keys)."""
    if not isinstance(value, dict):
        return value
    out: dict[int, object] = {}
    for key, bias in value.items():
        # Digits are counted before they are read; a leading zero would make two keys of one id.
        if not (isinstance(key, str) and _ID_TEXT.fullmatch(key) and int(key) <= MAX_TOKEN_ID):
            raise ValueError(f"keys must be token ids from 0 to {MAX_TOKEN_ID}, got {_show(key)}")
        out[int(key)] = bias
    return out


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(_stop_list)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class GenerateFields(WireModel):
    """What chat and plain completions share. None means the default in the comment of ``sampling.to_sampling``."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, ge=MIN_REPETITION_PENALTY, le=100.0, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0, allow_inf_nan=False)
    logit_bias: Annotated[dict[int, Bias] | None, BeforeValidator(_logit_bias)] = Field(
        default=None, max_length=MAX_LOGIT_BIAS
    )
    stop: Stop = Field(default=None, max_length=MAX_STOPS)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    seed: int | None = Field(default=None, ge=-INT64 - 1, le=INT64)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKEN_ID)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKEN_ID)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT)
    priority: int | None = Field(default=None, ge=-INT64 - 1, le=INT64)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object) -> object:
        return _sift(data, cls, IGNORED, NEUTRAL) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _consistent(self) -> "GenerateFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.structured_outputs is not None and self._formatted:
            raise ValueError("response_format and structured_outputs cannot both constrain the output")
        limit = self.output_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise ValueError(f"min_tokens {self.min_tokens} is larger than max_tokens {limit}")
        return self

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None: up to the context's end."""
        return self.max_tokens

    @property
    def _formatted(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def constrained(self) -> bool:
        """Whether a grammar binds the answer."""
        return self.structured_outputs is not None or self._formatted

    @property
    def choices(self) -> int:
        """Answers a prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _tool_choice(value: object) -> object:
    if value == "required" or isinstance(value, dict):
        raise ValueError(f"{value!r} is not honoured; use 'auto' or 'none', or constrain the answer by response_format")
    return value


class PromptFields(WireModel):
    """How a conversation becomes a prompt; shared by chat and by /tokenize."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _final_message(self) -> "PromptFields":
        if self.continue_final_message:
            if self.add_generation_prompt is not False:
                raise ValueError("continue_final_message needs add_generation_prompt: false")
            if self.messages[-1].role != "assistant":
                raise ValueError(
                    f"continue_final_message needs a last message of role 'assistant', got {self.messages[-1].role!r}"
                )
        return self

    @property
    def named_documents(self) -> Mapping[str, str]:
        """The id of each document that the messages name, and the field that names it (first)."""
        found: dict[str, str] = {}
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if isinstance(part, DocumentPart):
                    found.setdefault(part.document_id, f"messages[{i}].content[{j}].document_id")
        return found

    @property
    def document_counts(self) -> Counter[str]:
        """How often the messages name each document: its text stands in the prompt as often."""
        parts = (part for message in self.messages if isinstance(message.content, list) for part in message.content)
        return Counter(part.document_id for part in parts if isinstance(part, DocumentPart))


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerateFields, PromptFields):
    """POST /v1/chat/completions."""

    tool_choice: Annotated[Literal["none", "auto"] | None, BeforeValidator(_tool_choice)] = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKEN_ID)
    add_special_tokens: Literal[False] | None = None

    @model_validator(mode="after")
    def _chat_consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens {both[0]} and max_completion_tokens {both[1]} contradict each other")
        inner = self.chat_template_kwargs.reasoning_effort if self.chat_template_kwargs else None
        if None not in (inner, self.reasoning_effort) and inner != self.reasoning_effort:
            raise ValueError(f"reasoning_effort {self.reasoning_effort!r} contradicts chat_template_kwargs' {inner!r}")
        return self

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens``, today's name, or ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools the model may call: none under tool_choice "none", which then leaves them out of the prompt too."""
        return () if self.tool_choice == "none" or not self.tools else tuple(self.tools)


def _prompt_shape(value: object) -> object:
    """Name the four accepted shapes; a union's own error would list a failure for each of a million ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of token-id lists, not empty")
    _homogeneous(value)
    return value


def _homogeneous(items: list[Any]) -> None:
    """One kind of item throughout. Whole-list operations: a prompt may hold a million ids."""
    kind = type(items[0])
    if kind not in (str, int, list):
        raise ValueError(f"item 0 must be a text, a token id or a list of token ids, got {_show(items[0])}")
    if set(map(type, items)) != {kind}:
        i, item = next((i, item) for i, item in enumerate(items) if type(item) is not kind)
        raise ValueError(f"items must be of one kind; item 0 is {kind.__name__}, item {i} is {_show(item)}")
    for i, ids in enumerate(items if kind is list else [items] if kind is int else []):
        where = f"item {i} " if kind is list else "token ids "
        if not ids or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
            bad: object = next((t for t in ids if type(t) is not int or not 0 <= t <= MAX_TOKEN_ID), [])
            raise ValueError(f"{where}must be a non-empty list of integers from 0 to {MAX_TOKEN_ID}, got {_show(bad)}")


Prompt = Annotated[Any, BeforeValidator(_prompt_shape)]


class CompletionRequest(GenerateFields):
    """POST /v1/completions. ``max_tokens`` defaults to 16, as OpenAI's does."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None

    @property
    def output_limit(self) -> int | None:
        """``max_tokens``, 16 where it is not given."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One entry a prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(self.prompt),)
        return tuple(p if isinstance(p, str) else tuple(p) for p in self.prompt)


class TokenizeTextRequest(WireModel):
    """POST /tokenize with ``prompt``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(PromptFields):
    """POST /tokenize with ``messages``: the ids that /v1/chat/completions would send to the engine."""

    model: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: Literal[False] | None = None
    reasoning_effort: Effort | None = None

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools in the prompt."""
        return tuple(self.tools or ())


def _printable(value: str | None) -> str | None:
    if value is not None and not value.isprintable():
        raise ValueError(f"must hold printable characters only, got {_show(value)}")
    return value


class DocumentRequest(WireModel):
    """POST /v1/longread/documents. ``wait`` false: answer at once, read in the background."""

    model: str | None = None
    text: str
    name: Annotated[str | None, AfterValidator(_printable)] = Field(default=None, min_length=1, max_length=MAX_NAME)
    pinned: bool | None = None
    wait: bool | None = None


class DetokenizeRequest(WireModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


AnyModel = TypeVar("AnyModel", bound=WireModel)


def _sift(
    data: dict[str, object],
    model: type[WireModel],
    ignored: Mapping[str, str],
    neutral: Mapping[str, tuple[object, ...]],
) -> dict[str, object]:
    """Drop the documented do-nothing fields; refuse the rest that the model does not have, each for its own reason."""
    kept: dict[str, object] = {}
    for name, value in data.items():
        if name in model.model_fields:
            kept[name] = value
        elif name in ignored:
            continue
        elif name in neutral:
            if value is not None and not _is_one_of(value, neutral[name]):
                only = _listed(neutral[name])
                raise InvalidRequestError(f"{name}: not supported; only {only} is accepted, got {_show(value)}", name)
        elif name in RENAMED:
            raise InvalidRequestError(f"{name}: not a field of this server; use {RENAMED[name]}", name)
        else:
            near = get_close_matches(name, model.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"unknown field {name[:64]!r}{hint}", name[:64])
    return kept


def _is_one_of(value: object, accepted: tuple[object, ...]) -> bool:
    return any(type(value) is type(v) and value == v for v in accepted)


def _listed(accepted: tuple[object, ...]) -> str:
    return " or ".join(["null", *map(repr, accepted)])


def validate(model: type[AnyModel], data: object) -> AnyModel:
    """Check a parsed body. Raises InvalidRequestError that names the field, the limit and the value."""
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {_show(data)}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> InvalidRequestError:
    """The first problem, in words. Union branches (their loc parts name types) are collapsed to the field's path."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part[:1].isupper() and "[" not in part and part not in ("str", "int", "bool", "dict", "list"):
            path += f".{part}" if path else part
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return InvalidRequestError(f"{path}: {message}" if path else message, path or None)
    if first["type"] == "missing":
        return InvalidRequestError(f"{path}: field required", path)
    return InvalidRequestError(f"{path}: {message}, got {_show(first['input'])}", path)


def _show(value: object) -> str:
    text = repr(value)[:80] if not isinstance(value, list | dict) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) < 80 else text + "…"
