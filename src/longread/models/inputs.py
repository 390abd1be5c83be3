"""What a model's forward pass receives for one step."""

from dataclasses import dataclass

from torch import Tensor

from longread.spec.batch import Segment


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A ragged batch: the tokens of all segments laid end to end, gathered fresh for each step.

    token_ids: int64 [T]; positions: int64 [T] (0-based, in each sequence); segments: in order of ``offset``.
    logit_rows: int64 [R], the rows of the flattened batch whose logits are wanted (may be empty).
    """

    token_ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    logit_rows: Tensor
