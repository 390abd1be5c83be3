"""Chooses the next token of each row where the logits are: greedy, temperature, min_p, top_k and top_p.

Knows logits on a device and each row's SamplingState; must not know sequences, pages or events. Order and meaning are
sampler.py's. Rows that need more (grammar, penalties, bias, min_tokens, logprobs), and the few whose nucleus is wider
than what is looked at, are copied to the host and go through it.

The noise of a number is a hash of the row's seed, its output index and the token: it knows nothing of the batch. Rows
are worked on in blocks of one shape, since a device's sums are rounded differently where the shape is another: a row's
token depends on its own logits and state only. It is another noise than sampler.py's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longread.engine.sampler import CANDIDATES, Sample, no_choice, sample
from longread.engine.sampling_state import SamplingState
from longread.engine.staging import Arrival, Staging

ROWS = 16  # of a block; each costs some 30 launches
BLOCK_NUMBERS = 1 << 22  # logits that are worked on at a time, at most (but for one row)
# SplitMix64 (Steele, Lea, Flood 2014), with signed constants: products wrap around.
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
MASK = 2**64 - 1
INFINITY = float("inf")


class DeviceSampler:
    """``rows``: the most that are chosen at a time. ``vocab``: logits of a row."""

    def __init__(self, device: torch.device, rows: int, vocab: int):
        self._device = device
        self._block = max(1, min(ROWS, BLOCK_NUMBERS // vocab))
        count = -(-rows // self._block) * self._block
        params = {"temperature": torch.float32, "min_p": torch.float32, "top_p": torch.float32, "top_k": torch.int32}
        self._staging = Staging(
            {"row": (torch.int64, count), "key": (torch.int64, count)} | {n: (t, count) for n, t in params.items()},
            device,
        )
        self._steps = torch.arange(1, vocab + 1, device=device) * GOLDEN  # int64 [vocab]
        self._coming = Arrival(
            {"token": (torch.int64, rows), "peak": (torch.float32, rows), "unsure": (torch.int32, rows)}, device
        )

    def pick(self, logits: Tensor) -> None:
        """Write each row's largest logit and its token (the first of equals) to their fixed place: all that greedy
        rows need, in one launch. ``logits``: float32 [R, vocab].
        """
        found, count = self._coming.device, logits.shape[0]
        torch.max(logits, dim=-1, out=(found["peak"][:count], found["token"][:count]))

    def begin(self, logits: Tensor, rows: Sequence[SamplingState], picked: bool = False) -> "Choosing":
        """Start to choose one token a row. ``logits``: float32 [R, vocab], not changed, and needed until ``result``,
        which comes before the next call. ``picked``: ``pick`` was launched on these rows, which others may follow.
        """
        drawn = [i for i, row in enumerate(rows) if not row.greedy and not on_host(row)]
        if rows and not picked:
            self.pick(logits)
        if drawn:
            self._draw(logits, rows, drawn)
        return Choosing(logits, rows, drawn, self._coming)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingState], drawn: Sequence[int]) -> None:
        """Write tokens of the rows ``drawn`` to their place, and whether they are unsure."""
        found, given, params = self._coming.device, self._staging.begin(), [rows[i].params for i in drawn]
        n, vocab = len(drawn), logits.shape[1]
        for name, values, rest in (
            ("row", drawn, drawn[-1]),
            ("key", [key(rows[i].seed, rows[i].output_length) for i in drawn], 0),
            ("temperature", [p.temperature for p in params], 1.0),
            ("min_p", [p.min_p for p in params], 0.0),
            ("top_p", [p.top_p for p in params], 1.0),
            ("top_k", [p.top_k if p.top_k < vocab else 0 for p in params], 0),
        ):
            given[name][:n] = values
            given[name][n:] = rest
        self._staging.send()
        cuts = any(p.min_p for p in params), any(p.top_k or p.top_p < 1 for p in params)
        for start in range(0, n, self._block):
            own = {name: part[start : start + self._block] for name, part in self._staging.device.items()}
            tokens, unsure = self._block_of(logits.index_select(0, own["row"]), own, *cuts)
            count = min(self._block, n - start)
            at = own["row"][:count]
            found["token"].index_copy_(0, at, tokens[:count])
            found["unsure"].index_copy_(0, at, unsure[:count].to(torch.int32))

    def _block_of(self, x: Tensor, own: dict[str, Tensor], floors: bool, cuts: bool) -> tuple[Tensor, Tensor]:
        """Tokens [B] and whether each is unsure. ``x``: float32 [B, vocab], changed. A column a row in ``own``."""
        x /= own["temperature"][:, None]
        unsure = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        if floors:
            x.masked_fill_(x < x.amax(dim=-1, keepdim=True) + own["min_p"].log()[:, None], -float("inf"))
        if cuts:
            unsure = truncate(x, own["top_k"], own["top_p"])
        z = self._steps + own["key"][:, None]
        z ^= (z >> 30) & (MASK >> 30)
        z *= FIRST
        z ^= (z >> 27) & (MASK >> 27)
        z *= SECOND
        z ^= (z >> 31) & (MASK >> 31)
        # -log(1 - u) of the smallest u decides: u is kept exact where it is small.
        u = ((z >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
        x -= u.neg_().log1p_().neg_().log_()
        return x.argmax(dim=-1), unsure


class Choosing:
    """Tokens on their way. ``drawn``: which rows were drawn on the device."""

    def __init__(self, logits: Tensor, rows: Sequence[SamplingState], drawn: Sequence[int], coming: Arrival):
        self._logits, self._rows, self._drawn, self._coming = logits, rows, drawn, coming
        self._number = coming.send()

    def there(self) -> bool:
        """Whether the device has chosen."""
        return self._coming.there()

    def result(self) -> list[Sample]:
        """One sample a row; waits for the device."""
        found, count = self._coming.wait(self._number), len(self._rows)
        chosen = [
            Sample(token) if -INFINITY < peak < INFINITY else Sample(-1, error=no_choice(peak))
            for token, peak in zip(found["token"][:count].tolist(), found["peak"][:count].tolist(), strict=True)
        ]
        unsure = found["unsure"]
        host = [i for i, row in enumerate(self._rows) if on_host(row)] + [i for i in self._drawn if unsure[i]]
        if host:
            part = self._logits[host].to("cpu", torch.float32)
            for i, one in zip(host, sample(part, [self._rows[i] for i in host]), strict=True):
                chosen[i] = one
        return chosen


def on_host(row: SamplingState) -> bool:
    """Whether a row needs what only sampler.py does. Never changes for the tokens of one output but by min_tokens."""
    p = row.params
    return (
        row.grammar is not None
        or row.occurrences is not None
        or row.bias_ids is not None
        or p.logprobs is not None
        or row.output_length < p.min_tokens
    )


def truncate(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """top_k (0: off), then top_p, on logits float32 [B, vocab] in place; bool [B]: the candidates were not enough."""
    width = min(CANDIDATES, x.shape[1])
    values = x.topk(width, dim=-1).values
    wide, all_of_them = top_k.long()[:, None], width == x.shape[1]
    border = values.gather(1, wide.clamp(1, width) - 1).masked_fill_(wide == 0, -float("inf"))
    x.masked_fill_(x < border, -float("inf"))
    values.masked_fill_(values < border, -float("inf"))
    mass = (values - x.logsumexp(dim=-1, keepdim=True)).exp()
    kept = (mass.cumsum(dim=-1) - mass < top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
    off = top_p[:, None] >= 1
    x.masked_fill_(x < values.gather(1, kept - 1).masked_fill_(off, -float("inf")), -float("inf"))
    unsure = (wide > width) | (~off & (kept == width)) if not all_of_them else off & ~off
    return unsure[:, 0]


def key(seed: int, index: int) -> int:
    """What the noise of output ``index`` under ``seed`` begins with: int64."""
    mixed = _mix(_mix(seed & MASK) + (index + 1) * 0x9E3779B97F4A7C15 & MASK)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31
