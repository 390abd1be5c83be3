"""A native model with its runner on a device, from a checkpoint or from drawn weights.

Knows torch's devices and what loading needs of them; must not know requests or the cache's books.
"""

import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from longread.engine.device_runner import DeviceRunner, Limits, Measured
from longread.kernels.dispatch import kernel
from longread.kernels.records import ref as records
from longread.kv.tensors import StateTensors
from longread.models.native_v3 import NativeV3
from longread.models.native_v4 import NativeV4
from longread.plan.figures import gib
from longread.spec.config import MemoryPlan, ResolvedConfig
from longread.spec.errors import ConfigError
from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter
from longread.spec.model import ModelSpec
from longread.spec.state import StateGroup
from longread.weights.random import random_native
from longread.weights.reader import Checkpoint

log = logging.getLogger(__name__)

# Scratch grows with a context: without it every size would leave holes between the last ones' blocks.
ALLOCATOR, SETTING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Progress = Callable[[int, int], None]


def cuda_device() -> torch.device:
    """The GPU, ready. Raises ConfigError where torch cannot use it."""
    os.environ.setdefault(ALLOCATOR, SETTING)  # before CUDA is first used in this process
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device=cuda: torch {torch.__version__} cannot use CUDA here: pip install --force-reinstall torch "
            "from the index of your CUDA version, or use device=cpu"
        )
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def native_model(
    spec: ModelSpec,
    config: ResolvedConfig,
    checkpoint: Checkpoint | None,
    device: torch.device,
    progress: Progress | None,
) -> NativeV3 | NativeV4:
    """``checkpoint`` None: the weights are drawn on the device. ``progress``: in tensors."""
    weights = random_native(spec, device, config.seed) if checkpoint is None else checkpoint.native(spec)
    if progress is not None:
        weights = _told(weights, spec, progress)
    with torch.inference_mode(False):
        native = NativeV4 if spec.mla is None else NativeV3
        return native(spec, weights, DTYPES[config.dtype], device)


def _told(weights: Callable[[str], Tensor], spec: ModelSpec, progress: Progress) -> Callable[[str], Tensor]:
    total = sum(1 for entry in inventory(spec) if not is_drafter(entry.name, spec))
    taken: set[str] = set()

    def told(name: str) -> Tensor:
        taken.add(name)
        progress(len(taken), total)
        return weights(name)

    return told


def device_runner(
    model: NativeV3 | NativeV4, store: StateTensors, config: ResolvedConfig, spec: ModelSpec, device: torch.device
) -> DeviceRunner:
    """Not yet prepared."""
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, spec.vocab)
    graphs = device.type == "cuda"
    slots, arrivals = config.num_slots, store.arrivals
    return DeviceRunner(model, store.views, limits, slots=slots, device=device, graphs=graphs, arrivals=arrivals)


def state_tensors(groups: tuple[StateGroup, ...], config: ResolvedConfig, device: torch.device) -> StateTensors:
    """Of which a load's first layers can be used while its others come."""
    pools = config.num_pages, config.num_slots, config.num_snapshots
    return StateTensors(groups, *pools, DTYPES[config.dtype], device, spread=kernel(records.spread, device.type))


def prepare(runner: DeviceRunner, memory: MemoryPlan, device: torch.device) -> Measured:
    """Have every kernel compiled and every graph captured; log what the plan said beside what is there. The runner as
    calibration needs it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    told = time.monotonic()

    def progress(kind: str, done: int, total: int) -> None:
        log.info("preparing: %s %d of %d after %.0f s", kind, done, total, time.monotonic() - told)

    runner.prepare(progress)
    if device.type == "cuda":
        log.info("%s", memory_told(memory, device))
    return Measured(runner, device)


def allocated_bytes(device: torch.device, otherwise: int) -> int:
    """What torch has handed out on a GPU; ``otherwise`` where it does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else otherwise


def memory_told(memory: MemoryPlan, device: torch.device) -> str:
    """Plan and reality in one line."""
    stats = torch.cuda.memory_stats(device)
    peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    free, total = torch.cuda.mem_get_info(device)
    off = memory.device_peak / peak - 1 if peak else 0.0
    return (
        f"GPU memory: torch's peak predicted {gib(memory.device_peak)}, measured {gib(peak)} ({off:+.1%}); reserved "
        f"{gib(reserved)}, with CUDA and graphs {gib(total - free)} in use on the card, predicted "
        f"{gib(memory.on_device)}"
    )
