"""Runs that others or we measured, as deployments that the planner can predict: the table behind the calibration.

Reads ``published.toml`` only. A run says what its source does not, and one that cannot be compared fairly says why.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.spec.model import ModelSpec
from longread.spec.releases import release

Metric = Literal["ttft", "tpot", "throughput", "prefill"]


@dataclass(frozen=True, slots=True)
class Run:
    """One measured value and the deployment and load that gave it.

    ``value`` in seconds (ttft, tpot) or tokens/s (throughput, prefill). ``isl``: prompt tokens, or the context of tpot.
    ``cached`` of them were read before; ``groups`` data-parallel groups prefill at once. ``text``: HTTP and tokenizing
    are in the value. ``layers``: only that many layers of the model ran. ``fit``: whether it calibrates; else ``why``
    says what forbids it.
    """

    name: str
    source: str
    deployment: Deployment
    metric: Metric
    value: float
    isl: int
    cached: int = 0
    batch: int = 1
    concurrency: int = 1
    osl: int = 1
    groups: int = 1
    text: bool = True
    layers: int | None = None
    variant: str = ""
    version: str = ""
    unknown: str = ""
    fit: bool = True
    why: str = ""
    here: bool = False

    @property
    def own_cut(self) -> bool:
        """Measured by us on the first layers of a model only."""
        return self.layers is not None

    @property
    def label(self) -> str:
        load = {
            "ttft": f"TTFT {self.isl:,}" + (f" ({self.cached:,} cached)" if self.cached else ""),
            "tpot": f"TPOT batch {self.batch} at {self.isl:,}",
            "throughput": f"{self.concurrency} streams {self.isl:,}/{self.osl:,}",
            "prefill": f"prefill of {self.isl:,}",
        }[self.metric]
        return f"{self.name}: {load}"


@cache
def published_runs() -> tuple[Run, ...]:
    """Every run of the table, in its order."""
    return tuple(run for series in _table()["series"] for run in _runs(series))


@cache
def left_out() -> tuple[tuple[str, str], ...]:
    """Published figures that are not in the table: what, and why."""
    return tuple((row["what"], row["why"]) for row in _table()["left_out"])


def _table() -> dict[str, Any]:
    return tomllib.loads((files("longread.plan") / "published.toml").read_text(encoding="utf-8"))


def _runs(series: Mapping[str, Any]) -> list[Run]:
    deployment = _deployment(series)
    shared = {
        key: series[key] for key in ("text", "layers", "variant", "version", "unknown", "fit", "why") if key in series
    }
    return [
        Run(
            name=series["name"],
            source=series["source"],
            deployment=deployment,
            metric=series["metric"],
            **shared,
            **point,
        )
        for point in series["points"]
    ]


def _deployment(series: Mapping[str, Any]) -> Deployment:
    spec = release(series["model"])
    if "layers" in series:
        spec = with_layers(spec, series["layers"], series.get("first_dense"))
    return Deployment(
        spec=spec,
        hardware=parse_hardware(series["hardware"]),
        strategy=Strategy(**series.get("strategy", {})),
        engine=series["engine"],
        experts=series.get("experts", "native"),
        cache=series.get("cache", "fp8_ds_mla"),
        chunk=series.get("chunk", 8192),
    )


def with_layers(spec: ModelSpec, layers: int, first_dense: int | None = None) -> ModelSpec:
    """The first ``layers`` layers of a model, without a drafter: what fits one card with real layer shapes."""
    compressed = spec.compressed
    if compressed is not None:
        compressed = replace(compressed, ratios=compressed.ratios[:layers])
    moe = spec.moe if first_dense is None else replace(spec.moe, first_dense=first_dense)
    return replace(spec, layers=layers, moe=moe, compressed=compressed, mtp_layers=0, dspark=None)
