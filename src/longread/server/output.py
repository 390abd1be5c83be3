"""One choice's tokens on their way to text: characters, stop strings, log-probabilities, the end and its reason.

Knows: tokenizer and stop strings. Must not know: chat markup, response shapes.
"""

from collections.abc import Iterable

from longread.server.subscription import Subscription
from longread.spec.engine import FinishEvent, TokenEvent
from longread.spec.errors import EngineFailedError, OverloadedError, RequestError
from longread.wire.detokenize import IncrementalDetokenizer, StopChecker
from longread.wire.responses import Json, token_logprob
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import GenerateFields

LOGPROB_FLOOR = -9999.0  # JSON has no infinity; vLLM's value for an impossible token


class ChoiceText:
    """The text of one request's output, and what it cost. ``ended`` is set by its FinishEvent."""

    def __init__(self, tokenizer: Tokenizer, fields: GenerateFields):
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=fields.skip_special_tokens is not False)
        self._stops = StopChecker(fields.stop or (), include=bool(fields.include_stop_str_in_output))
        self._min_tokens = fields.min_tokens or 0
        self.token_ids: list[int] = []
        self.ended: FinishEvent | None = None
        self._taken = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; the request must be stopped then."""
        return self._stops.matched

    def push(self, event: TokenEvent) -> str:
        """The text that is certain now."""
        self.token_ids.append(event.token_id)
        return self._check(self._detokenizer.push(event.token_id))

    def finish(self, event: FinishEvent, subscription: Subscription) -> str:
        """The last text. Raises the error of a request that did not end by itself."""
        self.ended = event
        if self.matched is None and event.reason in ("failed", "cancelled"):
            raise error_of(event, subscription)
        return self._check(self._detokenizer.flush()) + self._stops.flush()

    def _check(self, text: str) -> str:
        return self._stops.push(text, stoppable=len(self.token_ids) > self._min_tokens)

    def take_new_ids(self) -> list[int]:
        """Ids since the last call."""
        new = self.token_ids[self._taken :]
        self._taken = len(self.token_ids)
        return new

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the stop string, or all that the engine counted (an end token is one of them)."""
        if self.matched is not None or self.ended is None:
            return len(self.token_ids)
        return self.ended.completion_tokens

    @property
    def finish_reason(self) -> str:
        """The engine's reason, or stop where a stop string ended it. Only once ``ended`` is set."""
        assert self.ended is not None
        return "stop" if self.matched is not None else self.ended.reason

    def stop_reason(self, eos_id: int) -> str | int | None:
        """vLLM's field: the stop string or stop token id; None for the model's own end and for a length limit."""
        if self.matched is not None:
            return self.matched
        token = self.ended.stop_token if self.ended is not None else None
        return None if token == eos_id else token


def error_of(event: FinishEvent, subscription: Subscription) -> RequestError:
    """The error of a request that did not end by itself."""
    refusal = subscription.refusals.get(event.request_id)
    if refusal is not None:
        return refusal
    if event.reason == "cancelled":
        return OverloadedError("the request was cancelled by the server: send it again", code="cancelled")
    return EngineFailedError(f"the engine failed on this request: {event.error}; others go on", code="request_failed")


class TokenLogprobs:
    """Log-probability entries of one choice that have not been sent yet, in chat's shape."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._entries: list[Json] = []

    def add(self, event: TokenEvent) -> None:
        """Keep the entry of one token."""
        token, raw, logprob = self._entry(event.token_id, event.logprob if event.logprob is not None else LOGPROB_FLOOR)
        self._entries.append(token_logprob(token, raw, logprob, [self._entry(i, p) for i, p in event.top]))

    def _entry(self, token_id: int, logprob: float) -> tuple[str, bytes, float]:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), max(logprob, LOGPROB_FLOOR)

    def take(self) -> list[Json]:
        """Entries since the last call."""
        entries, self._entries = self._entries, []
        return entries


def timings_of(texts: Iterable[ChoiceText]) -> Json:
    """``{"timings": {...}}`` in milliseconds: TTFT = queue + prefill, E2E = TTFT + decode. Empty without a token.

    Of several choices: the first one's arrival and scheduling, the first token of any, the end of the last.
    """
    ends = [text.ended.times for text in texts if text.ended is not None]
    times = [t for t in ends if t.first_token]
    if not times:
        return {}
    arrived, scheduled = min(t.arrived for t in times), min(t.scheduled for t in times)
    first, end = min(t.first_token for t in times), max(t.finished for t in times)
    spans = {
        "queue_ms": scheduled - arrived,
        "prefill_ms": first - scheduled,
        "ttft_ms": first - arrived,
        "decode_ms": end - first,
        "e2e_ms": end - arrived,
    }
    return {"timings": {name: round(span * 1000, 3) for name, span in spans.items()}}
