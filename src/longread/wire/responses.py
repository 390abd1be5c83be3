"""Answers as plain dicts for orjson: OpenAI's shapes with vLLM's additions. Our own output needs no validation.

Reasoning is given twice, as ``reasoning`` (vLLM's name) and ``reasoning_content`` (DeepSeek's). Knows no streaming.
"""

import time
from collections.abc import Sequence

from longread.spec.errors import RequestError
from longread.wire.parsing import ParsedCall

Json = dict[str, object]


def now() -> int:
    """Unix seconds, for ``created``."""
    return int(time.time())


def error_body(error: RequestError) -> Json:
    """``{"error": {message, type, param, code}}``; ``code`` falls back to the HTTP status."""
    code: str | int = error.code if error.code is not None else error.status
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": code}}


def usage(prompt: int, completion: int, *, cached: int, reasoning: int | None = None) -> Json:
    """Token counts. ``reasoning`` None where the route has no reasoning; it is part of ``completion``."""
    out: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return out


def total_usage(parts: Sequence[Json], prompts: int, *, cached: int) -> Json:
    """One usage of several choices over the same prompt (or several prompts): ``prompts`` tokens counted once each."""
    completion = sum(_count(part, "completion_tokens") for part in parts)
    details = [part["completion_tokens_details"] for part in parts if "completion_tokens_details" in part]
    reasoning = sum(_count(d, "reasoning_tokens") for d in details) if details else None
    return usage(prompts, completion, cached=cached, reasoning=reasoning)


def _count(part: object, key: str) -> int:
    value = part[key] if isinstance(part, dict) else 0
    return value if isinstance(value, int) else 0


def model_list(names: Sequence[str], *, created: int, max_model_len: int) -> Json:
    """GET /v1/models; the first name is the model, the others its aliases."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "longread",
                "root": names[0],
                "parent": None,
                "max_model_len": max_model_len,
            }
            for name in names
        ],
    }


def token_logprob(token: str, raw: bytes, logprob: float, top: Sequence[tuple[str, bytes, float]] = ()) -> Json:
    """One entry of chat ``logprobs.content``: the token's text, its bytes, and the best alternatives."""
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(raw),
        "top_logprobs": [{"token": t, "logprob": p, "bytes": list(b)} for t, b, p in top],
    }


def completion_logprobs(entries: Sequence[Json], offset: int = 0) -> Json:
    """The older shape of /v1/completions, out of ``token_logprob`` entries; ``offset``: letters before the first."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(str(entry["token"]))
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: Json) -> dict[str, object]:
    """Alternatives by text, the sampled token among them, as OpenAI's older shape has it."""
    top = entry["top_logprobs"]
    out = {str(t["token"]): t["logprob"] for t in top} if isinstance(top, list) else {}
    return {str(entry["token"]): entry["logprob"]} | out


def tool_calls(calls: Sequence[ParsedCall]) -> list[Json]:
    """A message's ``tool_calls``, in the order the model made them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def chat_choice(
    index: int,
    content: str,
    reasoning: str | None,
    calls: Sequence[ParsedCall],
    finish_reason: str,
    *,
    stop_reason: str | int | None = None,
    logprobs: Sequence[Json] | None = None,
    token_ids: Sequence[int] | None = None,
) -> Json:
    """One choice. Content is null only beside tool calls. ``reasoning`` None or empty: no such fields' value."""
    message: Json = {
        "role": "assistant",
        "content": None if calls and not content.strip() else content,
        "refusal": None,
        "reasoning": reasoning or None,
        "reasoning_content": reasoning or None,
    }
    if calls:
        message["tool_calls"] = tool_calls(calls)
    choice: Json = {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": list(logprobs), "refusal": None},
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return choice


def completion_choice(
    index: int,
    text: str,
    finish_reason: str,
    *,
    stop_reason: str | int | None = None,
    logprobs: Json | None = None,
    token_ids: Sequence[int] | None = None,
) -> Json:
    """One choice of the older shape; ``logprobs`` from ``completion_logprobs``."""
    choice: Json = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return choice


def chat_response(
    request_id: str, model: str, choices: Sequence[Json], counts: Json, *, created: int, prompt_token_ids: object = None
) -> Json:
    """The whole answer of /v1/chat/completions; ``counts`` from ``usage``, ``created`` in Unix seconds."""
    return _response("chat.completion", request_id, model, choices, counts, created, prompt_token_ids)


def completion_response(
    request_id: str, model: str, choices: Sequence[Json], counts: Json, *, created: int, prompt_token_ids: object = None
) -> Json:
    """The whole answer of /v1/completions; ``prompt_token_ids`` is one list a prompt."""
    return _response("text_completion", request_id, model, choices, counts, created, prompt_token_ids)


def _response(
    kind: str, request_id: str, model: str, choices: Sequence[Json], counts: Json, created: int, prompt_ids: object
) -> Json:
    out: Json = {
        "id": request_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": list(choices),
        "usage": counts,
    }
    if prompt_ids is not None:
        out["prompt_token_ids"] = prompt_ids
    return out


def tokenize_response(ids: Sequence[int], max_model_len: int, strings: Sequence[str] | None = None) -> Json:
    """vLLM's answer of /tokenize; ``strings``: the text of each id."""
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": list(ids),
        "token_strs": None if strings is None else list(strings),
    }


def detokenize_response(text: str) -> Json:
    """vLLM's answer of /detokenize."""
    return {"prompt": text}
