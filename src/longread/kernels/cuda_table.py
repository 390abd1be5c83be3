"""What runs on a GPU: reference function -> kernel launcher of the same signature.

Imported by dispatch.py when a CUDA device is first asked for; everything in it needs Triton.
"""

from collections.abc import Callable, Mapping
from typing import Any

from longread.kernels.compressor import device_ref as compressor
from longread.kernels.compressor import triton as compressor_triton
from longread.kernels.experts import ref as experts
from longread.kernels.experts import triton as experts_triton
from longread.kernels.fp8 import ref as fp8
from longread.kernels.fp8 import triton as fp8_triton
from longread.kernels.hyper import ref as hyper
from longread.kernels.hyper import triton as hyper_triton
from longread.kernels.indexer import ref as indexer
from longread.kernels.indexer import triton as indexer_triton
from longread.kernels.mla import device_ref as mla
from longread.kernels.mla import triton as mla_triton
from longread.kernels.norm import device_ref as norm
from longread.kernels.norm import triton as norm_triton
from longread.kernels.records import ref as records
from longread.kernels.records import triton as records_triton
from longread.kernels.sparse_attention import device_ref as sparse_attention
from longread.kernels.sparse_attention import triton as sparse_attention_triton
from longread.kernels.window import ref as window
from longread.kernels.window import triton as window_triton

CUDA: Mapping[Callable[..., Any], Callable[..., Any]] = {
    fp8.quantise: fp8_triton.quantise,
    fp8.linear: fp8_triton.linear,
    fp8.grouped_linear: fp8_triton.grouped_linear,
    fp8.gated: fp8_triton.gated,
    fp8.latents: fp8_triton.latents,
    fp8.turn_back: fp8_triton.turn_back,
    hyper.weights: hyper_triton.weights,
    hyper.enter: hyper_triton.enter,
    hyper.leave: hyper_triton.leave,
    experts.prepare: experts_triton.prepare,
    experts.route: experts_triton.route,
    experts.experts: experts_triton.experts,
    norm.add_norm: norm_triton.add_norm,
    mla.latents: mla_triton.latents,
    mla.rotate: mla_triton.rotate,
    mla.attend_rows: mla_triton.attend_rows,
    mla.attend_chunk: mla_triton.attend_chunk,
    compressor.layer_rows: compressor_triton.layer_rows,
    compressor.chunk: compressor_triton.chunk,
    compressor.keep: compressor_triton.keep,
    indexer.queries: indexer_triton.queries,
    indexer.keys: indexer_triton.keys,
    indexer.choose_rows: indexer_triton.choose_rows,
    indexer.choose_chunk: indexer_triton.choose_chunk,
    window.slab: window_triton.slab,
    window.keep: window_triton.keep,
    sparse_attention.entries: sparse_attention_triton.entries,
    sparse_attention.rows_turned: sparse_attention_triton.rows_turned,
    sparse_attention.chunk_turned: sparse_attention_triton.chunk_turned,
    records.spread: records_triton.spread,
}
