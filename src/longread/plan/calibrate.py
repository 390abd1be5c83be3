"""How much slower engines are than their kernels: factors learnt from runs, narrow where siblings were measured.

A run's factor is measured / raw time. Factors are averaged in logarithms over a tree (phase, kind of attention, kind
of card, engine, deployment); a node's mean is drawn to its parent's by how much nodes of that depth differ (empirical
Bayes), so a deployment that nobody ran gets its relatives' mean and a wide interval. Cards of one kind share a
deployment's factor: on the faster of two it is never slower. Intervals are meant to hold 95 %: Student's t times the
spread that is left at each depth below the match; runs of one deployment that disagree more than runs of one deployment
usually do, widen its own.

What leave-one-out does not show: the constants of ``hand_set`` were set by hand on some of the same runs, and so were
the readings of what sources leave open (``unknown`` in the table). They stay fixed when a run is left out.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from longread.plan.bench_file import read_runs
from longread.plan.communication import NETWORK_START
from longread.plan.deployment import Deployment
from longread.plan.efficiency import ISSUE_ONCE, ISSUE_SECONDS, LAUNCH_SECONDS, STREAM_SHARE, WEIGHT_ONLY_SHARE
from longread.plan.estimate import Estimate, Provenance
from longread.plan.frontend import front_end
from longread.plan.ops import expert_format
from longread.plan.published import Run, published_runs
from longread.plan.raw import decode_step, prefill, prefill_rate, request_seconds
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

Phase = Literal["prefill", "decode", "warm"]
Place = tuple[str, ...]
DEPTHS = ("phase", "attention", "card", "engine", "deployment")
_H20 = re.compile(r"H20\b")  # H20-96, H20-141; not H200, which is seven times as fast
WARM_TOKENS = 512  # up to so many new tokens a request is warm: none of the runs behind that factor had more than 32
# Spread (log) that is never assumed smaller, by depth: two kinds that happen to agree prove little. Assumed.
_LEAST = {1: 0.25, 2: 0.20, 3: 0.15, 4: 0.12, 5: 0.15}
_WITHIN_LEAST = 0.06
# Student's t for 95 % by degrees of freedom, but one degree has 90 %'s: 95 % (12.7) would be a factor of 100.
_T = {1: 6.31, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}


@dataclass(frozen=True, slots=True)
class Scale:
    """What to multiply a raw time with."""

    low: float
    centre: float
    high: float
    provenance: Provenance
    source: str

    def apply(self, raw: float, floor: float = 0.0) -> Estimate:
        """The estimate of ``raw`` seconds; nothing is predicted below the physical ``floor``."""
        ends = [max(raw * end, floor) for end in (self.low, self.centre, self.high)]
        return Estimate(ends[0], ends[1], ends[2], self.provenance, self.source, floor)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's place in the tree and its log factor. ``here``: measured by the user's own runs."""

    path: Place
    log: float
    here: bool
    source: str


def phase(new: int, cached: int) -> Phase:
    """Whose factors a prompt of ``new`` tokens behind ``cached`` ones has."""
    return "warm" if cached and new <= WARM_TOKENS else "prefill"


def path_of(d: Deployment, phase: Phase, variant: str = "") -> Place:
    """The groups of a prediction, widest first, and the card within its kind."""
    if d.spec.shared_kv is not None:
        attention = "v4.1"
    elif d.spec.compressed is not None:
        attention = "v4"
    else:
        attention = "sparse MLA" if d.spec.indexer is not None else "dense MLA"
    card = d.hardware.card
    kind = "H20" if _H20.match(card.name) else card.architecture
    strategy = replace(d.strategy, replicas=1).label
    own = "/".join([d.spec.label, strategy, expert_format(d), variant])
    return (phase, attention, kind, d.engine, own, card.name)


class Factors:
    """The tree of mean log factors over some runs."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)
        self._by_path: dict[Place, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            for depth in range(len(DEPTHS) + 1):
                self._by_path[sample.path[:depth]].append(sample)
        self._plain = {path: self._plain_mean(path) for path in sorted(self._by_path, key=len, reverse=True)}
        self._within = self._usual_spread()
        self._spread = {depth: self._spread_at(depth) for depth in range(1, len(DEPTHS) + 1)}
        self._means: dict[Place, float] = {}
        self._scales: dict[Place, Scale] = {}
        for path in sorted(self._by_path, key=len):
            self._means[path] = self._shrunk(path)

    @property
    def deployments(self) -> int:
        """Groups at the end of the tree: no more means than these are free."""
        return sum(1 for path in self._means if len(path) == len(DEPTHS))

    @property
    def runs(self) -> int:
        return len(self._samples)

    def scale(self, path: Place) -> Scale:
        """The factor for a prediction at ``path``, from its deepest group with runs."""
        if path not in self._scales:
            self._scales[path] = self._scale(path)
        return self._scales[path]

    def _scale(self, path: Place) -> Scale:
        if not self._samples:
            return Scale(0.7, 1.3, 3.0, "roofline", "no run to compare with: kernels and links, losses assumed")
        depth = max(n for n in range(len(DEPTHS) + 1) if path[:n] in self._by_path)
        node = path[:depth]
        members = self._by_path[node]
        if depth == len(DEPTHS):
            step, freedom = self._inside(node)
            variance, count = step * step, len(members)
        else:
            below = [self._spread[level][0] for level in range(depth + 1, len(DEPTHS) + 1)] + [self._within[0]]
            step, freedom = self._spread[depth + 1]
            variance, count = sum(s * s for s in below), len({s.path[: depth + 1] for s in members})
        reach = _student(freedom) * math.sqrt(variance + step * step / count)
        mean = self._means[node]
        provenance, words = self._origin(depth, members, path[len(DEPTHS) :])
        return Scale(math.exp(mean - reach), math.exp(mean), math.exp(mean + reach), provenance, words)

    def _origin(self, depth: int, members: list[Sample], card: Place) -> tuple[Provenance, str]:
        same = [s for s in members if s.path[len(DEPTHS) :] == card]
        found = same if depth == len(DEPTHS) and same else members
        sources = sorted({s.source for s in found})
        words = f"{len(found)} run{'s' if len(found) > 1 else ''} of the same {DEPTHS[depth - 1] if depth else 'kind'}"
        if depth == len(DEPTHS) and not same:
            words += f" on {', '.join(sorted({s.path[-1] for s in members}))}"
        words += f": {'; '.join(sources[:3])}" + ("; ..." if len(sources) > 3 else "")
        logs = [s.log for s in found]
        if depth == len(DEPTHS) and max(logs) - min(logs) > math.log(2):
            words += f" (they lie {math.exp(min(logs)):.1f} to {math.exp(max(logs)):.1f} times above kernels and links)"
        if depth == len(DEPTHS) and same:
            return ("measured here" if all(s.here for s in same) else "measured elsewhere"), words
        return ("interpolated" if depth >= 3 else "roofline"), words

    def _inside(self, leaf: Place) -> tuple[float, int]:
        """Spread of one deployment's runs, and degrees of freedom: the usual one, or its own where that is larger."""
        members = self._by_path[leaf]
        if len(members) > 1:
            own = math.sqrt(sum((s.log - self._plain[leaf]) ** 2 for s in members) / (len(members) - 1))
            if own > self._within[0]:
                return own, len(members) - 1
        return self._within

    def _usual_spread(self) -> tuple[float, int]:
        """Pooled spread of the runs of one deployment, and its degrees of freedom."""
        square, freedom = 0.0, 0
        for path, members in self._by_path.items():
            if len(path) == len(DEPTHS) and len(members) > 1:
                square += sum((s.log - self._plain[path]) ** 2 for s in members)
                freedom += len(members) - 1
        spread = math.sqrt(square / freedom) if freedom else _WITHIN_LEAST
        return max(spread, _WITHIN_LEAST), max(freedom, 1)

    def _plain_mean(self, path: Place) -> float:
        """Mean of the child groups' means, so that a long series does not outvote others."""
        members = self._by_path[path]
        if len(path) == len(DEPTHS):
            return fmean(s.log for s in members)
        children: dict[Place, list[Sample]] = defaultdict(list)
        for sample in members:
            children[sample.path[: len(path) + 1]].append(sample)
        return fmean(self._leaf_mean(group, len(path) + 1) for group in children.values())

    def _leaf_mean(self, members: list[Sample], depth: int) -> float:
        if depth == len(DEPTHS):
            return fmean(s.log for s in members)
        children: dict[Place, list[Sample]] = defaultdict(list)
        for sample in members:
            children[sample.path[: depth + 1]].append(sample)
        return fmean(self._leaf_mean(group, depth + 1) for group in children.values())

    def _spread_at(self, depth: int) -> tuple[float, int]:
        """How far groups of ``depth`` lie from their parents' means, pooled over parents with several children."""
        square, freedom = 0.0, 0
        children: dict[Place, list[float]] = defaultdict(list)
        for path, mean in self._plain.items():
            if len(path) == depth:
                children[path[:-1]].append(mean)
        for means in children.values():
            if len(means) > 1:
                middle = fmean(means)
                square += sum((m - middle) ** 2 for m in means)
                freedom += len(means) - 1
        spread = math.sqrt(square / freedom) if freedom else 0.0
        return max(spread, _LEAST[depth]), max(freedom, 1)

    def _shrunk(self, path: Place) -> float:
        """The node's mean, drawn to its parent's by the ratio of the spread inside to the spread between."""
        if not path:
            return self._plain[path]
        depth, members = len(path), self._by_path[path]
        if depth == len(DEPTHS):
            inside, count = self._inside(path)[0], len(members)
        else:
            inside, count = self._spread[depth + 1][0], len({s.path[: depth + 1] for s in members})
        weight = inside**2 / self._spread[depth][0] ** 2
        return (count * self._plain[path] + weight * self._means[path[:-1]]) / (count + weight)


def _student(freedom: int) -> float:
    return _T[max(k for k in _T if k <= freedom)]


def raw_value(run: Run) -> float:
    """The run's metric by kernels and links alone, in its own unit."""
    d = run.deployment
    if run.metric == "tpot":
        return sum(decode_step(d, run.batch, run.isl).values())
    if run.metric == "prefill":
        return prefill_rate(d, run.isl)
    if run.metric == "throughput":
        return run.osl / sum(request_seconds(d, run.isl, run.cached, run.osl, run.concurrency))
    parts = front_end(d, run.isl, text=run.text) if run.cached else {}
    return sum(parts.values()) + sum(prefill(d, run.isl - run.cached, run.cached, groups=run.groups).values())


def phase_of(run: Run) -> Phase:
    """Which factors a run informs. A throughput of short prompts is decode."""
    if run.metric in ("tpot", "throughput"):
        return "decode"
    return phase(run.isl - run.cached, run.cached)


def sample_of(run: Run) -> Sample:
    raw, value = raw_value(run), run.value
    slower = value / raw if run.metric in ("ttft", "tpot") else raw / value
    return Sample(path_of(run.deployment, phase_of(run), run.variant), math.log(slower), run.here, run.source)


@cache
def published_samples() -> tuple[tuple[Run, Sample], ...]:
    """Every published run with its sample, fitted or not."""
    return tuple((run, sample_of(run)) for run in published_runs())


@cache
def default_factors() -> Factors:
    """Factors of the published runs that may calibrate."""
    return Factors(sample for run, sample in published_samples() if run.fit)


@dataclass(frozen=True, slots=True)
class Held:
    """One run against its prediction by the other runs. ``predicted`` in the run's unit."""

    run: Run
    predicted: Estimate

    @property
    def error(self) -> float:
        """Relative error of the centre."""
        return self.predicted.centre / self.run.value - 1

    @property
    def holds(self) -> bool:
        return self.predicted.holds(self.run.value)

    @property
    def reason(self) -> str:
        """Why the interval may miss the run: what forbids a fair comparison, or what the source leaves open."""
        if self.holds:
            return ""
        return self.run.why or f"not known: {self.run.unknown}"


def predict(run: Run, factors: Factors, raw: float | None = None) -> Estimate:
    """The run's metric by ``factors``, in its own unit."""
    raw = raw_value(run) if raw is None else raw
    scale = factors.scale(path_of(run.deployment, phase_of(run), run.variant))
    if run.metric in ("ttft", "tpot"):
        return scale.apply(raw)
    return Estimate(raw / scale.high, raw / scale.centre, raw / scale.low, scale.provenance, scale.source)


def leave_one_out(*, by: Literal["run", "deployment"] = "run") -> tuple[Held, ...]:
    """Each published run predicted from the others; ``by`` deployment leaves out all runs of its deployment."""
    pairs = published_samples()
    held = []
    for run, sample in pairs:
        others = [
            other
            for row, other in pairs
            if row.fit
            and row is not run
            and not (by == "deployment" and other.path[: len(DEPTHS)] == sample.path[: len(DEPTHS)])
        ]
        factor = math.exp(sample.log)
        raw = run.value / factor if run.metric in ("ttft", "tpot") else run.value * factor
        held.append(Held(run, predict(run, Factors(others), raw)))
    return tuple(held)


def hand_set() -> tuple[str, ...]:
    """Constants that were set by hand on runs of the table, and on which; no run that is left out changes them."""
    own, far = "own runs on one H200", "R1 on two nodes of H100"
    return (
        f"share of the bandwidth in passes over activations {STREAM_SHARE:g} ({own})",
        f"share of the BF16 peak with 4-bit weights {WEIGHT_ONLY_SHARE:g} ({own})",
        f"gap between kernels of a graph {LAUNCH_SECONDS * 1e6:g} us ({own})",
        f"issue of a prefill step's kernels {ISSUE_ONCE * 1e3:g} ms once ({own})",
        f"{ISSUE_SECONDS['v4'] * 1e3:g} ms a V4 layer ({own})",
        f"{ISSUE_SECONDS['mla'] * 1e3:g} ms an MLA layer ({own}; {far})",
        f"start of a collective over the network {NETWORK_START * 1e6:g} us ({far})",
    )


def median_error(held: Sequence[Held]) -> float:
    """Median absolute relative error of the centres of the runs that calibrate."""
    return median(abs(h.error) for h in held if h.run.fit)


@dataclass(frozen=True, slots=True)
class Compared:
    """One own run: predicted by published runs alone, by the own runs too, and by the own runs without this one."""

    run: Run
    before: Estimate
    after: Estimate
    held_out: Estimate

    def line(self) -> str:
        """Measurement and predictions in one line, times in milliseconds."""
        of = self.run.value
        shown = " -> ".join(
            f"{name} {e.centre * 1e3:,.4g} ({e.centre / of - 1:+.0%}, {e.low * 1e3:,.4g}-{e.high * 1e3:,.4g})"
            for name, e in (("before", self.before), ("after", self.after), ("left out", self.held_out))
        )
        return f"{self.run.label}: measured {of * 1e3:,.4g} ms; {shown}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors with the own runs in them, and what they change."""

    factors: Factors
    rows: tuple[Compared, ...]

    def error(self, which: Literal["before", "after", "held_out"]) -> float:
        """Median absolute relative error of the centres."""
        return median(abs(getattr(row, which).centre / row.run.value - 1) for row in self.rows)


def calibrate(
    files: Sequence[Path], *, hardware: Hardware | None = None, specs: Mapping[str, ModelSpec] | None = None
) -> Calibration:
    """Fit the factors to result files of ``longread bench``. Raises ``ConfigError`` as ``bench_file.read_runs`` does.

    ``hardware``: the machine they were measured on (a file from ``longread probe``), where the files do not say.
    """
    if not files:
        raise ConfigError("no result file to calibrate with")
    runs = [run for file in files for run in read_runs(file, hardware=hardware, specs=specs)]
    known = [sample for run, sample in published_samples() if run.fit]
    own = [sample_of(run) for run in runs]
    covered = {sample.path for sample in own}
    known = [sample for sample in known if sample.path not in covered]  # own runs replace others' of the same kind
    before, after, rows = default_factors(), Factors([*known, *own]), []
    for index, run in enumerate(runs):
        raw = run.value / math.exp(own[index].log)
        without = Factors([*known, *own[:index], *own[index + 1 :]])
        rows.append(Compared(run, *(predict(run, f, raw) for f in (before, after, without))))
    return Calibration(after, tuple(rows))
