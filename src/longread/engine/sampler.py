"""Chooses the next token of each row from its logits.

Knows logits and each row's SamplingState; must not know sequences, pages or events. Order, as in vLLM (V1 sampler):
raw log-probabilities · grammar mask · min_tokens mask · logit_bias · repetition, frequency and presence penalties ·
(greedy rows: argmax) · temperature · min_p · top_k · top_p · Gumbel-max draw. The raw log-probabilities are the model's
own distribution, before everything else. Equal logits at a top_k or top_p border are all kept, so that the result does
not depend on the order of a sort.

The noise of a row is a counter-based stream (Philox, Salmon et al. 2011) keyed by seed and output index: it knows
nothing of the batch, of preemption, or of what was drawn before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longread.engine.sampling_state import SamplingState

CANDIDATES = 1024  # top_p first looks at this many of the largest logits; a full sort only where they are not enough


@dataclass(frozen=True, slots=True)
class Sample:
    """One row's choice. ``error`` says why there is none (then ``token`` is -1)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def sample(logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample]:
    """Choose one token a row. ``logits``: float32 [R, vocab], changed in place; ``rows``: R states, not changed."""
    if not rows:
        return []
    errors: dict[int, str] = {}
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[wanted] if wanted else None  # a copy of these rows, taken before anything changes them
    _mask(logits, rows, errors)
    _add_bias(logits, rows)
    _penalise(logits, rows)
    peaks, greedy = logits.max(dim=-1)
    tokens = greedy.tolist()
    for i, peak in enumerate(peaks.tolist()):
        if not -float("inf") < peak < float("inf"):
            errors.setdefault(i, no_choice(peak))
    random = [i for i, row in enumerate(rows) if not row.greedy and i not in errors]
    if random:
        part = logits if len(random) == len(rows) else logits[random]
        for i, token in zip(random, _draw(part, [rows[i] for i in random]), strict=True):
            tokens[i] = token
    entries = _logprobs(raw, [(rows[i].params.logprobs or 0, tokens[i]) for i in wanted]) if raw is not None else []
    reported = dict(zip(wanted, entries, strict=True))
    nothing: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ())
    return [
        Sample(-1, error=errors[i]) if i in errors else Sample(token, *reported.get(i, nothing))
        for i, token in enumerate(tokens)
    ]


def no_choice(peak: float) -> str:
    """Why a row whose largest logit is no number gets no token."""
    if peak == -float("inf"):
        return "no token is left to choose: grammar, min_tokens and logit_bias exclude each other"
    return f"the model's logits are not finite (largest: {peak})"


def _mask(logits: Tensor, rows: Sequence[SamplingState], errors: dict[int, str]) -> None:
    """Forbid what the grammar or min_tokens forbid. A grammar that fails is an error of its own row only."""
    vocab = logits.shape[1]
    for i, row in enumerate(rows):
        grammar = row.grammar
        if grammar is not None and grammar.active:
            allowed = grammar.allowed(vocab)
            if grammar.error is not None:
                errors[i] = f"the grammar failed: {grammar.error}"
            logits[i].masked_fill_(torch.from_numpy(~allowed), -float("inf"))
            if grammar.finished:
                continue  # only the end token is left, which min_tokens would take away
        if row.output_length < row.params.min_tokens:
            logits[i, row.end_ids] = -float("inf")


def _flat(parts: list[tuple[int, Tensor]], vocab: int) -> Tensor:
    """Indices into the flattened logits of (row, token ids) pairs: int64 [N]."""
    return torch.cat([ids + row * vocab for row, ids in parts])


def _add_bias(logits: Tensor, rows: Sequence[SamplingState]) -> None:
    biased = [(i, row) for i, row in enumerate(rows) if row.bias_ids is not None]
    if not biased:
        return
    index = _flat([(i, row.bias_ids) for i, row in biased if row.bias_ids is not None], logits.shape[1])
    logits.view(-1)[index] += torch.cat([row.bias_values for _, row in biased if row.bias_values is not None])


def _penalise(logits: Tensor, rows: Sequence[SamplingState]) -> None:
    """Repetition on prompt and output (divide what is positive, multiply what is negative), then frequency and presence
    on the output: touches the tokens that occurred, not whole rows.
    """
    counted = [(i, row.occurrences) for i, row in enumerate(rows) if row.occurrences is not None]
    counted = [(i, seen) for i, seen in counted if seen is not None and seen.size]
    if not counted:
        return
    flat = logits.view(-1)
    index = _flat([(i, seen.ids) for i, seen in counted if seen is not None], logits.shape[1])
    counts = torch.cat([seen.counts for _, seen in counted if seen is not None])
    sizes = torch.tensor([seen.size for _, seen in counted if seen is not None])
    of = [rows[i].params for i, _ in counted]

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values).repeat_interleave(sizes)

    repetition = spread([p.repetition_penalty for p in of])
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * spread([p.frequency_penalty for p in of])
    values -= (counts > 0) * spread([p.presence_penalty for p in of])
    flat[index] = values


def _draw(logits: Tensor, rows: Sequence[SamplingState]) -> list[int]:
    """Temperature, truncation and one draw a row. ``logits`` [R, vocab] is changed in place."""
    temperatures = [row.params.temperature for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits /= torch.tensor(temperatures)[:, None]
    _truncate(logits, rows)
    # argmax(logit + Gumbel) draws from softmax(logit); -log of an exponential variate is a Gumbel variate.
    noise = torch.empty_like(logits)
    for i, row in enumerate(rows):
        stream = np.random.Generator(np.random.Philox(key=np.array([row.seed, row.output_length], dtype=np.uint64)))
        stream.standard_exponential(dtype=np.float32, out=noise[i].numpy())
    logits -= noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()
    return [int(token) for token in logits.argmax(dim=-1).tolist()]


def _truncate(logits: Tensor, rows: Sequence[SamplingState]) -> None:
    """min_p, then top_k, then top_p, each on what the former left: forbid all below a row's threshold."""
    vocab = logits.shape[1]
    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        threshold = logits.amax(dim=-1) + torch.tensor(min_p).log()
        logits.masked_fill_(logits < threshold[:, None], -float("inf"))
    cut = [i for i, row in enumerate(rows) if 0 < row.params.top_k < vocab]
    if cut:
        top_k = torch.tensor([rows[i].params.top_k for i in cut])
        part = logits[cut]
        border = part.topk(int(top_k.max()), dim=-1).values.gather(1, top_k[:, None] - 1)
        logits[cut] = part.masked_fill_(part < border, -float("inf"))
    nucleus = [i for i, row in enumerate(rows) if row.params.top_p < 1.0]
    if nucleus:
        part = logits[nucleus]
        border = _nucleus_border(part, torch.tensor([rows[i].params.top_p for i in nucleus]))
        logits[nucleus] = part.masked_fill_(part < border, -float("inf"))


def _nucleus_border(logits: Tensor, top_p: Tensor) -> Tensor:
    """Smallest logit of each row's nucleus: the fewest largest tokens whose mass reaches top_p. float32 [R, 1]."""
    vocab = logits.shape[1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    width = min(CANDIDATES, vocab)
    while True:
        values = logits.topk(width, dim=-1).values
        mass = (values - total).exp()
        before = mass.cumsum(dim=-1) - mass
        kept = (before < top_p[:, None]).sum(dim=-1).clamp_min(1)
        if width == vocab or bool((kept < width).all()):
            return values.gather(1, kept[:, None] - 1)
        width = vocab


def _logprobs(raw: Tensor, wanted: list[tuple[int, int]]) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Log-probability of the chosen token and the ``count`` best of each row, from the untouched logits.

    raw: float32 [R, vocab]; wanted: R pairs (count, chosen token).
    """
    total = raw.logsumexp(dim=-1)
    chosen = (raw.gather(1, torch.tensor([max(token, 0) for _, token in wanted])[:, None])[:, 0] - total).tolist()
    values, ids = raw.topk(max(count for count, _ in wanted), dim=-1)
    best, names = (values - total[:, None]).tolist(), ids.tolist()
    return [
        (chosen[i], tuple(zip(names[i][:count], best[i][:count], strict=True))) for i, (count, _) in enumerate(wanted)
    ]
