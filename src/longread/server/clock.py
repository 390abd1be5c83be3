"""Where a call's time goes: a chain of marks from its first byte to the first byte of its answer.

Knows: part names, the engine's own times. Must not know: routes, text, metrics. Each mark ends one part and begins the
next, so the parts of a call add up to the time between its ends by construction: nothing can fall between them, and a
part that is not measured (None, never 0) lies inside the part that is marked after it.
"""

import time
from dataclasses import dataclass

from longread.spec.engine import RequestTimes
from longread.wire.responses import Json

# In this order. ``thread``: until a prompt thread was free; ``check``: back on the loop, limits and grammar;
# ``queue``: all waiting behind that, the step in progress included; ``first_byte``: from the sampled token to the
# socket.
FRONT_PARTS = ("receive", "thread", "parse", "render", "tokenise", "hash", "check")
ENGINE_PARTS = ("lookup", "queue", "load_host", "load_disk", "prefill", "sample")
LAST_PART = "first_byte"
PARTS = (*FRONT_PARTS, *ENGINE_PARTS, LAST_PART)

Parts = dict[str, float | None]


class Clock:
    """The marks of one call, in monotonic seconds. One thread at a time; the call is handed from thread to thread."""

    __slots__ = ("_last", "_spent", "begun", "first_byte")

    def __init__(self) -> None:
        self.begun = self._last = time.monotonic()
        self.first_byte: float | None = None
        self._spent: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """What was done since the last mark was ``part``; a part may come more than once."""
        now = time.monotonic()
        self._spent[part] = self._spent.get(part, 0.0) + now - self._last
        self._last = now

    def sent(self) -> None:
        """The first byte behind the first token is on its way."""
        self.first_byte = time.monotonic()

    @property
    def handed_over(self) -> float:
        """The last mark: when the call was the engine's."""
        return self._last

    def front(self) -> Parts:
        """Seconds of the parts before the engine."""
        return {part: self._spent.get(part) for part in FRONT_PARTS}


@dataclass(frozen=True, slots=True)
class Timing:
    """One call's times: ``parts`` in seconds by name, in order; ``ttft`` their sum, None before the first token.

    ``total``: to the engine's last event, or to the first byte where that came later; None before it.
    ``decode``: first token to last, None likewise.
    """

    begun: float
    parts: Parts
    ttft: float | None
    decode: float | None
    total: float | None
    prefill_tokens: int | None
    prefill_chunks: int | None

    def json(self) -> Json:
        """Milliseconds; null where a part was not measured or has not come yet."""
        return {
            "ttft_ms": _ms(self.ttft),
            "parts_ms": {part: _ms(seconds) for part, seconds in self.parts.items()},
            "prefill_tokens": self.prefill_tokens,
            "prefill_chunks": self.prefill_chunks,
            "decode_ms": _ms(self.decode),
            "total_ms": _ms(self.total),
        }

    def header(self) -> str:
        """In the syntax of Server-Timing (https://www.w3.org/TR/server-timing/): what is known, in milliseconds."""
        known: Parts = {**self.parts, "decode": self.decode, "total": self.total}
        return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in known.items() if seconds is not None)


def timing(clock: Clock, times: RequestTimes | None) -> Timing:
    """The parts of a call whose first token came at ``times.first_token``; ``times`` None: not yet."""
    parts: Parts = {**clock.front(), **dict.fromkeys((*ENGINE_PARTS, LAST_PART))}
    if times is None or not times.first_token:
        return Timing(clock.begun, parts, None, None, None, None, None)
    parts |= _engine_parts(clock.handed_over, times)
    if clock.first_byte is not None:
        parts[LAST_PART] = clock.first_byte - times.first_token
    return Timing(
        begun=clock.begun,
        parts=parts,
        ttft=(clock.first_byte or times.first_token) - clock.begun,
        decode=times.finished - times.first_token if times.finished else None,
        total=max(times.finished, clock.first_byte or 0.0) - clock.begun if times.finished else None,
        prefill_tokens=times.prefill_tokens if times.prefill_finished else None,
        prefill_chunks=times.prefill_chunks if times.prefill_finished else None,
    )


def _engine_parts(handed_over: float, times: RequestTimes) -> Parts:
    """The engine's parts; the way to its thread is waiting too."""
    if times.prefill_finished:
        parts: Parts = dict(times.parts())
        parts["queue"] = (parts["queue"] or 0.0) + times.arrived - handed_over
        return {part: parts[part] for part in ENGINE_PARTS}
    # An engine that does not tell its parts apart: what it knows stands for what lies around it.
    return {"queue": times.scheduled - handed_over, "prefill": times.first_token - times.scheduled}


def _ms(seconds: float | None) -> float | None:
    """A difference of sums can be a rounding error below zero: 0.0 is added so that it does not show as -0.0."""
    return None if seconds is None else round(seconds * 1000, 3) + 0.0
