"""``longread serve``: what the engine can run today, and why not otherwise.

On a GPU the command is tried against the card that is planned for: what ``longread serve`` would refuse there is
refused here.
"""

import sys
from dataclasses import replace
from pathlib import Path

from longread.plan.deployment import Deployment, Workload
from longread.plan.device_memory import CAPABILITY
from longread.plan.launch import models
from longread.plan.launch.command import WEIGHTS, Flag, Launch, Options, cache_folder, place
from longread.plan.machine import Gpu, Machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, from_mapping
from longread.spec.errors import ConfigError
from longread.spec.model import ModelSpec
from longread.spec.reduced import random_spec
from longread.spec.releases import release_name

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v4")
DTYPES = ("bfloat16", "float32")
CACHES = {"fp8_ds_mla": "fp8", "fp8": "fp8", "bfloat16": "bfloat16"}  # a plan's, as --kv-cache-dtype on a GPU
UNKNOWN = sys.maxsize  # bytes of a node's main memory that nobody told


def longread_launch(d: Deployment, workload: Workload | None, options: Options) -> Launch:
    """Raises ``ConfigError`` for what is no Hopper GPU, for several cards or nodes, for models that the engine lacks,
    and for what it would refuse on that card.
    """
    d = replace(d, engine="longread")
    on_gpu = d.hardware.card.architecture != "cpu"
    _refuse(d, options, on_gpu)
    model = options.model or (
        models.name_of(d, options) if options.layers else f"{WEIGHTS}/{models.name_of(d, options)}"
    )
    flags = [
        Flag("--served-model-name", models.name_of(d, options), 'what clients write in "model"'),
        Flag("--host", options.host, "addresses other than loopback open it to the network: give keys as well"),
        Flag("--port", str(options.port), "HTTP"),
        *(_device_flags(d) if on_gpu else (_cpu_dtype(d),)),
        *(_cut(d, model, options.layers) if options.layers is not None else ()),
        Flag(
            "--max-model-len",
            str(d.max_model_len),
            f"prompt and output; the model's own limit is {d.spec.max_position:,}",
        ),
        Flag("--max-num-seqs", str(d.max_num_seqs), _seqs_why(workload)),
        Flag("--max-num-batched-tokens", str(d.chunk), "tokens of one step; decoding goes on between two of them"),
        Flag("--enable-prefix-caching", None, "a document that comes again costs its load, not its prefill"),
    ]
    if d.host_cache > 0:
        flags.append(Flag("--host-cache-size", str(d.host_cache), "bytes of main memory for what the cache evicts"))
    if workload is not None and workload.tier == "disk" and workload.prefix > 0:
        folder = cache_folder("longread")
        flags.append(Flag("--store", folder, f"{workload.prefix:.0%} of each prompt was read before and lies on disk"))
    if on_gpu:
        _try(d, model, flags)
    title = f"{d.spec.label} on {d.hardware.label}"
    notes = ("what is left out is chosen at start and printed with its reason", *options.notes)
    (process,) = place(d, options)
    gpus = 1 if on_gpu else 0
    return Launch("longread", "", title, ("longread", "serve", model), tuple(flags), (), (process,), notes, gpus, 1)


def _cpu_dtype(d: Deployment) -> Flag:
    return Flag("--dtype", d.cache, f"weights are computed, and the cache is kept, in {d.cache}")


def _shape(spec: ModelSpec) -> tuple[object, ...]:
    """What two specs of one model have in common, however they are called and stored."""
    return spec.family, spec.hidden, spec.layers, spec.heads, spec.vocab, spec.moe, spec.mla, spec.compressed


def _device_flags(d: Deployment) -> list[Flag]:
    cache = CACHES[d.cache]
    return [
        Flag("--device", "cuda", "weights are kept and multiplied as they are stored"),
        Flag(
            "--kv-cache-dtype", cache, "rows packed as DeepSeek's kernels do" if cache == "fp8" else "rows as computed"
        ),
        Flag("--gpu-memory-utilization", f"{d.memory_share:g}", "of the card; what weights and a step leave is cache"),
    ]


def _cut(d: Deployment, model: str, layers: str) -> tuple[Flag, Flag]:
    """Of a model whose first layers alone are planned. Raises ConfigError where ``model`` is another one."""
    if release_name(model) is not None or Path(model).is_dir():
        found = random_spec(model, layers)
        if _shape(found) != _shape(d.spec):
            raise ConfigError(f"longread serve {model} --layers {layers} would be {found.label}, not {d.spec.label}")
    return (
        Flag("--random-weights", None, "times and memory of a model that is cut; answers mean nothing"),
        Flag("--layers", layers.strip(), "its first layers"),
    )


def _try(d: Deployment, model: str, flags: list[Flag]) -> None:
    """Have the engine's own rules decide on the card as its description has it. Raises ConfigError."""
    known = {flag.name.removeprefix("--").replace("-", "_"): flag.value for flag in flags}
    given = {name: True if value is None else value for name, value in known.items() if name not in ("host", "port")}
    card, memory = d.hardware.card, d.hardware.host_memory
    host = UNKNOWN if memory is None else int(memory.value)
    gpu = Gpu(card.name, int(card.memory.value), int(card.usable.value), card.compute_capability or (0, 0))
    try:
        options: EngineOptions = from_mapping({"model": model, **given})
        resolve(options, d.spec, Machine(host, host, "as described"), gpu)
    except ConfigError as error:
        raise ConfigError(f"longread serve would refuse this plan on {d.hardware.label}: {error}") from None


def _refuse(d: Deployment, options: Options, on_gpu: bool) -> None:
    card = d.hardware.card
    if d.spec.family not in FAMILIES:
        raise ConfigError(
            f"longread serve does not run {d.spec.label} yet ({d.spec.family}; it runs {', '.join(FAMILIES)}); "
            "emit vllm or sglang on GPUs"
        )
    if d.strategy.gpus * d.strategy.replicas > 1 or d.hardware.nodes > 1:
        raise ConfigError(
            f"longread serve is one process on one machine, on one GPU at most, not {d.strategy.label} on "
            f"{d.hardware.label}; emit vllm or sglang for this deployment"
        )
    if options.layers is not None and options.model is None and options.name is None:
        raise ConfigError(
            f"longread serve finds no model called {d.spec.label!r}: with --layers give a released model's name, or "
            "its folder with --model-path"
        )
    if on_gpu and (card.compute_capability is None or card.compute_capability[0] != CAPABILITY[0]):
        raise ConfigError(f"longread serve has kernels for Hopper GPUs, not for {card.name}; emit vllm or sglang")
    if on_gpu and d.experts != "native":
        raise ConfigError(f"longread serve multiplies experts as they are stored, not as {d.experts}; use native ones")
    if on_gpu and d.cache not in CACHES:
        raise ConfigError(f"longread serve keeps its cache on a GPU in {', '.join(CACHES)}, not {d.cache}")
    if not on_gpu and d.cache not in DTYPES:
        raise ConfigError(f"longread serve keeps its cache in {' or '.join(DTYPES)} on a CPU, not {d.cache}")
    if options.engine_version is not None:
        raise ConfigError("longread serve is the one that is installed; leave the engine version out")


def _seqs_why(workload: Workload | None) -> str:
    return "requests worked on at once" if workload is None else f"{workload.concurrency} are meant to run at once"
