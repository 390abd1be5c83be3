"""A model's weights as kernels take them: matrices joined by their inputs, experts stacked, formats as stored.

Knows tensor names' endings and formats; knows no model. ``weights`` gives a stored tensor by its native name, scales as
``.scale`` beside ``.weight``; it may read or make it on demand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.kernels.dispatch import kernel
from longread.kernels.experts import ref as experts
from longread.kernels.experts.ref import ExpertWeights, Kind
from longread.kernels.fp8.ref import BLOCK, FP8, Fp8Weight, Weight
from longread.kernels.quant.ref import decode_scale
from longread.spec.errors import UnsupportedModelError

Names = Sequence[str]


@dataclass(frozen=True, slots=True)
class Loader:
    """Stored tensors by name, the compute dtype of plain ones, and where they go."""

    weights: Callable[[str], Tensor]
    dtype: torch.dtype
    device: torch.device

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor in the compute dtype or another."""
        return self.weights(name).to(self.device, dtype or self.dtype)

    def matrix(self, *names: str) -> Weight:
        """Matrices (without ``.weight``) of equal inputs, one under another; in FP8 where they are stored so.

        Raises UnsupportedModelError where a scale block of 128 rows would reach from one matrix into the next.
        """
        parts = [self._stored(name) for name in names]
        plain = [part for part in parts if isinstance(part, Tensor)]
        if plain:
            return plain[0] if len(parts) == 1 else torch.cat(plain)
        packed = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(parts) == 1:
            return packed[0]
        for name, part in zip(names[:-1], packed[:-1], strict=True):
            if part.values.shape[0] % BLOCK:
                raise UnsupportedModelError(name, f"{name} has {part.values.shape[0]} rows, no multiple of {BLOCK}")
        values = torch.cat([part.values.view(torch.uint8) for part in packed]).view(FP8)
        return Fp8Weight(values, torch.cat([part.scales for part in packed]))

    def experts(self, prefix: str, count: int) -> ExpertWeights:
        """w1 over w3, and w2, of ``{prefix}{number}.``, stacked, in the device's form. Peak: a layer's stacks twice."""
        first = self.weights(f"{prefix}0.w1.weight").dtype
        kinds: dict[torch.dtype, Kind] = {torch.int8: "fp4", FP8: "fp8"}
        kind = kinds.get(first, "plain")
        w13, s13 = self._stack([[f"{prefix}{e}.{w}" for w in ("w1", "w3")] for e in range(count)], kind)
        w2, s2 = self._stack([[f"{prefix}{e}.w2"] for e in range(count)], kind)
        return kernel(experts.prepare, self.device.type)(ExpertWeights(kind, w13, s13, w2, s2))

    def _stack(self, names: Sequence[Names], kind: str) -> tuple[Tensor, Tensor | None]:
        """[E, rows of all of an expert's matrices, columns] and scales, copied in one by one."""

        def stacked(made: Callable[[str], Tensor]) -> Tensor:
            out: Tensor | None = None
            for expert, own in enumerate(names):
                for place, name in enumerate(own):
                    tensor = made(name)
                    rows, columns = tensor.shape
                    if out is None:
                        shape = len(names), rows * len(own), columns
                        out = torch.empty(shape, dtype=tensor.dtype, device=self.device)
                    out[expert, place * rows : (place + 1) * rows] = tensor
            assert out is not None  # a model has experts
            return out

        if kind == "plain":
            return stacked(lambda name: self.weights(name + ".weight").to(self.dtype)), None
        values = stacked(lambda name: self.weights(name + ".weight").view(torch.uint8))
        if kind == "fp4":
            return values, stacked(lambda name: self.weights(name + ".scale").view(torch.uint8))
        return values.view(FP8), stacked(lambda name: decode_scale(self.weights(name + ".scale")))

    def _stored(self, name: str) -> Weight:
        tensor = self.weights(name + ".weight")
        if tensor.dtype != FP8:
            return tensor.to(self.device, self.dtype)
        scales = decode_scale(self.weights(name + ".scale").to(self.device))
        return Fp8Weight(tensor.to(self.device), scales)


def first_rows(w: Weight, count: int) -> Weight:
    """The first ``count`` rows of a matrix, a multiple of 128 where it is in FP8."""
    if isinstance(w, Tensor):
        return w[:count]
    return Fp8Weight(w.values[:count], w.scales[: count // BLOCK])
