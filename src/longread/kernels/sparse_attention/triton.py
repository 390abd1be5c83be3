"""V4's attention on a GPU: the kernels behind ``device_ref``'s functions, with the same signatures."""

from longread.kernels.sparse_attention.chunk_triton import chunk_turned
from longread.kernels.sparse_attention.entries_triton import entries
from longread.kernels.sparse_attention.rows_triton import rows_turned

__all__ = ["chunk_turned", "entries", "rows_turned"]
