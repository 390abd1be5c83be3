"""What a native tensor name says: scale or weight, drafter or backbone, kept in float32 or not.

Knows DeepSeek's naming (V2/V3: ``model.layers.N…weight`` + ``weight_scale_inv``; V4: ``layers.N…weight`` + ``scale``).
"""

import re

from longread.spec.model import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Small tensors that steer choices or mixing: rounding them would change which experts or rows are taken.
_FLOAT32 = re.compile(r"(e_score_correction_bias|gate\.bias|attn_sink|\.ape|(^|\.)hc_(attn|ffn|head)_(fn|base|scale))$")


def is_scale(name: str) -> bool:
    """True for the scale of a quantised weight (V4's ``hc_*_scale`` are weights)."""
    return name.endswith((".weight_scale_inv", ".scale"))


def scale_names(weight: str) -> tuple[str, str]:
    """The names that the scale of ``weight`` may have: V2/V3's, V4's."""
    return f"{weight}_scale_inv", f"{weight.removesuffix('.weight')}.scale"


def weight_of(scale: str) -> str:
    """The weight's name for a scale's name."""
    return (
        scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else scale.removesuffix(".scale") + ".weight"
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
