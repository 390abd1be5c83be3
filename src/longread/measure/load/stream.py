"""A server-sent event stream read into an outcome.

Knows the syntax of event streams and the fields of OpenAI's chunks. Must not know sockets or clocks: bytes come with
the instant at which they came. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import math
from collections.abc import Mapping
from typing import Any

import orjson

from longread.measure.load.outcome import Outcome

EVENT_BYTES = 16 * 2**20  # of one event; a server that never ends a line is not buffered for ever
SAID_CHARACTERS = 300  # of what a server says about an error
MOST_TOKENS = 2**31  # of one request; a count above is none, and does not reach a sum
BROKEN_OFF = ("abort", "error")  # finish reasons by which servers say, with status 200, that they gave up


class StreamError(Exception):
    """The stream is not what it should be. ``kind``: the outcome's failure; the message: what was there."""

    def __init__(self, kind: str, said: str):
        super().__init__(said)
        self.kind = kind


class Events:
    """Bytes to the data of whole events, however they were cut. Comments, names and ids of events are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that ``piece`` completes. Raises StreamError for an event that is too long."""
        lines = (self._rest + piece if self._rest else piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > EVENT_BYTES or self._size > EVENT_BYTES:
            raise StreamError("malformed stream", f"an event of more than {EVENT_BYTES // 2**20} MiB")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
        return found


class Reader:
    """Fills ``outcome`` from the response's body. ``done``: [DONE] was seen. ``heard``: the instant of the last event
    of any kind; the answer itself is over with its last choice, and usage may come later.
    """

    def __init__(self, outcome: Outcome):
        self.outcome = outcome
        self.done = False
        self.heard: float | None = None
        self._events = Events()
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._counted = 0  # tokens that earlier chunks said they had brought the answer to

    def feed(self, piece: bytes, now: float) -> None:
        """``piece`` came at ``now``. Raises StreamError for what is not a chunk, and for an error that the server
        reports in the stream.
        """
        for data in self._events.feed(piece):
            self.heard = now
            if data.strip() == b"[DONE]":
                self.done = True
                return  # what stands behind it is no part of the answer, whether it comes in the same piece or not
            self._chunk(_object(data), now)

    def close(self) -> None:
        """The body is over. Raises StreamError where the answer is not whole: neither [DONE] nor a finish reason, one
        that says that the server gave up, or no chunk at all.
        """
        out = self.outcome
        if out.finish_reason in BROKEN_OFF:
            raise StreamError(f"finish reason {out.finish_reason}", "the server gave up on the answer")
        if not self.done and out.finish_reason is None:
            raise StreamError("half a stream", f"the stream ended after {len(out.chunk_times)} chunks with text")
        if out.first_chunk is None:
            raise StreamError("empty answer", "the stream ended without a single choice")

    def keep(self) -> None:
        """Put the texts into the outcome, also of an answer that broke off."""
        out = self.outcome
        out.text, out.reasoning = "".join(self._answer), "".join(self._reasoning)
        if len(out.chunk_tokens) != len(out.chunk_times):  # not every chunk told
            del out.chunk_tokens[:]

    def _chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        out = self.outcome
        if chunk.get("error") is not None:
            raise StreamError("error in the stream", said_of(chunk))
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if out.request_id is None and isinstance(chunk.get("id"), str):
            out.request_id = chunk["id"]
        if isinstance(usage, Mapping):
            self._usage(usage)
        timing = timing_of(chunk)
        if timing:
            out.server_timing = {**(out.server_timing or {}), **timing}
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            self._choice(choices[0], usage, now)
            out.last = now
        elif not isinstance(choices, list) and not isinstance(usage, Mapping):
            raise StreamError("malformed stream", f"an event without choices: {str(dict(chunk))[:SAID_CHARACTERS]}")

    def _choice(self, choice: Mapping[str, Any], usage: object, now: float) -> None:
        out, delta = self.outcome, choice.get("delta")
        if choice.get("index") not in (0, None):
            raise StreamError("malformed stream", f"choice {choice['index']!r:.40} where one was asked for")
        if out.first_chunk is None:
            out.first_chunk = now
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            out.finish_reason = reason
        fields: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {"content": choice.get("text")}
        thought = fields.get("reasoning_content") or fields.get("reasoning")
        answer = fields.get("content")
        thought, answer = (text if isinstance(text, str) else "" for text in (thought, answer))
        called = bool(fields.get("tool_calls"))
        if thought:
            self._reasoning.append(thought)
            out.first_reasoning = now if out.first_reasoning is None else out.first_reasoning
        if answer or called:
            self._answer.append(answer)
            out.first_answer = now if out.first_answer is None else out.first_answer
        if thought or answer or called:
            out.chunk_times.append(now)
            self._count_chunk(choice, usage)

    def _count_chunk(self, choice: Mapping[str, Any], usage: object) -> None:
        """Tokens of this chunk, where every chunk so far told: by running usage, or by its own log-probabilities."""
        out = self.outcome
        if len(out.chunk_tokens) != len(out.chunk_times) - 1:
            return
        told = choice.get("logprobs")
        tokens = (told.get("content") or told.get("tokens")) if isinstance(told, Mapping) else None
        total = whole(usage.get("completion_tokens")) if isinstance(usage, Mapping) else None
        if total is not None:
            if total >= self._counted:  # one that falls is no count
                out.chunk_tokens.append(total - self._counted)
            self._counted = total
        elif isinstance(tokens, list):
            out.chunk_tokens.append(len(tokens))

    def _usage(self, usage: Mapping[str, Any]) -> None:
        out = self.outcome
        prompt, output = whole(usage.get("prompt_tokens")), whole(usage.get("completion_tokens"))
        out.prompt_tokens = prompt if prompt is not None else out.prompt_tokens
        if output is not None:
            out.output_tokens, out.tokens_from = output, "usage"
        for name, field, where in (
            ("cached_tokens", "cached_tokens", "prompt_tokens_details"),
            ("reasoning_tokens", "reasoning_tokens", "completion_tokens_details"),
        ):
            details = usage.get(where)
            value = whole(details.get(name) if isinstance(details, Mapping) else None)
            if value is not None:
                setattr(out, field, value)


def whole(value: object) -> int | None:
    """A count that a server told; None for what is none."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise StreamError("malformed stream", f"{error}: {data[:SAID_CHARACTERS].decode(errors='replace')}") from None
    if not isinstance(found, dict):
        raise StreamError("malformed stream", f"not an object: {data[:SAID_CHARACTERS].decode(errors='replace')}")
    return found


def timing_of(chunk: Mapping[str, Any]) -> dict[str, float]:
    """What a server tells of its own times in a body, milliseconds by its names: ``timings`` and Longread's parts."""
    own = chunk.get("longread")
    told = own.get("timing") if isinstance(own, Mapping) else None
    parts = told.get("parts_ms") if isinstance(told, Mapping) else None
    found: dict[str, float] = {}
    for source in (chunk.get("timings"), told, parts):
        if isinstance(source, Mapping):
            found |= {str(n): float(v) for n, v in source.items() if type(v) in (int, float)}
    return found


def header_timing(text: str) -> dict[str, float]:
    """A Server-Timing header's durations in milliseconds; entries without one are left out."""
    found = {}
    for entry in text[:8192].split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur":
                try:
                    duration = float(value.strip().strip('"'))
                except ValueError:
                    continue
                if math.isfinite(duration):
                    found[name] = duration
    return found


def said_of(document: object) -> str:
    """The message in an error's body, shortened."""
    error = document.get("error", document) if isinstance(document, Mapping) else document
    if isinstance(error, Mapping):
        error = error.get("message", error)
    return str(error)[:SAID_CHARACTERS]
