"""What became of one request, and of a run of them.

Knows the instants that the client saw and what is derived from them. Must not know how they came: HTTP is client.py's,
percentiles over requests are metrics.py's. What is not known is None, never 0.

All instants are seconds on the run's clock (0: the run's start); ``due``, ``sent`` and the rest compare directly.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "refused", "failed", "timeout", "cancelled"]
# What Longread's answers tell of a TTFT in ``server_timing``, in order (server/clock.py).
SERVER_PARTS = (
    *("receive", "thread", "parse", "render", "tokenise", "hash", "check"),
    *("lookup", "queue", "load_host", "load_disk", "prefill", "sample", "first_byte"),
)


@dataclass(slots=True)
class Outcome:
    """One request.

    ``status``: ok: answered to its end; refused: the server said no before any answer (4xx, 503); failed: anything
    else that broke (5xx, a lost connection, half a stream, a stream that is not one); timeout; cancelled: by the
    client, at Ctrl-C or at the end of a bounded run.
    ``failure``: a short word for what went wrong, the same for all of its kind ("http 429", "half a stream").
    ``index``: its place in the sequence of asks. ``due``: when the schedule wanted it sent; ``held``: seconds that the
    cap on concurrency, or an earlier turn of its session, held it after that; ``sent``: when the client began to send
    it, body ready, no connection sought yet.
    ``first_byte``: the response's head. ``first_chunk``: the first event with a choice, the empty role chunk included.
    ``first_reasoning``, ``first_answer``: the first reasoning text and the first answer text (tool calls count as
    answer). ``last``: the last event with a choice (text or finish reason); usage that comes after it is no part of
    the answer. ``ended``: the last event of any kind, of an answer; else when it was given up.
    ``chunk_times``: of each event with text; ``chunk_tokens``: tokens of each, empty where the server does not say.
    ``tokens_from``: who counted ``output_tokens``; ``counted_tokens``: the tokenizer's own count of the answer, beside
    the server's. ``server_timing``: milliseconds by the server's own names.
    ``new_connection``: whether one had to be opened for it.
    """

    key: str
    kind: str
    index: int = 0
    session: str | None = None
    status: Status = "failed"
    http_status: int | None = None
    failure: str | None = None
    error: str | None = None
    due: float = 0.0
    held: float = 0.0
    sent: float = 0.0
    first_byte: float | None = None
    first_chunk: float | None = None
    first_reasoning: float | None = None
    first_answer: float | None = None
    last: float | None = None
    ended: float | None = None
    chunk_times: array = field(default_factory=lambda: array("d"))
    chunk_tokens: array = field(default_factory=lambda: array("q"))
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    tokens_from: Literal["usage", "tokenizer"] | None = None
    counted_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    reasoning: str = ""
    server_timing: Mapping[str, float] | None = None
    request_id: str | None = None
    new_connection: bool | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from ``sent`` to the first event with reasoning or answer text; the empty role chunk is not one."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def ttfc(self) -> float | None:
        """Seconds to the first event with a choice, the role chunk included: what vLLM's bench calls TTFT."""
        return None if self.first_chunk is None else self.first_chunk - self.sent

    @property
    def ttfrt(self) -> float | None:
        """Seconds to the first reasoning text."""
        return None if self.first_reasoning is None else self.first_reasoning - self.sent

    @property
    def ttfat(self) -> float | None:
        """Seconds to the first text of the answer itself, after any reasoning."""
        return None if self.first_answer is None else self.first_answer - self.sent

    @property
    def e2el(self) -> float | None:
        """Seconds to the last event with a choice of a request that was answered to its end; None for the others."""
        return None if self.last is None or self.status != "ok" else self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """(e2el - ttft) / (output tokens - 1) in seconds; None with at most one token or with no count."""
        e2el, ttft = self.e2el, self.ttft
        if e2el is None or ttft is None or self.output_tokens is None or self.output_tokens <= 1:
            return None
        return (e2el - ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring events with text. One event may hold several tokens, so a gap is no ITL."""
        times = self.chunk_times
        return [times[i] - times[i - 1] for i in range(1, len(times))]

    @property
    def lateness(self) -> float:
        """Seconds that the client sent it after its time, what held it on purpose taken off."""
        return max(self.sent - self.due - self.held, 0.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity of the client's own, in seconds."""

    count: int
    p50: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the client itself cost while it ran. ``loop_lag``: how late the event loop woke for a timer of its own.
    ``lateness``: of sends, after the schedule or after what held them ended. ``cpu_share``: CPU seconds of the client's
    process per second, 1 is one core. ``new_connections``: how many of the measured requests had to open one.
    """

    loop_lag: Spread | None
    lateness: Spread | None
    cpu_share: float | None
    new_connections: int = 0


@dataclass(slots=True)
class Run:
    """``outcomes`` in the order of their end, warm-ups apart in ``warmups``. ``started``: Unix time of 0 on the run's
    clock, after the warm-ups. ``duration``: seconds until the last request ended. ``planned``: requests wanted; with
    ``partial`` fewer were measured. ``peak``: most requests in flight at one instant.
    """

    outcomes: list[Outcome]
    warmups: list[Outcome]
    started: float
    duration: float
    planned: int
    partial: bool
    overhead: Overhead
    peak: int = 0

    @property
    def ended(self) -> float:
        """Unix time."""
        return self.started + self.duration
