"""Chunks that are computed a few layers at a time, so that decoding rows need not wait for whole ones.

Knows launches and how long they took; must not know requests or the schedule. Launches run ahead of the device: what
``advance`` puts on the stream is computed behind what was put there before, and times come from the device's events.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_LAYERS = 2  # of the first slice, as long as nothing is known of a layer's time


@dataclass(slots=True)
class Pace:
    """Seconds of a layer as last measured, kept from one chunk to the next: they are alike; 0: unknown."""

    layer: float = 0.0


@dataclass(slots=True)
class _Slice:
    layers: int
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
    """``work`` launches a layer at each step and returns the logits, float32 [R, vocab]. ``dropped``: segments, by
    their slots, that nobody wants any more; their rest is left out (``work`` looks at it).
    """

    work: Generator[None, None, Tensor]
    dropped: set[int]
    device: torch.device
    pace: Pace
    logits: Tensor | None = None
    _running: list[_Slice] = field(default_factory=list)
    _seconds: float = 0.0

    def advance(self, seconds: float | None) -> bool:
        """Launch about that much more of it, None: the rest. True: all is launched, and ``logits`` is there."""
        self._look()
        count = 1 << 30
        if seconds is not None:
            count = max(1, int(seconds / self.pace.layer)) if self.pace.layer else FIRST_LAYERS
        start, done = self._now(), 0
        with torch.inference_mode():
            try:
                while done < count:
                    next(self.work)
                    done += 1
            except StopIteration as end:
                self.logits = end.value
                done += 1
        self._running.append(_Slice(done, start, self._now()))
        return self.logits is not None

    def seconds(self) -> float:
        """What all of it took on the device; to be asked when it is over."""
        self._look()
        return self._seconds

    def _look(self) -> None:
        while self._running and (took := self._running[0].seconds()) is not None:
            self._seconds += took
            self.pace.layer = took / self._running[0].layers
            del self._running[0]

    def _now(self) -> "torch.cuda.Event | float":
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
