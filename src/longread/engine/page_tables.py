"""The page tables of all running sequences on a device, by slot: only what has changed is sent.

Knows segments and slots. A sequence of 512K tokens has 2,048 pages, and a step gets one more at most: sending whole
tables each step would cost more than the step's launches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longread.engine.staging import Staging
from longread.spec.batch import Segment

SENT = 8192  # table entries at a time; more go in several rounds


class PageTables:
    """``pages``: the most that a sequence has."""

    def __init__(self, slots: int, pages: int, device: torch.device):
        self._pages = pages
        self._table = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self._known: list[tuple[int, ...]] = [()] * slots
        self._staging = Staging({"at": (torch.int64, SENT), "page": (torch.int32, SENT)}, device)

    def of(self, slots: Tensor, pages: int) -> Tensor:
        """int32 [B, pages]: the first pages of these slots (int32 [B]), 0 behind a sequence's last. A launch."""
        return self._table[:, :pages].index_select(0, slots)

    def update(self, segments: Sequence[Segment]) -> None:
        """Bring the tables up to these segments' pages."""
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for segment in segments:
            known, pages = self._known[segment.slot], segment.pages
            if known == pages:
                continue
            same = len(known) if len(known) <= len(pages) and pages[: len(known)] == known else 0
            changed = np.zeros(max(len(pages), len(known)) - same, dtype=np.int32)  # what is left behind them: page 0
            changed[: len(pages) - same] = pages[same:]
            first = segment.slot * self._pages + same
            places.append(np.arange(first, first + len(changed)))
            values.append(changed)
            self._known[segment.slot] = pages
        if places:
            self._send(np.concatenate(places), np.concatenate(values))

    def _send(self, places: np.ndarray, values: np.ndarray) -> None:
        flat, device = self._table.view(-1), self._staging.device
        for start in range(0, len(places), SENT):
            count = min(SENT, len(places) - start)
            given = self._staging.begin()
            given["at"][:count] = places[start : start + count]
            given["page"][:count] = values[start : start + count]
            self._staging.send()
            flat.index_copy_(0, device["at"][:count], device["page"][:count])
