"""A server of OpenAI's API without a model, for the gate: next tokens come from a hash of what stands before them.

As good as a language model for everything that a gate compares: deterministic, with log-probabilities, seeds and
temperatures, and faults on demand. Speaks through httpx's MockTransport; no socket, no torch.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_TEXTS = """17 days|4 percent|Dr Keller|Port Alma|12,000 EUR|not|the|clause|1.2|3.4|is|of|for|24|February|rent|fee|shall
|be|owner|gate|every|never|120|metres|file|code|KX|limit|date|month|permit|north|south|east|west|mill|oak|elm|ash"""
WORDS = tuple([f" {text.strip()}" for text in _TEXTS.split("|")])
ANSWER = 6  # tokens
FIRST_ID = 10_000


@dataclass
class Toy:
    """``noise``: of the logits (standard deviation), drawn anew for each context but the same each time. ``hidden``:
    what the server cannot do: "logprobs", "completions", "ids", "seed", "salt", "cached". ``wrong_every``: each n-th
    answer is another one. ``stale``: what was asked before is answered from wrong state. ``busy``: so many 429 first.
    ``broken_every``: each n-th chat is a 500. ``heat``: the temperature that is used, whatever is asked for. ``dtype``:
    what /metrics tells that it computes in and keeps. ``rounding``: of the
    logits of what it answers out of the cache. ``sure``: how far its best token is before the others, in nats.
    """

    noise: float = 0.0
    hidden: frozenset[str] = frozenset()
    wrong_every: int = 0
    stale: bool = False
    busy: int = 0
    broken_every: int = 0
    heat: float | None = None
    prompt_logprobs: bool = False
    dtype: str | None = None
    rounding: float = 0.0
    sure: float = 0.0
    interrupted_at: int = 0  # for whoever serves it: the request during which the user presses Ctrl-C
    max_model_len: int = 32768
    requests: list[dict[str, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    chats: int = 0
    drawn: random.Random = field(default_factory=lambda: random.Random(0))

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy", "max_model_len": self.max_model_len}]})
        if request.url.path == "/metrics":
            told = f',dtype="{self.dtype}",cache_dtype="{self.dtype}"' if self.dtype is not None else ""
            return httpx.Response(
                200, text=f'toy:cache_config_info{{block_size="16",num_gpu_blocks="256"{told}}} 1.0\n'
            )
        body = json.loads(request.content)
        self.requests.append(body)
        if self.busy:
            self.busy -= 1
            return _error(429, "busy", {"Retry-After": "0"})
        if request.url.path == "/v1/chat/completions":
            return self._chat(body)
        if request.url.path == "/v1/completions" and "completions" not in self.hidden:
            return self._complete(body)
        return _error(404, "no such route")

    def _refused(self, body: dict[str, Any]) -> httpx.Response | None:
        fields = {"logprobs": "logprobs", "ids": "return_token_ids", "seed": "seed", "salt": "cache_salt"}
        for name, sent in fields.items():
            if name in self.hidden and body.get(sent):
                return _error(400, f"unknown field {sent}")
        return None

    def _chat(self, body: dict[str, Any]) -> httpx.Response:
        refused = self._refused(body)
        if refused is not None:
            return refused
        self.chats += 1
        if self.broken_every and self.chats % self.broken_every == 0:
            return _error(500, "the engine failed")
        text = "\n".join(f"{m['role']}: {m['content']}" for m in body["messages"])
        prompt = ids_of(f"{text}\nassistant:")
        key = f"{body.get('cache_salt')}/{hashlib.blake2b(text.encode()).hexdigest()}"
        cached = len(prompt) - 1 if key in self.seen else 0
        self.seen.add(key)
        rounding = self.rounding if cached else 0.0
        tokens, rows = self._generate(prompt, body, stale=self.stale and cached > 0, limit=ANSWER, rounding=rounding)
        if self.wrong_every and self.chats % self.wrong_every == 0:
            tokens[0] = " 99 days"
        message = {"role": "assistant", "content": "".join(tokens)}
        told = None
        if body.get("logprobs"):
            told = {
                "content": [_entry(token, row, body["top_logprobs"]) for token, row in zip(tokens, rows, strict=True)]
            }
        short = body["max_tokens"] < ANSWER
        choice = {"index": 0, "message": message, "logprobs": told, "finish_reason": "length" if short else "stop"}
        if body.get("return_token_ids"):
            choice["token_ids"] = [FIRST_ID + WORDS.index(t) if t in WORDS else 1 for t in tokens]
        whole = {"choices": [choice], "usage": self._usage(prompt, tokens, cached)}
        if body.get("return_token_ids"):
            whole["prompt_token_ids"] = prompt
        return _stream(whole) if body.get("stream") else httpx.Response(200, json=whole)

    def _complete(self, body: dict[str, Any]) -> httpx.Response:
        refused = self._refused(body)
        if refused is not None:
            return refused
        prompt = body["prompt"] if isinstance(body["prompt"], list) else ids_of(body["prompt"])
        tokens, rows = self._generate(prompt, body, stale=False, limit=body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "text": "".join(tokens), "finish_reason": "length", "logprobs": None}
        if body.get("logprobs") is not None:
            tops = [dict(_best(row, body["logprobs"])) for row in rows]
            values = [dict(zip(WORDS, row, strict=True))[token] for token, row in zip(tokens, rows, strict=True)]
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": [{token: value} | top for token, value, top in zip(tokens, values, tops, strict=True)],
            }
        if body.get("prompt_logprobs") is not None:
            if not self.prompt_logprobs:
                return _error(400, "prompt_logprobs is not supported")
            untold = max(1, len(prompt) - 2 * ANSWER)  # nobody looks there
            choice["prompt_logprobs"] = [None] * untold + [
                {
                    str(n): {"logprob": value, "decoded_token": token}
                    for n, (token, value) in enumerate(_best(self._row(prompt[:at]), body["prompt_logprobs"]))
                }
                for at in range(untold, len(prompt))
            ]
        return httpx.Response(200, json={"choices": [choice], "usage": self._usage(prompt, tokens, 0)})

    def _usage(self, prompt: Sequence[int], tokens: Sequence[str], cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if "cached" not in self.hidden:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _generate(
        self, prompt: Sequence[int], body: dict[str, Any], stale: bool, limit: int, rounding: float = 0.0
    ) -> tuple[list[str], list[list[float]]]:
        context, tokens, rows = list(prompt), [], []
        for at in range(min(limit, body["max_tokens"])):
            row = self._row([*context, 0] if stale else context, rounding)
            temperature = body.get("temperature", 1)
            if temperature and self.heat is not None:
                temperature = self.heat
            choice = max(range(len(row)), key=row.__getitem__)
            if temperature:
                seed = body.get("seed") if "seed" not in self.hidden else None
                draw = random.Random(f"{seed if seed is not None else random.random()}/{at}")
                weights = [math.exp((value - max(row)) / temperature) for value in row]
                choice = draw.choices(range(len(row)), weights)[0]
            tokens.append(WORDS[choice])
            rows.append(row)
            context.append(FIRST_ID + choice)
        return tokens, rows

    def _row(self, context: Sequence[int], rounding: float = 0.0) -> list[float]:
        """Log-probabilities of WORDS after a context."""
        key = ",".join(map(str, context[-400:])) + f"/{len(context)}"
        draw = random.Random(key)
        logits = [2.0 * draw.gauss(0, 1) for _ in WORDS]
        logits[logits.index(max(logits))] += self.sure
        if self.noise:
            other = random.Random(key + "/noise")
            logits = [value + self.noise * other.gauss(0, 1) for value in logits]
        if rounding:
            logits = [value + rounding * self.drawn.uniform(-1, 1) for value in logits]
        total = math.log(math.fsum(map(math.exp, logits)))
        return [value - total for value in logits]


def ids_of(text: str) -> list[int]:
    """One id a word."""
    return [int.from_bytes(hashlib.blake2b(w.encode(), digest_size=2).digest()) % 9000 + 100 for w in text.split()]


def _best(row: Sequence[float], count: int) -> list[tuple[str, float]]:
    return sorted(zip(WORDS, row, strict=True), key=lambda pair: -pair[1])[:count]


def _entry(token: str, row: Sequence[float], count: int) -> dict[str, Any]:
    told = dict(zip(WORDS, row, strict=True))
    best = [{"token": name, "logprob": value} for name, value in _best(row, count)]
    return {"token": token, "logprob": told.get(token, -9.0), "top_logprobs": best}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


def _stream(whole: dict[str, Any]) -> httpx.Response:
    """The same answer as chunks: a token each, then the end, then usage."""
    choice = whole["choices"][0]
    entries = (choice["logprobs"] or {}).get("content") or []
    text = choice["message"]["content"]
    parts = [entry["token"] for entry in entries] if entries else [text[:3], text[3:]]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": part}, "logprobs": {"content": [entries[i]]} if entries else None}]}
        for i, part in enumerate(parts)
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({"choices": [], "usage": whole["usage"]})
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx.Response(200, text=lines, headers={"content-type": "text/event-stream"})
