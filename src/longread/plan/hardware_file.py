"""Cards and machines as TOML: the table in the wheel, users' files, and what ``longread probe`` writes.

Knows the format, its units and what cannot be true. Must not know which cards exist (``plan.cards``).

A machine file::

    gpus = 8
    card = "H20-96"                 # a known card, or a table [card] with name, architecture and its figures;
                                    # base = "H20-96" in that table fills in what it leaves out
    [host]
    memory = { value = 2, unit = "TiB", mark = "measured", source = "..." }    # network, disk_read, disk_write too
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any, cast, get_args

from longread.plan.given_file import read_given
from longread.spec.errors import ConfigError
from longread.spec.hardware import Architecture, Card, Figure, Hardware, Mark, Rate

FILE_BYTES = 2**16  # what a probe writes takes 4 KiB
DOTS_MAX = 64  # in one key: tomllib takes quadratic time for a key of many parts
LEAST, MOST = 1e-9, 1e30  # of a figure's value, in whatever unit
NODES_MAX = 4096
GPUS_MAX = 128
BYTES = {"B": 1.0} | {f"{p}B": 1000.0**n for n, p in enumerate("KMGTP", 1)}
BYTES |= {f"{p}iB": 1024.0**n for n, p in enumerate("KMGTP", 1)}
UNITS: dict[str, dict[str, float]] = {
    "a size": BYTES,
    "bytes a second": {f"{unit}/s": factor for unit, factor in BYTES.items()},
    "operations a second": {"FLOP/s": 1.0} | {f"{p}FLOP/s": 1000.0**n for n, p in enumerate("KMGTP", 1)},
    "a power": {"W": 1.0, "kW": 1000.0},
    "a count": {"SMs": 1.0},
}
FIGURES = {
    "sms": "a count",
    "memory": "a size",
    "usable": "a size",
    "bandwidth": "bytes a second",
    "l2": "a size",
    "nvlink": "bytes a second",
    "pcie": "bytes a second",
    "power": "a power",
    "measured_bandwidth": "bytes a second",
}
NEEDED = ("memory", "usable", "bandwidth")
HOST = {
    "network": "bytes a second",
    "memory": "a size",
    "disk_read": "bytes a second",
    "disk_write": "bytes a second",
}
PLAIN = ("name", "aliases", "architecture", "compute_capability")
RATES, MARKS, ARCHITECTURES = get_args(Rate), get_args(Mark), get_args(Architecture)
# What was measured may lie above the sheet: GeForce cards clock past the "boost" that their sheets count with
# (a 5090 by 15 %). Much more than that is a slip of units.
ABOVE_THE_SHEET = 1.3
# Bytes/s of a card's memory that are believed: a slow CPU's channel to four times a B200. Outside, a unit slipped.
BANDWIDTHS = (1e9, 5e13)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|' + "'[^']*'" + r"")


def read_machine(path: Path, find: Callable[[str], Card]) -> Hardware:
    """The machine in a file; ``find`` gives a known card by name. Raises ConfigError naming file and key."""
    origin = str(path) if len(str(path)) <= 200 else f"...{str(path)[-190:]}"
    data = _load(path, origin)
    _refuse_unknown(data, ("gpus", "nodes", "card", "host", "probe"), "", origin)
    gpus = _whole(data.get("gpus", 1), "gpus", GPUS_MAX, origin)
    nodes = _whole(data.get("nodes", 1), "nodes", NODES_MAX, origin)
    if "card" not in data:
        raise ConfigError(f'{origin}: card is missing; write card = "H200", or a table [card] with its figures')
    card = _machine_card(data["card"], find, origin)
    host = _table(data.get("host", {}), "host", origin)
    _refuse_unknown(host, HOST, "host.", origin)
    known = {key: read_figure(value, f"host.{key}", HOST[key], origin) for key, value in host.items()}
    if nodes > 1 and "network" not in known:
        raise ConfigError(f"{origin}: host.network is missing; {nodes} nodes talk over it (one direction, a node)")
    return Hardware(
        card,
        gpus,
        nodes,
        network=known.get("network"),
        host_memory=known.get("memory"),
        disk_read=known.get("disk_read"),
        disk_write=known.get("disk_write"),
    )


def _machine_card(value: object, find: Callable[[str], Card], origin: str) -> Card:
    if isinstance(value, str):
        return find(value)
    table = dict(_table(value, "card", origin))
    base = table.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{origin}: card.base must be the name of a known card, not {_shown(base)}")
    known = find(base) if base is not None else None
    name = table.pop("name", known.name if known else None)
    if not isinstance(name, str) or not name.strip() or len(name) > 64 or not name.isprintable():
        raise ConfigError(f"{origin}: card.name must be a short text, not {_shown(name)}")
    return read_card(name.strip(), table, "card.", origin, known)


def read_card(name: str, data: Mapping[str, Any], where: str, origin: str, base: Card | None = None) -> Card:
    """One card of a TOML table; what it leaves out is ``base``'s. Raises ConfigError naming file and key."""
    _refuse_unknown(data, (*PLAIN, *FIGURES, "flops", "measured_flops"), where, origin)
    values: dict[str, Any] = {f.name: getattr(base, f.name) for f in fields(Card)} if base else {}
    values |= {"name": name, "aliases": _aliases(data.get("aliases", []), where, origin)}
    if "architecture" in data or not base:
        values["architecture"] = _one_of(data.get("architecture"), f"{where}architecture", ARCHITECTURES, origin)
    if "compute_capability" in data or not base:
        values["compute_capability"] = _capability(data.get("compute_capability"), where, origin)
    for key, kind in FIGURES.items():
        if key in data:
            values[key] = read_figure(data[key], where + key, kind, origin)
        elif not base:
            values[key] = None
    for key in ("flops", "measured_flops"):
        table = _table(data.get(key, {}), where + key, origin)
        _refuse_unknown(table, RATES, f"{where}{key}.", origin)
        own = {rate: read_figure(f, f"{where}{key}.{rate}", "operations a second", origin) for rate, f in table.items()}
        values[key] = (dict(values[key]) if base else {}) | own
    missing = [key for key in NEEDED if values[key] is None] + ([] if values["flops"] else ["flops"])
    if missing:
        raise ConfigError(f"{origin}: {where}{missing[0]} is missing; a card needs {', '.join((*NEEDED, 'flops'))}")
    return _consistent(Card(**values), where, origin)


def _consistent(card: Card, where: str, origin: str) -> Card:
    if card.usable.value > card.memory.value:
        raise ConfigError(f"{origin}: {where}usable ({card.usable.value:,.0f} B) is more than memory")
    low, high = BANDWIDTHS
    if not low <= card.bandwidth.value <= high:
        raise ConfigError(
            f"{origin}: {where}bandwidth is {card.bandwidth.value:.3g} B/s; memories have between {low / 1e9:g} GB/s "
            f"and {high / 1e12:g} TB/s: is the unit right?"
        )
    pairs: list[tuple[str, Figure | None, Figure | None]] = [("bandwidth", card.bandwidth, card.measured_bandwidth)]
    pairs += [(f"flops.{rate}", card.flops.get(rate), figure) for rate, figure in card.measured_flops.items()]
    for key, peak, measured in pairs:
        if peak and measured and measured.value > ABOVE_THE_SHEET * peak.value:
            times = measured.value / peak.value
            raise ConfigError(
                f"{origin}: {where}measured_{key} is {times:.3g} times {where}{key}; one of them is wrong"
            )
    return card


def read_figure(value: object, key: str, kind: str, origin: str) -> Figure:
    """``{ value, unit, mark, source }`` in base units. Raises ConfigError naming file and key."""
    table = _table(value, key, origin)
    parts = ("value", "unit", "mark", "source")
    _refuse_unknown(table, parts, f"{key}.", origin)
    for part in parts:
        if part not in table:
            raise ConfigError(f"{origin}: {key}.{part} is missing; a figure is {{ {', '.join(parts)} }}")
    number, unit, source = table["value"], table["unit"], table["source"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not LEAST <= number <= MOST:
        raise ConfigError(f"{origin}: {key}.value must be a number above 0, not {_shown(number)}")
    factor = UNITS[kind].get(unit) if isinstance(unit, str) else None
    if factor is None:
        raise ConfigError(f"{origin}: {key}.unit is {_shown(unit)}; {kind} is written in {', '.join(UNITS[kind])}")
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{origin}: {key}.source must say where the figure comes from, not {_shown(source)}")
    exact = float(Decimal(str(number)) * Decimal(factor))  # 4.14 TB/s, not 4.1399...
    return Figure(exact, cast(Mark, _one_of(table["mark"], f"{key}.mark", MARKS, origin)), source.strip())


def machine_toml(hardware: Hardware, evidence: Mapping[str, object] | None = None) -> str:
    """``hardware`` as text that ``read_machine`` reads back to an equal one; ``evidence`` goes to [probe]."""
    lines = [f"gpus = {hardware.gpus}"] + ([f"nodes = {hardware.nodes}"] if hardware.nodes > 1 else [])
    card = hardware.card
    lines += ["", "[card]", f"name = {_text(card.name)}"]
    if card.aliases:
        lines.append(f"aliases = {_value(list(card.aliases))}")
    lines.append(f"architecture = {_text(card.architecture)}")
    if card.compute_capability:
        lines.append(f"compute_capability = {_text('{}.{}'.format(*card.compute_capability))}")
    lines += [_figure_line(key, getattr(card, key), kind) for key, kind in FIGURES.items() if getattr(card, key)]
    for key, rates in (("flops", card.flops), ("measured_flops", card.measured_flops)):
        if rates:
            lines += ["", f"[card.{key}]"]
            lines += [_figure_line(rate, rates[rate], "operations a second") for rate in rates]
    host = {"network": hardware.network, "memory": hardware.host_memory}
    host |= {"disk_read": hardware.disk_read, "disk_write": hardware.disk_write}
    if any(host.values()):
        lines += ["", "[host]"] + [_figure_line(key, f, HOST[key]) for key, f in host.items() if f]
    if evidence:
        lines += ["", "[probe]"] + [f"{_text(key)} = {_value(value)}" for key, value in evidence.items()]
    return "\n".join(lines) + "\n"


def _figure_line(key: str, figure: Figure, kind: str) -> str:
    # The base unit keeps every digit: a file that is read back gives the same machine.
    unit = next(iter(UNITS[kind]))
    source = _text(figure.source)
    return (
        f"{key} = {{ value = {figure.value!r}, unit = {_text(unit)}, mark = {_text(figure.mark)}, source = {source} }}"
    )


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_text(str(k))} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return _text(str(value))


def _text(text: str) -> str:
    """A TOML basic string: JSON's, which leaves DEL alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _load(path: Path, origin: str) -> Mapping[str, Any]:
    try:
        text = read_given(path, FILE_BYTES, "the TOML file that describes the machine")
    except FileNotFoundError:
        raise ConfigError(f"{origin}: no such file; `longread probe --output {origin}` measures this machine") from None
    for number, line in enumerate(text.splitlines(), 1):
        # A key ends at "="; between a list's commas there is at most a number.
        if line.count(".") > DOTS_MAX and max(map(_dots, re.split(r"[=,]", _STRING.sub("", line)))) > DOTS_MAX:
            raise ConfigError(f"{origin}: line {number} has a key of more than {DOTS_MAX} dots")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, nested without end
        raise ConfigError(f"{origin}: not a TOML file: {str(error)[:200]}") from None


def _dots(part: str) -> int:
    return part.count(".")


def _refuse_unknown(data: Mapping[str, Any], known: Iterable[str], where: str, origin: str) -> None:
    names = sorted(known)
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(key[:64], names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{origin}: {where}{key[:64]} is not a known key{hint} (all: {', '.join(names)})")


def _table(value: object, key: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin}: {key} must be a table, not {_shown(value)}")
    return value


def _whole(value: object, key: str, most: int, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{origin}: {key} must be a whole number from 1 to {most}, not {_shown(value)}")
    return value


def _one_of(value: object, key: str, valid: tuple[str, ...], origin: str) -> str:
    if value is None:
        raise ConfigError(f"{origin}: {key} is missing; one of {', '.join(valid)}")
    if value not in valid:
        raise ConfigError(f"{origin}: {key} is {_shown(value)}; one of {', '.join(valid)}")
    return str(value)


def _aliases(value: object, where: str, origin: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{origin}: {where}aliases must be a list of names, not {_shown(value)}")
    return tuple(value)


def _capability(value: object, where: str, origin: str) -> tuple[int, int] | None:
    if value is None:
        return None
    major, dot, minor = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(major) + len(minor) <= 4):
        raise ConfigError(f'{origin}: {where}compute_capability must be a text such as "9.0", not {_shown(value)}')
    return int(major), int(minor)


def _shown(value: object) -> str:
    """``value`` for a message: short, whatever the file holds."""
    if isinstance(value, Mapping | list):
        return f"a {'table' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**18:
        return "an integer beyond 10^18"  # repr of a huge one is slow, and capped by Python
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
