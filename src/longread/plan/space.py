"""Which deployments a search looks at: strategies that a machine allows, and formats.

What engines cannot run is ``engine_limits``'. Computes no byte and no second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longread.plan.deployment import Deployment, EngineName, ExpertFormat, Strategy
from longread.plan.engine_limits import engine_limit as engine_limit
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

CHUNK = 8192  # vLLM's server default on cards of this size, with which most published runs were made
SMALLER_CHUNKS = (4096, 2048)
OTHER_CHUNKS = (2048, 4096, 16384, 32768)
SHARE = 0.92
LARGER_SHARES = (0.95, 0.98)  # DeepSeek-R1 was served on 8 x H20-96 with 0.98 (deepseek-ai/DeepSeek-V3#212)
STAGES_MAX = 8


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user decided; None: searched. ``context``: max_model_len; ``host_cache``: bytes a node."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: bool | None = None
    replicas: int | None = None
    experts: ExpertFormat | None = None
    cache: str | None = None
    chunk: int | None = None
    memory_share: float | None = None
    context: int | None = None
    host_cache: int | None = None

    @property
    def splits(self) -> bool:
        """Whether anything about the strategy is decided: then what it leaves open is not pruned by habit."""
        return any(value is not None for value in (self.tp, self.pp, self.cp, self.dp, self.ep, self.replicas))


def strategies(spec: ModelSpec, hardware: Hardware, engine: EngineName, fixed: Fixed) -> Iterator[Strategy]:
    """Splits worth looking at.

    A replica takes a divisor of one machine's cards, or whole machines; replicas fill what is left. Pruned: more than
    eight stages, tp over more than two machines, context parallelism together with attention data parallelism, and
    cp where the engine has none. What the user fixed is yielded even where it cannot be, so that somebody says why.
    """
    total = hardware.total_gpus
    sizes = _replica_sizes(hardware)
    stages = [n for n in _divisors(total) if n <= min(STAGES_MAX, spec.layers)]
    widths = [n for n in sizes if n <= 2 * hardware.gpus]
    for pp in _choices(fixed.pp, stages):
        for cp in _choices(fixed.cp, _divisors(hardware.gpus) if _has_cp(spec, engine) else [1]):
            for tp in _choices(fixed.tp, widths):
                size = tp * pp * cp
                free = [n for n, given in ((tp, fixed.tp), (pp, fixed.pp), (cp, fixed.cp)) if given is None]
                if size not in sizes and (len(free) == 3 or (size > total and max(free, default=1) > 1)):
                    continue
                replicas = fixed.replicas if fixed.replicas is not None else max(total // max(size, 1), 1)
                yield from _attention_splits(engine, tp, pp, cp, replicas, fixed)


def _attention_splits(engine: EngineName, tp: int, pp: int, cp: int, replicas: int, fixed: Fixed) -> Iterator[Strategy]:
    if engine == "sglang" and cp > 1 and tp > 1 and not fixed.splits:
        return  # SGLang's --attn-cp-size divides the cards of one tp group, which is what cp counts here
    for dp in _choices(fixed.dp, _divisors(tp) if cp == 1 and tp > 0 else [1]):
        for ep in (False, True) if fixed.ep is None else (fixed.ep,):
            if ep and tp * cp == 1 and fixed.ep is None:
                continue
            yield Strategy(tp, pp, cp, dp, ep, replicas)


def _replica_sizes(hardware: Hardware) -> list[int]:
    inside = _divisors(hardware.gpus)
    return inside + [n * hardware.gpus for n in _divisors(hardware.nodes) if n > 1]


def _choices(fixed: int | None, free: list[int]) -> list[int]:
    return free if fixed is None else [fixed]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _has_cp(spec: ModelSpec, engine: EngineName) -> bool:
    if engine == "vllm":
        return False
    return engine == "longread" or spec.indexer is not None


def expert_formats(spec: ModelSpec, fixed: Fixed) -> tuple[ExpertFormat, ...]:
    """Native, and FP8 where the checkpoint has FP4: Hopper multiplies FP8 on its tensor cores, FP4 only as BF16.

    int4 and bf16 are looked at when asked for: another checkpoint, and int4 changes answers.
    """
    if fixed.experts is not None:
        return (fixed.experts,)
    return ("native", "fp8") if spec.quant is not None and spec.quant.experts == "fp4" else ("native",)


def cache_formats(spec: ModelSpec, hardware: Hardware, fixed: Fixed) -> tuple[str, ...]:
    """The cache types that the engines use for this kind of attention, the exact one first."""
    if fixed.cache is not None:
        return (fixed.cache,)
    if hardware.card.architecture == "cpu":
        return ("float32",)
    if spec.compressed is not None:
        return ("fp8_ds_mla",)
    return ("fp8_ds_mla", "bfloat16") if spec.indexer is not None else ("bfloat16", "fp8")


def as_run(spec: ModelSpec, hardware: Hardware) -> ModelSpec:
    """The model as an engine holds it there: longread's CPU engine decodes to float32 unless told otherwise."""
    if hardware.card.architecture != "cpu":
        return spec
    return replace(spec, quant=None, torch_dtype="float32")


def lossy(d: Deployment) -> tuple[str, ...]:
    """What of ``d`` rounds more than the model's own release does, in words."""
    found = []
    if d.experts == "int4":
        found.append("int4 experts: a re-quantised checkpoint, answers change")
    if d.cache == "fp8" and d.spec.indexer is None:
        found.append("FP8 cache: dense MLA was released with BF16 keys and values")
    if d.cache in ("fp8_ds_mla_mxfp4", "nvfp4"):
        found.append(f"{d.cache} cache: 4-bit entries or index keys")
    return tuple(found)


def other_checkpoint(d: Deployment) -> str:
    """What has to be downloaded or converted instead of the release; empty: nothing."""
    if d.experts == "native":
        return ""
    return f"needs a checkpoint whose experts are {d.experts}"


def runs_today(d: Deployment) -> bool:
    """Whether predictions rest on runs of the engine on such hardware: longread's on GPUs do not yet."""
    return d.engine != "longread" or d.hardware.card.architecture == "cpu"


def simplicity(d: Deployment) -> int:
    """How many things beyond plain tensor parallelism somebody has to run and debug."""
    s = d.strategy
    return sum((s.pp > 1, s.cp > 1, s.dp > 1, s.ep, s.replicas > 1, d.experts != "native", s.gpus > d.hardware.gpus))
