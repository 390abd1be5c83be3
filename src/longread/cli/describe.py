"""How a resolved configuration and a running engine are put on the screen."""

from longread.spec.config import MemoryPlan, ResolvedConfig
from longread.spec.engine import EngineInfo


def config_lines(resolved: ResolvedConfig) -> list[str]:
    """The resolved configuration for the screen: what was given, what was chosen, and why."""
    chosen = {choice.option: choice for choice in resolved.choices}
    names = (
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_pages",
        "num_snapshots",
        "enable_prefix_caching",
        "snapshot_interval",
    )
    rows = [(name, str(getattr(resolved, name)), chosen.pop(name).reason if name in chosen else "") for name in names]
    rows += [(choice.option, choice.value, choice.reason) for choice in chosen.values()]
    width, value_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [f"  {name:<{width}}  {value:<{value_width}}  {reason}".rstrip() for name, value, reason in rows]


def memory_line(plan: MemoryPlan, info: EngineInfo) -> str:
    """Like for like (what exists before the first request), then the most that the process may take."""
    predicted, allocated, total = (f"{n / 2**20:,.1f} MiB" for n in (plan.allocated, info.allocated_bytes, plan.total))
    return f"memory: weights and cache predicted {predicted}, allocated {allocated}; with workspace and program {total}"


def step_line(info: EngineInfo) -> str:
    """What a step may take without a shorter target of the SLO."""
    if info.step_target is None:
        return "  steps: as long as max_num_batched_tokens makes them (step_target none)"
    return f"  steps: {info.step_target * 1e3:.3g} ms ({info.step_reason})"


def ready_line(info: EngineInfo, address: str) -> str:
    return f"serving {info.model} on {address} (stop with Ctrl-C)"
