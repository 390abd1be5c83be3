"""What others report of memory, and whom it concerns: shown beside what the formulas say, since both can be wrong.

Reads ``published_memory.toml`` only.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release


@dataclass(frozen=True, slots=True)
class MemoryFact:
    """``fits`` sequences of ``context`` tokens fitted on ``deployment`` (None: not said); ``shown``: GB on a card."""

    said: str
    source: str
    deployment: Deployment
    context: int
    fits: int | None
    shown: tuple[float, float] | None
    drafter: bool
    unknown: str

    @property
    def words(self) -> str:
        d = self.deployment
        drafts = ", drafter loaded" if self.drafter else ""
        return (
            f"published for {d.spec.label} on {d.hardware.label} ({d.engine} {d.strategy.label}{drafts}): {self.said} "
            f"({self.source}; not said: {self.unknown})"
        )

    def concerns(self, spec: ModelSpec, hardware: Hardware) -> bool:
        """Whether it is about as large a model on the same machine."""
        theirs = self.deployment
        return _size(theirs.spec) == _size(spec) and theirs.hardware.label == hardware.label


def _size(spec: ModelSpec) -> tuple[object, ...]:
    """What memory depends on, drafter aside: V3, R1 and V3.1 are one, V4-Pro and its 0813 as well."""
    return spec.mla, spec.compressed, spec.indexer, spec.moe, spec.layers, spec.hidden, spec.vocab


@cache
def memory_facts() -> tuple[MemoryFact, ...]:
    """Every row of the table, in its order."""
    text = (files("longread.plan") / "published_memory.toml").read_text(encoding="utf-8")
    return tuple(_fact(row) for row in tomllib.loads(text)["fact"])


def _fact(row: dict[str, Any]) -> MemoryFact:
    deployment = Deployment(
        release(row["model"]),
        parse_hardware(row["hardware"]),
        Strategy(**row["strategy"]),
        row["engine"],
        cache=row.get("cache", "fp8_ds_mla"),
        chunk=row.get("chunk", 8192),
        max_num_seqs=max(row.get("fits", 1), 1),
        max_model_len=row["context"],
    )
    shown = row.get("shown")
    return MemoryFact(
        row["said"],
        row["source"],
        deployment,
        row["context"],
        row.get("fits"),
        (float(shown[0]), float(shown[1])) if shown else None,
        row.get("drafter", False),
        row["unknown"],
    )


def against(spec: ModelSpec, hardware: Hardware, context: int, sessions: int) -> list[MemoryFact]:
    """Published limits that ``sessions`` sequences of ``context`` tokens would go beyond on this machine."""
    return [
        fact
        for fact in memory_facts()
        if fact.fits is not None and sessions > fact.fits and _reaches(context, fact) and fact.concerns(spec, hardware)
    ]


def _reaches(context: int, fact: MemoryFact) -> bool:
    return context >= 0.95 * fact.context  # 1,000,000 and 1,048,000 are meant where 1,048,576 is said
