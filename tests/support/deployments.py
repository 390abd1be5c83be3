"""Deployments for tests of the planner: cards with round figures, and models cut to few layers."""

from dataclasses import replace

from longread.plan.deployment import Deployment, Strategy
from longread.spec.hardware import Card, Figure, Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release

GIB = 2**30


def figure(value: float) -> Figure:
    return Figure(value, "derived", "chosen for a test")


def card(name: str, gib: float) -> Card:
    """A Hopper card of ``gib`` GiB, all of them usable."""
    size = figure(gib * GIB)
    flops = {"fp8": figure(296e12), "bf16": figure(148e12)}
    bandwidth = figure(4e12)
    none = None
    return Card(name, (), "hopper", (9, 0), none, size, size, bandwidth, flops, none, none, none, none, none, {})


H20 = card("H20-96", 96)
H200 = card("H200", 139.8)


def deployment(
    model: str | ModelSpec, *, gpus: int = 8, on: Card = H20, nodes: int = 1, **options: object
) -> Deployment:
    """``options``: fields of Deployment; ``strategy`` default TP over all GPUs of a node."""
    spec = release(model) if isinstance(model, str) else model
    options = {
        "strategy": Strategy(tp=gpus),
        "engine": "vllm",
        "max_model_len": min(524288, spec.max_position),
    } | options
    return Deployment(spec, Hardware(on, gpus, nodes), **options)  # type: ignore[arg-type]


def cut(model: str, layers: int, ratios: tuple[int, ...] = (), dense: int = 0) -> ModelSpec:
    """A release with its first ``layers`` layers, ``ratios`` of V4 layers given anew, and no drafter."""
    spec = release(model)
    spec = replace(spec, layers=layers, mtp_layers=0, dspark=None, moe=replace(spec.moe, first_dense=dense))
    if spec.compressed is None:
        return replace(spec, max_position=524288 + 16384)
    return replace(spec, compressed=replace(spec.compressed, ratios=ratios))
