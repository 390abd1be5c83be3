"""What a server may do under pressure before a test fails: named limits, each with its default and the reason for it.

Knows no measurement. Limits come from a TOML file (``name = value``) and from ``name=value`` on the command line, which
wins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from longread.measure.located_toml import read
from longread.spec.errors import ConfigError

COLD, CONTEXT, MIXED, REASONING, RECOVERY = "cold", "context", "mixed", "reasoning", "recovery"
TESTS = (COLD, CONTEXT, MIXED, REASONING, RECOVERY)
TITLES = {
    COLD: "cold start",
    CONTEXT: "long context",
    MIXED: "mixed load",
    REASONING: "reasoning stability",
    RECOVERY: "failure recovery",
}


@dataclass(frozen=True, slots=True)
class Limit:
    name: str
    test: str
    default: float
    most: float
    unit: str
    what: str
    reason: str


LIMITS = (
    Limit(
        "cold_start_s",
        COLD,
        600,
        86_400,
        "s",
        "time from the process's start to its first answer, the slowest start",
        "a choice: longer than that and a restart is an outage that somebody must be told of",
    ),
    Limit(
        "first_request_stall_s",
        COLD,
        2,
        3600,
        "s",
        "by how much the first request of a shape takes longer than the next ones of it, the worst start",
        "a choice: what is compiled or allocated then is paid by a user; 2 s is what an interactive one notices",
    ),
    Limit(
        "leak_bytes_per_request",
        CONTEXT,
        65_536,
        2**40,
        "bytes",
        "growth of the server's own memory a long request, after warming up",
        "64 KiB at a request each 5 s are 1 GiB a day",
    ),
    Limit(
        "gpu_leak_bytes_per_request",
        CONTEXT,
        65_536,
        2**40,
        "bytes",
        "the same of GPU memory",
        "as leak_bytes_per_request; engines allocate their cache at the start, so nothing should grow",
    ),
    Limit(
        "ttft_growth",
        CONTEXT,
        0.2,
        1000,
        "share",
        "rise of TTFT from the first long request to the last, all alike",
        "a choice: a fifth is more than clocks and temperature explain",
    ),
    Limit(
        "context_failures",
        CONTEXT,
        0,
        1e6,
        "requests",
        "long requests that were not answered to their end",
        "what fits the server's own limit is to be answered",
    ),
    Limit(
        "short_ttft_p99_ms",
        MIXED,
        2000,
        1e9,
        "ms",
        "99th percentile of short requests' TTFT beside long documents",
        "a choice: an interactive first token; set it to what your users were promised",
    ),
    Limit(
        "decode_stall_p99_ms",
        MIXED,
        500,
        1e9,
        "ms",
        "99th percentile over answers of the longest pause between two events while a long prompt is read",
        "a choice: a reader at 5 words a second waits for two or three of them",
    ),
    Limit(
        "long_slowdown",
        MIXED,
        3,
        1e6,
        "times",
        "TTFT of long documents beside short requests, against alone",
        "a choice: a fair share is given to short ones, and a document still comes to its end",
    ),
    Limit(
        "starve_s",
        MIXED,
        60,
        86_400,
        "s",
        "a short request without its first token for longer is starved",
        "a choice: common HTTP proxies give up after 60 s without a byte",
    ),
    Limit("starved", MIXED, 0, 1e6, "requests", "short and long requests that were starved, or not answered", "none"),
    Limit(
        "reasoning_share_min",
        REASONING,
        0.95,
        1,
        "share",
        "answers with reasoning, at least; 0: not judged",
        "a choice: what thinks at times only cannot be relied on; 0 for a server that is not meant to",
    ),
    Limit(
        "empty_share",
        REASONING,
        0.02,
        1,
        "share",
        "answers without any text after the reasoning",
        "a choice; 189 answers without one show it",
    ),
    Limit(
        "truncated_share",
        REASONING,
        0.05,
        1,
        "share",
        "answers that do not end by themselves",
        "a choice; 73 answers without one show it. More max tokens where thinking needs them",
    ),
    Limit(
        "loop_share",
        REASONING,
        0.025,
        1,
        "share",
        "answers or reasonings that go in circles",
        "as the gate's repetition",
    ),
    Limit(
        "length_drift",
        REASONING,
        0.25,
        100,
        "share",
        "change of the output's length over the run, either way",
        "a choice: the asks are drawn alike, so a server that does not change gives the same in both halves",
    ),
    Limit(
        "share_drift", REASONING, 0.10, 1, "share", "change of the share with reasoning between the halves", "a choice"
    ),
    Limit(
        "recovery_s",
        RECOVERY,
        120,
        86_400,
        "s",
        "from the kill to the next answer",
        "a choice; of a server that loads weights from a disk set it to what cold_start_s says",
    ),
    Limit(
        "hang_s",
        RECOVERY,
        30,
        86_400,
        "s",
        "a request in flight without its end so long after the kill hangs",
        "a choice: a client must learn that its answer will not come",
    ),
    Limit("hung", RECOVERY, 0, 1e6, "requests", "requests in flight that hung", "none"),
    Limit(
        "changed_answers",
        RECOVERY,
        0,
        1e6,
        "answers",
        "greedy answers that differ after the recovery",
        "a restart changes no weights. Answers that differ before the kill already are left out",
    ),
    Limit(
        "left_processes",
        RECOVERY,
        0,
        1000,
        "processes",
        "what the killed process had started and did not end with it",
        "they hold GPU memory that the next start needs",
    ),
    Limit(
        "cached_share_after_min",
        RECOVERY,
        0,
        1,
        "share",
        "share of a document's tokens that come from the cache after the recovery, at least; 0: told only",
        "only a store outlives a process; set it where the server has one",
    ),
)
BY_NAME: Mapping[str, Limit] = {limit.name: limit for limit in LIMITS}


def limits_of(file: Path | None, given: Sequence[str]) -> dict[str, float]:
    """All limits by name. Raises ConfigError for an unknown name (with the nearest) or a value outside its range."""
    found = {limit.name: limit.default for limit in LIMITS}
    if file is not None:
        located = read(file)
        located.only((), located.data, BY_NAME)
        for name, value in located.data.items():
            try:
                found[name] = _checked(name, value)
            except ConfigError as error:
                raise located.error((name,), str(error)) from None
    for text in given:
        name, sign, written = (part.strip() for part in text.partition("="))
        if not sign:
            raise ConfigError(f"--limit {text[:60]!r}: it is written NAME=VALUE")
        if name not in BY_NAME:
            near = get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--limit: no limit is called {name[:60]!r}{hint} (all: {', '.join(BY_NAME)})")
        try:
            value = float(written)
        except ValueError:
            raise ConfigError(f"--limit {name}: {written[:60]!r} is not a number") from None
        found[name] = _checked(name, value)
    return found


def _checked(name: str, value: object) -> float:
    most = BY_NAME[name].most
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value <= most
    ):
        raise ConfigError(f"{name} must be a number from 0 to {most:g}, not {value!r:.60}")
    return float(value)
