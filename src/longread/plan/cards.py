"""Which cards are known, and a machine by what a user calls it: "8xH20-96", "2x8xH20-96", "cpu", or a file.

Knows the table ``cards.toml`` beside it. Must not know models or strategies.
"""

import difflib
import os
import re
import tomllib
import unicodedata
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from longread.plan.hardware_file import FIGURES, GPUS_MAX, NODES_MAX, UNITS, read_card, read_figure, read_machine
from longread.plan.machine import last_level_cache, probe_machine
from longread.spec.errors import ConfigError
from longread.spec.hardware import Card, Figure, Hardware

TABLE = "plan/cards.toml"
CPU = "cpu"
_COUNT = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*[x×*]\s*", re.IGNORECASE)
_ODD = re.compile(r"[^A-Za-z0-9 ._()/-]")  # characters that would be dropped: a typing error, or not a name at all
_FAR = 0.5  # names less alike than this are no help


@dataclass(frozen=True, slots=True)
class _Entry:
    card: Card
    per_node: int
    network_per_card: Figure | None
    cores: int | None


def card_names() -> tuple[str, ...]:
    """Every card that the table holds, the CPU last."""
    return tuple(entry.card.name for entry in _table())


def card(name: str) -> Card:
    """A card by name or alias, however it is written ("NVIDIA GeForce RTX 4090", "rtx4090").

    Raises ConfigError for an unknown one, naming those near.
    """
    return _entry(name).card


def find_card(name: str) -> Card | None:
    """The card that a driver calls ``name``, or None: not every card is in the table."""
    entry = _by_name().get(_plain(name))
    return entry.card if entry else None


def also_called(text: str) -> str | None:
    """A note where the name fits several cards (H20 has two sizes) and ``parse_hardware`` takes the first."""
    name = unicodedata.normalize("NFKC", text).partition("@")[0]
    while (match := _COUNT.match(name)) is not None:
        name = name[match.end() :]
    entry = _by_name().get(_plain(name))
    if entry is None or _plain(entry.card.name) == _plain(name):
        return None
    others = [
        n for n in card_names() if _plain(n).startswith(_plain(name)) and n.startswith(f"{name.strip().upper()}-")
    ]
    if len(others) < 2 or entry.card.name not in others:
        return None
    more = " and ".join(n for n in others if n != entry.card.name)
    return f"{name.strip()} is read as {entry.card.name}; there is {more} too"


def parse_hardware(text: str) -> Hardware:
    """A machine: "H200", "8xH20-96", "2x8xH20-96" (two nodes of eight), "cpu" (this machine's), or a TOML file's path.

    Several nodes talk over what the maker's reference machine has, one direction; "2x8xH20-96@200GB/s" says what yours
    has. A text with a slash or with the ending .toml is a path; the file is what ``longread probe`` writes.
    Raises ConfigError: nothing given, 0 or negative counts, an unknown card (naming those near), a file that is
    incomplete (naming key and file).
    """
    text = unicodedata.normalize("NFKC", text).strip()  # full-width digits and signs
    if not text:
        raise ConfigError(f"no hardware given; write 8xH20-96, a TOML file, or one of {', '.join(card_names())}")
    if "://" in text:
        raise ConfigError(f"{text[:80]!r} is an address; nothing is fetched: give a TOML file that is here")
    if text.lower().endswith(".toml") or (("/" in text or os.sep in text) and "@" not in text):
        return read_machine(Path(text), card)
    shown = text if len(text) <= 80 else text[:77] + "..."
    machine, at, rate = text.partition("@")
    counts, name = _counts(machine, shown)
    entry = _entry(name)
    gpus, nodes = (counts[-1:] or [1])[0], counts[0] if len(counts) == 2 else 1
    if entry.card.architecture == "cpu":
        if counts not in ([], [1]) or at:
            raise ConfigError(f"{shown!r}: the CPU is one machine; write cpu")
        return _this_cpu(entry)
    if gpus > entry.per_node:
        better = f"; {gpus} of them are {-(-gpus // entry.per_node)}x{entry.per_node}x{entry.card.name}"
        hint = better if nodes == 1 and gpus % entry.per_node == 0 else ""
        raise ConfigError(f"{shown!r}: one machine holds at most {entry.per_node} {entry.card.name}{hint}")
    return Hardware(entry.card, gpus, nodes, network=_network(entry, gpus, nodes, rate.strip() if at else None, shown))


def _counts(text: str, shown: str) -> tuple[list[int], str]:
    """The numbers in front of the name, outermost first, and the name."""
    counts: list[int] = []
    while (match := _COUNT.match(text)) is not None:
        number, text = match[1], text[match.end() :]
        limit = NODES_MAX if counts == [] else GPUS_MAX
        if not number.isdecimal() or len(number) > 9 or not 1 <= int(number) <= limit:
            raise ConfigError(
                f"{shown!r}: {number[:20]} is no number of GPUs or nodes; a whole number from 1 to {limit}"
            )
        counts.append(int(number))
    if len(counts) > 2:
        raise ConfigError(f"{shown!r}: {len(counts)} counts; write GPUSxCARD or NODESxGPUSxCARD, such as 2x8xH20-96")
    if not text.strip():
        raise ConfigError(f"{shown!r}: no card after the count; one of {', '.join(card_names())}")
    return counts, text


def _network(entry: _Entry, gpus: int, nodes: int, rate: str | None, shown: str) -> Figure | None:
    """Bytes/s of one node, one direction: as given, else the reference machine's ports, one a card."""
    if rate is not None:
        if nodes == 1:
            raise ConfigError(f"{shown!r}: @{rate[:20]} is the network between nodes, and there is one node")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]i?B/s|[MGT]bit/s|[MGT]b/s)", rate[:40])
        if match is None or float(match[1]) <= 0:
            raise ConfigError(f"{shown!r}: @{rate[:20]} is no rate; write @200GB/s or @1600Gb/s, one direction, a node")
        unit = match[2].replace("bit/s", "b/s")
        factor = UNITS["bytes a second"].get(unit) or UNITS["bytes a second"][unit.replace("b/s", "B/s")] / 8
        return Figure(float(match[1]) * factor, "press", "given on the command line")
    one = entry.network_per_card
    if nodes == 1 or one is None:
        return None
    return replace(one, value=one.value * gpus, mark="derived", source=f"{gpus} cards: {one.source}; yours may differ")


def _this_cpu(entry: _Entry) -> Hardware:
    """The generic CPU, as large as this machine: its memory, its cores, and the generic rates for as many cores."""
    machine = probe_machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    factor = cores / (entry.cores or 1)
    total = Figure(machine.total_bytes, "measured", f"read here: {machine.limited_by}")

    def scaled(figure: Figure) -> Figure:
        if factor == 1:
            return figure
        return Figure(figure.value * factor, "derived", f"{cores} cores, each as in: {figure.source}")

    cache = last_level_cache()
    card = replace(
        entry.card,
        l2=Figure(cache, "measured", "read here: last-level cache") if cache else None,
        memory=total,
        usable=replace(total, value=machine.available_bytes, source=f"available here now: {machine.limited_by}"),
        flops={rate: scaled(figure) for rate, figure in entry.card.flops.items()},
        measured_flops={rate: scaled(figure) for rate, figure in entry.card.measured_flops.items()},
    )
    return Hardware(card, 1, host_memory=total)


def _entry(name: str) -> _Entry:
    if (odd := _ODD.search(name)) is not None:
        raise ConfigError(f"{name.strip()[:64]!r}: {odd[0]!r} is in no card's name; write such as 8xH20-96")
    found = _by_name().get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name[:64]), _by_name(), n=3, cutoff=_FAR)
        names = list(dict.fromkeys(_by_name()[alias].card.name for alias in near))
        backwards = re.fullmatch(r"(.+?)\s*[x×*]\s*(\d+)", name.strip(), re.IGNORECASE)
        if backwards and _plain(backwards[1]) in _by_name():
            names = [f"{backwards[2]}x{_by_name()[_plain(backwards[1])].card.name}"]
        hint = f"; did you mean {' or '.join(names)}?" if names else ""
        known = f"known: {', '.join(card_names())}; others: a TOML file, as `longread probe` writes"
        raise ConfigError(f"{name.strip()[:64]!r} is not a known card{hint} ({known})")
    return found


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "gpu"))


@cache
def _by_name() -> dict[str, _Entry]:
    return {_plain(name): entry for entry in _table() for name in (entry.card.name, *entry.card.aliases)}


@cache
def _table() -> tuple[_Entry, ...]:
    data = tomllib.loads(files("longread").joinpath(TABLE).read_text(encoding="utf-8"))
    entries = []
    for name, table in data.items():
        own = {key: table.pop(key, None) for key in ("per_node", "network_per_card", "cores")}
        link = own["network_per_card"]
        network = read_figure(link, f"{name}.network_per_card", FIGURES["nvlink"], TABLE) if link else None
        entries.append(_Entry(read_card(name, table, f"{name}.", TABLE), own["per_node"] or 1, network, own["cores"]))
    return tuple(entries)
