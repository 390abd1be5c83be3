"""A profile of the server's steps, fetched over HTTP, and held against a machine's peak rates.

Knows the two routes and the planner's cards. Must not know where a profile comes from inside the server.

The floor of a group of ops is max(FLOPs / peak, bytes / bandwidth) with the planner's counts for the same tokens; its
share of the roofline is floor / measured time. What is only moved (norms, top-k) has no floor, since what of it stays
in a cache is not known; neither has time between ops.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from longread.measure.load.pages import NoPageError, read, session
from longread.measure.load.target import Target
from longread.plan.floor import peak_name
from longread.spec.errors import ConfigError, LongreadError
from longread.spec.hardware import Card, Hardware

SECONDS = 180.0  # telling a long profile takes its time
MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Group:
    """``share``: of the steps' time; ``prompt_share``: of the time of those that read prompts. ``flops``, ``bytes``:
    None where the planner counts none. ``floor_ms``, ``bound`` and ``of_roofline``: None without hardware or counts.
    """

    name: str
    calls: int
    self_ms: float
    share: float | None
    prompt_share: float | None
    flops: float | None
    bytes: float | None
    floor_ms: float | None
    bound: str | None
    of_roofline: float | None


class NoProfileError(LongreadError):
    """The server does not profile; the message says what it answered."""


def start(target: Target, num_steps: int) -> None:
    """Raises NoProfileError."""
    _post(target, "/start_profile", {"num_steps": num_steps})


def stop(target: Target) -> dict[str, Any]:
    """The profile. Raises NoProfileError, also where a server writes its profile itself and tells none (vLLM)."""
    told = _post(target, "/stop_profile", {})
    if not isinstance(told, dict) or not isinstance(told.get("rows"), list):
        raise NoProfileError("the server profiled and tells no table: look for its trace where its own options say")
    try:
        groups(told, None)
    except (KeyError, TypeError, ValueError) as error:
        raise NoProfileError(f"the server's profile cannot be read: {error!r:.200}") from None
    return told


def _post(target: Target, path: str, body: Mapping[str, Any]) -> Any:
    try:
        with session(target, SECONDS) as client:
            data = read(client, target.base_url + path, MOST_BYTES, body)
        return json.loads(data) if data.strip() else None
    except NoPageError as error:
        raise NoProfileError(f"{path}: {error}") from None
    except ValueError:
        raise NoProfileError(f"{path}: its answer is not JSON") from None


def groups(profile: Mapping[str, Any], hardware: Hardware | None) -> list[Group]:
    """By group of ops, the longest first; all of them together are the steps' time."""
    calls: dict[str, int] = {}
    took: dict[str, float] = {}
    prompt: dict[str, float] = {}
    for row in profile["rows"]:
        name = str(row["group"])
        calls[name] = calls.get(name, 0) + int(row["calls"])
        took[name] = took.get(name, 0.0) + float(row["self_ms"])
        prompt[name] = prompt.get(name, 0.0) + float(row["prompt_ms"])
    total, read = float(profile["step_ms"]), float(profile["prompt_step_ms"])
    counts, card = profile.get("counts") or {}, hardware.card if hardware is not None else None
    made = [
        _group(name, calls[name], ms, _part(ms, total), _part(prompt[name], read), counts.get(name), card)
        for name, ms in took.items()
    ]
    return sorted(made, key=lambda each: -each.self_ms)


def _part(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _group(
    name: str,
    calls: int,
    ms: float,
    share: float | None,
    prompt_share: float | None,
    count: Mapping[str, Any] | None,
    card: Card | None,
) -> Group:
    flops = bytes_ = floor = bound = None
    if count is not None:
        flops, bytes_ = float(count["flops"]), float(count["bytes"])
        if card is not None and flops:
            work = flops / peak_of(card, str(count["rate"])) * 1000
            moved = bytes_ / bandwidth_of(card) * 1000
            floor, bound = max(work, moved), "FLOPs" if work >= moved else "bytes"
    reached = floor / ms if floor is not None and ms else None
    return Group(name, calls, ms, share, prompt_share, flops, bytes_, floor, bound, reached)


def peak_of(card: Card, rate: str) -> float:
    """FLOP/s measured on it, else its sheet's. Raises ConfigError where it has neither that type nor a wider one."""
    name = peak_name(card, rate)
    found = card.measured_flops.get(name) or card.flops[name]
    return found.value


def bandwidth_of(card: Card) -> float:
    return (card.measured_bandwidth or card.bandwidth).value


def document(profile: Mapping[str, Any], hardware: Hardware | None) -> dict[str, Any]:
    """The profile with its groups, and the rates that they were held against."""
    rates = None
    if hardware is not None:
        kinds = {str(each["rate"]) for each in (profile.get("counts") or {}).values() if each["flops"]}
        rates = {"hardware": hardware.label, "bytes_per_s": bandwidth_of(hardware.card)}
        rates |= {f"{kind}_flops_per_s": peak_of(hardware.card, kind) for kind in sorted(kinds)}
    return {**profile, "groups": [asdict(each) for each in groups(profile, hardware)], "rates": rates}


def check_hardware(hardware: Hardware) -> None:
    """Raises ConfigError for hardware that is no single device's roofline."""
    if hardware.total_gpus != 1:
        raise ConfigError(f"--hardware {hardware.label}: a step is held against one device; name one, or a file")
