"""What vLLM and SGLang make of the memory that is left for their cache: the capacity that they report, and what holds.

vLLM 0.26 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py) cuts V4's cache into groups of equal layers that share
one pool of blocks, and reserves for every request the window and compressor pages of all tokens that may be in flight,
whatever its length. Its log line is max_model_len * blocks / blocks a request: fixed + per token, not a rate
(vllm#51041, #54703). SGLang 0.5.23 (model_executor/pool_configurator.py) keeps a window row for a tenth of all tokens.
Knows nothing of how much memory is left; ``plan.gpu_memory`` does.
"""

from dataclasses import dataclass, replace

from longread.plan.deployment import Deployment
from longread.plan.gpu_memory import GpuMemory, capacity_of, gpu_memory
from longread.plan.shards import cache_share
from longread.spec.count import fixed_bytes_per_request, kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.model import CompressedSpec, ModelSpec

BLOCK_TOKENS = 256  # V4's --block-size
WINDOW_BLOCK, CSA_BLOCK, HCA_BLOCK = 64, 4, 8  # tokens a block of window rows and of compressor states
ALIGNMENT = 576  # FlashMLA's packing: each layer's block is padded to a multiple
ENTRY_BYTES = 584  # FlashMLA's V4 record: 448 FP8, 64 RoPE channels in bfloat16, 7 scales and one byte of padding
BATCHES_IN_FLIGHT = 2  # asynchronous scheduling, the default with one pipeline stage
SGLANG_WINDOW_SHARE = 0.1  # --swa-full-tokens-ratio
SGLANG_CSA_RING, SGLANG_HCA_RING = 8, 128
SGLANG_PAGE = 256


@dataclass(frozen=True, slots=True)
class PeerCapacity:
    """``reported_tokens`` and ``reported_sessions`` (of max_model_len) as the engine's log has them for one cache;
    ``metric_tokens``: vLLM's cache_config_info, computed otherwise. ``sessions``: of ``context`` tokens that really run
    at once, all caches together. ``fixed_bytes`` a request and ``token_bytes`` a token fit the pool's use exactly up to
    blocks. ``ours`` the same sessions in longread's cache. ``why``: the difference in a sentence.
    """

    engine: str
    pool_bytes: int
    reported_tokens: int
    reported_sessions: float
    metric_tokens: int | None
    sessions: float
    context: int
    fixed_bytes: int
    token_bytes: float
    ours: float
    why: str


@dataclass(frozen=True, slots=True)
class Groups:
    """vLLM's cache groups of a V4 model: layers by kind (a drafter's among the windows), bytes of a layer's block."""

    csa: int
    hca: int
    windows: tuple[int, ...]  # window layers, cut into groups of about as many layers as the first group has tuples
    entry: int  # of 64 rows: CSA entries, window rows, and compressor states, which are padded to it
    index: int
    hca_entry: int

    @property
    def pool_block(self) -> int:
        """Bytes that one block takes of the pool: the most layers of each block size in any group."""
        return self.entry * max(self.csa, self.hca, *self.windows) + self.index * self.csa + self.hca_entry * self.hca

    @property
    def first(self) -> int:
        """Bytes of one block of the first group, by which vLLM divides a request's bytes."""
        return self.csa * (self.entry + self.index) + self.hca * self.hca_entry


def peer_capacity(
    d: Deployment,
    context: int | None = None,
    *,
    pool: int | None = None,
    drafter_layers: int = 0,
    memory: GpuMemory | None = None,
) -> PeerCapacity:
    """What ``d.engine`` reports, and holds at ``context`` (default max_model_len) tokens a sequence.

    ``pool``: bytes for the cache on one card where the log named them, else ``gpu_memory``'s. ``drafter_layers``: of a
    loaded drafter, each with a window cache. ``memory``: of ``d``, where it is known already. Raises ``ConfigError``
    for longread, which reports what ``capacity`` says.
    """
    if d.engine == "longread":
        raise ConfigError("longread's own cache holds what plan.gpu_memory.capacity says; ask for vllm or sglang")
    memory = memory or gpu_memory(d, drafter=drafter_layers > 0)
    size = max(memory.free, 0) if pool is None else pool
    length = context or d.max_model_len
    if d.engine == "sglang":
        return _sglang(d, memory, size, length, drafter_layers)
    compressed = d.spec.compressed
    if compressed is None or d.spec.shared_kv is not None:
        return _plain(d, memory, size, length)
    return _vllm(d, memory, size, length, groups_of(d.spec, compressed, d.strategy.pp, drafter_layers))


def groups_of(spec: ModelSpec, c: CompressedSpec, pp: int = 1, drafter_layers: int = 0) -> Groups:
    """The groups of a stage with a ``pp``-th of the layers of each kind (rounded up)."""
    if spec.indexer is None:
        raise ConfigError(f"{spec.label}: no indexer, which V4's cache groups have")
    csa, hca = -(-c.ratios.count(4) // pp), -(-c.ratios.count(128) // pp)
    window = -(-spec.layers // pp) + drafter_layers
    tuples = _tuples([csa, window, csa, hca])
    count = -(-window // tuples)
    return Groups(
        csa,
        hca,
        tuple(window // count + (i < window % count) for i in range(count)),
        _aligned(BLOCK_TOKENS // 4 * ENTRY_BYTES),
        _aligned(BLOCK_TOKENS // 4 * (spec.indexer.head_dim + 4)),
        _aligned(BLOCK_TOKENS // 128 * ENTRY_BYTES),
    )


def request_bytes(g: Groups, context: int, in_flight: int, window: int = 128) -> int:
    """What vLLM reserves for one request: rows of ``context`` tokens, and every page of the other groups that
    ``in_flight`` tokens may touch before those that have left the window are given back.
    """

    def blocks(reach: int, tokens: int) -> int:
        return -(-min(reach - 1 + in_flight, context) // tokens) + 1

    rows = -(-context // BLOCK_TOKENS) * g.first
    windows = blocks(window, WINDOW_BLOCK) * sum(g.windows) * g.entry
    csa_states = blocks(8, CSA_BLOCK) * g.csa * (g.entry + g.index)
    hca_states = blocks(128, HCA_BLOCK) * g.hca * g.entry
    return rows + windows + csa_states + hca_states


def in_flight_tokens(d: Deployment) -> int:
    """Scheduled and not yet given back: max_num_batched_tokens a batch, two batches, or one a pipeline stage."""
    return d.chunk * (BATCHES_IN_FLIGHT if d.strategy.pp == 1 else d.strategy.pp)


def _vllm(d: Deployment, memory: GpuMemory, pool: int, context: int, g: Groups) -> PeerCapacity:
    flight, caches = in_flight_tokens(d), d.strategy.dp * d.strategy.replicas
    blocks = pool // g.pool_block
    asked = -(-request_bytes(g, d.max_model_len, flight) // g.first)
    reported = blocks / asked
    one = -(-request_bytes(g, context, flight) // g.first)
    # The fixed part from afar, in bytes of the pool: what a request of no length but a full reserve would hold.
    long = BLOCK_TOKENS * (flight // BLOCK_TOKENS + 1)
    fixed = request_bytes(g, long, flight) - long // BLOCK_TOKENS * g.first
    scale = g.pool_block / g.first
    ours = _ours(d, memory, pool, context)
    per_token = sum(memory.kv_per_token.values())
    return PeerCapacity(
        "vllm",
        pool,
        int(reported * d.max_model_len),
        reported,
        int(blocks / _metric_blocks(g, d.max_model_len, flight) * d.max_model_len),
        blocks / one * caches,
        context,
        int(fixed * scale),
        g.first / BLOCK_TOKENS * scale,
        ours,
        f"vLLM reserves {fixed * scale / 2**30:.2f} GiB a request for window and compressor pages of {flight} tokens "
        f"in flight, and pads blocks: {g.first / BLOCK_TOKENS * scale:,.0f} B a token where the rows have "
        f"{per_token:,.0f}; "
        "longread keeps one ring a sequence",
    )


def _metric_blocks(g: Groups, length: int, in_flight: int) -> int:
    """Blocks a request as vLLM's cache_config_info counts them: every group as if all its layers were its first one,
    divided by the first layer of the first group, which is an index cache. An artefact, not a capacity.
    """

    def blocks(reach: int, tokens: int) -> int:
        return -(-min(reach - 1 + in_flight, length) // tokens) + 1

    first = -(-length // BLOCK_TOKENS) * g.index + blocks(8, CSA_BLOCK) * g.index
    rest = (blocks(128, WINDOW_BLOCK) * len(g.windows) + blocks(128, HCA_BLOCK)) * g.entry
    return -(-(first + rest) // g.index)


def _plain(d: Deployment, memory: GpuMemory, pool: int, context: int) -> PeerCapacity:
    """Models without windows: every token costs the same, in both engines as in ours."""
    per_token = sum(memory.kv_per_token.values())
    tokens = int(pool / per_token)
    ours = _ours(d, memory, pool, context)
    caches = d.strategy.dp * d.strategy.replicas
    return PeerCapacity(
        d.engine,
        pool,
        tokens,
        tokens / d.max_model_len,
        tokens,
        tokens / context * caches,
        context,
        0,
        per_token,
        ours,
        f"as longread's cache, {per_token:,.0f} B a token and nothing fixed",
    )


def _sglang(d: Deployment, memory: GpuMemory, pool: int, context: int, drafter_layers: int) -> PeerCapacity:
    """V4: tokens = (pool - HCA states of all requests) / bytes a token, windows and CSA states for a tenth of them."""
    c, ix = d.spec.compressed, d.spec.indexer
    if c is None or ix is None or d.spec.shared_kv is not None:
        return _plain(d, memory, pool, context)
    pp = d.strategy.pp
    layers, csa, hca = (-(-n // pp) for n in (d.spec.layers, c.ratios.count(4), c.ratios.count(128)))
    states = SGLANG_CSA_RING / c.window * csa * 4 * (4 * c.head_dim + 4 * ix.head_dim)
    window = SGLANG_WINDOW_SHARE * (layers * ENTRY_BYTES + states)
    rows = sum(kv_bytes_per_token(d.spec, "fp8_ds_mla").values()) / pp
    per_token = (rows + window) * (1 + (1 / layers if drafter_layers else 0))
    requests = max(d.max_num_seqs, 1)
    fixed = (requests + 2) * SGLANG_HCA_RING * 2 * c.head_dim * 4 * hca
    tokens = max(int((pool - fixed) / per_token), 0) // SGLANG_PAGE * SGLANG_PAGE
    ours = _ours(d, memory, pool, context)
    held = sum(fixed_bytes_per_request(d.spec, "fp8_ds_mla").values())
    return PeerCapacity(
        "sglang",
        pool,
        tokens,
        tokens / d.max_model_len,
        None,
        tokens / context * d.strategy.dp * d.strategy.replicas,
        context,
        fixed // requests,
        per_token,
        ours,
        f"SGLang keeps window rows and CSA states for {SGLANG_WINDOW_SHARE:.0%} of all tokens ({window:,.0f} B a token "
        f"beside {rows:,.0f}) and {fixed / 2**30:.2f} GiB of HCA states; "
        f"longread keeps {held / 2**20:.1f} MiB a sequence",
    )


def _ours(d: Deployment, memory: GpuMemory, pool: int, context: int) -> float:
    """Sessions that longread's cache would hold in the same bytes, its snapshots included."""
    own = replace(d, engine="longread")
    share = cache_share(d) / cache_share(own)
    rows = {name: size * share for name, size in memory.kv_per_token.items()}
    room = replace(memory, kv_per_token=rows, usable=pool + memory.weight_total + memory.beside)
    return capacity_of(own, room, context).sessions


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tuples(counts: list[int]) -> int:
    """Layers a group: the number from the first group's up that pads all groups least, the largest of equals."""
    sizes = range(counts[0], max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
