"""What several engines' launches share: refusals, model names, and reasons with the deployment's own numbers."""

from dataclasses import dataclass

from longread.plan.deployment import Deployment, Workload
from longread.plan.engine_limits import NAMES, engine_limit
from longread.plan.figures import gib
from longread.plan.gpu_memory import GpuMemory, gpu_memory, require_room
from longread.plan.launch.command import Options, Variable, parts_of
from longread.plan.launch.models import unsure
from longread.plan.peer_capacity import peer_capacity
from longread.plan.shards import check_strategy
from longread.plan.timing import request_cost, ttft_cold, ttft_warm
from longread.spec.errors import ConfigError

HOST_WHY = "the address it answers on; anything but loopback is open to whoever reaches it, put keys before it"
FULL_TILE = 128  # rows of one grouped GEMM tile (DeepGEMM, Triton and Marlin alike)


@dataclass(frozen=True, slots=True)
class Admission:
    """Numbers that keep a first-token target under load, for one replica: prompt tokens and requests that may wait.

    ``rate``: prompt tokens/s, what is already cached counted as read.
    """

    tokens: int
    requests: int
    rate: float
    source: str
    problem: str = ""


def checked(d: Deployment, workload: Workload | None, options: Options, version: str) -> GpuMemory:
    """The deployment's memory, after everything that this version cannot do was refused with ``ConfigError``."""
    engine = d.engine
    tier = workload.tier if workload is not None and workload.prefix > 0 else "device"
    limit = engine_limit(d, version, tier)
    if limit is not None:
        what = f"{d.spec.label} as {d.strategy.label} on {d.hardware.label}"
        raise ConfigError(f"{NAMES[engine]} {version} cannot run {what}: {limit}")
    check_strategy(d)
    _check_workload(d, workload)
    _check_experts(d, options)
    require_room(d, d.max_model_len)
    memory = gpu_memory(d)
    held = peer_capacity(d)
    if held.reported_sessions < 1:
        raise ConfigError(
            f"{engine} does not start with max_model_len={d.max_model_len}: its cache holds "
            f"{held.reported_sessions:.2f} of one such sequence ({held.why}); lower max_model_len or the chunk, or use "
            "more cards"
        )
    return memory


def _check_workload(d: Deployment, workload: Workload | None) -> None:
    if workload is None:
        return
    asked = workload.isl + workload.osl
    if asked > d.max_model_len:
        raise ConfigError(
            f"requests of {workload.isl} + {workload.osl} = {asked} tokens do not fit max_model_len={d.max_model_len}"
        )
    if workload.tier != "device" and workload.prefix > 0 and d.host_cache <= 0:
        raise ConfigError(
            f"the workload finds its prefix on {workload.tier}, the deployment keeps nothing outside the GPU "
            "(host_cache=0); give host_cache, or a prefix on device"
        )


def expert_type(d: Deployment) -> str:
    """What the routed experts are when they are loaded."""
    return _stored(d) if d.experts == "native" else d.experts


def _stored(d: Deployment) -> str:
    return d.spec.quant.experts if d.spec.quant is not None else "bf16"


def _check_experts(d: Deployment, options: Options) -> None:
    stored = _stored(d)
    if d.experts in ("native", stored) or options.model is not None:
        return
    known = " (sgl-project publishes such conversions of V4 for SGLang)" if d.experts == "fp8" else ""
    raise ConfigError(
        f"{d.spec.label}'s experts are stored as {stored}; no engine turns them into {d.experts} when it loads: name a "
        f"converted checkpoint (--model-path){known}, or plan with --experts native"
    )


def common_notes(d: Deployment, memory: GpuMemory, workload: Workload | None, options: Options) -> list[str]:
    """The header: what the plan holds, and for which load it was made."""
    parts = f"weights {gib(memory.weight_total)}, beside them {gib(memory.beside)}, cache {gib(memory.free)}"
    held = peer_capacity(d)
    kept = f"{held.reported_tokens:,} tokens, {held.reported_sessions:.1f} sequences of {d.max_model_len:,}"
    fixed = f"; each takes {gib(held.fixed_bytes)} whatever its length" if held.fixed_bytes else ""
    lines = [
        f"per GPU, predicted: {parts} of {gib(memory.usable)} usable",
        f"its log should report about {kept}{fixed} ({next(iter(memory.sharing.values()))})",
    ]
    if workload is not None:
        before = f"{workload.isl:,} tokens in, {workload.prefix:.0%} of them read before"
        requests = "1 request" if workload.concurrency == 1 else f"{workload.concurrency:,} requests"
        lines.append(f"load: {requests} at once, {before}, {workload.osl:,} out")
    limits = admission(d, workload, options)
    if limits is not None and limits.problem:
        lines.append(limits.problem)
    doubt = unsure(d, options)
    return [*lines, *((doubt,) if doubt is not None else ()), *options.notes]


def chunk_why(d: Deployment) -> str:
    """Why so many tokens a step: rows that each routed expert gets, and what a step with fewer is better at."""
    moe, groups = d.spec.moe, d.strategy.dp
    rows = d.chunk * groups * moe.top_k / moe.routed
    together = f" x {groups} data parallel groups" if groups > 1 else ""
    full = "GEMM tiles of 128 rows are full"
    if rows < FULL_TILE:
        full = (
            "which do not fill GEMM tiles of 128 rows: reading is slower for it, and in exchange no decoding request "
            "waits long for a step, and a step takes little memory from the cache"
        )
    return f"{d.chunk:,}{together} x {moe.top_k} of {moe.routed} experts = {rows:,.0f} tokens an expert, {full}"


def memory_why(d: Deployment, memory: GpuMemory) -> str:
    """Why this share of the memory."""
    shown = d.hardware.card.memory.value
    left = shown - d.memory_share * shown
    return (
        f"{gib(d.memory_share * shown)} of the {gib(shown)} that the card shows: weights {gib(memory.weight_total)} + "
        f"step {gib(memory.beside)} + cache {gib(memory.free)}; {gib(left)} stay for the driver and fragments"
    )


def seqs_why(d: Deployment, memory: GpuMemory, workload: Workload | None) -> str:
    """Why so many sequences: what the cache holds."""
    context = d.max_model_len if workload is None else workload.isl + workload.osl
    held = peer_capacity(d, context)
    groups = d.strategy.dp
    where = f"each of the {groups} caches holds" if groups > 1 else "the cache holds"
    sessions = held.sessions / groups / d.strategy.replicas
    why = f"{where} {sessions:.1f} sequences of {context:,} tokens, more wait"
    if workload is None:
        return why
    return f"{why}; {workload.concurrency} requests are meant to run at once"


def length_why(d: Deployment, memory: GpuMemory, workload: Workload | None) -> str:
    """Why this context length."""
    one = memory.session_bytes(d.max_model_len)
    load = "" if workload is None else f"the load asks for {workload.isl + workload.osl:,}; "
    return f"{load}one such sequence is {gib(one)} of cache a GPU, the model's limit {d.spec.max_position:,}"


def split_why(d: Deployment) -> str:
    """Why tensor parallelism of this size, with what crosses which link."""
    s, gpus = d.strategy, d.hardware.gpus
    heads = s.tp // s.dp
    why = f"{d.spec.heads} heads: {d.spec.heads // heads} a GPU; two all-reduces a layer"
    if heads * s.cp > gpus:
        measured = "on 32 H20 TP32 gained 2.54x where PP4 x TP8 gained 3.31x (LMSYS, 2026-01-15)"
        return f"{why}, ACROSS nodes: {measured}; prefer TP{gpus} with PP"
    return f"{why} over links inside one node"


def admission(d: Deployment, workload: Workload | None, options: Options) -> Admission | None:
    """What may wait so that the last one admitted still meets the first-token target; None without a target.

    The rate is the replica's whole prompt rate (cached tokens counted as read), by the planner's cost of one request.
    Where one request alone misses the target nothing helps: ``problem`` says by how much.
    """
    if workload is None or workload.ttft_target is None:
        return None
    target, new, factors = workload.ttft_target, max(workload.isl - workload.cached, 1), options.factors
    if workload.cached:
        alone = ttft_warm(d, workload.isl, new, workload.tier, factors=factors).total.centre
    else:
        alone = ttft_cold(d, workload.isl, factors=factors).total.centre
    reading, _ = request_cost(d, workload, factors=factors)
    rate, source = workload.isl / reading.centre, f"predicted ({reading.provenance})"
    if alone > target:
        problem = (
            f"ttft={target:g}s is likely missed: {workload.isl:,} tokens ({new:,} of them new) take {alone:.2f} s on "
            "an idle replica, so no limit of the queue keeps it and none is set"
        )
        return Admission(0, 0, rate, source, problem)
    queued = int((target - alone) * rate)
    return Admission(max(queued, 1), int(queued // workload.isl) + 1, rate, source)


def experts_why(d: Deployment) -> str:
    """Why experts lie whole on cards."""
    routed, cards = d.spec.moe.routed, d.strategy.tp * d.strategy.cp
    return f"{routed} experts lie whole, {routed // cards} a GPU, instead of a slice of each on every GPU"


def queue_why(workload: Workload, limits: Admission) -> str:
    """Why so much may wait."""
    left = f"(ttft target {workload.ttft_target:g} s - one request alone)"
    return f"{left} x {limits.rate:,.0f} prompt tokens/s, {limits.source}"


def network(d: Deployment, options: Options) -> list[Variable]:
    """NCCL's variables where a replica spans nodes."""
    if parts_of(d) == 1:
        return []
    found = [Variable("NCCL_DEBUG", "WARN", "names the transport that failed instead of only hanging at start")]
    if options.interface is not None:
        why = f"{d.hardware.nodes} nodes meet over {options.interface}; NCCL's own guess may be a management port"
        found += [Variable(name, options.interface, why) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    return found


def closing_notes(d: Deployment, options: Options) -> list[str]:
    """What the flags do not choose, and what several nodes need."""
    lines = []
    if d.hardware.card.architecture != "hopper":
        lines.append(f"kernel choices here are for Hopper; on {d.hardware.card.name} {NAMES[d.engine]} chooses its own")
    if d.spec.mtp_layers:
        lines.append("speculative decoding is off: it helps few streams and takes memory from the cache")
    return lines + network_notes(d, options)


def network_notes(d: Deployment, options: Options) -> list[str]:
    """What a launch over several nodes needs from the reader."""
    if parts_of(d) == 1:
        return []
    addresses = ", ".join(options.address(node) for node in range(d.hardware.nodes))
    lines = [f"the nodes are {addresses}: names that each of them must resolve"]
    rate = d.hardware.network
    if rate is not None:
        lines.append(f"planned with {rate.value / 1e9:.0f} GB/s a node between them ({rate.source})")
    if options.interface is None:
        lines.append("if they have several interfaces, name the fast one (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)")
    return lines
