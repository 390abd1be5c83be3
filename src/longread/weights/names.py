"""What a native tensor name says where the inventory does not: drafter or backbone, kept in float32 or not.

A file may hold drafter tensors of another drafter than ``config.json`` names, so names decide, not the inventory.
"""

import re

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


def keeps_float32(name: str) -> bool:
    """True for a tensor that is loaded as float32 whatever the compute type."""
    return _FLOAT32.search(name) is not None
