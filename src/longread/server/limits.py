"""How much work a server takes on and how long it may take: the limits that may change while it serves.

Knows: names, ranges, a TOML file. Must not know: engines, requests. Names are vLLM's where vLLM has the limit.
"""

import difflib
import math
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

DAY = 86400
LEAST_BUFFER = 256
MOST = 10**12  # of any count: more is a slip, and numbers without end break sums
MAX_FILE_BYTES = 8192  # nested names of a larger one could cost gigabytes to read
TIMEOUTS = ("queue_timeout", "ttft_timeout", "request_timeout")  # of an accepted request, from then on
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NONE = ("none", "off")


@dataclass(frozen=True, slots=True)
class Limits:
    """Frozen; a reload makes another. None: no such limit. Times in seconds. Raises ConfigError.

    ``max_num_queued_reqs``: requests accepted beyond those that run at once (vLLM's counts those, too).
    ``max_num_queued_tokens``: once so many accepted prompt tokens of its class and above wait to be read, a request is
    refused. ``queue_timeout``: until a prompt begins to be read; ``ttft_timeout``: until the first token;
    ``request_timeout``: until the end; all from when the request was accepted. The class "ingest" has no such times:
    nobody waits for it.
    ``stream_timeout``: a client that reads nothing of what is ready for it for so long is cut off.
    ``max_stream_buffer``: so is one that leaves so many tokens of its answer untaken.
    """

    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    request_timeout: float | None = None
    stream_timeout: float | None = 60.0
    max_stream_buffer: int = 16384

    def __post_init__(self) -> None:
        if self.max_num_queued_reqs is not None and self.max_num_queued_reqs < 0:
            raise ConfigError(
                f"max_num_queued_reqs: {self.max_num_queued_reqs} is negative; 0 refuses all that cannot run at once"
            )
        if self.max_num_queued_tokens is not None and self.max_num_queued_tokens < 1:
            raise ConfigError(f"max_num_queued_tokens: {self.max_num_queued_tokens} is below 1: nothing would be taken")
        if self.max_stream_buffer < LEAST_BUFFER:
            raise ConfigError(
                f"max_stream_buffer: {self.max_stream_buffer} is below {LEAST_BUFFER} tokens: so many may come at once"
            )
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_stream_buffer"):
            if (getattr(self, name) or 0) > MOST:
                raise ConfigError(f"{name}: must be at most {MOST:,}")
        for name in (*TIMEOUTS, "stream_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= DAY:  # also refuses nan
                raise ConfigError(f"{name}: {value} is not above 0 and at most {DAY} seconds; none turns it off")


def from_mapping(values: Mapping[str, object], base: Limits | None = None) -> Limits:
    """``base`` with what is given instead: counts as numbers or "32K", times in seconds or "500ms", "none" for no
    limit; names with ``_`` or ``-``. Raises ConfigError, naming the nearest for an unknown one.
    """
    known = [field.name for field in fields(Limits)]
    changed: dict[str, object] = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown limit {given[:64]!r}; {hint}")
        changed[name] = parse_seconds(name, value) if name.endswith("_timeout") else parse_count(name, value)
    if changed.get("max_stream_buffer", LEAST_BUFFER) is None:
        raise ConfigError("max_stream_buffer: without a limit, one client that does not read could fill the memory")
    return replace(base or Limits(), **changed)  # type: ignore[arg-type]


def from_toml(path: Path, base: Limits | None = None) -> Limits:
    """The same from a file of ``name = value`` lines; what it leaves out stays as in ``base``. Raises ConfigError.

    It may be read while the server serves: a pipe, which could make it wait, is refused.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"limits {path}: must be a file of at most {MAX_FILE_BYTES:,} bytes")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, too many digits
        raise ConfigError(f"limits {path}: cannot be read: {str(error)[:200]}") from error
    try:
        return from_mapping(values, base)
    except ConfigError as error:
        raise ConfigError(f"limits {path}: {error}") from error


def parse_count(name: str, value: object) -> int | None:
    """A whole number, "32K" (32768), "32k" (32000), or "none". Raises ConfigError."""
    if isinstance(value, str):
        return None if value.strip().lower() in _NONE else parse_tokens(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: must be a whole number or none, not {str(value)[:64]!r}")
    return value


def parse_seconds(name: str, value: object) -> float | None:
    """Seconds as a number, or with a unit (us, ms, s, min, h), or "none". Raises ConfigError."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _NONE:
            return None
        unit = next((unit for unit in ("us", "ms", "min", "h", "s") if text.endswith(unit)), "")
        try:
            value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
        except ValueError:
            raise ConfigError(f"{name}: {text[:64]!r} is no time; write seconds, 500ms, 2min, or none") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: must be seconds or none, not {str(value)[:64]!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ConfigError(f"{name}: must be seconds or none, not {str(value)[:64]!r}")
    return seconds
