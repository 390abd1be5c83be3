"""What is planned: a model on hardware, split and stored in some way, under some load. Decides and computes nothing."""

from dataclasses import dataclass
from typing import Literal

from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

ExpertFormat = Literal["native", "fp8", "int4", "bf16"]
EngineName = Literal["longread", "vllm", "sglang"]
Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one replica is split over ``gpus`` = tp * pp * cp cards.

    ``tp`` splits heads, FFN columns and vocabulary; ``pp`` splits layers; ``cp`` splits the tokens of one sequence
    (prefill) and its cache (decode context parallel), weights of attention replicated. ``dp`` is attention data
    parallelism inside the replica: ``dp`` groups of tp / dp cards each hold whole attention weights and the caches of
    their own sequences, experts stay split over all tp cards. ``ep``: routed experts lie whole on cards (expert
    parallel) instead of cut by columns. ``replicas`` whole copies beside each other.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: bool = False
    replicas: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def label(self) -> str:
        parts = [f"TP{self.tp}"]
        parts += [f"{name}{size}" for name, size in (("PP", self.pp), ("CP", self.cp), ("DP", self.dp)) if size > 1]
        parts += ["EP"] if self.ep else []
        return "-".join(parts) + (f" x{self.replicas}" if self.replicas > 1 else "")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way to run ``spec``. ``cache`` is a packing of ``spec.count.PACKINGS``; ``chunk`` is max_num_batched_tokens.

    ``experts``: the type that routed experts have in memory; *native* is the checkpoint's. ``memory_share`` is vLLM's
    gpu_memory_utilization. ``host_cache`` bytes a node; ``snapshots`` ring snapshots that a sequence keeps.
    """

    spec: ModelSpec
    hardware: Hardware
    strategy: Strategy
    engine: EngineName = "longread"
    experts: ExpertFormat = "native"
    cache: str = "fp8_ds_mla"
    chunk: int = 8192
    max_num_seqs: int = 16
    max_model_len: int = 131072
    memory_share: float = 0.92
    host_cache: int = 0
    snapshots: int = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """``isl`` and ``osl`` tokens a request, of which the share ``prefix`` (0..1) of the input was read before.

    ``concurrency`` requests are in flight at once. ``tier``: where what was read before lies. Targets in seconds; None:
    no target.
    """

    isl: int
    osl: int
    prefix: float = 0.0
    concurrency: int = 1
    tier: Tier = "device"
    ttft_target: float | None = None
    tpot_target: float | None = None

    @property
    def cached(self) -> int:
        return int(self.isl * self.prefix)
