"""What Triton's interpreter gets wrong although the compiler does not: loop bounds and products of bfloat16.

Loop bounds that a kernel computes are arrays of one number, which numpy from 2.4 on refuses as integers; bfloat16
numbers are kept as uint16, and ``dot`` multiplies those.
"""

import os
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def filled_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where kernels are compiled. Import it into a test file to have it there."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
