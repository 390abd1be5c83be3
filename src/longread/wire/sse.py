"""Server-sent events and the chunks of a stream.

A chat stream is, for each choice: a role chunk, deltas, a finish chunk; then a usage chunk with no choices where it was
asked for, then ``[DONE]``. An error after the first byte is an event too, since the status line is gone by then.
"""

from collections.abc import Iterable, Sequence

import orjson

from longread.spec.errors import RequestError
from longread.wire.parsing import ContentDelta, ParseEvent, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from longread.wire.responses import Json, error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Json) -> bytes:
    """One event. JSON has no raw newlines, so one data line is enough."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """An error behind the status line, in the body's shape."""
    return event(error_body(error))


def delta(found: ParseEvent) -> Json | None:
    """The ``delta`` object of a parser event; None for the end of a call, which the wire does not mark."""
    if isinstance(found, ContentDelta):
        return {"content": found.text}
    if isinstance(found, ReasoningDelta):
        return {"reasoning": found.text, "reasoning_content": found.text}
    if isinstance(found, ToolCallStart):
        function = {"name": found.name, "arguments": ""}
        return {"tool_calls": [{"index": found.index, "id": found.id, "type": "function", "function": function}]}
    if isinstance(found, ToolArgumentsDelta):
        return {"tool_calls": [{"index": found.index, "function": {"arguments": found.text}}]}
    return None


def gathered(events: Iterable[ParseEvent]) -> list[ParseEvent]:
    """Neighbouring deltas of one kind joined, so that a step of several tokens is one chunk."""
    out: list[ParseEvent] = []
    for found in events:
        last = out[-1] if out else None
        if isinstance(found, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + found.text)
        elif isinstance(found, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + found.text)
        elif (
            isinstance(found, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta) and last.index == found.index
        ):
            out[-1] = ToolArgumentsDelta(found.index, last.text + found.text)
        else:
            out.append(found)
    return out


class ChunkStream:
    """Builds the chunks of one response. ``usage`` in the methods: vLLM's continuous usage, None to leave it out."""

    def __init__(self, request_id: str, model: str, created: int, kind: str):
        self._head: Json = {"id": request_id, "object": kind, "created": created, "model": model}
        self._opening = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'

    def _chunk(self, choices: Sequence[Json], counts: Json | None, extra: Json | None = None) -> bytes:
        data: Json = self._head | {"choices": list(choices)}
        if counts is not None:
            data["usage"] = counts
        return event(data | extra if extra else data)

    def _plain(self, index: int, field: bytes, text: str, end: bytes) -> bytes:
        """A chunk of nothing but text, as ``_chunk`` would write it: most tokens are that, and this takes a third."""
        return b"%b%d,%b%b%b}]}\n\n" % (self._opening, index, field, orjson.dumps(text), end)

    def usage(self, counts: Json, extra: Json | None = None) -> bytes:
        """The last chunk before ``[DONE]``; ``extra``: further fields beside ``usage``."""
        return self._chunk([], counts, extra)


class ChatStream(ChunkStream):
    """Chunks of /v1/chat/completions."""

    def __init__(self, request_id: str, model: str, created: int):
        super().__init__(request_id, model, created, "chat.completion.chunk")

    def role(self, index: int, *, prompt_token_ids: Sequence[int] | None = None, usage: Json | None = None) -> bytes:
        """Comes first. Its empty content is no output token: a client that times the first token must skip it."""
        extra: Json | None = None if prompt_token_ids is None else {"prompt_token_ids": list(prompt_token_ids)}
        choice = self._choice(index, {"role": "assistant", "content": ""}, None, None)
        return self._chunk([choice], usage, extra)

    def deltas(
        self,
        index: int,
        events: Sequence[ParseEvent],
        *,
        logprobs: Sequence[Json] | None = None,
        token_ids: Sequence[int] | None = None,
        usage: Json | None = None,
    ) -> list[bytes]:
        """Chunks of parser events. Logprobs and ids ride on the first chunk; alone they make a chunk with an empty
        delta, since a token may end up in no text yet.
        """
        joined = gathered(events) if len(events) > 1 else events
        if len(joined) == 1 and logprobs is None and token_ids is None and usage is None:
            (only,) = joined
            if isinstance(only, ContentDelta):
                return [
                    self._plain(index, b'"delta":{"content":', only.text, b'},"logprobs":null,"finish_reason":null')
                ]
        found = [d for d in map(delta, joined) if d is not None]
        if not found and (logprobs or token_ids):
            found = [{}]
        chunks = []
        for i, part in enumerate(found):
            choice = self._choice(index, part, None, logprobs if i == 0 else None)
            if token_ids is not None and i == 0:
                choice["token_ids"] = list(token_ids)
            chunks.append(self._chunk([choice], usage))
        return chunks

    def finish(
        self, index: int, reason: str, *, stop_reason: str | int | None = None, usage: Json | None = None
    ) -> bytes:
        """The choice's last chunk, with an empty delta."""
        choice = self._choice(index, {}, reason, None) | {"stop_reason": stop_reason}
        return self._chunk([choice], usage)

    @staticmethod
    def _choice(index: int, part: Json, reason: str | None, logprobs: Sequence[Json] | None) -> Json:
        content = None if logprobs is None else {"content": list(logprobs), "refusal": None}
        return {"index": index, "delta": part, "logprobs": content, "finish_reason": reason}


class CompletionStream(ChunkStream):
    """Chunks of /v1/completions."""

    def __init__(self, request_id: str, model: str, created: int):
        super().__init__(request_id, model, created, "text_completion")

    def text(
        self,
        index: int,
        text: str,
        *,
        logprobs: Json | None = None,
        token_ids: Sequence[int] | None = None,
        usage: Json | None = None,
    ) -> bytes:
        """A piece of text with its logprobs and ids, possibly empty."""
        if logprobs is None and token_ids is None and usage is None:
            return self._plain(index, b'"text":', text, b',"logprobs":null,"finish_reason":null')
        choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if token_ids is not None:
            choice["token_ids"] = list(token_ids)
        return self._chunk([choice], usage)

    def finish(
        self, index: int, reason: str, *, stop_reason: str | int | None = None, usage: Json | None = None
    ) -> bytes:
        """The choice's last chunk, with no text."""
        choice: Json = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        return self._chunk([choice | {"stop_reason": stop_reason}], usage)
