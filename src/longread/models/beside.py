"""Launches beside the ones that a step waits for: a second stream, forked and joined, also inside a captured graph.

Knows streams only. Tensors made beside may be used after ``join``; what was made on either stream may be let go then,
since the next fork waits for all that was launched before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A side stream of a CUDA device. Where there is none, or ``on`` is false, everything is launched in its turn."""

    def __init__(self, device: torch.device, on: bool):
        self.on = on and device.type == "cuda"
        self._side: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside waits for all launched before, and nothing after it waits for it before ``join``."""
        if self._side is None or not self.on:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What is launched from now on waits for all that was launched beside."""
        if self._side is not None and self.on:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


NEVER = Beside(torch.device("cpu"), on=False)
