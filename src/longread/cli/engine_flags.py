"""The engine's options on the command line: those that ``plan`` and ``serve`` share, and ``serve``'s own.

Knows: EngineOptions' names, which are vLLM's where vLLM has the option. Must not know: what is chosen for those left
out.
"""

import argparse
from typing import TYPE_CHECKING

from longread.cli.parser import whole
from longread.spec.config import EngineOptions, from_mapping

if TYPE_CHECKING:
    from argparse import _ActionsContainer

MEMORY_FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "host_cache_size",
    "dtype",
)
SERVING_FLAGS = ("seed", "enable_prefix_caching", "snapshot_interval", "store", "store_size", "slo", "step_target")
DEVICE_FLAGS = ("device", "kv_cache_dtype", "gpu_memory_utilization", "random_weights", "layers")


def add_memory_flags(group: "_ActionsContainer") -> None:
    """What a memory plan depends on."""
    group.add_argument("--max-model-len", metavar="N", help="tokens of prompt and output together; default: what fits")
    group.add_argument("--max-num-seqs", metavar="N", help="requests worked on at once; default: chosen")
    group.add_argument(
        "--max-num-batched-tokens", metavar="N", help="tokens of one step, the prefill chunk; default: chosen"
    )
    group.add_argument("--kv-cache-memory-bytes", metavar="SIZE", help="memory of the KV cache; default: chosen")
    group.add_argument(
        "--host-cache-size", metavar="SIZE", help="main memory for what is evicted from the KV cache; default: 0"
    )
    group.add_argument("--num-gpu-blocks-override", metavar="N", help="exactly so many pages of 256 tokens")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="type of weights and cache"
    )


def add_serving_flags(group: "_ActionsContainer") -> None:
    """What only a running engine asks for."""
    group.add_argument("--seed", type=whole, default=0, help="seed of requests that bring none")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse what was read before",
    )
    group.add_argument(
        "--snapshot-interval", metavar="N", default="32K", help="tokens between saved ring states of a long prompt"
    )
    group.add_argument(
        "--slo", metavar="TARGETS", help="ttft=2s,tpot=50ms: steps are kept as short as that; default: no targets"
    )
    group.add_argument(
        "--step-target",
        metavar="TIME",
        default="auto",
        help="what a step may take without a TTFT target: who comes waits for its end; none: any; default: auto, the "
        "shortest that reads nearly at the best rate, as measured at the start",
    )
    add_store_flags(group)


def add_device_flags(group: "_ActionsContainer") -> None:
    """What computes, and what a GPU is used for."""
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU that can")
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8"),
        default="auto",
        help="how cached rows are kept on a GPU; auto: fp8, as DeepSeek's own kernels do",
    )
    group.add_argument(
        "--gpu-memory-utilization", metavar="SHARE", help="share of the GPU's memory to take; default: 0.92"
    )


def add_drawn_flags(group: "_ActionsContainer") -> None:
    """What is computed where there is no checkpoint."""
    group.add_argument(
        "--random-weights",
        action="store_true",
        help="draw the weights instead of reading any, to measure times and memory: CHECKPOINT is a public model's "
        "name (DeepSeek-V4-Flash), a bundled model or a folder with a config.json; what it answers means nothing",
    )
    group.add_argument(
        "--layers", metavar="N", help="with --random-weights: the first N layers; 1+3: one dense and three MoE layers"
    )


def add_store_flags(group: "_ActionsContainer", required: bool = False) -> None:
    """Where what was read is kept."""
    group.add_argument(
        "--store", metavar="DIR", required=required, help="keep what was read in this folder, also for the next start"
    )
    group.add_argument("--store-size", metavar="SIZE", help="what the store may take; default: 20GiB")


def options_from(args: argparse.Namespace, model: str, served_model_name: str | None = None) -> EngineOptions:
    """The options of whichever flags the command has. Raises ConfigError."""
    names: tuple[str, ...] = MEMORY_FLAGS + SERVING_FLAGS
    if hasattr(args, "device"):  # else a kv_cache_dtype is a planned deployment's
        names += DEVICE_FLAGS
    flags = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return from_mapping({"model": model, "served_model_name": served_model_name, **flags})
