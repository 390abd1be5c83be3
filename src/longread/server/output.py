"""One choice's tokens on their way to text: characters, stop strings, log-probabilities, the end and its reason.

Knows: tokenizer and stop strings. Must not know: chat markup, response shapes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from longread.server.driver import Subscription
from longread.spec.engine import FinishEvent, TokenEvent
from longread.spec.errors import EngineFailedError, OverloadedError, RequestError
from longread.wire.detokenize import IncrementalDetokenizer, StopChecker
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import GenerateFields


class ChoiceText:
    """The text of one request's output, and what it cost. ``ended`` is set by its FinishEvent."""

    def __init__(self, tokenizer: Tokenizer, fields: GenerateFields):
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=fields.skip_special_tokens is not False)
        self._stops = StopChecker(fields.stop or (), include=bool(fields.include_stop_str_in_output))
        self.token_ids: list[int] = []
        self.ended: FinishEvent | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; the request must be stopped then."""
        return self._stops.matched

    def push(self, event: TokenEvent) -> str:
        """The text that is certain now."""
        self.token_ids.append(event.token_id)
        return self._stops.push(self._detokenizer.push(event.token_id))

    def finish(self, event: FinishEvent, subscription: Subscription) -> str:
        """The last text. Raises the error of a request that did not end by itself."""
        self.ended = event
        if self.matched is None and event.reason in ("failed", "cancelled"):
            raise _error_of(event, subscription)
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the stop string, or all that the engine counted (an end token is one of them)."""
        if self.matched is not None or self.ended is None:
            return len(self.token_ids)
        return self.ended.completion_tokens

    @property
    def finish_reason(self) -> str:
        assert self.ended is not None
        return "stop" if self.matched is not None else self.ended.reason

    def stop_reason(self, eos_id: int) -> str | int | None:
        """vLLM's field: the stop string or stop token id; None for the model's own end and for a length limit."""
        if self.matched is not None:
            return self.matched
        token = self.ended.stop_token if self.ended is not None else None
        return None if token == eos_id else token


def _error_of(event: FinishEvent, subscription: Subscription) -> RequestError:
    refusal = subscription.refusals.get(event.request_id)
    if refusal is not None:
        return refusal
    if event.reason == "cancelled":
        return OverloadedError("the request was cancelled by the server: send it again", code="cancelled")
    return EngineFailedError(f"the engine failed on this request: {event.error}; others go on", code="request_failed")


@dataclass(frozen=True, slots=True)
class Timings:
    """The ``timings`` object of an answer, milliseconds: TTFT = queue + prefill, E2E = TTFT + decode.

    Of several choices: from the arrival to the first choice's schedule, the first token of any, the end of the last.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    e2e_ms: float

    @classmethod
    def of(cls, events: Iterable[FinishEvent]) -> "Timings | None":
        """None where no choice got as far as a token."""
        times = [event.times for event in events if event.times.first_token]
        if not times:
            return None
        arrived = min(t.arrived for t in times)
        scheduled = min(t.scheduled for t in times)
        first = min(t.first_token for t in times)
        end = max(t.finished for t in times)
        spans = (scheduled - arrived, first - scheduled, first - arrived, end - first, end - arrived)
        return cls(*(round(span * 1000, 3) for span in spans))
