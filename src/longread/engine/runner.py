"""Runs the model on one gathered batch and the sampler on its logits.

Knows tensors and the model's forward; must not know requests, queues or pages' owners. What is common to all models
and nothing else: a model's own state stays behind its state groups. Every step's inputs are new tensors (state is not
input).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longread.engine.batch import Batch
from longread.engine.sampler import Sample, sample
from longread.engine.sampling_state import SamplingState
from longread.models.inputs import StepInputs


class Model(Protocol):
    """What the engine needs of a model (models/deepseek_v3.py, models/deepseek_v4.py)."""

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        """Logits, float32 [R, vocab], of ``inputs.logit_rows``; reads and writes ``state``."""
        ...


class Runner:
    """A model with the storage of its state groups (``state[name]``, see spec/state.py)."""

    def __init__(self, model: Model, state: Mapping[str, Tensor]):
        self._model = model
        self._state = state

    def forward(self, batch: Batch) -> Tensor:
        """Compute a batch; returns float32 logits [R, vocab], one row for each of ``batch.sampling``."""
        inputs = StepInputs(_ids(batch.token_ids), _ids(batch.positions), batch.segments, _ids(batch.logit_rows))
        with torch.inference_mode():
            return self._model.forward(inputs, self._state).contiguous()

    def lost(self, error: Exception) -> bool:
        """Whether nothing more can be computed in this process."""
        return False

    def choose(self, logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample]:
        """One token for each row of logits, which are consumed."""
        with torch.inference_mode():
            return sample(logits, rows)


def _ids(values: "array[int]") -> Tensor:
    """int64 tensor over the array's own memory, which nothing else touches and which lives as long as the tensor."""
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
