"""Records in pinned memory, spread over a storage by a GPU that reads them itself, against the reference."""

import pytest
import torch
from interpreter_gaps import filled_gaps  # noqa: F401, an autouse fixture

from longread.kernels.records import ref

pytest.importorskip("triton")
from longread.kernels.records import triton as fast

pytestmark = pytest.mark.gpu
PLACES, LAYERS, ROWS = 19, 5, 4


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(584, torch.uint8), (36, torch.uint8), (9, torch.bfloat16), (3, torch.uint8), (6, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2, 7, PLACES])
def test_any_layers_of_any_records(width: int, dtype: torch.dtype, count: int, device: str) -> None:
    """Between other parts of the record, in no order; what is not meant stays as it was."""
    g = torch.Generator().manual_seed(width + count)
    got = torch.full((LAYERS, PLACES, ROWS, width), 7, dtype=dtype, device=device)
    want = got.cpu()
    part = ROWS * width * got.element_size()
    size, at = part * (LAYERS + 2), part
    memory = torch.randint(0, 256, (size * (PLACES + 1),), generator=g, dtype=torch.uint8)
    pinned = memory.pin_memory() if device == "cuda" else memory
    starts = torch.randperm(PLACES + 1, generator=g)[:count] * size
    places = torch.randperm(PLACES, generator=g)[:count]
    for layers in ((2, 2), (1, 2), (0, LAYERS), (3, LAYERS)):
        for programs, vectors in ((1, 32), (3, 128)):
            fast.spread(
                pinned, starts.to(device), places.to(device), got, at, layers, programs=programs, vectors=vectors
            )
        ref.spread(memory, starts, places, want, at, layers)
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_no_records(device: str) -> None:
    got = torch.full((2, 3, 4, 8), 7, dtype=torch.uint8, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    fast.spread(torch.zeros(64, dtype=torch.uint8), none, none, got, 0, (0, 2))
    assert (got == 7).all()
