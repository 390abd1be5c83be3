"""The engine's options as a user gives them, and as they stand once resolved.

Names and meaning as in vLLM where vLLM has them. Both objects are frozen: ``plan.resolve`` turns one into the other
and gives a reason for everything it chose itself. Knows no machine, no model and no server.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Literal

from longread.spec.errors import ConfigError
from longread.spec.state import CacheKind

Dtype = Literal["auto", "float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8"]

_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
TOKEN_UNITS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}  # case decides, as in vLLM's options
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
AMOUNT_MAX = 2**60
TTFT_STEPS = 4
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|min)\s*", re.IGNORECASE)
_TARGET = re.compile(r"(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|min)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds, None where there is none: until the first token, and from one token to the next."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def step(self) -> float | None:
        """What a step may take: a part of the TTFT, since whoever arrives in it waits for its end."""
        return None if self.ttft is None else self.ttft / TTFT_STEPS

    def __str__(self) -> str:
        named = (("ttft", self.ttft), ("tpot", self.tpot))
        return ",".join(
            f"{name}={value:g}s" if value >= 1 else f"{name}={value * 1e3:g}ms"
            for name, value in named
            if value is not None
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may choose about an engine. None means: choose for me and tell me why.

    model: checkpoint folder. served_model_name: name in the API (None: the folder's name).
    dtype: type of weights and cache. max_model_len: prompt plus output, in tokens. max_num_seqs: requests worked on
    at once. max_num_batched_tokens: tokens of one step, i.e. the prefill chunk. kv_cache_memory_bytes: bytes for
    pages, slots and snapshots together. num_gpu_blocks_override: exactly so many pages of 256 tokens, whatever
    fits. snapshot_interval: tokens between two saved ring snapshots of a long prompt. seed: of the engine's own draws.
    store: folder of the disk store (None: none), store_size: bytes it may take. host_cache_size: bytes of main memory
    for what is evicted from the device. slo: targets that the schedule keeps its steps within ("ttft=2s,tpot=50ms").
    step_target: seconds that a step may take where slo says nothing shorter (None: any; "auto": chosen by what steps
    are measured at when the engine starts). device: what computes. kv_cache_dtype: how cached rows are kept (fp8:
    packed as DeepSeek keeps them). gpu_memory_utilization: share of the device's memory that the engine may take.
    random_weights: ``model`` is a public model's name, or a folder with a config.json, and its weights are drawn; its
    answers mean nothing. layers: with random_weights, fewer of them ("32", or "1+3": dense and MoE ones).
    """

    model: str
    served_model_name: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    snapshot_interval: int = 32768
    seed: int = 0
    store: str | None = None
    store_size: int | None = None
    host_cache_size: int | None = None
    slo: Slo | None = None
    step_target: float | Literal["auto"] | None = None
    device: DeviceChoice = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float | None = None
    random_weights: bool = False
    layers: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One value that was chosen for the user, and why."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part. ``weights`` to ``snapshots`` are allocated when the engine starts, and so is ``host_cache``;
    ``workspace`` and ``logits`` come and go with a step; ``runtime`` is the program itself; ``store_buffers`` are the
    copies that wait for the disk. On a GPU all but ``host_cache`` and ``store_buffers`` lie in its memory, and
    ``runtime`` is what CUDA and its graphs take there.
    """

    weights: int
    kv_pages: int
    kv_slots: int
    kv_snapshots: int
    workspace: int
    logits: int
    runtime: int
    host_cache: int = 0
    store_buffers: int = 0

    @property
    def kv_cache(self) -> int:
        return self.kv_pages + self.kv_slots + self.kv_snapshots

    @property
    def allocated(self) -> int:
        """What is there before the first request."""
        return self.weights + self.kv_cache + self.host_cache

    @property
    def on_device(self) -> int:
        """On a GPU: what lies in its memory at most."""
        return self.device_peak + self.runtime

    @property
    def device_peak(self) -> int:
        """On a GPU: the most that torch's allocator hands out at a time (``torch.cuda.max_memory_allocated``)."""
        return self.weights + self.kv_cache + self.workspace + self.logits

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What the engine is built from. Pages hold 256 tokens; a slot is one running sequence's rings, a snapshot one
    saved copy of a slot. ``memory`` is ``plan.memory``'s prediction for these pools; ``choices`` explains each value
    that the user did not give.
    """

    model: str
    served_model_name: str
    dtype: ComputeDtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    num_slots: int
    num_snapshots: int
    enable_prefix_caching: bool
    snapshot_interval: int
    seed: int
    memory: MemoryPlan
    choices: tuple[Choice, ...] = ()
    store: str | None = None
    store_size: int = 0
    host_cache_size: int = 0
    slo: Slo | None = None
    step_target: float | Literal["auto"] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    kv_cache: CacheKind = "model"
    random_weights: bool = False
    layers: str | None = None


def from_mapping(values: Mapping[str, object]) -> EngineOptions:
    """Options from flags or a file. Amounts may be text: "20GiB", "512MB" (bytes), "128K" (1024), "128k" (1000).

    Raises ``ConfigError``: an unknown name (the nearest valid one is given), a wrong type, or a value out of range.
    """
    known = {field.name: field for field in fields(EngineOptions)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name).replace("-", "_"), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ConfigError(f"option {name} is required")
    return EngineOptions(**{name: _READERS[name](name, value) for name, value in values.items()})  # type: ignore[arg-type]


def parse_bytes(name: str, text: str) -> int:
    """A size: "20GiB", "1.5 GB", "1048576". Raises ``ConfigError``."""
    return _amount(name, text, _BYTE_UNITS)


def parse_tokens(name: str, text: str) -> int:
    """A token count: "131072", "128K" (131072), "128k" (128000). Raises ``ConfigError``."""
    return _amount(name, text, TOKEN_UNITS)


def parse_slo(name: str, text: str) -> Slo:
    """Targets: "ttft=2s,tpot=50ms", either alone. Units: us, ms, s, min. Raises ``ConfigError``."""
    found: dict[str, float] = {}
    for part in text[:200].split(","):
        match = _TARGET.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{name}: {part[:40]!r} is no target; write ttft=2s,tpot=50ms (us, ms, s, min)")
        target = match[1].lower()
        if target in found:
            raise ConfigError(f"{name}: {target} is given twice")
        found[target] = float(match[2]) * _SECONDS[match[3].lower()]
        if not 0 < found[target] < math.inf:
            raise ConfigError(f"{name}: {target} must be above 0, not {match[2][:40]}{match[3]}")
    return Slo(**found)


def _amount(name: str, text: str, units: Mapping[str, int]) -> int:
    match = _AMOUNT.fullmatch(text[:64])
    if match is None or match[2] not in units or len(text) > 64:
        raise ConfigError(f"{name}: {text[:64]!r} is not an amount; write a number and one of {', '.join(units)[2:]}")
    value = float(match[1]) * units[match[2]] if "." in match[1] else int(match[1]) * units[match[2]]
    if value != math.floor(value):
        raise ConfigError(f"{name}: {text!r} is not a whole number")
    return int(value)


def _whole(name: str, value: object, low: int, parse: Callable[[str, str], int]) -> int:
    if isinstance(value, str):
        value = parse(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: must be a whole number, not {type(value).__name__} {str(value)[:64]!r}")
    if not low <= value <= AMOUNT_MAX:
        raise ConfigError(f"{name}: must be between {low} and 2^60, not {str(value)[:32]}")
    return value


def _count(low: int, parse: Callable[[str, str], int] = parse_tokens) -> Callable[[str, object], object]:
    return lambda name, value: _whole(name, value, low, parse)


def _auto(reader: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None or value == "auto" else reader(name, value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name}: must be a non-empty text, not {str(value)[:64]!r}")
    return value


def _one_of(*known: str) -> Callable[[str, object], object]:
    def read(name: str, value: object) -> object:
        if value not in known:
            raise ConfigError(f"{name}: {str(value)[:64]!r} is not supported; known: {', '.join(known)}")
        return value

    return read


def _share(name: str, value: object) -> float:
    if isinstance(value, str):
        text = value[:64]
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{name}: {text!r} is no number; write a share such as 0.92") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name}: must be above 0 and at most 1, not {str(value)[:64]}")
    return float(value)


def _slo(name: str, value: object) -> Slo:
    return value if isinstance(value, Slo) else parse_slo(name, _text(name, value))


def _seconds(name: str, value: object) -> float | None:
    """A duration: "100ms", or a number of seconds; "none" for no limit."""
    if value == "none":
        return None
    if isinstance(value, str):
        match = _DURATION.fullmatch(value[:64])
        if match is None:
            raise ConfigError(f"{name}: {value[:64]!r} is no duration; write 100ms (us, ms, s, min), or none")
        value = float(match[1]) * _SECONDS[match[2].lower()]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}: must be a number of seconds above 0, not {str(value)[:64]!r}")
    return float(value)


def step_target(name: str, value: object) -> float | Literal["auto"] | None:
    """A duration, "none" for any, or "auto". Raises ConfigError."""
    if value is None or value == "auto":
        return value
    return _seconds(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: must be true or false, not {str(value)[:64]!r}")
    return value


_READERS: dict[str, Callable[[str, object], object]] = {
    "model": _text,
    "served_model_name": _auto(_text),
    "dtype": _one_of("auto", "float32", "bfloat16"),
    "max_model_len": _auto(_count(1)),
    "max_num_seqs": _auto(_count(1)),
    "max_num_batched_tokens": _auto(_count(1)),
    "kv_cache_memory_bytes": _auto(_count(1, parse_bytes)),
    "num_gpu_blocks_override": _auto(_count(1)),
    "enable_prefix_caching": _flag,
    "snapshot_interval": _count(256),
    "seed": _count(0),
    "store": _auto(_text),
    "store_size": _auto(_count(1, parse_bytes)),
    "host_cache_size": _auto(_count(0, parse_bytes)),
    "slo": _auto(_slo),
    "step_target": step_target,
    "device": _one_of("auto", "cpu", "cuda"),
    "kv_cache_dtype": _one_of("auto", "bfloat16", "fp8"),
    "gpu_memory_utilization": _auto(_share),
    "random_weights": _flag,
    "layers": _auto(_text),
}
