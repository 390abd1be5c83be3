"""Triton's own hooks on a GPU: a kernel is found without running, compiled in a thread, and launched as it is."""

import pytest
import torch

from longread.engine.compile_ahead import compile_all, missing_kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")


@triton.jit
def _doubled(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n), at < n)


def test_what_is_compiled_ahead_is_what_is_launched() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, y = torch.arange(100, device=device, dtype=torch.float32), torch.zeros(100, device=device)
    compiled: list[object] = []

    def launch(block: int) -> None:
        _doubled[(triton.cdiv(100, block),)](x, y, 100, BLOCK=block)

    found = missing_kernels([lambda: launch(32), lambda: launch(64), lambda: launch(32)])
    assert len(found) == 2 and not y.any()
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["fn"].name)
    try:
        compile_all(found, device, lambda done, total: None)
        assert compiled == ["_doubled"] * 2
        launch(32)
        assert torch.equal(y, 2 * x)
        y.zero_()
        assert missing_kernels([lambda: launch(64), lambda: launch(16)])[0].launch != found[0].launch
        assert not y.any(), "a kernel that was there has run"
        launch(64)
        assert torch.equal(y, 2 * x) and len(compiled) == 2
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
