"""Whole training steps as CUDA graphs: one launch where a step of a small model would be thousands.

Knows a step as a function of tensors whose shapes do not change; knows nothing of models. The step must take whatever
varies (learning rates) from device tensors and change everything in place.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WARM_UP = 2  # real steps before the capture: they compile, and give the optimisers their state


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    result: Tensor


class Stepper:
    """Runs ``step(inputs) -> figures``: the first times of a key as it is, then captured once and replayed.

    Call it on one stream that is not the default one. Where a capture fails, ``report`` is told and the key goes on
    without a graph.
    """

    def __init__(self, step: Callable[[Sequence[Tensor]], Tensor], report: Callable[[str], None]):
        self._step, self._report = step, report
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Drop all graphs and the memory that they share."""
        self._captured.clear()
        self._seen.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, inputs: Sequence[Tensor]) -> Tensor:
        """``inputs`` on the device; returns figures of their own memory."""
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP:
            return self._step(inputs)
        if key not in self._captured:
            self._captured[key] = self._capture(inputs)
        captured = self._captured[key]
        if captured is None:
            return self._step(inputs)
        torch._foreach_copy_(list(captured.inputs), list(inputs))
        captured.graph.replay()
        return captured.result.clone()

    def _capture(self, inputs: Sequence[Tensor]) -> Captured | None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the loader's own thread may pin memory meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                result = self._step(inputs)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._report(f"{type(error).__name__}: {error}")
            return None
        return Captured(graph, inputs, result)
