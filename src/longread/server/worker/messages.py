"""What a server and its engine's process say to each other.

Knows the engine protocol's types and how each travels. Must not know sockets or processes.

To the process: trusted, since the server started it. From the process: checked whole, types and shapes, by pydantic;
what does not fit raises ValueError. Prompts go as their int32 bytes with their page hashes; the choices of one prompt
send it once. Times are monotonic seconds, which on one machine mean the same in every process.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import ConfigDict, JsonValue, TypeAdapter

from longread.spec.engine import (
    EngineInfo,
    EngineStats,
    Event,
    FinishEvent,
    FirstToken,
    GenerationRequest,
    GrammarSpec,
    SamplingParams,
    Standing,
    TokenEvent,
)
from longread.spec.errors import EngineFailedError, InvalidRequestError, OverloadedError, RequestError
from longread.spec.profiler import ProfileError
from longread.spec.state import HashedTokens

SETUP, SUBMIT, CANCEL, WATCH, GRAMMAR, EXPLAIN, CLOSE = b"S", b"R", b"C", b"W", b"G", b"E", b"X"
LOADED, FAILED, STEP, CHECKED, EXPLAINED = b"l", b"f", b"s", b"g", b"e"
PROFILE, PROFILED = b"P", b"p"
TO_PROCESS = b"".join((SETUP, SUBMIT, CANCEL, WATCH, GRAMMAR, EXPLAIN, PROFILE, CLOSE))
FROM_PROCESS = b"".join((LOADED, FAILED, STEP, CHECKED, EXPLAINED, PROFILED))
MAX_PROMPT_BYTES = 2**32  # ids and hashes of a prompt; what the server accepts is far less

_CONFIG = ConfigDict(strict=True, ser_json_inf_nan="constants", ser_json_bytes="hex", val_json_bytes="hex")

FailedAs = Literal["config", "checkpoint", "other"]
Refusal = tuple[str, str, str | None, str | None]  # class, message, param, code
Loaded = tuple[EngineInfo, EngineStats, dict[str, JsonValue]]  # the last: what else the loader has to tell
# (request, token, logprob, top, first) of tokens that carry more than their id
_Rich = tuple[int, int, float | None, tuple[tuple[int, float], ...], FirstToken | None]
# [request, token, request, token, ...]; rich tokens; ends; stats, None: as before; (request, computed tokens)
_Step = tuple[list[int], list[_Rich], list[tuple[int, FinishEvent]], EngineStats | None, list[tuple[int, int]]]

_STEP: TypeAdapter[_Step] = TypeAdapter(_Step, config=_CONFIG)
_LOADED: TypeAdapter[Loaded] = TypeAdapter(Loaded, config=_CONFIG)
_FAILED: TypeAdapter[tuple[FailedAs, str]] = TypeAdapter(tuple[FailedAs, str], config=_CONFIG)
_CHECKED: TypeAdapter[tuple[int, Refusal | None]] = TypeAdapter(tuple[int, Refusal | None], config=_CONFIG)
_EXPLAINED: TypeAdapter[tuple[int, Standing | None]] = TypeAdapter(tuple[int, Standing | None], config=_CONFIG)
# What an engine told of its profile, nothing where one was begun; or why not
Profiled = tuple[int, dict[str, JsonValue] | None, Refusal | None]
_PROFILED: TypeAdapter[Profiled] = TypeAdapter(Profiled, config=_CONFIG)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine brought. ``events`` go with the numbers of their requests, which are the server's;
    of one request in the order in which they happened. ``computed``: how far the watched requests' prompts are.
    """

    events: Sequence[tuple[int, Event]]
    stats: EngineStats | None
    computed: Sequence[tuple[int, int]]


def encode_submit(
    number: int, request: GenerationRequest, last: GenerationRequest | None
) -> tuple[bytes, list[bytes | memoryview]]:
    """JSON text and blob of a request that ``check_request`` has accepted. ``last``: the one that was sent before."""
    scalars = {
        field.name: getattr(request, field.name)
        for field in fields(GenerationRequest)
        if field.name not in ("prompt", "sampling", "hashed")
    }
    told: dict[str, object] = {"number": number, "request": scalars, "sampling": _changed(request.sampling)}
    if last is not None and request.prompt is last.prompt and request.hashed is last.hashed:
        return _dumps(told | {"same": True}), []
    hashed = request.hashed
    if hashed is None:
        return _dumps(told), [array("i", request.prompt).tobytes()]
    whole = len(hashed.data) == 4 * len(request.prompt)
    told["hashed"] = [hashed.root.hex(), len(hashed.data), len(hashed.hashes), hashed.least, hashed.most]
    ids = hashed.data if whole else array("i", request.prompt).tobytes()
    return _dumps(told), [ids, b"".join(hashed.hashes)]


def decode_submit(text: bytes, blob: bytes, last: GenerationRequest | None) -> tuple[int, GenerationRequest]:
    """The number and the request. ``last``: the one that came before."""
    told = json.loads(text)
    sampling = _sampling(told["sampling"])
    if told.get("same"):
        assert last is not None
        prompt, hashed = last.prompt, last.hashed
    else:
        prompt, hashed = _prompt(told.get("hashed"), memoryview(blob))
    return told["number"], GenerationRequest(**told["request"], prompt=prompt, sampling=sampling, hashed=hashed)


def _prompt(described: Sequence[Any] | None, blob: memoryview) -> tuple[tuple[int, ...], HashedTokens | None]:
    if described is None:
        return tuple(blob.cast("i").tolist()), None
    root, size, pages, least, most = described
    end = len(blob) - 16 * pages
    hashes = tuple(bytes(blob[at : at + 16]) for at in range(end, len(blob), 16))
    hashed = HashedTokens(bytes.fromhex(root), bytes(blob[:size]), hashes, least, most)
    return tuple(blob[:end].cast("i").tolist()), hashed


def _changed(sampling: SamplingParams) -> dict[str, object]:
    """Its fields that differ from the default."""
    told: dict[str, object] = {}
    for field in fields(SamplingParams):
        value = getattr(sampling, field.name)
        if value != field.default:
            told[field.name] = [value.kind, value.value] if isinstance(value, GrammarSpec) else value
    return told


def _sampling(told: Mapping[str, Any]) -> SamplingParams:
    given = dict(told)
    if "logit_bias" in given:
        given["logit_bias"] = tuple((token, bias) for token, bias in given["logit_bias"])
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    if "grammar" in given:
        given["grammar"] = GrammarSpec(*given["grammar"])
    return SamplingParams(**given)


def encode(value: object) -> bytes:
    """Any other message to the process."""
    return _dumps(value)


def decode(text: bytes) -> Any:
    return json.loads(text)


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()  # ASCII: texts may hold lone surrogates


def encode_step(
    events: Sequence[Event], numbers: Mapping[str, int], stats: EngineStats | None, computed: Sequence[tuple[int, int]]
) -> bytes:
    """Tokens first, then the ends: no request has a token behind its end."""
    plain: list[int] = []
    rich: list[_Rich] = []
    ends: list[tuple[int, FinishEvent]] = []
    for event in events:
        number = numbers[event.request_id]
        if isinstance(event, FinishEvent):
            ends.append((number, event if event.error is None else replace(event, error=valid(event.error))))
        elif event.first is None and event.logprob is None and not event.top:
            plain += (number, event.token_id)
        else:
            rich.append((number, event.token_id, event.logprob, event.top, event.first))
    return _STEP.dump_json((plain, rich, ends, stats, list(computed)))


def decode_step(text: bytes, names: Mapping[int, str]) -> Step:
    """Raises ValueError, also for a number that is no request's, a second end, or a token behind an end."""
    plain, rich, ends, stats, computed = _STEP.validate_json(text)
    events: list[tuple[int, Event]] = []
    try:
        # A request's first token is rich and its later ones are plain, or all of them are rich.
        for number, token, logprob, top, first in rich:
            events.append((number, TokenEvent(names[number], token, logprob, top, first)))
        for number, token in zip(plain[::2], plain[1::2], strict=True):
            events.append((number, TokenEvent(names[number], token)))
        for number, end in ends:
            if names[number] != end.request_id:
                raise ValueError(f"the end of request {end.request_id!r} came as that of {names[number]!r}")
            events.append((number, end))
    except KeyError as error:
        raise ValueError(f"an event of request number {error}, which is not in flight") from None
    if len({number for number, _ in ends}) != len(ends):
        raise ValueError("a request ended twice")
    return Step(events, stats, computed)


def refused(request: GenerationRequest, error: RequestError) -> FinishEvent:
    """The end of a request that the engine did not accept."""
    return FinishEvent(request.request_id, "failed", len(request.prompt), 0, 0, error=error.message)


def encode_loaded(info: EngineInfo, stats: EngineStats, told: Mapping[str, JsonValue]) -> bytes:
    return _LOADED.dump_json((info, stats, dict(told)))


def decode_loaded(text: bytes) -> Loaded:
    """Raises ValueError."""
    return _LOADED.validate_json(text)


def encode_failed(kind: FailedAs, message: str) -> bytes:
    return _FAILED.dump_json((kind, valid(message)))


def decode_failed(text: bytes) -> tuple[FailedAs, str]:
    """Raises ValueError."""
    return _FAILED.validate_json(text)


def encode_checked(number: int, error: RequestError | None) -> bytes:
    """How the check of a grammar ended."""
    if error is None:
        return _CHECKED.dump_json((number, None))
    return _CHECKED.dump_json((number, (type(error).__name__, valid(error.message), error.param, error.code)))


def decode_checked(text: bytes) -> tuple[int, RequestError | None]:
    """Raises ValueError."""
    number, refusal = _CHECKED.validate_json(text)
    if refusal is None:
        return number, None
    name, message, param, code = refusal
    kinds: dict[str, type[RequestError]] = {
        kind.__name__: kind for kind in (InvalidRequestError, OverloadedError, EngineFailedError)
    }
    return number, kinds.get(name, InvalidRequestError)(message, param, code)


def encode_profiled(number: int, told: Mapping[str, JsonValue] | None, error: RequestError | None) -> bytes:
    """``told``: the profile, None where one was begun."""
    refusal = None if error is None else (type(error).__name__, valid(error.message), error.param, error.code)
    return _PROFILED.dump_json((number, None if told is None else dict(told), refusal))


def decode_profiled(text: bytes) -> tuple[int, dict[str, JsonValue] | None, RequestError | None]:
    """Raises ValueError."""
    number, told, refusal = _PROFILED.validate_json(text)
    if refusal is None:
        return number, told, None
    _, message, param, code = refusal
    return number, None, ProfileError(message, param, code)


def encode_explained(number: int, standing: Standing | None) -> bytes:
    return _EXPLAINED.dump_json((number, standing))


def decode_explained(text: bytes) -> tuple[int, Standing | None]:
    """Raises ValueError."""
    return _EXPLAINED.validate_json(text)


def valid(text: str) -> str:
    """As Unicode that can be sent: an exception may quote a lone surrogate."""
    return text.encode("utf-8", "replace").decode()
