"""The GPU floor: CUDA, or with TRITON_INTERPRET=1 a CPU under Triton's interpreter, where sizes must be tiny."""

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" under the interpreter. tests/conftest.py has skipped what has neither."""
    if INTERPRETED:
        pytest.importorskip("triton")
    return "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Several processes test on one device: none keeps what its last test took."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
