"""A deployment as the simulator needs it: the planner's prediction of a step, by table, and what its memory holds.

Knows a deployment and the planner's single steps and bytes. The planner predicts chunks and decode steps apart; here
they share one pass through the layers, as in an engine with chunked prefill: weights are read once, and attention is
paid by each sequence. Launches, kernels' efficiency and the engine's own losses are the planner's, calibrated on runs.
"""

from bisect import bisect_right
from collections.abc import Sequence

from longread.engine.virtual import Cost, Limits
from longread.plan.calibrate import Factors, default_factors, path_of
from longread.plan.deployment import Deployment
from longread.plan.efficiency import STEP_SECONDS
from longread.plan.gpu_memory import gpu_memory
from longread.plan.raw import decode_step, issue_seconds, prefill_step
from longread.spec.cost import CostModel, StepCost
from longread.spec.errors import ConfigError
from longread.spec.state import PAGE_TOKENS
from longread.spec.step_target import StepTarget, quick_step

SNAPSHOT_INTERVAL = 32768

_PREFIXES = (0, 4096, 16384, 65536, 262144, 1048576)  # linear between: dense at the start, where top-k limits are
_CONTEXTS = (256, 8192, 65536, 1048576)
_WAITED = "issue of kernels"
# Steps that a linear model is fitted to: sizes of chunks and of decode batches, each at each of the contexts.
_FIT_CHUNKS = (256, 1024, 2048, 4096, 8192)
_FIT_CONTEXTS = (1024, 16384, 131072, 524288)
_LEAST_SIZE = 4  # of the chunks that decide how long a step should be; deep in a book few tokens are many seconds


class Table:
    """Values over a grid of two whole numbers, linear between and past the ends."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int], values: Sequence[Sequence[float]]):
        self._rows, self._columns, self._values = rows, columns, values

    def at(self, row: float, column: float) -> float:
        i, u = _between(self._rows, row)
        j, v = _between(self._columns, column)
        low, high = self._values[i], self._values[i + 1]
        return (1 - u) * ((1 - v) * low[j] + v * low[j + 1]) + u * ((1 - v) * high[j] + v * high[j + 1])


def _between(marks: Sequence[int], value: float) -> tuple[int, float]:
    """The interval that ``value`` lies in (the last one for larger values), and how far into it."""
    i = min(max(bisect_right(marks, value) - 1, 0), len(marks) - 2)
    return i, (value - marks[i]) / (marks[i + 1] - marks[i])


class PlannedCost:
    """Seconds of a step of ``d``'s one replica; a ``Cost``. ``scales``: of prefill and of decode, by calibration.

    Pipeline stages work on different chunks: a step is a stage's part of them, and filling the pipeline is left out.
    """

    def __init__(self, d: Deployment, factors: Factors | None = None):
        known = default_factors() if factors is None else factors
        self.scales = known.scale(path_of(d, "prefill")), known.scale(path_of(d, "decode"))
        self._read, self._write = (scale.centre for scale in self.scales)
        sizes = _doubling(max(d.chunk, d.max_num_seqs, 2))
        whole = [[_work(d, n, p) for p in _PREFIXES] for n in sizes]
        self._dense = Table(sizes, (0, 1), [[row[0], row[0]] for row in whole])
        # A token's share of what it pays for looking back; less for a large chunk, which shares the reading.
        looks = [[(each - row[0]) / n for each in row] for n, row in zip(sizes, whole, strict=True)]
        self._looks = Table(sizes, _PREFIXES, looks)
        rows = _doubling(max(d.max_num_seqs, 2))
        steps = [[sum(decode_step(d, n, c).values()) for c in _CONTEXTS] for n in rows]
        self._decode = Table(rows, _CONTEXTS, steps)
        self._issue = issue_seconds(d) / d.strategy.pp

    def seconds(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]] = ()) -> float:
        rows, context = decodes
        mean = context / rows if rows else 0.0
        if not chunks:
            return self._decode.at(rows, mean) * self._write + STEP_SECONDS
        work = self._dense.at(rows + sum(n for n, _ in chunks), 0)
        work += sum(n * self._looks.at(n, prefix) for n, prefix in chunks)
        total = max(work, self._issue) * self._read + STEP_SECONDS
        if rows:  # their rows are counted above; what they look back at is a decode step's
            total += max(self._decode.at(rows, mean) - self._decode.at(rows, _CONTEXTS[0]), 0.0) * self._write
        return total


def _work(d: Deployment, chunk: int, prefix: int) -> float:
    """Seconds of a chunk's kernels and links a stage; waiting for their issue is one wait a step, whatever is in it."""
    parts = prefill_step(d, chunk, prefix)
    return sum(value for name, value in parts.items() if name != _WAITED) / d.strategy.pp


def _doubling(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return sizes


def planned_limits(d: Deployment, *, pages: int | None = None, snapshot_interval: int = SNAPSHOT_INTERVAL) -> Limits:
    """What one replica of ``d`` holds. ``pages``: exactly so many, whatever fits. Raises ConfigError: not one page fits
    beside the slots and snapshots.
    """
    memory = gpu_memory(d)
    slot, page = sum(memory.kv_fixed.values()), PAGE_TOKENS * sum(memory.kv_per_token.values())
    snapshots = d.snapshots * d.max_num_seqs if slot else 0
    left = memory.free - d.max_num_seqs * slot - snapshots * memory.snapshot_bytes
    found = int(left / page) if pages is None else pages
    if found < 1:
        raise ConfigError(
            f"{d.strategy.label} on {d.hardware.label}: nothing is left for the cache beside the weights and "
            f"{d.max_num_seqs} sequences (max_num_seqs); use more cards or fewer sequences"
        )
    return Limits(
        pages=found,
        max_num_seqs=d.max_num_seqs,
        max_num_batched_tokens=d.chunk,
        snapshots=snapshots,
        snapshot_interval=snapshot_interval,
        context=min(d.max_model_len, found * PAGE_TOKENS),
        rings=bool(slot),
    )


def calibrated(cost: Cost, limits: Limits) -> CostModel:
    """What a schedule knows of ``cost`` that has watched steps of all sizes that the limits allow."""
    budget, most = limits.max_num_batched_tokens, limits.max_num_seqs
    model = CostModel(_through_points(cost, budget, most, limits.context))
    contexts = [c for c in _FIT_CONTEXTS if c <= limits.context] or [limits.context]
    for before in contexts:
        for rows in _doubling(most):
            decodes = min(rows, most), min(rows, most) * before
            model.observe(decodes, (), cost.seconds(decodes))
        for size in [n for n in _FIT_CHUNKS if n <= budget] or [budget]:
            for rows in {0, min(most // 2, budget - size)}:
                work = (rows, rows * before), ((size, before),)
                model.observe(*work, cost.seconds(*work))
    return model


def planned_step_target(cost: Cost, limits: Limits) -> StepTarget:
    """What an engine would choose that measured steps of these costs: at the start of a prompt and in the middle of the
    longest, where looking back is most of a token's work and less of a step is shared by its tokens.
    """
    sizes = [n for n in _doubling(limits.max_num_batched_tokens) if n >= _LEAST_SIZE]
    return quick_step([[(n, cost.seconds((0, 0), ((n, at),))) for n in sizes] for at in (0, limits.context // 2)])


def _through_points(cost: Cost, budget: int, rows: int, context: int) -> StepCost:
    """Through one step of each kind, so that no observation is far from what was predicted."""
    one, many = cost.seconds((1, 256)), cost.seconds((rows, rows * 256))
    far = cost.seconds((rows, rows * context))
    decode = max((many - one) / (rows - 1), 0.0) if rows > 1 else 0.0
    whole, half = (cost.seconds((0, 0), ((n, 0),)) for n in (budget, -(-budget // 2)))
    token = max((whole - half) / max(budget // 2, 1), 0.0)
    launch = max(one - decode, 0.0)
    return StepCost(
        launch=launch,
        decode=decode,
        context=max(far - many, 0.0) / (rows * context),
        chunk=max(whole - token * budget - launch, 0.0),
        token=token,
        pair=max(cost.seconds((0, 0), ((budget, context),)) - whole, 0.0) / (budget * context),
    )
