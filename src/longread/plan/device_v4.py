"""Which sizes of a V4 model a GPU's kernels take.

Knows a spec and the sizes that kernels/ are written for; knows no torch.
"""

from longread.plan.device_mla import BLOCK, MOST_EXPERTS, power
from longread.spec.model import CompressedSpec, HyperSpec, IndexerSpec, ModelSpec

WINDOW = 128  # kernels.window: tokens of a ring
HEADS = (128, 512)  # kernels.sparse_attention.chunk_triton: channels of a head
STREAMS = 4  # kernels.hyper
INDEX_HEADS, INDEX_CHANNELS = 256, 32  # kernels.indexer: at most, at least
# kernels.indexer.topk: scores of a row that is read whole; else groups, and elements of one selection.
DIRECT, GROUPS, ENTRIES = 8192, 16384, 16384


def unfit_v4(spec: ModelSpec, c: CompressedSpec, ix: IndexerSpec, hyper: HyperSpec, context: int) -> str | None:
    """What of a model's sizes the kernels do not take; None: they run it. The window's would write beyond their rings,
    the others' references wait for the device, which no graph can, or take more memory than is planned. ``context``:
    tokens of the longest.
    """
    moe, block = spec.moe, BLOCK if spec.quant is not None else 16
    if c.window != WINDOW:
        return f"sliding_window {c.window} is not {WINDOW}"
    if c.head_dim not in HEADS:
        return f"head_dim {c.head_dim} is none of {', '.join(map(str, HEADS))}"
    if not power(c.rope_head_dim) or c.rope_head_dim < 8:
        return f"qk_rope_head_dim {c.rope_head_dim} is no power of two from 8 up"
    if hyper.mult != STREAMS:
        return f"hc_mult {hyper.mult} is not {STREAMS}"
    for name, size, whole in (
        ("hidden_size", spec.hidden, BLOCK),
        ("moe_intermediate_size", moe.intermediate, BLOCK),
        ("q_lora_rank", c.q_lora_rank, block),
        ("o_lora_rank", c.o_lora_rank, block),
    ):
        if size % whole:
            return f"{name} {size} is no multiple of {whole}"
    if moe.routed > MOST_EXPERTS:
        return f"n_routed_experts {moe.routed} are more than {MOST_EXPERTS}"
    return _unfit_index(ix, context) if 4 in c.ratios else None


def _unfit_index(ix: IndexerSpec, context: int) -> str | None:
    if not power(ix.heads) or ix.heads > INDEX_HEADS:
        return f"index_n_heads {ix.heads} is no power of two up to {INDEX_HEADS}"
    if not power(ix.head_dim) or ix.head_dim < INDEX_CHANNELS:
        return f"index_head_dim {ix.head_dim} is no power of two from {INDEX_CHANNELS} up"
    rows, wide = context // 4, 1 << (ix.top_k - 1).bit_length()
    if rows > max(DIRECT, ix.top_k):
        most = GROUPS * max((size for size in (16, 32, 64) if wide * size <= ENTRIES), default=0)
        if rows > most:
            shorter = 4 * max(DIRECT, ix.top_k, most)
            return f"index_topk {ix.top_k} of {context} tokens is chosen of up to {shorter} (max_model_len={shorter})"
    return None
