"""A small client of OpenAI's API for gates: bounded in requests and time, patient with a server that is busy.

Knows HTTP and the shapes of answers; knows no levels. It trusts nothing that comes back: what is not of the API's shape
is a MalformedError that names the field.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from longread.measure.gate.distribution import Position
from longread.measure.gate.errors import MalformedError, RefusedError, SpentError, UnreachableError

TRIES = 6  # of a request that a busy server puts off
LONGEST_WAIT = 30.0  # seconds between two of them
BUSY = (429, 503)
MOST_BYTES = 256 * 2**20  # of one answer
QUOTED = 300
_ESCAPED = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_LONE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. ``positions`` is empty where no log-probabilities came; ``token_ids`` and ``prompt_ids`` None where
    the server does not tell them; ``cached`` tokens None likewise.
    """

    text: str
    finish_reason: str | None
    reasoning: str = ""
    positions: tuple[Position, ...] = ()
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached: int | None = None
    seconds: float = 0.0


@dataclass
class Allowance:
    """What may still be spent. ``clock`` is monotonic seconds."""

    max_requests: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        self.end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        return self.end - self.clock()

    def spend(self) -> None:
        """Count one request. Raises SpentError."""
        if self.left <= 0:
            raise SpentError(f"the time of {self.seconds:.0f} s is used up (--budget)")
        if self.requests >= self.max_requests:
            raise SpentError(f"{self.max_requests:,} requests are used up (--max-requests)")
        self.requests += 1


class Client:
    """One server and one of its models. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        allowance: Allowance,
        *,
        api_key: str | None = None,
        timeout: float = 300.0,
        concurrency: int = 8,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.allowance, self.timeout = allowance, timeout
        self.model = ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency + 4)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=transport)
        self._room = asyncio.Semaphore(concurrency)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> str | None:
        """The body of a GET; None where there is no such thing."""
        try:
            async with self._http.stream("GET", self.root + path) as response:
                text = await _body(response, path)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self.root}{path}: {_reason(error)}; is the server running?") from error
        if response.status_code in (401, 403):
            raise RefusedError(response.status_code, f"{path}: give its API key (--api-key)")
        return text if response.status_code == 200 else None

    async def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """One request. Raises RefusedError, UnreachableError, MalformedError, SpentError."""
        raw = await self._patiently(path, {"model": self.model, **body})
        found = _document(raw, f"{path}: the answer")
        if not isinstance(found, dict):
            raise MalformedError(f"{path}: the answer is no JSON object")
        return found

    async def chat(self, messages: Sequence[Mapping[str, object]], **fields: object) -> Answer:
        """/v1/chat/completions, in one piece or as a stream (``stream=True``)."""
        return await self._ask("/v1/chat/completions", {"messages": list(messages), **fields})

    async def complete(self, prompt: str | Sequence[int], **fields: object) -> Answer:
        """/v1/completions."""
        value = prompt if isinstance(prompt, str) else list(prompt)
        return await self._ask("/v1/completions", {"prompt": value, **fields})

    async def _ask(self, path: str, body: dict[str, object]) -> Answer:
        begun = time.perf_counter()
        if body.get("stream"):
            body = {**body, "stream_options": {"include_usage": True}}
            raw = await self._patiently(path, {"model": self.model, **body})
            found = _joined(raw, path)
        else:
            found = await self.post(path, body)
        answer = read_answer(found, time.perf_counter() - begun)
        self.allowance.prompt_tokens += answer.prompt_tokens or 0
        self.allowance.output_tokens += answer.output_tokens or 0
        return answer

    async def _patiently(self, path: str, body: Mapping[str, object]) -> str:
        """Send, and again while the server says that it is busy. Broken connections are not sent again: an answer that
        was lost is a finding of its own.
        """
        async with self._room:
            for attempt in range(1, TRIES + 1):
                self.allowance.spend()
                status, text, wait = await self._once(path, body)
                if status == 200:
                    return text
                if status not in BUSY or attempt == TRIES:
                    raise RefusedError(status, f"{path}: {_said(text)}")
                pause = min(wait if wait is not None else 0.5 * 2**attempt, LONGEST_WAIT)
                if pause > self.allowance.left:
                    raise SpentError("the server is busy for longer than the time that is left (--budget)")
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _once(self, path: str, body: Mapping[str, object]) -> tuple[int, str, float | None]:
        # A request that has begun may end a little after the time, so that it is not lost.
        timeout = max(1.0, min(self.timeout, self.allowance.left + 5.0))
        try:
            async with self._http.stream("POST", self.root + path, json=body, timeout=timeout) as response:
                return response.status_code, await _body(response, path), _retry_after(response)
        except httpx.TimeoutException as error:
            if self.allowance.left <= 0:
                raise SpentError(f"the time of {self.allowance.seconds:.0f} s is used up (--budget)") from error
            raise UnreachableError(f"{path}: no answer within {timeout:.0f} s (--timeout)") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self.root}{path}: {_reason(error)}") from error


async def _body(response: httpx.Response, path: str) -> str:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MOST_BYTES:
            raise MalformedError(f"{path}: the answer is larger than {MOST_BYTES // 2**20} MiB")
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


def _document(raw: str, what: str) -> Any:
    """JSON, with NaN and infinities: what they stand for is judged where they stand. Halves of surrogate pairs, which
    no file takes, become replacement characters.
    """
    try:
        found = json.loads(raw)
        return json.loads(_LONE.sub("\ufffd", json.dumps(found, ensure_ascii=False))) if _ESCAPED.search(raw) else found
    except (ValueError, RecursionError):
        raise MalformedError(f"{what} is not JSON: {raw[:QUOTED]!r}") from None


def _retry_after(response: httpx.Response) -> float | None:
    try:
        wait = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return wait if math.isfinite(wait) and wait >= 0 else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _said(text: str) -> str:
    """The error's own words, where the body has them."""
    try:
        body = json.loads(text)
        inner = body.get("error", body)
        said = inner.get("message", text) if isinstance(inner, dict) else text
    except (ValueError, AttributeError):
        said = text
    return str(said)[:QUOTED]


def _joined(raw: str, path: str) -> dict[str, Any]:
    """A stream as the answer in one piece that it stands for: one choice."""
    text: list[str] = []
    reasoning: list[str] = []
    entries: list[Any] = []
    ids: list[Any] = []
    older: list[dict[str, Any]] = []
    whole: dict[str, Any] = {"usage": None}
    reason = None
    for chunk in _chunks(raw, path):
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for choice in map(_object, _list(chunk.get("choices"), "choices")):
            if choice.get("index") not in (0, None):
                raise MalformedError(f"{path}: choice {choice['index']!r:.40} where one was asked for")
            delta = _object(choice.get("delta")) or {"content": choice.get("text")}
            text.append(str(delta.get("content") or ""))
            reasoning.append(str(delta.get("reasoning_content") or delta.get("reasoning") or ""))
            told = _object(choice.get("logprobs"))
            entries += _list(told.get("content"), "logprobs.content")
            older.append(told)
            ids += _list(choice.get("token_ids"), "token_ids")
            reason = choice.get("finish_reason") or reason
    logprobs: dict[str, Any] = {"content": entries}
    if not entries:
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            logprobs[name] = [item for told in older for item in _list(told.get(name), f"logprobs.{name}")]
    message = {"content": "".join(text), "reasoning_content": "".join(reasoning)}
    choice = {"message": message, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids or None}
    return {**whole, "choices": [choice]}


def _chunks(raw: str, path: str) -> Iterator[dict[str, Any]]:
    for line in raw.split("\n"):  # not splitlines: a text may hold other separators
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        chunk = _document(line[5:], f"{path}: a chunk of the stream")
        if not isinstance(chunk, dict):
            raise MalformedError(f"{path}: a chunk of the stream is no object")
        if chunk.get("error"):
            raise MalformedError(f"{path}: the stream ended with an error: {_said(json.dumps(chunk))}")
        yield chunk


def read_answer(found: Mapping[str, Any], seconds: float = 0.0) -> Answer:
    """The first choice of an answer of either route. Raises MalformedError."""
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedError("the answer has no choices")
    choice = choices[0]
    message, usage = _object(choice.get("message")), _object(found.get("usage"))
    text = message.get("content") if message else choice.get("text")
    cached = _object(usage.get("prompt_tokens_details")).get("cached_tokens")
    reason = choice.get("finish_reason")
    return Answer(
        text if isinstance(text, str) else "",
        reason if isinstance(reason, str) else None,
        str(message.get("reasoning_content") or message.get("reasoning") or ""),
        read_positions(choice.get("logprobs")),
        _ids(choice.get("token_ids")),
        _ids(_prompt_ids(found, choice)),
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(cached),
        seconds,
    )


def _list(value: object, name: str) -> list[Any]:
    """Missing is empty; anything else that is no list is no answer."""
    if value is not None and not isinstance(value, list):
        raise MalformedError(f"{name}: {str(value)[:40]!r} where a list belongs")
    return value or []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _prompt_ids(found: Mapping[str, Any], choice: Mapping[str, Any]) -> object:
    """vLLM has them in the choice (completions) or beside it (chat); Longread beside it, one list a prompt."""
    ids = choice.get("prompt_token_ids") or found.get("prompt_token_ids")
    return ids[0] if isinstance(ids, list) and ids and isinstance(ids[0], list) else ids


def read_positions(told: object) -> tuple[Position, ...]:
    """Log-probabilities of either route's shape; () where there are none. Raises MalformedError."""
    if not isinstance(told, dict):
        return ()
    content = told.get("content")
    if isinstance(content, list) and content:
        return tuple(_entry(entry) for entry in content)
    tokens, tops = told.get("tokens"), told.get("top_logprobs")
    if not isinstance(tokens, list) or not isinstance(tops, list):
        return ()
    values = _list(told.get("token_logprobs"), "logprobs.token_logprobs") or [None] * len(tokens)
    found = []
    for token, value, top in zip(tokens, values, tops, strict=False):
        pairs = [(str(t), number(p)) for t, p in top.items()] if isinstance(top, dict) else []
        found.append(Position(str(token), None if value is None else number(value), ranked(pairs)))
    return tuple(found)


def _entry(entry: object) -> Position:
    if not isinstance(entry, dict) or not isinstance(entry.get("token"), str):
        raise MalformedError("logprobs.content: an entry has no token")
    pairs = []
    for other in _list(entry.get("top_logprobs"), "logprobs.content: top_logprobs"):
        if not isinstance(other, dict) or not isinstance(other.get("token"), str):
            raise MalformedError("logprobs.content: top_logprobs has an entry without a token")
        pairs.append((other["token"], number(other.get("logprob"))))
    return Position(entry["token"], number(entry.get("logprob")), ranked(pairs))


def ranked(pairs: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Best first; equal ones by name, so that the order does not depend on the server's."""
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def number(value: object) -> float:
    """A log-probability. Raises MalformedError unless it is a number <= 0 (a rounding above is taken as 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-3:  # NaN is not, either
        raise MalformedError(f"a log-probability is {str(value)[:40]!r}; it must be a number up to 0")
    return float(max(min(value, 0.0), -9999.0))


def _ids(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        return None
    return tuple(value)


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
