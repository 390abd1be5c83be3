"""What of a checkpoint is loaded, as which type, and how many bytes that makes.

Knows names and sizes only. The reader loads by these rules and the planner counts by them, so that the two agree.
A checkpoint may hold drafter tensors of another drafter than ``config.json`` names, so names decide what a drafter is.
"""

import re

from longread.spec.inventory import ITEMSIZE, TensorSpec, inventory
from longread.spec.model import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Small tensors that steer choices or mixing: rounding them would change which experts or rows are taken.
_FLOAT32 = re.compile(
    r"(e_score_correction_bias|gate\.bias(_vl)?|attn_sink|\.ape|(^|\.)hc_(attn|ffn|head)_(fn|base|scale))$"
)


def is_drafter(name: str, spec: ModelSpec) -> bool:
    """True for MTP (and DSpark) tensors: V3 stores them as layers behind the last one, V4 under ``mtp.``."""
    if name.startswith("mtp."):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= spec.layers


def loaded_dtype(entry: TensorSpec, dtype: str) -> str:
    """The type of a loaded weight when the model computes in ``dtype`` ("bfloat16", "float16" or "float32")."""
    if entry.dtype == "int64":
        return "int64"
    return "float32" if _FLOAT32.search(entry.name) else dtype


def loaded_shape(entry: TensorSpec) -> tuple[int, ...]:
    """The shape of a loaded weight: int8 stores two FP4 numbers a byte, so its rows become twice as long."""
    return (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.dtype == "int8" else entry.shape


def loaded_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the loaded backbone for compute type ``dtype``; no scales, no drafter.

    Weights that lie on disk in the wanted type stay views into the mapped file: they count here, although the system
    may drop and reread their pages.
    """
    total = 0
    for entry in inventory(spec):
        if entry.scale_of is None and not is_drafter(entry.name, spec):
            numbers = entry.elements * (2 if entry.dtype == "int8" else 1)
            total += numbers * ITEMSIZE[loaded_dtype(entry, dtype)]
    return total
