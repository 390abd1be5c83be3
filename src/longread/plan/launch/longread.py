"""``longread serve``: what the engine can run today, and why not otherwise."""

from dataclasses import replace

from longread.plan.deployment import Deployment, Workload
from longread.plan.launch import models
from longread.plan.launch.command import WEIGHTS, Flag, Launch, Options, cache_folder, place
from longread.spec.errors import ConfigError

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v4")
DTYPES = ("bfloat16", "float32")


def longread_launch(d: Deployment, workload: Workload | None, options: Options) -> Launch:
    """Raises ``ConfigError`` for GPUs, for several cards or nodes, and for models that the engine lacks."""
    d = replace(d, engine="longread")
    _refuse(d, options)
    model = options.model or f"{WEIGHTS}/{models.name_of(d, options)}"
    flags = [
        Flag("--served-model-name", models.name_of(d, options), 'what clients write in "model"'),
        Flag("--host", options.host, "addresses other than loopback open it to the network: give keys as well"),
        Flag("--port", str(options.port), "HTTP"),
        Flag("--dtype", d.cache, f"weights are computed, and the cache is kept, in {d.cache}"),
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
    title = f"{d.spec.label} on {d.hardware.label}"
    notes = ("what is left out is chosen at start and printed with its reason", *options.notes)
    (process,) = place(d, options)
    return Launch("longread", "", title, ("longread", "serve", model), tuple(flags), (), (process,), notes, 0, 1)


def _refuse(d: Deployment, options: Options) -> None:
    if d.hardware.card.architecture != "cpu":
        raise ConfigError(
            f"a launch of longread on GPUs ({d.hardware.label}) is not written: `longread serve MODEL --device cuda` "
            "runs V2 to V4 on one Hopper card and chooses the rest itself; emit vllm or sglang for this deployment"
        )
    if d.spec.family not in FAMILIES:
        raise ConfigError(
            f"longread serve does not run {d.spec.label} yet ({d.spec.family}; it runs {', '.join(FAMILIES)}); "
            "emit vllm or sglang on GPUs"
        )
    if d.strategy.gpus * d.strategy.replicas > 1 or d.hardware.nodes > 1:
        raise ConfigError(f"longread serve is one process on one machine, not {d.strategy.label} on {d.hardware.label}")
    if d.cache not in DTYPES:
        raise ConfigError(f"longread serve keeps its cache in {' or '.join(DTYPES)} on a CPU, not {d.cache}")
    if options.engine_version is not None:
        raise ConfigError("longread serve is the one that is installed; leave the engine version out")


def _seqs_why(workload: Workload | None) -> str:
    return "requests worked on at once" if workload is None else f"{workload.concurrency} are meant to run at once"
