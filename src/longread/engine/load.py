"""From a checkpoint to a running engine: the only place that knows all the rooms at once.

Order: every refusal that costs nothing first (config, options, memory), then files, then weights, then the cache.
"""

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longread.engine import load_device
from longread.engine.calibrate import calibrate, warm_up
from longread.engine.core import Core
from longread.engine.device_runner import DeviceRunner
from longread.engine.engine import LocalEngine
from longread.engine.profile import NamedRunner, ProfiledEngine
from longread.engine.runner import Model, Runner
from longread.engine.scheduler import Scheduler
from longread.kernels.dispatch import name_ops
from longread.kv.cache import KVCache
from longread.kv.disk.store import DiskStore
from longread.kv.host import HostArena
from longread.kv.records import Layout
from longread.kv.tensors import StateTensors
from longread.kv.tiers import Tiers
from longread.models.deepseek_v3 import DeepseekV3
from longread.models.deepseek_v4 import DeepseekV4
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, ResolvedConfig
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import EngineInfo
from longread.spec.errors import ConfigError, StoreError
from longread.spec.model import ModelSpec
from longread.spec.profiler import ProfilerConfig
from longread.spec.reduced import random_spec
from longread.spec.state import PAGE_TOKENS, StateGroup, cache_root, pages_for, state_groups
from longread.spec.step_target import StepTarget
from longread.weights.fixture import random_weights
from longread.weights.reader import Checkpoint

if TYPE_CHECKING:
    from longread.engine.grammar import GrammarCompiler

log = logging.getLogger(__name__)

CALIBRATED_BYTES = 16 * 2**20  # of weights are worth a second of measuring; a toy's steps are over before it would be
CALIBRATED_SECONDS = 4.0  # at most; a quiet machine of two cores is done with a reader before that
Progress = Callable[[int, int], None]  # (bytes read, bytes to read)


def load_engine(options: EngineOptions, progress: Progress | None = None) -> LocalEngine:
    """Load a checkpoint and make an engine. Raises ConfigError, CheckpointError (each before any weight is read)."""
    path = Path(options.model)
    if options.random_weights:
        spec = random_spec(options.model, options.layers)
    else:
        spec = spec_from_config(read_config(path), label=path.resolve().name)
    return load_resolved(path, spec, resolve(options, spec, probe_machine()), progress)


def load_resolved(
    path: Path,
    spec: ModelSpec,
    config: ResolvedConfig,
    progress: Progress | None = None,
    profiler: ProfilerConfig | None = None,
) -> LocalEngine:
    """The same for a caller that has already resolved the options. ``profiler``: its steps can be profiled."""
    if config.device == "cuda" and profiler is not None:
        raise ConfigError("the profiler looks at steps on a CPU; leave out --profiler-config, or use device=cpu")
    name_ops(profiler is not None)
    groups = state_groups(spec, config.kv_cache)
    loaded = (
        _on_gpu(path, spec, config, groups, progress)
        if config.device == "cuda"
        else _on_cpu(path, spec, config, groups, progress, profiler is not None)
    )
    store = loaded.store
    # The fingerprint, not the folder's name: a copy of the model shares its cache identity, a fine-tune does not.
    kind = config.dtype if config.device == "cpu" else f"{config.dtype} on {config.device}"
    root = cache_root(dataclasses.replace(spec, label=""), loaded.identity, kind, config.kv_cache)
    cache = KVCache(
        groups,
        root,
        config.num_pages,
        config.num_slots,
        config.num_snapshots,
        store,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    disk = _open_store(spec, config, root, store)
    tiers = _tiers(config, cache, store, disk)
    tokenizer = path / "tokenizer.json"
    allocated = loaded.allocated() + (tiers.host.nbytes if tiers is not None else 0)
    calibration = calibrate(
        loaded.measured,
        store.views,
        num_slots=config.num_slots,
        num_pages=min(config.num_pages, pages_for(config.max_model_len)),
        max_num_batched_tokens=config.max_num_batched_tokens,
        seconds=min(CALIBRATED_SECONDS, config.memory.weights / CALIBRATED_BYTES),
    )
    target = _step_target(config, calibration.target)
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        snapshot_interval=config.snapshot_interval,
        tiers=tiers,
        slo=config.slo,
        step_target=target,
    )
    core = Core(
        info=_info(spec, config, allocated, root, target),
        runner=loaded.runner,
        cache=cache,
        scheduler=scheduler,
        groups=groups,
        state=store.views,
        grammars=_grammars(tokenizer, spec),
        snapshot_interval=config.snapshot_interval,
        draws=random.Random(config.seed),
        tiers=tiers,
        store=disk,
        costs=calibration.costs,
    )
    return LocalEngine(core) if profiler is None else ProfiledEngine(core, spec, config.dtype, profiler)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on its device. ``measured``: how calibration runs steps; ``identity``: of its weights, for the cache;
    ``allocated``: bytes of weights and cache.
    """

    runner: Runner | DeviceRunner
    measured: Model
    store: StateTensors
    identity: str
    allocated: Callable[[], int]


def _on_cpu(
    path: Path,
    spec: ModelSpec,
    config: ResolvedConfig,
    groups: tuple[StateGroup, ...],
    progress: Progress | None,
    named: bool,
) -> _Loaded:
    dtype = load_device.DTYPES[config.dtype]
    if config.random_weights:
        identity = drawn_identity(config.seed)
        weights: Mapping[str, Tensor] = random_weights(spec, config.seed)
    else:
        checkpoint = Checkpoint.open(path)
        weights, identity = checkpoint.load(spec, dtype, progress), checkpoint.fingerprint
    model = _model(spec, weights, dtype)
    store = StateTensors(groups, config.num_pages, config.num_slots, config.num_snapshots, dtype)
    warm_up(model, store.views, config.num_slots)
    runner = (NamedRunner if named else Runner)(model, store.views)
    return _Loaded(runner, model, store, identity, lambda: _tensor_bytes(model) + store.nbytes)


def _on_gpu(
    path: Path, spec: ModelSpec, config: ResolvedConfig, groups: tuple[StateGroup, ...], progress: Progress | None
) -> _Loaded:
    device = load_device.cuda_device()
    checkpoint = None if config.random_weights else Checkpoint.open(path)
    model = load_device.native_model(spec, config, checkpoint, device, progress)
    store = load_device.state_tensors(groups, config, device)
    runner = load_device.device_runner(model, store, config, spec, device)
    measured = load_device.prepare(runner, config.memory, device)
    identity = drawn_identity(config.seed) if checkpoint is None else checkpoint.fingerprint
    return _Loaded(
        runner,
        measured,
        store,
        identity,
        lambda: load_device.allocated_bytes(device, _tensor_bytes(model) + store.nbytes),
    )


def drawn_identity(seed: int) -> str:
    """Of random weights: what they computed is never taken for a checkpoint's."""
    return f"random weights {seed}"


def _grammars(tokenizer: Path, spec: ModelSpec) -> "GrammarCompiler | None":
    """Loads the grammar library, where there is a vocabulary for it."""
    if not tokenizer.is_file():
        return None
    try:
        from longread.engine.grammar import GrammarCompiler
    except ModuleNotFoundError as error:
        log.warning("structured output is refused: %s (it is one of Longread's requirements)", error)
        return None
    return GrammarCompiler(tokenizer, spec.vocab, spec.eos_id)


def _open_store(spec: ModelSpec, config: ResolvedConfig, root: bytes, tensors: StateTensors) -> DiskStore | None:
    """The disk store. One that cannot be opened is told and left out: service goes on without it."""
    if config.store is None:
        return None
    layout = Layout(root, spec.label, config.dtype, tensors.page_bytes, tensors.ring_bytes)
    try:
        return DiskStore.open(Path(config.store), layout, max_bytes=config.store_size)
    except StoreError as error:
        log.error("service goes on without the store: %s", error)
        return None


def _tiers(config: ResolvedConfig, cache: KVCache, tensors: StateTensors, disk: DiskStore | None) -> Tiers | None:
    """What lies below the device; None: nothing."""
    if disk is None and not config.host_cache_size:
        return None
    sizes = tensors.page_bytes, tensors.ring_bytes
    host = HostArena(*sizes, config.host_cache_size, tensors.allocate_host)
    return Tiers(cache, tensors, host, disk, interval=config.snapshot_interval)


def _model(spec: ModelSpec, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Model:
    """The model of a family; ``resolve`` has refused the families that are not implemented."""
    return DeepseekV4(spec, weights, dtype) if spec.family == "deepseek_v4" else DeepseekV3(spec, weights, dtype)


def _step_target(config: ResolvedConfig, measured: StepTarget) -> StepTarget:
    """What a step may take; where an SLO decides, ``resolve`` has written that into the configuration."""
    if config.step_target == "auto":
        return measured
    return StepTarget(config.step_target, "as given" if config.slo is None or config.slo.step is None else "by --slo")


def _info(spec: ModelSpec, config: ResolvedConfig, allocated_bytes: int, root: bytes, target: StepTarget) -> EngineInfo:
    return EngineInfo(
        model=config.served_model_name,
        max_model_len=config.max_model_len,
        max_request_tokens=min(config.max_model_len, config.num_pages * PAGE_TOKENS),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab=spec.vocab,
        eos_id=spec.eos_id,
        page_tokens=PAGE_TOKENS,
        num_pages=config.num_pages,
        predicted_bytes=config.memory.total,
        allocated_bytes=allocated_bytes,
        cache_root=root,
        step_target=target.seconds,
        step_reason=target.reason,
        dtype=config.dtype,
        cache_dtype="fp8" if config.kv_cache == "fp8" else config.dtype,
    )


def _tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object reaches through attributes and containers, shared bytes once.

    A view into the mapped checkpoint counts as what it shows, not as the whole file; a view into another tensor that is
    reached, too, adds nothing.
    """
    extents: list[tuple[int, int]] = []
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            extents.append((thing.data_ptr(), thing.data_ptr() + thing.nbytes))
        elif isinstance(thing, Mapping):
            todo.extend(thing.values())
        elif isinstance(thing, list | tuple):
            todo.extend(thing)
        elif type(thing).__module__.startswith("longread.models"):
            names = [*getattr(thing, "__dict__", {}), *getattr(thing, "__slots__", ())]
            todo.extend(getattr(thing, name) for name in names)
    total = end = 0
    for start, stop in sorted(extents):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
