"""What the server and its machine looked like while a run went on: gauges of /metrics, memory of the process, the GPUs.

Knows those three sources. Must not know requests. A thread of its own looks once a second; only the lines of the gauges
are parsed, so that the client's event loop does not wait for it. A figure that cannot be had is missing with a reason,
never 0. Memory is bounded: a long run keeps every second, fourth, ... look.

The ``samples`` block of a result, schema 1: ``every_s``; ``at``: seconds on the run's clock; ``series``: by name a
value (or None) for each of them: ``kv usage`` (0..1), ``running``, ``waiting``, ``rss`` (bytes); ``gpus``: for each
``index``, ``name``, ``memory_total``, ``power_limit`` and ``series`` of ``temperature`` (°C), ``power`` (W),
``sm clock`` (MHz), ``memory`` (bytes in use); ``missing``, here and in each GPU: reasons by name.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from longread.measure.load.pages import NoPageError, read, session
from longread.measure.load.target import Target
from longread.plan.doctor.nvml import Asked, Nvml
from longread.plan.doctor.nvml import load as load_nvml
from longread.plan.doctor.series import ENGINES, GAUGES, read_metrics
from longread.spec.errors import ConfigError

SCHEMA = 1
EVERY = 1.0
MOST = 2048  # looks that are kept
SECONDS = 5.0  # for one /metrics
BODY_BYTES = 16 * 2**20
PATIENCE = 2.0  # at the end, for a look that hangs in the driver
GAUGE_NAMES = ("kv usage", "running", "waiting")
GPU_NAMES = ("temperature", "power", "sm clock", "memory")
ELSEWHERE = "the server is not on this machine"
_SPELLINGS = sorted({name for engine in ENGINES for names in GAUGES[engine].values() for name in names})
_LINES = re.compile(rf"^(?:{'|'.join(ENGINES)}):(?:{'|'.join(_SPELLINGS)})(?:\{{[^\n]*\}})? [^\n]*$", re.MULTILINE)

Values = dict[str, float | None]


@dataclass(slots=True)
class Card:
    """One GPU. ``missing``: reasons by name."""

    index: int
    name: str | None = None
    memory_total: int | None = None
    power_limit: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything. ``at``: Unix time."""

    at: float
    own: Values
    cards: tuple[Values, ...]


class Sampler:
    """Looks from ``start`` to ``stop``. ``pid``: the server's process on this machine, its children counted with it.

    ``nvml`` and ``clock`` are replaced in tests, which call ``look`` themselves.
    """

    def __init__(
        self,
        target: Target,
        pid: int | None = None,
        every: float = EVERY,
        nvml: Callable[[], Nvml] = load_nvml,
        clock: Callable[[], float] = time.time,
    ):
        self.looks: list[Look] = []
        self.missing: dict[str, str] = {}
        self._target, self._pid, self._every, self._clock = target, pid, every, clock
        self._load = nvml
        self._seen: set[str] = set()
        self._cards: list[tuple[Card, Asked]] = []
        self._stride, self._number = 1, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The last look was the one before this. A thread that hangs in the driver is left behind."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        with session(self._target, SECONDS) as client:
            self.open()
            begun = time.monotonic()
            while not self._over.is_set():
                self.look(client)
                late = (time.monotonic() - begun) % self._every
                self._over.wait(self._every - late)

    def open(self) -> None:
        """Find the GPUs, once."""
        if not self._target.local:
            self.missing["gpus"] = ELSEWHERE
            return
        nvml = self._load()
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.missing["gpus"] = f"no NVIDIA driver answers here: {error}"
            return
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                self._cards.append((Card(index, missing=dict.fromkeys(GPU_NAMES, str(error))), Asked(nvml)))
                continue
            self._cards.append((self._card(Asked(nvml, handle), index), Asked(nvml, handle)))
        if not count:
            self.missing["gpus"] = "there is none"

    def _card(self, ask: Asked, index: int) -> Card:
        name, memory = ask.get("name", "nvmlDeviceGetName"), ask.get("memory", "nvmlDeviceGetMemoryInfo")
        limit = ask.number("power_limit", "nvmlDeviceGetEnforcedPowerLimit")
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        total = None if memory is None else int(memory.total)
        return Card(index, text, total, None if limit is None else limit / 1000)

    def look(self, client: httpx.Client) -> None:
        """One look, kept unless there are too many of them already."""
        at = self._clock()
        own = {**self._gauges(client), "rss": self._rss()}
        cards = tuple(self._values(card, ask) for card, ask in self._cards)
        self._seen |= {name for name, value in own.items() if value is not None}
        if self._number % self._stride == 0:
            self.looks.append(Look(at, own, cards))
            if len(self.looks) >= MOST:
                del self.looks[1::2]
                self._stride *= 2
        self._number += 1

    def _gauges(self, client: httpx.Client) -> Values:
        url = f"{self._target.base_url}/metrics"
        found: Values = dict.fromkeys(GAUGE_NAMES)
        try:
            lines = "\n".join(_LINES.findall(read(client, url, BODY_BYTES).decode("utf-8", "replace")))
            reading = read_metrics(lines + "\n")
        except (NoPageError, ConfigError) as error:
            self.missing.update(dict.fromkeys(GAUGE_NAMES, f"{url}: {str(error)[:200]}"))
            return found
        for name in GAUGE_NAMES:
            if name in reading.gauges:
                found[name] = reading.gauges[name]
            else:
                self.missing[name] = f"{url}: {reading.engine} tells none"
        return found

    def _rss(self) -> float | None:
        """Resident memory of the process and all under it; shared pages are counted in each."""
        if self._pid is None:
            self.missing["rss"] = "the server's process is not known; name it with --server-pid"
            return None
        try:
            process = psutil.Process(self._pid)
            total = process.memory_info().rss
            for child in process.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.NoSuchProcess:  # it ended since
                    continue
        except psutil.Error as error:
            self.missing["rss"] = f"process {self._pid}: {str(error)[:200]}"
            return None
        return float(total)

    def _values(self, card: Card, ask: Asked) -> Values:
        if ask.handle is None:
            return dict.fromkeys(GPU_NAMES)
        temperature = ask.number("temperature", "nvmlDeviceGetTemperatureV", 0)
        if temperature is None:
            temperature = ask.number("temperature", "nvmlDeviceGetTemperature", 0)
        power = ask.number("power", "nvmlDeviceGetPowerUsage")
        clock = ask.number("sm clock", "nvmlDeviceGetClockInfo", 1)
        memory = ask.get("memory", "nvmlDeviceGetMemoryInfo")
        card.missing.update({name: why for name, why in ask.unread.items() if name in GPU_NAMES})
        return {
            "temperature": temperature,
            "power": None if power is None else power / 1000,
            "sm clock": clock,
            "memory": None if memory is None else int(memory.used),
        }

    def block(self, started: float) -> dict[str, Any]:
        """``started``: Unix time of 0 on the run's clock. A figure that was read at all is not missing."""
        looks = list(self.looks)  # a thread left behind may still add to it
        own = {name: [look.own[name] for look in looks] for name in (*GAUGE_NAMES, "rss") if name in self._seen}
        missing = {name: why for name, why in self.missing.items() if name not in own}
        cards = [card for card, _ in self._cards]
        if not looks:
            missing.setdefault("all", "the run was over before the first look")
        return {
            "schema": SCHEMA,
            "every_s": self._every * self._stride,
            "at": [round(look.at - started, 3) for look in looks],
            "series": own,
            "gpus": [_card_json(card, [look.cards[place] for look in looks]) for place, card in enumerate(cards)],
            "missing": missing,
        }


def _card_json(card: Card, rows: list[Values]) -> dict[str, Any]:
    columns: Mapping[str, list[float | None]] = {name: [row[name] for row in rows] for name in GPU_NAMES}
    known = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return {
        "index": card.index,
        "name": card.name,
        "memory_total": card.memory_total,
        "power_limit": card.power_limit,
        "series": known,
        "missing": {name: why for name, why in card.missing.items() if name not in known},
    }
