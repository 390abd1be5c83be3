"""Muon: momentum whose update is orthogonalised by Newton-Schulz steps, batched over equal shapes.

Knows matrices [..., out, in] and a learning rate. Parameters of one (out, in), stacked expert matrices among them,
share one momentum buffer and one run of batched products: the kernel launches are as many as the shapes, not more.
Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Replace each matrix of float32 [N, out, in] by one with the same singular vectors and singular values near 1.

    bfloat16 products on CUDA, float32 elsewhere. A zero matrix stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)
    if x.device.type == "cuda":
        x = x.bfloat16()
    a, b, c = _QUINTIC
    for _ in range(steps):
        square = x @ x.mT
        poly = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return (x.mT if tall else x).float()


class Muon:
    """The optimiser of the matrices of a model: Nesterov momentum, then `orthogonalise`, then a step of lr * scale.

    scale = sqrt(max(1, out / in)). A parameter without a gradient counts as one with a zero gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, steps: int = 5) -> None:
        self.momentum = momentum
        self.steps = steps
        self._parameters: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            self._parameters.setdefault((parameter.shape[-2], parameter.shape[-1]), []).append(parameter)
        self._buffers = {
            shape: torch.cat([torch.zeros_like(p).reshape(-1, *shape) for p in same])
            for shape, same in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """One update of every parameter; ``lr`` may be a tensor on the device."""
        for (out, inner), same in self._parameters.items():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            flat = torch.cat([g.reshape(-1, out, inner) for g in grads])
            buffer = self._buffers[out, inner]
            buffer.lerp_(flat, 1 - self.momentum)
            update = orthogonalise(flat.lerp_(buffer, self.momentum), self.steps) * (lr * max(1.0, out / inner) ** 0.5)
            parts = update.split([p.numel() // (out * inner) for p in same])
            shaped = [part.reshape(p.shape) for part, p in zip(parts, same, strict=True)]
            torch._foreach_sub_(list(same), shaped)

    def state_dict(self) -> dict[str, Tensor]:
        """Momentum by "OUTxIN": float32 [matrices, out, in]."""
        return {f"{out}x{inner}": buffer for (out, inner), buffer in self._buffers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, buffer in self.state_dict().items():
            buffer.copy_(state[name])
