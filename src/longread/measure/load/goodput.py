"""Goodput: requests that met every latency that was asked for.

Knows vLLM's ``--goodput`` syntax and one outcome's latencies. Must not know percentiles or files.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longread.measure.intervals import wilson
from longread.measure.load.outcome import Outcome
from longread.spec.errors import ConfigError

SLO_NAMES = ("ttft", "ttfat", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Goodput:
    """``good`` of ``counted`` requests met all; cancelled ones are not counted, failed ones are and are not good.
    ``unknown``: requests of which it cannot be said (no token count); while there are any, ``rate`` (requests/s) and
    ``fraction`` are None.
    """

    slos: Mapping[str, float]
    good: int
    counted: int
    unknown: int
    rate: float | None
    fraction: float | None
    interval: tuple[float, float] | None


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` as milliseconds by name. Raises ConfigError for anything else."""
    found: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if not colon:
            raise ConfigError(f"--goodput {word[:60]!r}: an SLO is written NAME:MILLISECONDS, as ttft:200")
        if name not in SLO_NAMES:
            near = difflib.get_close_matches(name, SLO_NAMES, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--goodput: no SLO is called {name[:60]!r}{hint} (all: {', '.join(SLO_NAMES)})")
        if name in found:
            raise ConfigError(f"--goodput names {name} twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {name}: {value[:60]!r} is not a number of milliseconds") from None
        if not 0 < found[name] < math.inf:
            raise ConfigError(f"--goodput {name}: {value[:60]} ms; it must be above 0 and have an end")
    return found


def goodput(outcomes: Sequence[Outcome], slos: Mapping[str, float], duration: float) -> Goodput:
    verdicts = [met(each, slos) for each in outcomes if each.status != "cancelled"]
    good, unknown = verdicts.count(True), verdicts.count(None)
    known = not unknown and bool(verdicts)
    return Goodput(
        slos,
        good,
        len(verdicts),
        unknown,
        good / duration if known and duration > 0 else None,
        good / len(verdicts) if known else None,
        wilson(good, len(verdicts)) if known else None,
    )


def met(outcome: Outcome, slos: Mapping[str, float]) -> bool | None:
    """None: not known. A TPOT asks nothing of an answer of at most one token, as in vLLM's bench."""
    if outcome.status != "ok":
        return False
    unknown = False
    for name, most in slos.items():
        if name == "tpot" and outcome.output_tokens is not None and outcome.output_tokens <= 1:
            continue
        value: float | None = getattr(outcome, name)
        if value is None:
            unknown = True
        elif value * 1000 > most:
            return False
    return None if unknown else True
