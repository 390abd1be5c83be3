"""One request from submission to its one end: its timeline, its sampling state, and the rules that end it.

Knows the request and what has been sampled; must not know the schedule, the cache's pools or the model.
"""

import time

from longread.engine.sampler import Sample
from longread.engine.sampling_state import SamplingState
from longread.engine.sequence import Timeline
from longread.spec.engine import FinishEvent, FinishReason, FirstToken, GenerationRequest, RequestTimes, TokenEvent
from longread.spec.reuse import Reuse


class Request:
    """``limit`` is the largest number of output tokens: max_tokens, or what the context leaves."""

    def __init__(self, request: GenerationRequest, sampling: SamplingState, eos_id: int, max_request_tokens: int):
        params = request.sampling
        room = max_request_tokens - len(request.prompt)
        self.request = request
        self.sampling = sampling
        self.timeline = Timeline(request.request_id, request.prompt, request.hashed, request.cache_salt)
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self.stop_token: int | None = None
        self.reuse: Reuse | None = None
        self.arrived = time.monotonic()
        self.scheduled = 0.0
        self.prefill_started = 0.0
        self.prefill_finished = 0.0
        self.prefill_tokens = 0
        self.prefill_chunks = 0
        self.first_token = 0.0
        self._told = 0  # tokens of the prompt
        self._eos_id = eos_id
        self._stops = set(params.stop_token_ids) if params.ignore_eos else {eos_id, *params.stop_token_ids}

    def started(self, reuse: Reuse) -> None:
        """Called at the first admission; a resume reuses the request's own pages, which says nothing."""
        self.reuse = reuse
        self.scheduled = time.monotonic()

    def computed(self, tokens: int, start: float, end: float) -> None:
        """A step between two moments computed ``tokens`` of the prompt (or again, of what a preemption lost)."""
        if not self.first_token:
            self.prefill_started = self.prefill_started or start
            self.prefill_finished = end
            self.prefill_tokens += tokens
            self.prefill_chunks += 1

    def newly_read(self) -> int:
        """Tokens of the prompt that have their state, reused ones too, since this was last asked. None of them twice,
        though a preemption lost it; the last one has it with the first token.
        """
        length = len(self.request.prompt)
        known = length if self.first_token else min(self.timeline.computed, length)
        new, self._told = max(known - self._told, 0), max(known, self._told)
        return new

    def accept(self, sample: Sample) -> tuple[TokenEvent | None, FinishReason | None, str | None]:
        """Take the sampled token. Returns the event it makes, whether it ends the request, and a failure's message."""
        first = not self.first_token
        self.first_token = self.first_token or time.monotonic()
        if sample.error is not None:
            return None, "failed", sample.error
        token, grammar = sample.token, self.sampling.grammar
        # Behind the end of its grammar nothing but the end token is possible, so it ends even with ignore_eos.
        closes = grammar is not None and grammar.active and token == self._eos_id
        if closes or (token in self._stops and self.sampling.output_length >= self.request.sampling.min_tokens):
            self.stop_token = token
            return None, "stop", None
        self.sampling.accept(token)
        self.timeline.tokens.append(token)
        if grammar is not None and grammar.error is not None:
            return None, "failed", f"the grammar failed: {grammar.error}"
        known = FirstToken(self.times(), self.reuse) if first else None
        event = TokenEvent(self.request.request_id, token, sample.logprob, sample.top, known)
        return event, "length" if self.sampling.output_length >= self.limit else None, None

    def finish(self, reason: FinishReason, preemptions: int, error: str | None = None) -> FinishEvent:
        """The request's last event. A token that ended the output counts as completed, as in vLLM's usage."""
        return FinishEvent(
            request_id=self.request.request_id,
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.sampling.output_length + (self.stop_token is not None),
            cached_tokens=self.reuse.reused_tokens if self.reuse is not None else 0,
            preemptions=preemptions,
            stop_token=self.stop_token,
            error=error,
            times=self.times(time.monotonic()),
            reuse=self.reuse,
        )

    def times(self, finished: float = 0.0) -> RequestTimes:
        """All moments so far."""
        admission = self.timeline.admission
        return RequestTimes(
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=finished,
            looked_up=admission.looked_up,
            loaded=admission.loaded or admission.looked_up,
            prefill_started=self.prefill_started,
            prefill_finished=self.prefill_finished,
            prefill_tokens=self.prefill_tokens,
            prefill_chunks=self.prefill_chunks,
            lookup=admission.lookup,
            load_host=admission.load_host,
            load_disk=admission.load_disk,
        )
