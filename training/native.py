"""Between a checkpoint's tensors and a twin's parameters: experts stacked, names fit for attributes, stored types.

Knows the inventory of a spec; knows no arithmetic. ``layers.0.ffn.experts.3.w1.weight`` of every expert becomes one
parameter ``layers.0.ffn.experts.w1.weight`` [E, out, in].
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter, loaded_shape
from longread.spec.model import ModelSpec

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.*)$")


class Native:
    """shapes: of every stacked name, in the inventory's order. kinds: "fp8", "fp4", "bfloat16", "float32" or "int64".
    buffers: names that no gradient reaches (router biases and tables). block, power_of_two: the FP8 layout.
    """

    def __init__(self, spec: ModelSpec):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}
        self.block = spec.quant.block if spec.quant else (128, 128)
        self.power_of_two = False
        entries = [e for e in inventory(spec) if not is_drafter(e.name, spec)]
        for e in entries:
            if e.scale_of is not None:
                fp8 = self.kinds.get(_stacked(e.scale_of)[0]) == "fp8"
                self.power_of_two |= fp8 and (e.dtype == "float8_e8m0" or bool(spec.quant and spec.quant.power_of_two))
                continue
            name, expert = _stacked(e.name)
            shape = loaded_shape(e)
            self.shapes[name] = shape if expert is None else (spec.moe.routed, *shape)
            self.kinds[name] = {"float8_e4m3": "fp8", "int8": "fp4"}.get(e.dtype, e.dtype)
        self.buffers = {
            name for name in self.shapes if name.endswith(("tid2eid", "gate.bias", "e_score_correction_bias"))
        }

    @staticmethod
    def escaped(name: str) -> str:
        """A name without dots, for ``register_parameter``."""
        return name.replace(".", "__")

    def split(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Native names; experts apart."""
        out: dict[str, Tensor] = {}
        for name, value in stacked.items():
            if ".experts." not in name or "shared" in name:
                out[name] = value
                continue
            head, tail = name.split(".experts.")
            out |= {f"{head}.experts.{e}.{tail}": part for e, part in enumerate(value.unbind(0))}
        return out

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of ``split``. Raises KeyError for a missing tensor."""
        out = {}
        for name, shape in self.shapes.items():
            if ".experts." not in name or "shared" in name:
                out[name] = tensors[name]
                continue
            head, tail = name.split(".experts.")
            out[name] = torch.stack([tensors[f"{head}.experts.{e}.{tail}"] for e in range(shape[0])])
        return out


def _stacked(name: str) -> tuple[str, int | None]:
    found = _EXPERT.match(name)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else (name, None)
