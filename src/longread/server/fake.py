"""An engine without a model: deterministic or scripted tokens under the same protocol and limits as the real one.

Knows: spec's engine protocol. Must not know: HTTP, text, tensors. It is a public test double: server, gateway and
client tests run on it without torch. It never sleeps; ``gate`` lets a test hold the steps back and release them.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from longread.spec.cost import StepCost
from longread.spec.engine import (
    EngineInfo,
    EngineStats,
    Event,
    FinishEvent,
    FinishReason,
    FirstToken,
    GenerationRequest,
    RequestTimes,
    Standing,
    TokenEvent,
    class_of,
)
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import check_request
from longread.spec.reuse import Excerpt, MissReason, Reuse
from longread.spec.state import PAGE_TOKENS

Script = Callable[[GenerationRequest], Sequence[int] | None]
Explain = Callable[[GenerationRequest, Reuse], Reuse]

KEPT_PROMPTS = 8  # that a new one is compared with, to tell where it differs
EXCERPT_TOKENS = 16  # before and behind a difference


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    script: Sequence[int] | None
    times: RequestTimes
    reuse: Reuse | None = None
    produced: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class _Counters:
    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    reused: Reuse = field(default_factory=lambda: Reuse(0))
    misses: dict[MissReason, int] = field(default_factory=dict)
    pages: set[int] = field(default_factory=set)
    prompts: deque[tuple[str | None, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_PROMPTS))


class FakeEngine:
    """Answers every request with ``script(request)`` (ids; the end of the script is the end token) or with made-up ids.

    Without a script the tokens depend on prompt, seed and position only, lie in ``token_range`` and run until
    ``max_tokens`` or the limit. ``fail_at_step`` makes that step (counted from 1) raise, as a broken engine would;
    ``fail_requests`` holds prompts' first ids whose request ends as "failed" alone. ``explain`` may tell another story
    of what was reused than the fake's own, which knows one tier and the beginnings of the last prompts.
    ``step_cost`` is what it says that a step costs, whatever it does.
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
        explain: Explain | None = None,
        gate: threading.Semaphore | None = None,
        cache_root: bytes = b"",
        step_cost: StepCost | None = None,
    ):
        self._script = script
        self._token_range = token_range
        self._fail_at_step = fail_at_step
        self._fail_requests = fail_requests
        self._explain = explain
        self._gate = gate
        self._step_cost = step_cost
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
            cache_root=cache_root,
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
        self._waiting.append(_Running(request, script, RequestTimes(arrived=time.monotonic())))

    def cancel(self, request_id: str) -> None:
        found = self._running.get(request_id)
        if found is None:
            found = next((w for w in self._waiting if w.request.request_id == request_id), None)
        if found is not None:
            found.cancelled = True

    def computed_tokens(self, request_id: str) -> int:
        return len(self._running[request_id].request.prompt) if request_id in self._running else 0

    def explain(self, request_id: str) -> Standing | None:
        """Waits for a slot, or decodes: prompts are read at once."""
        position = next((i for i, w in enumerate(self._waiting) if w.request.request_id == request_id), None)
        found = self._running.get(request_id) if position is None else self._waiting[position]
        if found is None:
            return None
        prompt = len(found.request.prompt)
        return Standing(
            request_id=request_id,
            phase="decode" if position is None else "waiting",
            reason="" if position is None else "slots",
            detail="it is being answered" if position is None else f"all {self._info.max_num_seqs} slots are taken",
            request_class=class_of(found.request.priority),
            position=position or 0,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            prompt_tokens=prompt,
            computed_tokens=prompt if position is None else 0,
            preemptions=0,
            waited=time.monotonic() - found.times.arrived,
        )

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> Sequence[Event]:
        """One token for every running request."""
        if self._gate is not None:
            self._gate.acquire()
        self.steps += 1
        if self._fail_at_step is not None and self.steps >= self._fail_at_step:
            raise RuntimeError("the fake engine was told to break")
        events: list[Event] = []
        self._admit(events)
        for running in list(self._running.values()):
            self._advance(running, events)
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
            reused_device_tokens=counters.reused.device_tokens,
            reused_host_tokens=counters.reused.host_tokens,
            reused_disk_tokens=counters.reused.disk_tokens,
            misses=tuple(counters.misses.items()),
            pages_free=self._info.num_pages,
            step_cost=self._step_cost,
        )

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._running.clear()

    def _admit(self, events: list[Event]) -> None:
        for waiting in [w for w in self._waiting if w.cancelled]:
            self._waiting.remove(waiting)
            events.append(self._finish(waiting, "cancelled"))
        while self._waiting and len(self._running) < self._info.max_num_seqs:
            running = self._waiting.popleft()
            self._start(running)
            self._counters.prompt_tokens += len(running.request.prompt)
            self._running[running.request.request_id] = running

    def _start(self, running: _Running) -> None:
        """Look the prompt up and read the rest of it at once, in one chunk; what was loaded took no time."""
        began = time.monotonic()
        reuse = self._reuse_of(running.request)
        counters = self._counters
        counters.reused = replace(
            counters.reused,
            device_tokens=counters.reused.device_tokens + reuse.device_tokens,
            host_tokens=counters.reused.host_tokens + reuse.host_tokens,
            disk_tokens=counters.reused.disk_tokens + reuse.disk_tokens,
        )
        counters.misses[reuse.reason] = counters.misses.get(reuse.reason, 0) + 1
        counters.prompts.append((running.request.cache_salt, running.request.prompt))
        looked_up, now = time.monotonic(), time.monotonic()
        running.reuse = reuse
        running.times = replace(
            running.times,
            lookup=looked_up - began,
            looked_up=looked_up,
            loaded=looked_up,
            scheduled=now,
            prefill_started=now,
            prefill_finished=time.monotonic(),
            prefill_tokens=reuse.recomputed_tokens,
            prefill_chunks=1,
        )

    def _reuse_of(self, request: GenerationRequest) -> Reuse:
        prompt = request.prompt
        others = [other for salt, other in self._counters.prompts if salt == request.cache_salt]
        known = max((_common(prompt, other) for other in others), default=0)
        cached = self._look_up(request.cache_salt, prompt)
        reuse = Reuse(len(prompt), device_tokens=cached, recomputed_tokens=len(prompt) - cached)
        if len(prompt) - cached <= PAGE_TOKENS and known == len(prompt):
            reuse = replace(reuse, reason="complete")
        elif known and known < len(prompt):
            other = max(others, key=lambda other: _common(prompt, other))
            if known < len(other):
                start, end = max(0, known - EXCERPT_TOKENS), known + EXCERPT_TOKENS
                excerpt = Excerpt(start, prompt[start:end], other[start:end])
                reuse = replace(reuse, reason="differs", at=known, excerpt=excerpt)
        return self._explain(request, reuse) if self._explain is not None else reuse

    def _look_up(self, salt: str | None, prompt: tuple[int, ...]) -> int:
        """Tokens of whole pages seen before; the last token is always computed, as in the real engine."""
        pages = self._counters.pages
        cached, hit = 0, True
        for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
            key = hash((salt, prompt[:end]))
            hit = hit and key in pages and end < len(prompt)
            cached = end if hit else cached
            pages.add(key)
        self._counters.queries += len(prompt)
        self._counters.hits += cached
        return cached

    def _advance(self, running: _Running, events: list[Event]) -> None:
        request, sampling = running.request, running.request.sampling
        if running.cancelled:
            return self._end(running, "cancelled", events)
        if request.prompt[0] in self._fail_requests:
            return self._end(running, "failed", events, error="the fake engine was told to fail this request")
        token = self._next_token(running)
        first = None
        if not running.times.first_token:
            running.times = replace(running.times, first_token=time.monotonic())
            first = FirstToken(running.times, running.reuse)
        running.produced += 1
        self._counters.generation_tokens += 1
        enough = running.produced > sampling.min_tokens
        if enough and (token in sampling.stop_token_ids or (token == self._info.eos_id and not sampling.ignore_eos)):
            return self._end(running, "stop", events, stop_token=token)
        events.append(self._token_event(request, token, first))
        budget = self._info.max_request_tokens - len(request.prompt)
        if running.produced >= min(budget, sampling.max_tokens if sampling.max_tokens is not None else budget):
            self._end(running, "length", events)
        return None

    def _next_token(self, running: _Running) -> int:
        if running.script is not None:
            return running.script[running.produced] if running.produced < len(running.script) else self._info.eos_id
        low, high = self._token_range
        seed = running.request.sampling.seed or 0
        return low + (sum(running.request.prompt[-8:]) * 31 + seed * 7919 + running.produced * 131) % (high - low)

    def _token_event(self, request: GenerationRequest, token: int, first: FirstToken | None) -> TokenEvent:
        count = request.sampling.logprobs
        if count is None:
            return TokenEvent(request.request_id, token, first=first)
        others = [(token + 1 + i) % self._info.vocab for i in range(max(0, count - 1))]
        top = [(token, -0.25), *((other, -1.5 - i) for i, other in enumerate(others))][:count]
        return TokenEvent(request.request_id, token, -0.25, tuple(top), first)

    def _end(
        self,
        running: _Running,
        reason: FinishReason,
        events: list[Event],
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        del self._running[running.request.request_id]
        events.append(self._finish(running, reason, stop_token, error))

    def _finish(
        self,
        running: _Running,
        reason: FinishReason,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> FinishEvent:
        return FinishEvent(
            request_id=running.request.request_id,
            reason=reason,
            prompt_tokens=len(running.request.prompt),
            completion_tokens=running.produced,
            cached_tokens=running.reuse.reused_tokens if running.reuse is not None else 0,
            stop_token=stop_token,
            error=error,
            times=replace(running.times, finished=time.monotonic()),
            reuse=running.reuse,
        )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many ids two prompts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def scripted(answers: Mapping[tuple[int, ...], Sequence[int]], default: Sequence[int] | None = None) -> Script:
    """A script that answers a prompt ending in a key with its value, else ``default`` (None: made-up ids)."""

    def script(request: GenerationRequest) -> Sequence[int] | None:
        for ending, answer in answers.items():
            if request.prompt[-len(ending) :] == ending:
                return answer
        return default

    return script
