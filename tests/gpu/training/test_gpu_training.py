"""The twins' fast forms on a CUDA device against their plain ones."""

import pytest
import torch
from training import attention
from training.configs import READER_V3, READER_V4
from training.twin_v3 import TwinV3
from training.twin_v4 import TwinV4


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    """Root mean square difference, relative to the reference's."""
    ours, theirs = ours.float(), theirs.float()
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert error < bound, f"relative error {error:.2e}, allowed {bound:.0e}"


# torch 2.11 compiles flex attention by way of what it calls deprecated itself.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("length", "ratio"), [(256, 4), (512, 128), (384, 0), (2048, 4)])
@pytest.mark.parametrize("sparse", [False, True])
def test_flex_equals_eager(length: int, ratio: int, sparse: bool) -> None:
    if sparse and ratio != 4:
        pytest.skip("only the indexed layers select")
    torch.manual_seed(0)
    rows, heads, width = 2, 8, 128
    count = length // ratio if ratio else 0
    q0 = torch.randn(rows, heads, length, width, device="cuda")
    k0 = torch.randn(rows, length + count, width, device="cuda")
    wanted = torch.randn(rows, heads, length, width, device="cuda")
    chosen = (torch.rand(rows, length, count, device="cuda") < 0.3) if sparse else None
    results = []
    for run in (attention.eager, attention.flex):
        q, k = q0.clone().requires_grad_(), k0.clone().requires_grad_()
        out, lse = run(q, k, 128, ratio, width**-0.5, chosen)
        ((out.float() * wanted).sum() + (lse.float() * wanted[..., 0]).sum()).backward()
        results.append((out, lse, q.grad, k.grad))
    for theirs, ours in zip(*results, strict=True):
        close(ours, theirs, 2e-2)  # bfloat16 products of 128 terms


@pytest.mark.parametrize("selection", ["dense", "topk"])
def test_v4_compiled_equals_eager(selection: str) -> None:
    torch.manual_seed(0)
    twin = TwinV4(READER_V4).cuda()
    twin.selection = selection
    ids = torch.randint(3, 4096, (2, 1024), device="cuda")
    outs = []
    for eager in (True, False):
        twin.eager = eager
        if not eager:
            twin.compile_layers()
        with torch.autocast("cuda", torch.bfloat16):
            outs.append(twin.hidden(ids).detach())
    # Under bfloat16 a router or an index may choose otherwise at a near tie, so single rows may differ.
    error = ((outs[0] - outs[1]).norm(dim=-1) / outs[0].norm(dim=-1)).median()
    assert error < 5e-2


def test_v3_fused_attention_equals_eager() -> None:
    torch.manual_seed(0)
    twin = TwinV3(READER_V3).cuda()
    ids = torch.randint(3, 4096, (2, 1000), device="cuda")
    outs = []
    for eager in (True, False):
        twin.eager = eager
        with torch.autocast("cuda", torch.bfloat16):
            outs.append(twin.hidden(ids).detach())
    error = ((outs[0] - outs[1]).norm(dim=-1) / outs[0].norm(dim=-1)).median()
    assert error < 5e-2
