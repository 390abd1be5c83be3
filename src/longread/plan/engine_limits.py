"""What each engine cannot run, by version: one table that the search, the checks of a split and launches ask.

Read from the wheels of the versions named (vLLM: config/, models/deepseek_v4*, v1/worker/gpu; SGLang: server_args.py,
arg_groups/, configs/) and from the issues named; knows no card's memory and computes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from longread.plan.deployment import Deployment, EngineName, Tier

VERSIONS: dict[EngineName, tuple[str, ...]] = {  # oldest first; launches are written for these
    "vllm": ("0.26.0", "0.33.0"),
    "sglang": ("0.5.17", "0.5.23"),
}
NAMES: dict[EngineName, str] = {"longread": "longread", "vllm": "vLLM", "sglang": "SGLang"}
SPARSE_CAPABILITY = ((9, 0), (10, 0), (10, 3))  # FlashMLA's sparse kernels
SGLANG_CP_MAX = 8  # "context parallel only supports single machine (tp_size <= 8)" (arg_groups, 0.5.23)


@dataclass(frozen=True, slots=True)
class Limit:
    """``applies``: to which deployments of ``engine``; ``versions``: in which (None: all). ``split``: about the split
    alone, whatever the card. ``words``: what and what to use instead; ``{...}`` are the strategy's numbers.
    """

    engine: EngineName
    applies: Callable[[Deployment], bool]
    words: str
    source: str
    split: bool = True
    versions: tuple[str, ...] | None = None


def _sparse(d: Deployment) -> bool:
    return d.spec.indexer is not None


def _windows(d: Deployment) -> bool:
    return d.spec.compressed is not None


def _dense(d: Deployment) -> bool:
    return not _sparse(d)


def _v41(d: Deployment) -> bool:
    return d.spec.shared_kv is not None


LIMITS: tuple[Limit, ...] = (
    Limit(
        "longread",
        lambda d: d.hardware.card.architecture == "cpu" and d.strategy.gpus > 1,
        "longread runs on one CPU as one process",
        "longread serve",
        split=False,
    ),
    Limit(
        "longread",
        lambda d: d.strategy.gpus > d.hardware.gpus,
        "longread's own engine runs on one machine ({gpus} GPUs here), this takes {size}; plan it for vllm or sglang, "
        "or use replicas",
        "longread serve",
    ),
    Limit(
        "vllm",
        lambda d: d.strategy.pp > 1 and _windows(d),
        "vLLM has no pipeline parallelism for V4; use tp, dp or SGLang",
        "vllm#52761, a draft in vllm#45112",
        split=False,
    ),
    Limit(
        "vllm",
        lambda d: d.strategy.cp > 1 and _windows(d),
        "vLLM has no context parallelism for sliding-window caches (cp={cp}); use dp (whole caches, sequences spread) "
        "or SGLang (prefill context parallel)",
        "config/parallel.py of 0.26.0 and 0.33.0",
    ),
    Limit(
        "vllm",
        lambda d: d.strategy.cp > 1 and _dense(d),
        "vLLM splits a prompt's tokens (cp={cp}) for sparse MLA only; use tp or pp",
        "config/parallel.py of 0.33.0",
    ),
    Limit(
        "vllm",
        lambda d: d.strategy.cp > 1 and _sparse(d),
        "cannot split V3.2's cache over cp={cp} cards; use engine version 0.33.0, or dp or pp",
        "V2 model runner, default since 0.33.0",
        versions=("0.26.0",),
    ),
    Limit(
        "vllm",
        _v41,
        "has no DeepSeek-V4.1 (since 0.30); use engine version 0.33.0",
        "models/ of 0.26.0",
        split=False,
        versions=("0.26.0",),
    ),
    Limit(
        "sglang",
        _v41,
        "has no DeepSeek-V4.1; use engine version 0.5.23",
        "configs/ of 0.5.17; deepseek_v41 is in 0.5.23",
        split=False,
        versions=("0.5.17",),
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.cp > 1 and _dense(d),
        "SGLang splits a prompt's tokens over cards for sparse attention only (V3.2, V4; dense MLA: one at a "
        "time, and with DeepEP); use pp",
        "arg_groups of 0.5.23",
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.pp > 1 and _v41(d),
        "SGLang refuses pipeline parallelism for V4.1; use tp, dp or cp",
        "arg_groups/deepseek_v4_hook.py of 0.5.23",
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.cp > 1 and d.strategy.dp > 1,
        "cp={cp} and dp={dp} exclude each other; use one of them",
        "arg_groups of 0.5.23",
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.cp > 1 and d.strategy.tp * d.strategy.cp > SGLANG_CP_MAX,
        "SGLang splits a prompt within one machine of at most 8 GPUs, not over {stage}; use pp",
        "arg_groups of 0.5.23",
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.cp > 1 and d.strategy.tp > 1 and _windows(d),
        "SGLang gives context parallelism all GPUs of a stage; use tp=1 with cp={stage}, not tp={tp} with cp={cp}",
        "arg_groups of 0.5.23",
    ),
    Limit(
        "sglang",
        lambda d: d.strategy.cp > 1 and d.strategy.tp > 1,
        "SGLang gives context parallelism all GPUs of a stage; use tp=1 with cp={stage}, not tp={tp} with cp={cp}",
        "server_args.py of 0.5.17",
        versions=("0.5.17",),
    ),
)


def engine_limit(d: Deployment, version: str | None = None, tier: Tier = "device") -> str | None:
    """Why ``d.engine`` cannot run ``d`` at all, whatever its size; None: nothing known speaks against it.

    ``version``: None asks about the newest that is known. ``tier``: where what was read before shall be found.
    """
    return next(_card_limits(d), None) or next(_limits(d, version), None) or next(_tier_limits(d, tier), None)


def split_limit(d: Deployment) -> str | None:
    """The same about the split alone, with the newest version."""
    return next(_limits(d, None, split=True), None)


def _card_limits(d: Deployment) -> Iterator[str]:
    card = d.hardware.card
    if d.engine == "longread":
        return
    if card.architecture == "cpu":
        yield "plans for vllm and sglang are for GPUs; on a CPU longread runs"
    elif _sparse(d) and card.compute_capability is None:
        yield (
            f"whether {card.name} runs FlashMLA's sparse kernels is not known: its description lacks compute_capability"
        )
    elif _sparse(d) and card.compute_capability not in SPARSE_CAPABILITY:
        has = ".".join(map(str, card.compute_capability or ()))
        yield (
            f"its sparse attention (FlashMLA) is built for compute capability 9.0 and 10.x; {card.name} has {has}: use "
            "an H20, H100, H200 or B200, or a V3 model"
        )


def _limits(d: Deployment, version: str | None, split: bool = False) -> Iterator[str]:
    asked = version or VERSIONS.get(d.engine, ("",))[-1]
    s = d.strategy
    numbers = {"gpus": d.hardware.gpus, "size": s.gpus, "tp": s.tp, "cp": s.cp, "dp": s.dp, "stage": s.tp * s.cp}
    for limit in LIMITS:
        if limit.engine != d.engine or (split and not limit.split):
            continue
        if (limit.versions is None or asked in limit.versions) and limit.applies(d):
            what = limit.words.format(**numbers)
            name = "" if what.startswith((NAMES[d.engine], "nothing")) else f"{NAMES[d.engine]} {asked}: "
            yield f"{name}{what} ({limit.source})"


def _tier_limits(d: Deployment, tier: Tier) -> Iterator[str]:
    if d.engine == "vllm" and tier == "disk":
        yield (
            "vLLM alone keeps no cache on disk (that takes a connector such as LMCache or Mooncake); use the host "
            "tier, or SGLang with its file store"
        )
