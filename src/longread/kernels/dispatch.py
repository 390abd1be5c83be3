"""The one table of kernels: reference function x device type -> implementation with the same signature.

The reference is the CPU backend unless a faster one stands in the table; what runs on a GPU stands in cuda_table.py,
which is imported when first asked for (it needs Triton). Nothing falls back silently: a device without an entry is
refused.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch.profiler import record_function

from longread.kernels.compressor import cpu as compressor_cpu
from longread.kernels.compressor import device_ref as compressor_device
from longread.kernels.compressor import ref as compressor
from longread.kernels.experts import ref as experts
from longread.kernels.fp8 import ref as fp8
from longread.kernels.hyper import cpu as hyper_cpu
from longread.kernels.hyper import ref as hyper
from longread.kernels.indexer import ref as indexer
from longread.kernels.linear import cpu as linear_cpu
from longread.kernels.linear import ref as linear
from longread.kernels.mla import cpu as mla_cpu
from longread.kernels.mla import device_ref as mla_device
from longread.kernels.mla import ref as mla
from longread.kernels.moe import cpu as moe_cpu
from longread.kernels.moe import ref as moe
from longread.kernels.norm import cpu as norm_cpu
from longread.kernels.norm import device_ref as norm_device
from longread.kernels.norm import ref as norm
from longread.kernels.records import ref as records
from longread.kernels.rope import cpu as rope_cpu
from longread.kernels.rope import ref as rope
from longread.kernels.router import cpu as router_cpu
from longread.kernels.router import ref as router
from longread.kernels.sparse_attention import cpu as sparse_attention_cpu
from longread.kernels.sparse_attention import device_ref as sparse_attention_device
from longread.kernels.sparse_attention import ref as sparse_attention
from longread.kernels.window import ref as window
from longread.spec.errors import ConfigError

Op = TypeVar("Op", bound=Callable[..., Any])

TABLE: Mapping[Callable[..., Any], Mapping[str, Callable[..., Any]]] = {
    norm.rms_norm: {"cpu": norm_cpu.rms_norm},
    rope.rotate_: {"cpu": rope_cpu.rotate_},
    rope.apply_interleaved: {"cpu": rope.apply_interleaved},
    router.router_logits: {"cpu": router_cpu.router_logits},
    router.route: {"cpu": router_cpu.route},
    router.route_hash: {"cpu": router_cpu.route_hash},
    linear.linear: {"cpu": linear_cpu.linear},
    moe.mlp: {"cpu": moe_cpu.mlp},
    moe.experts: {"cpu": moe_cpu.experts},
    mla.write: {"cpu": mla.write},
    mla.attend: {"cpu": mla_cpu.attend},
    hyper.mix: {"cpu": hyper_cpu.mix},
    hyper.update: {"cpu": hyper_cpu.update},
    hyper.head: {"cpu": hyper.head},
    compressor.overlap_step: {"cpu": compressor_cpu.overlap_step},
    compressor.overlap_chunk: {"cpu": compressor.overlap_chunk},
    compressor.online_step: {"cpu": compressor_cpu.online_step},
    compressor.online_chunk: {"cpu": compressor.online_chunk},
    indexer.scores: {"cpu": indexer.scores},
    indexer.chosen: {"cpu": indexer.chosen},
    indexer.chosen_rows: {"cpu": indexer.chosen_rows},
    sparse_attention.attend: {"cpu": sparse_attention.attend},
    sparse_attention.decode: {"cpu": sparse_attention_cpu.decode},
    # What models/native_v4.py and native_v3.py are made of: a CPU runs the references, for tests.
    norm_device.add_norm: {"cpu": norm_device.add_norm},
    mla_device.latents: {"cpu": mla_device.latents},
    mla_device.rotate: {"cpu": mla_device.rotate},
    mla_device.attend_rows: {"cpu": mla_device.attend_rows},
    mla_device.attend_chunk: {"cpu": mla_device.attend_chunk},
    fp8.quantise: {"cpu": fp8.quantise},
    fp8.linear: {"cpu": fp8.linear},
    fp8.grouped_linear: {"cpu": fp8.grouped_linear},
    fp8.gated: {"cpu": fp8.gated},
    fp8.latents: {"cpu": fp8.latents},
    fp8.turn_back: {"cpu": fp8.turn_back},
    hyper.weights: {"cpu": hyper.weights},
    hyper.enter: {"cpu": hyper.enter},
    hyper.leave: {"cpu": hyper.leave},
    experts.prepare: {"cpu": experts.prepare},
    experts.route: {"cpu": experts.route},
    experts.experts: {"cpu": experts.experts},
    compressor_device.layer_rows: {"cpu": compressor_device.layer_rows},
    compressor_device.chunk: {"cpu": compressor_device.chunk},
    compressor_device.keep: {"cpu": compressor_device.keep},
    indexer.queries: {"cpu": indexer.queries},
    indexer.keys: {"cpu": indexer.keys},
    indexer.choose_rows: {"cpu": indexer.choose_rows},
    indexer.choose_chunk: {"cpu": indexer.choose_chunk},
    window.slab: {"cpu": window.slab},
    window.keep: {"cpu": window.keep},
    sparse_attention_device.entries: {"cpu": sparse_attention_device.entries},
    sparse_attention_device.rows_turned: {"cpu": sparse_attention_device.rows_turned},
    sparse_attention_device.chunk_turned: {"cpu": sparse_attention_device.chunk_turned},
    records.spread: {"cpu": records.spread},
}


OP_PREFIX = "longread::op::"


def kernel(reference: Op, device: str) -> Op:
    """The implementation of ``reference`` for a torch device type. Raises ConfigError where there is none."""
    chosen = _found(reference, device)
    return _ranged(reference, chosen) if _naming else chosen


_naming = False
_only_references = False


def force_reference(on: bool = True) -> None:
    """From now on references are given out, whatever the device: for comparing kernels with them in a whole model."""
    global _only_references
    _only_references = on


def name_ops(on: bool = True) -> None:
    """From now on kernels are given out as ranges of torch's profiler, by the names of their references; those given
    out before stay as they are. For engines that are to be profiled: a range costs a few microseconds a call.
    """
    global _naming
    _naming = on


def _ranged(reference: Op, chosen: Op) -> Op:
    name = OP_PREFIX + ".".join((reference.__module__.split(".")[-2], reference.__name__))

    @wraps(chosen)
    def ranged(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return chosen(*args, **options)

    return ranged  # type: ignore[return-value]  # of the same signature


def _found(reference: Op, device: str) -> Op:
    if _only_references:
        return reference
    row = TABLE[reference]
    if device == "cuda":
        from longread.kernels.cuda_table import CUDA  # needs Triton

        row = {**row, **({"cuda": CUDA[reference]} if reference in CUDA else {})}
    if device not in row:
        name = f"{reference.__module__}.{reference.__name__}"
        raise ConfigError(f"{name} has no implementation for device {device!r}; it runs on {', '.join(row)}")
    chosen: Op = row[device]  # type: ignore[assignment]  # the table pairs functions of one signature
    return chosen
