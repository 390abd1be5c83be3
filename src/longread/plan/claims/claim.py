"""What a claim says, and what is found about it. Data only."""

from dataclasses import dataclass
from typing import Literal

from longread.plan.deployment import EngineName, ExpertFormat, Strategy, Tier
from longread.plan.estimate import Estimate
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

Outcome = Literal["impossible", "only if", "plausible", "conservative"]
OUTCOMES: tuple[Outcome, ...] = ("impossible", "only if", "plausible", "conservative")
State = Literal["cold", "warm"]
RateOf = Literal["output", "input"]
RateScope = Literal["total", "user", "gpu"]


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Tokens/s of output or of input (prefill); of the whole machine, of each stream, or a card. None: not said."""

    value: float
    of: RateOf = "output"
    scope: RateScope | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What is claimed; None where nothing is said of it.

    Several ``specs`` or ``hardware``: the words fit each of them, and each is judged. Times in seconds. ``cached``: the
    share (0..1) of the input that was read before; ``suffix``: the tokens that were not. ``together``: requests arrive
    at the same moment; ``shared``: they are about one document; ``ids``: token ids come in, no text. ``understood`` and
    ``assumed``: in words, for the reader.
    """

    specs: tuple[ModelSpec, ...]
    hardware: tuple[Hardware, ...]
    text: str = ""
    isl: int | None = None
    osl: int | None = None
    ttft: float | None = None
    tpot: float | None = None
    rate: TokenRate | None = None
    concurrency: int | None = None
    cached: float | None = None
    suffix: int | None = None
    state: State | None = None
    tier: Tier | None = None
    engine: EngineName | None = None
    strategy: Strategy | None = None
    experts: ExpertFormat | None = None
    cache: str | None = None
    together: bool | None = None
    shared: bool | None = None
    ids: bool | None = None
    percentile: str | None = None
    understood: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def streams(self) -> int:
        return self.concurrency or 1

    @property
    def new_tokens(self) -> int | None:
        """Tokens that nobody read before, where the claim says so."""
        if self.suffix is not None:
            return self.suffix
        if self.cached is None or self.isl is None:
            return None
        return max(self.isl - int(self.isl * self.cached), 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the claim under one reading of it.

    Findings of one ``group`` are readings of the same words: the best of them counts. ``claimed``, ``floor`` and
    ``predicted`` in ``unit``: seconds, tokens/s or contexts. ``floor``: the least time, or the highest rate or number,
    that physics allows. ``reasons`` say why the outcome; ``arithmetic`` shows it; ``conditions`` are what must hold for
    it to be true.
    """

    group: str
    aspect: str
    outcome: Outcome
    claimed: float
    unit: str
    floor: float
    predicted: Estimate | None
    reasons: tuple[str, ...]
    arithmetic: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """The claim for one model on one machine. ``outcome``: of all statements together, each in its best reading."""

    model: str
    hardware: str
    outcome: Outcome
    headline: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def finding(self, aspect: str) -> Finding:
        """The one finding of this name. Raises ``KeyError``."""
        for found in self.findings:
            if found.aspect == aspect:
                return found
        raise KeyError(f"no finding {aspect!r} (there are: {', '.join(f.aspect for f in self.findings)})")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything about a claim. ``outcome``: that of the case that suits the claim best."""

    claim: Claim
    outcome: Outcome
    cases: tuple[Case, ...]
    other_meanings: tuple[str, ...]
    measurement: tuple[str, ...]
    questions: tuple[str, ...]


def best(outcomes: list[Outcome]) -> Outcome:
    return max(outcomes, key=OUTCOMES.index)


def worst(outcomes: list[Outcome]) -> Outcome:
    return min(outcomes, key=OUTCOMES.index)
