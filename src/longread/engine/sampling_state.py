"""What sampling keeps of one request between steps: seed, output length, penalties' counts, grammar.

It is derived from the request and its output alone and lives outside the cache, so preemption and batching leave it as
it is. Knows tensors of one row; must not know batches, sequences or events.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longread.spec.engine import SamplingParams

if TYPE_CHECKING:
    from longread.engine.grammar import GrammarState

GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM: dividing by them would overflow


class Occurrences:
    """Distinct token ids that penalties look at, and how often each is in the output; one update a token.

    The buffers grow by doubling. ``ids``: int64 [size], ``counts``: float32 [size], 0 for a token of the prompt alone.
    """

    def __init__(self, prompt: Sequence[int]):
        distinct = sorted(set(prompt))
        self._at = {token: i for i, token in enumerate(distinct)}
        capacity = max(64, 2 * len(distinct))
        self._ids = torch.zeros(capacity, dtype=torch.int64)
        self._ids[: len(distinct)] = torch.tensor(distinct, dtype=torch.int64)
        self._counts = torch.zeros(capacity)

    @property
    def size(self) -> int:
        return len(self._at)

    @property
    def ids(self) -> Tensor:
        return self._ids[: self.size]

    @property
    def counts(self) -> Tensor:
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        """Count one output token."""
        at = self._at.get(token)
        if at is None:
            at = self.size
            if at == len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._at[token] = at
            self._ids[at] = token
        self._counts[at] += 1


class SamplingState:
    """One row of the sampler. ``end_ids``: int64, what min_tokens forbids; ``bias_ids``/``bias_values``: logit_bias."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], eos_id: int, seed: int, grammar: "GrammarState | None"
    ):
        self.params = params
        self.seed = seed % 2**64
        self.output_length = 0
        self.grammar = grammar
        ends = set(params.stop_token_ids) if params.ignore_eos else {eos_id, *params.stop_token_ids}
        self.end_ids = torch.tensor(sorted(ends), dtype=torch.int64)
        self.bias_ids = self.bias_values = None
        if params.logit_bias:
            self.bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
            self.bias_values = torch.tensor([bias for _, bias in params.logit_bias])
        self.occurrences: Occurrences | None = None
        if params.repetition_penalty != 1.0:
            self.occurrences = Occurrences(prompt)
        elif params.presence_penalty or params.frequency_penalty:
            self.occurrences = Occurrences(())

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    def accept(self, token: int) -> None:
        """Take a token into the output."""
        self.output_length += 1
        if self.occurrences is not None:
            self.occurrences.add(token)
        if self.grammar is not None:
            self.grammar.consume(token)
