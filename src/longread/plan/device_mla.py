"""What V2 and V3 take of a GPU: their weights and the buffers of a step, by formulas.

Knows a spec and how models/native_v3.py holds its weights and kernels/mla its scratch; knows no torch.
"""

from functools import cache

from longread.spec.inventory import ITEMSIZE, inventory
from longread.spec.loaded import is_drafter, loaded_dtype
from longread.spec.model import MLASpec, ModelSpec

BLOCK = 128  # of FP8 scales
COMPUTE = 2  # bytes of a bfloat16
PAGE = 256  # tokens
ABSORBED = 512  # models.native_v3: longer chunks expand their context
# kernels.mla.triton: the largest latent whose tiles an SM's shared memory holds, by packing and whether heads are many.
MOST_RANK, MANY_HEADS = {(True, True): 1024, (True, False): 1024, (False, True): 512, (False, False): 2048}, 16
MOST_EXPERTS = 1024  # kernels.experts
MOST_WIDTH = 256  # kernels.mla: channels of a key that cuDNN's and flash's attention take, eights of them
KEYS = 16384  # kernels.mla.device_ref: keys expanded at once
# kernels.experts.triton: blocks are of 16 slots up to FEWER pairs an expert or FEW_PAIRS in all, of 32 up to FEW.
FEWER, FEW, FEW_PAIRS = 4, 24, 1024
PERSISTENT, OTHERS = 16, 64  # beyond: those of FP8 in the persistent kernel, those of plain weights and odd sizes
# kernels.mla.triton: parts of the keys for which the device is done soonest.
SMS, MOST_SPLITS, SPLIT_COST, TILE_KEYS, TILE_HEADS = 132, 64, 4, 64, 64


def mla_weights(spec: ModelSpec, mla: MLASpec) -> int:
    """Stored types, but

    scales     of FP8 matrices as float32
    kv_b_proj  in bfloat16: both forms of attention multiply by parts of it
    filled up  with zeros to whole blocks of 128: F of routed experts; in FP8 F of every network, and q_a_proj's rows
    plain      as bfloat16, the router's bias as float32; rotary frequencies, float32 [rope / 2]
    """
    total = 2 * mla.qk_rope_head_dim
    for entry in inventory(spec):
        kv_b = entry.name.removesuffix("_scale_inv").endswith("kv_b_proj.weight")
        if is_drafter(entry.name, spec) or (kv_b and entry.scale_of is not None):
            continue
        if entry.scale_of is not None:
            total += 4 * entry.elements
            continue
        size = ITEMSIZE[loaded_dtype(entry, "bfloat16")]
        if ".experts." not in entry.name and (entry.dtype != "float8_e4m3" or kv_b):
            total += entry.elements * size
        else:
            rows, columns = entry.shape
            if entry.name.endswith(("gate_proj.weight", "up_proj.weight", "q_a_proj.weight")):
                rows = _whole(rows)
            elif entry.name.endswith("down_proj.weight"):
                columns = _whole(columns)
            total += rows * columns * (1 if entry.dtype == "float8_e4m3" else size)
    return total


def unfit(spec: ModelSpec, mla: MLASpec, packed: bool) -> str | None:
    """What of a model's sizes the kernels do not take; None: they run it. Their references wait for the device, which
    no graph can. ``packed``: whether the cache is.
    """
    rank, rope, v = mla.kv_lora_rank, mla.qk_rope_head_dim, mla.v_head_dim
    if spec.hidden % BLOCK:
        return f"hidden_size {spec.hidden} is no multiple of {BLOCK}"
    if not (power(rank) and power(rope)) or min(rank, rope) < 16:
        return f"latents of {rank} and {rope} channels are not both powers of two from 16 up"
    if packed and rank % BLOCK:
        return f"kv_lora_rank {rank} is no multiple of {BLOCK}; kv_cache_dtype=bfloat16 takes it"
    most = MOST_RANK[packed, spec.heads > MANY_HEADS]
    if rank > most:
        other = f"; kv_cache_dtype=fp8 takes up to {MOST_RANK[True, True]}" if most < MOST_RANK[True, True] else ""
        return f"kv_lora_rank {rank} of {spec.heads} heads is above {most}{other}"
    width = mla.qk_nope_head_dim + rope
    if width % 8 or width > MOST_WIDTH:
        return f"keys of {width} channels are no multiple of 8, or more than {MOST_WIDTH}"
    if not power(v) or v > width:
        return f"values of {v} channels are no power of two, or wider than keys"
    if spec.layers > spec.moe.first_dense and spec.moe.routed > MOST_EXPERTS:
        return f"n_routed_experts {spec.moe.routed} are more than {MOST_EXPERTS}"
    if spec.quant is not None and (mla.q_lora_rank or 0) % BLOCK:
        return f"q_lora_rank {mla.q_lora_rank} is no multiple of {BLOCK}"
    return None


def mla_step_bytes(spec: ModelSpec, mla: MLASpec, tokens: int, bound: int) -> int:
    """Most that is alive at a time while models/native_v3.py computes a chunk of T = ``tokens`` of a sequence of up to
    L = ``bound``. H heads of n + r channels and v of values, latents of c + r, D hidden, k experts of F:

    always     x, the sublayer's input plain and in FP8, and the last output, [T, D] each; places and rotations
    attention  queries [T, H (n + r)]. Expanded (T > ABSORBED): the same once more from a page's start on, and as many
               of keys and values [.., H (n + r + v)], with their latents, as are expanded at once (KEYS; the chunk's
               own), beside a part of the results [T, H v] and what was found before it: nothing, one part, or from the
               third part on a sum in float32. Absorbed: queries and results [T, H c], each part of the keys as float32
    network    dense: [T, 2 F] and the same in FP8. Experts, of S slots (pairs, and blocks' padding): outputs [S, D]
               beside FP8 hidden [S, F], or the latter beside its source; the shared expert's output and the sum
    """
    d, moe = spec.hidden, spec.moe
    fp8 = spec.quant is not None
    always = 3 * d * COMPUTE + (quantised(d) if fp8 else 0) + 12 + 4 * mla.qk_rope_head_dim
    attention = _attention(spec, mla, tokens, bound)
    dense = max(moe.dense_intermediate if moe.first_dense else 0, moe.shared * moe.intermediate)
    network = tokens * (2 * _whole(dense) * COMPUTE + (quantised(dense) if fp8 else dense * COMPUTE))
    if spec.layers > moe.first_dense:
        network = max(network, _experts(spec, tokens, fp8))
    return tokens * always + max(attention, network)


def quantised(channels: int) -> int:
    """Bytes of a token's channels in FP8, with their scales."""
    return channels + 4 * -(-channels // BLOCK)


def _attention(spec: ModelSpec, mla: MLASpec, tokens: int, bound: int) -> int:
    heads, v, latent = spec.heads, mla.v_head_dim, mla.kv_lora_rank + mla.qk_rope_head_dim
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    queries = tokens * heads * width * COMPUTE
    if tokens <= ABSORBED:
        parts = _splits(tokens * -(-heads // TILE_HEADS), -(-bound // TILE_KEYS))
        scratch = 4 * parts * (mla.kv_lora_rank + 1) if parts > 1 else 0
        return queries + tokens * heads * (2 * mla.kv_lora_rank * COMPUTE + v * COMPUTE + scratch)
    begun = tokens + PAGE  # queries from a page's start on
    key, result = (heads * (width + v) + latent) * COMPUTE, begun * heads * v
    before = (0, COMPUTE, COMPUTE + 4)  # bytes of a result's number when the first, the second, the third part is made
    parts = min(max((bound - 1) // KEYS, 1), 3)
    others = min(bound, KEYS) * key + result * (before[parts - 1] + COMPUTE)
    own = begun * key + result * (before[2 if bound > begun else 0] + COMPUTE)
    return queries + begun * heads * width * COMPUTE + max(others, own) + 8 * begun * heads


def _experts(spec: ModelSpec, tokens: int, fp8: bool) -> int:
    moe, d = spec.moe, spec.hidden
    pairs = tokens * moe.top_k
    mean = 0.0 if pairs <= FEW_PAIRS else pairs / moe.routed
    block = expert_block(mean, fp8 and d % 256 == 0)
    slots = (min(pairs, moe.routed) + pairs // block) * block
    out, f = d * (4 if mean <= FEWER else COMPUTE), _whole(moe.intermediate)
    hidden = f + 4 if fp8 else f * COMPUTE
    most = slots * (hidden + max(out, f * COMPUTE if fp8 else 0) + 4)
    return most + tokens * (2 * d * COMPUTE + (d + 4 if fp8 else 0) + 4 * moe.routed) + 12 * pairs


def expert_block(mean: float, persistent: bool) -> int:
    """Slots of a block at ``mean`` pairs an expert; ``persistent``: whether that kernel has tiles for the model."""
    if mean <= FEW:
        return 16 if mean <= FEWER else 32
    return PERSISTENT if persistent else OTHERS


@cache
def _splits(programs: int, blocks: int) -> int:
    def cost(splits: int) -> int:
        return -(-programs * splits // SMS) * (-(-blocks // splits) + (SPLIT_COST if splits > 1 else 1))

    return min(range(1, max(1, min(MOST_SPLITS, blocks)) + 1), key=cost)


def power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _whole(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
