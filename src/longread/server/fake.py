"""An engine without a model: deterministic or scripted tokens under the same protocol and limits as the real one.

Knows: spec's engine protocol. Must not know: HTTP, text, tensors. It is a public test double: server, gateway and
client tests run on it without torch. It never sleeps; ``gate`` lets a test hold the steps back and release them.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from longread.spec.engine import (
    EngineInfo,
    EngineStats,
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    RequestTimes,
    TokenEvent,
)
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import check_request
from longread.spec.state import PAGE_TOKENS

Script = Callable[[GenerationRequest], Sequence[int] | None]


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    arrived: float
    script: Sequence[int] | None
    scheduled: float = 0.0
    first_token: float = 0.0
    produced: int = 0
    cached: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class _Counters:
    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pages: set[int] = field(default_factory=set)


class FakeEngine:
    """Answers every request with ``script(request)`` (ids; the end of the script is the end token) or with made-up ids.

    Without a script the tokens depend on prompt, seed and position only, lie in ``token_range`` and run until
    ``max_tokens`` or the limit. ``fail_at_step`` makes that step (counted from 1) raise, as a broken engine would;
    ``fail_requests`` holds prompts' first ids whose request ends as "failed" alone.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        model: str = "fake",
        max_model_len: int = 4096,
        max_num_seqs: int = 64,
        vocab: int = 129280,
        eos_id: int = 1,
        token_range: tuple[int, int] = (300, 1400),
        fail_at_step: int | None = None,
        fail_requests: frozenset[int] = frozenset(),
        gate: threading.Semaphore | None = None,
    ):
        self._script = script
        self._token_range = token_range
        self._fail_at_step = fail_at_step
        self._fail_requests = fail_requests
        self._gate = gate
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._counters = _Counters()
        self.steps = 0
        self.closed = False
        self._info = EngineInfo(
            model=model,
            max_model_len=max_model_len,
            max_request_tokens=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_model_len,
            vocab=vocab,
            eos_id=eos_id,
            page_tokens=PAGE_TOKENS,
            num_pages=max_num_seqs * -(-max_model_len // PAGE_TOKENS),
            predicted_bytes=0,
            allocated_bytes=0,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def validate(self, request: GenerationRequest) -> None:
        """Raises ContextLengthError or InvalidRequestError; changes nothing."""
        check_request(request, self._info)
        grammar = request.sampling.grammar
        if grammar is not None and grammar.kind == "json_schema":
            try:
                schema = json.loads(grammar.value)
            except json.JSONDecodeError as error:
                raise InvalidRequestError(f"the JSON schema is not JSON: {error}", param="response_format") from error
            if not isinstance(schema, dict | bool) or (isinstance(schema, dict) and schema.get("type") == "bad"):
                raise InvalidRequestError("the JSON schema cannot be compiled", param="response_format")

    def submit(self, request: GenerationRequest) -> None:
        self.validate(request)
        if request.request_id in self._running or any(
            w.request.request_id == request.request_id for w in self._waiting
        ):
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        script = self._script(request) if self._script is not None else None
        self._waiting.append(_Running(request, time.monotonic(), script))

    def cancel(self, request_id: str) -> None:
        found = self._running.get(request_id)
        if found is None:
            found = next((w for w in self._waiting if w.request.request_id == request_id), None)
        if found is not None:
            found.cancelled = True

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> Sequence[Event]:
        """One token for every running request."""
        if self._gate is not None:
            self._gate.acquire()
        self.steps += 1
        if self._fail_at_step is not None and self.steps >= self._fail_at_step:
            raise RuntimeError("the fake engine was told to break")
        now = time.monotonic()
        events: list[Event] = []
        self._admit(now, events)
        for running in list(self._running.values()):
            self._advance(running, now, events)
        return events

    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            num_requests_running=len(self._running),
            num_requests_waiting=len(self._waiting),
            kv_cache_usage_perc=len(self._running) / self._info.max_num_seqs,
            prefix_cache_queries=counters.queries,
            prefix_cache_hits=counters.hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            pages_free=self._info.num_pages,
        )

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._running.clear()

    def _admit(self, now: float, events: list[Event]) -> None:
        for waiting in [w for w in self._waiting if w.cancelled]:
            self._waiting.remove(waiting)
            events.append(self._finish(waiting, "cancelled", now))
        while self._waiting and len(self._running) < self._info.max_num_seqs:
            running = self._waiting.popleft()
            running.scheduled = now
            running.cached = self._look_up(running.request.prompt)
            self._counters.prompt_tokens += len(running.request.prompt)
            self._running[running.request.request_id] = running

    def _look_up(self, prompt: tuple[int, ...]) -> int:
        """Tokens of whole pages seen before; the last token is always computed, as in the real engine."""
        pages = self._counters.pages
        cached, hit = 0, True
        for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
            key = hash(prompt[:end])
            hit = hit and key in pages and end < len(prompt)
            cached = end if hit else cached
            pages.add(key)
        self._counters.queries += len(prompt)
        self._counters.hits += cached
        return cached

    def _advance(self, running: _Running, now: float, events: list[Event]) -> None:
        request, sampling = running.request, running.request.sampling
        if running.cancelled:
            return self._end(running, "cancelled", now, events)
        if request.prompt[0] in self._fail_requests:
            return self._end(running, "failed", now, events, error="the fake engine was told to fail this request")
        token = self._next_token(running)
        running.first_token = running.first_token or now
        running.produced += 1
        self._counters.generation_tokens += 1
        enough = running.produced > sampling.min_tokens
        if enough and (token in sampling.stop_token_ids or (token == self._info.eos_id and not sampling.ignore_eos)):
            return self._end(running, "stop", now, events, stop_token=token)
        events.append(self._token_event(request, token))
        budget = self._info.max_request_tokens - len(request.prompt)
        if running.produced >= min(budget, sampling.max_tokens if sampling.max_tokens is not None else budget):
            self._end(running, "length", now, events)
        return None

    def _next_token(self, running: _Running) -> int:
        if running.script is not None:
            return running.script[running.produced] if running.produced < len(running.script) else self._info.eos_id
        low, high = self._token_range
        seed = running.request.sampling.seed or 0
        return low + (sum(running.request.prompt[-8:]) * 31 + seed * 7919 + running.produced * 131) % (high - low)

    def _token_event(self, request: GenerationRequest, token: int) -> TokenEvent:
        count = request.sampling.logprobs
        if count is None:
            return TokenEvent(request.request_id, token)
        others = [(token + 1 + i) % self._info.vocab for i in range(max(0, count - 1))]
        top = [(token, -0.25), *((other, -1.5 - i) for i, other in enumerate(others))][:count]
        return TokenEvent(request.request_id, token, -0.25, tuple(top))

    def _end(
        self,
        running: _Running,
        reason: FinishReason,
        now: float,
        events: list[Event],
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        del self._running[running.request.request_id]
        events.append(self._finish(running, reason, now, stop_token, error))

    def _finish(
        self,
        running: _Running,
        reason: FinishReason,
        now: float,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> FinishEvent:
        return FinishEvent(
            request_id=running.request.request_id,
            reason=reason,
            prompt_tokens=len(running.request.prompt),
            completion_tokens=running.produced,
            cached_tokens=running.cached,
            stop_token=stop_token,
            error=error,
            times=RequestTimes(running.arrived, running.scheduled, running.first_token, now),
        )


def scripted(answers: Mapping[tuple[int, ...], Sequence[int]], default: Sequence[int] | None = None) -> Script:
    """A script that answers a prompt ending in a key with its value, else ``default`` (None: made-up ids)."""

    def script(request: GenerationRequest) -> Sequence[int] | None:
        for ending, answer in answers.items():
            if request.prompt[-len(ending) :] == ending:
                return answer
        return default

    return script
