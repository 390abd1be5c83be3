"""The training loss of one batch and what is recorded about it, without any wait for the device.

Knows the twin's contract (hidden, logits, index_loss); never forms the logits of positions that no loss needs.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from training.feed import Batch

FIGURES = ("loss", "answer_loss", "document_loss", "index_loss", "exact", "answers")


class Reader(Protocol):
    """What the objective needs of a twin."""

    def hidden(self, ids: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def index_loss(self) -> Tensor | None: ...
    def set_index_queries(self, where: Tensor | None) -> None: ...


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def exact_answers(guess: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many answers of a batch have every chosen token right under the true prefix, and how many answers it has.

    guess: int64 [P], the likeliest token at each answer position.
    """
    weights = batch.answers.weights
    wrong = torch.zeros_like(weights).index_add_(0, batch.spans, (guess != batch.answers.ids) * weights)
    tokens = torch.zeros_like(weights).index_add_(0, batch.spans, weights)
    return ((tokens > 0) & (wrong == 0)).sum(), (tokens > 0).sum()


def objective(twin: Reader, batch: Batch, *, document_weight: float, index_weight: float) -> tuple[Tensor, Tensor]:
    """The loss to descend (scalar, with its graph) and the figures of FIGURES (float32 [6], detached).

    Answers' mean cross entropy + document_weight * the document's + index_weight * the indexer's own loss.
    """
    twin.set_index_queries(batch.queries if index_weight else None)
    hidden = twin.hidden(batch.ids).flatten(0, 1)
    at = torch.cat([batch.answers.at, batch.document.at])
    logits = twin.logits(hidden.index_select(0, at))
    losses = functional.cross_entropy(logits, torch.cat([batch.answers.ids, batch.document.ids]), reduction="none")
    count = len(batch.answers.at)
    answer = _mean(losses[:count], batch.answers.weights)
    document = _mean(losses[count:], batch.document.weights)
    index = twin.index_loss() if index_weight else None
    loss = answer + document_weight * document
    if index is None:
        index = torch.zeros_like(loss)
    else:
        loss = loss + index_weight * index
    with torch.no_grad():
        exact, answers = exact_answers(logits[:count].argmax(-1), batch)
        figures = torch.stack([f.detach().float() for f in (loss, answer, document, index, exact, answers)])
    return loss, figures
