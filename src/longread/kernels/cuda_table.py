"""What runs on a GPU: reference function -> kernel launcher of the same signature.

Imported by dispatch.py when a CUDA device is first asked for; everything in it needs Triton.
"""

from collections.abc import Callable, Mapping
from typing import Any

CUDA: Mapping[Callable[..., Any], Callable[..., Any]] = {}
