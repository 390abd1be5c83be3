"""Casts of Triton's interpreter as a GPU makes them.

The interpreter cuts bfloat16 off instead of rounding it, and rounding an FP8 mantissa up loses its carry; the compiled
kernels round to the nearest even. With this, bytes can be compared under the interpreter too.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as hardware does; nothing where kernels are compiled. Import it into a test file to have it there."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float
    narrow = {tl.bfloat16: (torch.bfloat16, torch.int16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in narrow:
            return cut(data, source, target, rounding)
        kind, bits = narrow[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        if target == tl.float8e4nv:
            values = values.clamp(-448, 448)  # cvt.rn.satfinite
        return values.to(kind).view(bits).numpy().reshape(np.shape(data))

    monkeypatch.setattr(interpreter, "_convert_float", convert)
