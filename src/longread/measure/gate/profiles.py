"""What may differ before a gate fails: named limits, each with its reason, and profiles of them.

Knows no measurement. A profile file names a profile to start from and the limits that differ.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from longread.spec.errors import ConfigError

NAMES = ("lossless", "fp8-class", "int4-class")
SCOREBOARD = "the README of llama.cpp's tools/perplexity, LLaMA 3 8B scoreboard"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: its value in each built-in profile, in the order of NAMES, what range a value may have, and why."""

    name: str
    level: int
    values: tuple[float, float, float]
    most: float
    unit: str
    what: str
    reason: str


LIMITS = (
    Limit(
        "logprob_gap",
        0,
        (1e-3, 0.25, 0.25),
        10.0,
        "nats",
        "largest difference of a told log-probability when the same request is made cold, warm or beside others, of a "
        "server that says that it computes in float32; in level 1, what counts as a tie",
        "a server against itself: float32 stays below 1e-4 (measured on this project's engine: 3e-5). 0 asks for equal "
        "bits. The lossy profiles' value is for ties, which quantisation makes",
    ),
    Limit(
        "moved",
        0,
        (0.2, 0.2, 0.2),
        1.0,
        "share",
        "largest share of the probability that goes to other tokens at one position when the same request is made "
        "cold, warm or beside others, of a server that computes in bfloat16 or FP8, or does not say. Answers may part "
        "where such a share explains it",
        "sums of another order are rounded otherwise, which is no property of a profile. Logits that part by 0.8 nats "
        "move at most tanh(0.8 / 4) = 0.2, where two tokens are about equally likely; this project's engine on an "
        "H200 parted the likeliest 20 by up to 1.1, far in the tail, and 0.000014 moved. 0 asks for none, as "
        "batch-invariant kernels give",
    ),
    Limit(
        "moved_mean",
        0,
        (0.02, 0.02, 0.02),
        1.0,
        "share",
        "the same on average over all positions",
        "a position whose best token has probability P moves by P (1 - P) times what its logits part: 0.1 times 0.2 "
        "nats where answers are unsure of much. Measured: 1e-6 sound, 0.13 with a stale ring, 0.25 with rows of 4 bits",
    ),
    Limit(
        "tail_gap",
        0,
        (3.0, 3.0, 3.0),
        100.0,
        "nats",
        "largest difference of a told log-probability, of the same servers",
        "the 20 likeliest tokens reach e^-25, where rounding parts logits as everywhere: 0.3 nats in bfloat16 on a "
        "CPU, 1.1 on an H200, 1.6 with noise of 1e-4 in each product. A window that is one position old: 8.5 to 22",
    ),
    Limit(
        "kl_mean",
        1,
        (5e-4, 0.01, 0.05),
        10.0,
        "nats",
        "mean KL(base || candidate) at each context length",
        f"{SCOREBOARD}: q8_0 0.0014, q6_K 0.0057, q5_K_M 0.011, q4_K_M 0.031. Lossless is below half of "
        "the best of them; the others lie between the steps that nobody notices and those that people do",
    ),
    Limit(
        "kl_noise",
        1,
        (10, 0, 0),
        1e6,
        "times",
        "how many times the base's own noise (the same asks again, cold and in another order) mean KL may be; at least "
        "kl_floor and at most kl_mean counts. 0: the noise is not looked at",
        "what is lossless cannot be told from the base itself. Other batch shapes move it, so a repetition shows its "
        "order of magnitude and not more",
    ),
    Limit(
        "kl_floor",
        1,
        (1e-8, 1e-8, 1e-8),
        1.0,
        "nats",
        "mean KL below which kl_noise asks no more",
        "the bundled readers in float32: other chunk sizes move it by less than 1e-12; a log-probability that moves by "
        "1e-4 moves it by 1e-8 at most",
    ),
    Limit(
        "flips",
        1,
        (0.01, 0.05, 0.10),
        1.0,
        "share",
        "positions where another token is the most probable (ties within logprob_gap left out)",
        f"{SCOREBOARD}: q8_0 2.3 %, q6_K 4.0 %, q4_K_M 8.1 %. Answers flip with them (arXiv 2407.09141)",
    ),
    Limit(
        "nll",
        1,
        (0.005, 0.02, 0.10),
        10.0,
        "nats",
        "mean rise of the surprise at the base's own text",
        f"{SCOREBOARD}, rise of ln PPL: q8_0 0.001, q6_K 0.006, q4_K_M 0.028",
    ),
    Limit(
        "needle_drop",
        2,
        (0.025, 0.05, 0.10),
        1.0,
        "share",
        "net share of questions that were answered right by the base and are not any more",
        "a choice: one in 40, 20 and 10; 192 questions without a loss show the first",
    ),
    Limit(
        "needle_floor",
        2,
        (0.856, 0.856, 0.856),
        1.0,
        "share",
        "right answers where there is no base to compare with",
        "RULER (arXiv 2404.06654) calls a context length effective while the score is above 85.6 %",
    ),
    Limit(
        "exact_drop",
        3,
        (0.025, 0.05, 0.10),
        1.0,
        "share",
        "net loss of exact matches with the references against the base",
        "a choice, as needle_drop",
    ),
    Limit(
        "rouge_drop",
        3,
        (0.01, 0.03, 0.06),
        1.0,
        "points of F1",
        "loss of ROUGE-L F1 against the base",
        "a choice: an answer of 30 words that loses one word loses 0.02",
    ),
    Limit(
        "repetition",
        3,
        (0.025, 0.025, 0.05),
        1.0,
        "share",
        "answers that go in circles beyond those of the base",
        "a choice; a model that loops is broken, whatever its format saves, so fp8-class has no more than lossless",
    ),
    Limit(
        "truncation",
        3,
        (0.025, 0.025, 0.05),
        1.0,
        "share",
        "answers that do not end by themselves beyond those of the base",
        "a choice, as repetition",
    ),
    Limit(
        "critical_changes",
        4,
        (0, 0, 0),
        1_000_000,
        "values",
        "critical values (numbers, units, names, negations, parties, doses) that differ from the base or the truth",
        "one changed dose is one too many: no mean makes up for it",
    ),
    Limit(
        "critical_repairs",
        4,
        (0, 1_000_000, 1_000_000),
        1_000_000,
        "values",
        "critical values that the base had wrong and the candidate has right",
        "what is lossless changes nothing, not even for the better; elsewhere they are told and not held against it",
    ),
    Limit(
        "critical_bound",
        4,
        (0.05, 0.05, 0.05),
        1.0,
        "share",
        "what the share of changed critical values may still be, at 95 %, after none was seen",
        "73 probes without a change show 5 %; set 0.01 for 381 probes where more is at stake",
    ),
)
BY_NAME = {limit.name: limit for limit in LIMITS}


@dataclass(frozen=True, slots=True)
class Profile:
    """The limits by name. ``origin``: "built in", or the file that it was read from."""

    name: str
    limits: Mapping[str, float]
    origin: str = "built in"

    def __getitem__(self, name: str) -> float:
        return self.limits[name]

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {"name": self.name, "origin": self.origin, "limits": dict(self.limits)}


def built_in(name: str) -> Profile:
    """Raises ConfigError for another name."""
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"profile {name!r} is not one of {', '.join(NAMES)}, nor a .toml file{hint}")
    at = NAMES.index(name)
    return Profile(name, {limit.name: float(limit.values[at]) for limit in LIMITS})


def profile_of(text: str) -> Profile:
    """A built-in profile by name, or one in a TOML file by its path. Raises ConfigError."""
    return read(Path(text)) if text.endswith(".toml") else built_in(text)


def read(path: Path) -> Profile:
    """``base = "fp8-class"``, ``name = "..."`` (default: the file's) and a table ``[limits]``. Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"profile {path}: cannot be read: {error}") from error
    unknown = set(data) - {"base", "name", "limits"}
    if unknown:
        raise ConfigError(f"profile {path}: unknown key {min(unknown)!r}; it may have base, name and [limits]")
    base, name, own = data.get("base"), data.get("name", path.stem), data.get("limits", {})
    if not isinstance(base, str) or base not in NAMES:
        raise ConfigError(f"profile {path}: base must be one of {', '.join(NAMES)}, got {base!r}")
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or not isinstance(own, dict):
        raise ConfigError(f"profile {path}: name must be a text that prints, and limits a table")
    limits = dict(built_in(base).limits)
    for key, value in own.items():
        if key not in BY_NAME:
            near = get_close_matches(key, BY_NAME, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"profile {path}: unknown limit {key!r}{hint} (all: {', '.join(BY_NAME)})")
        most = BY_NAME[key].most
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= most:
            raise ConfigError(f"profile {path}: {key} must lie in 0..{most:g}, got {value!r}")
        limits[key] = float(value)
    return Profile(name, limits, str(path))
