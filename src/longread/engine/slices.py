"""Chunks that are computed a few layers at a time, so that decoding rows need not wait for whole ones.

Knows launches and how long they took; must not know requests or the schedule. Launches run ahead of the device: what
``advance`` puts on the stream is computed behind what was put there before, and times come from the device's events.

Each layer is told apart: of V4's, one that chooses entries of a long context takes several times what the next one
does, and of the last one only what is kept may be wanted. A pace by whichever layers came last let a whole chunk go
into one slice.
"""

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_LAYERS = 2  # of a slice, as long as nothing is known of a layer's time
WHOLE = -1


@dataclass(frozen=True, slots=True)
class Part:
    """What is launched in one go: a layer of a chunk, from 0 (WHOLE: all of them), padded to ``tokens``."""

    layer: int
    tokens: int


Work = Generator[Part, None, Tensor]  # yields what it launches next; returns the logits, float32 [R, vocab]


@dataclass(slots=True)
class Pace:
    """Seconds of each part when it was last measured, kept from one chunk to the next: they are alike."""

    measured: dict[Part, float] = field(default_factory=dict)

    def expected(self, part: Part) -> float | None:
        """None: that layer was never measured. Of another size it is taken for no faster than in proportion."""
        if part in self.measured:
            return self.measured[part]
        alike = [other for other in self.measured if other.layer == part.layer]
        nearest = min(alike, key=lambda other: abs(other.tokens - part.tokens), default=None)
        return None if nearest is None else self.measured[nearest] * max(1.0, part.tokens / nearest.tokens)


@dataclass(frozen=True, slots=True)
class _Launched:
    part: Part
    expected: float | None
    start: "torch.cuda.Event | float"
    end: "torch.cuda.Event | float"

    def seconds(self) -> float | None:
        """None: the device has not come so far."""
        if isinstance(self.start, float) or isinstance(self.end, float):
            assert isinstance(self.start, float) and isinstance(self.end, float)
            return self.end - self.start
        return self.start.elapsed_time(self.end) / 1e3 if self.end.query() else None


@dataclass(slots=True)
class Slices:
    """``dropped``: segments, by their slots, that nobody wants any more; ``work`` leaves their rest out."""

    work: Work
    dropped: set[int]
    device: torch.device
    pace: Pace
    logits: Tensor | None = None
    _coming: Part | None = None
    _running: deque[_Launched] = field(default_factory=deque)
    _announced: int = 0  # how many were dropped when ``_coming`` was heard of
    _late: float = 1.0  # times what was expected the last measured part took: a longer context than its like had
    _seconds: float = 0.0

    def advance(self, seconds: float | None) -> bool:
        """Launch about that much more of it, at least a layer; None: the rest. True: all is launched, and ``logits`` is
        there.
        """
        self._look()
        left, begun, before = seconds, False, self._now()
        with torch.inference_mode():
            if self._coming is None and self.logits is None:
                self._announced = len(self.dropped)
                self._launch()  # nothing: to hear what is first
            while self.logits is None and self._coming is not None:
                part, known = self._coming, self.pace.expected(self._coming)
                if seconds is not None and left is not None:
                    takes = seconds / FIRST_LAYERS if known is None else known * self._late
                    if begun and not 0 < takes <= left:
                        break
                    left -= takes
                dropped = len(self.dropped)
                self._launch()
                after = self._now()
                if dropped == self._announced:  # else nothing of it was launched
                    self._running.append(_Launched(part, known, before, after))
                self._announced = dropped
                begun, before = True, after
        return self.logits is not None

    def seconds(self) -> float:
        """What all of it took on the device; to be asked when it is over."""
        self._look()
        return self._seconds

    def _launch(self) -> None:
        try:
            self._coming = next(self.work)
        except StopIteration as end:
            self._coming, self.logits = None, end.value

    def _look(self) -> None:
        while self._running and (took := self._running[0].seconds()) is not None:
            launched = self._running.popleft()
            self._seconds += took
            self.pace.measured[launched.part] = took
            self._late = max(1.0, took / launched.expected) if launched.expected else 1.0

    def _now(self) -> "torch.cuda.Event | float":
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
