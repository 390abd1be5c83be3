"""``python -m sglang.launch_server`` for DeepSeek models, versions 0.5.17 and 0.5.23.

Flags and limits were read from those two wheels (server_args.py, arg_groups/, environ.py).
"""

from dataclasses import replace

from longread.plan import engine_limits
from longread.plan.deployment import Deployment, Workload
from longread.plan.figures import gib
from longread.plan.gpu_memory import GpuMemory
from longread.plan.launch import models, reasons
from longread.plan.launch.command import (
    Flag,
    Launch,
    Options,
    Process,
    Variable,
    cache_folder,
    head_of,
    parts_of,
    place,
    version_of,
)
from longread.spec.errors import ConfigError

VERSIONS = engine_limits.VERSIONS["sglang"]
TORCH = {"0.5.17": "2.11.0", "0.5.23": "2.14.1"}
_PAGE = {"deepseek_v32": 64, "deepseek_v4": 256, "deepseek_v41": 256}
_INIT_PORT = 20000


def sglang_launch(d: Deployment, workload: Workload | None, options: Options) -> Launch:
    """Raises ``ConfigError`` for what this SGLang cannot do."""
    d = replace(d, engine="sglang")
    version = version_of(options, VERSIONS, "SGLang")
    memory = reasons.checked(d, workload, options, version)
    cache_type(d)
    flags = [
        *_address(d, options),
        *_parallel(d, version),
        *_memory(d, memory, workload),
        *_scheduler(d, memory, workload, options),
        *_kernels(d),
        *_parsers(d, options),
    ]
    processes = tuple(_process(d, options, p) for p in place(d, options))
    model = models.model_of(d, options)
    return Launch(
        "sglang",
        version,
        f"{models.name_of(d, options)} on {d.hardware.label}, {d.strategy.label}",
        ("python3", "-m", "sglang.launch_server", "--model-path", model),
        tuple(flags),
        tuple(_variables(d, workload, options)),
        processes,
        tuple(_notes(d, memory, workload, options, version)),
        d.hardware.gpus,
        max(p.node for p in processes) + 1,
        d.host_cache,
    )


def cache_type(d: Deployment) -> tuple[str, str]:
    """SGLang's --kv-cache-dtype for the plan's packing, and why. Raises ``ConfigError``."""
    cache, family = d.cache, d.spec.family
    if family in ("deepseek_v2", "deepseek_v3"):
        if cache == "bfloat16":
            return "bfloat16", "1,152 B a layer and token as computed: nothing is rounded"
        if cache == "fp8":
            return "fp8_e4m3", "576 B a layer and token, half of bfloat16; one scale for all: gate the answers first"
        cure = "bfloat16 or fp8"
    elif family == "deepseek_v32":
        if cache == "bfloat16":
            return "bfloat16", "1,152 B a layer and token and 132 B of index key; SGLang's default on Hopper"
        if cache == "fp8_ds_mla":
            return "fp8_e4m3", "656 B a layer and token and 132 B of index key, against 1,284 in bfloat16"
        cure = "fp8_ds_mla or bfloat16"
    elif cache == "fp8_ds_mla":
        return "fp8_e4m3", "584 B a compressed row, the only record that V4's kernels read on Hopper"
    else:
        cure = "fp8_ds_mla (FP4 records need SM100; Hopper has no FP4 tensor cores)"
    raise ConfigError(
        f"SGLang cannot keep {d.spec.label}'s cache as {cache} on {d.hardware.card.name}; plan with {cure}"
    )


def _address(d: Deployment, options: Options) -> list[Flag]:
    name = models.name_of(d, options)
    return [
        Flag("--served-model-name", name, 'what clients write in "model"'),
        Flag("--host", options.host, reasons.HOST_WHY),
        Flag("--enable-metrics", None, "Prometheus at /metrics; off by default"),
        Flag("--enable-cache-report", None, "usage says how many prompt tokens were found in the cache"),
    ]


def _parallel(d: Deployment, version: str) -> list[Flag]:
    s, cards = d.strategy, d.strategy.tp * d.strategy.cp
    why = reasons.split_why(d)
    if s.cp > 1:
        why = f"SGLang counts all GPUs of a stage here; {s.cp} of them split a prompt's tokens"
    elif s.dp > 1:
        why = f"SGLang counts all GPUs of a stage here: experts are split over {cards}, attention by groups below"
    flags = [Flag("--tp-size", str(cards), why)]
    if s.pp > 1:
        layers = -(-d.spec.layers // s.pp)
        flags.append(Flag("--pp-size", str(s.pp), f"{d.spec.layers} layers, at most {layers} a stage"))
    if s.dp > 1:
        why = f"{s.dp} groups of {s.tp // s.dp} GPUs keep the caches of their own sequences whole"
        if version == "0.5.17":
            flags.append(Flag("--dp-size", str(s.dp), why))
            flags.append(Flag("--enable-dp-attention", None, "these groups are inside the replica, not copies of it"))
        else:
            flags.append(Flag("--attn-dp-size", str(s.dp), why))
    if s.cp > 1:
        why = f"a prompt is read by {s.cp} GPUs at once; 20 % and more off TTFT at 64K on 8x H20 (V4-Pro, vllm#47846)"
        flags.append(Flag("--enable-prefill-cp", None, why))
        flags.append(
            Flag("--cp-strategy", "interleave", "round robin: equal work for every GPU; all that V4 has on CUDA")
        )
        if s.tp > 1:
            flags.append(Flag("--attn-cp-size", str(s.cp), f"of {cards} GPUs; the rest splits heads by {s.tp}"))
    if s.ep:
        flags.append(Flag("--ep-size", str(cards), reasons.experts_why(d)))
    return flags


def static_share(d: Deployment, memory: GpuMemory) -> float:
    """--mem-fraction-static: weights and cache as a share of the shown memory; the step's scratch lies outside it."""
    return int((memory.usable - memory.beside) / d.hardware.card.memory.value * 1000) / 1000


def _memory(d: Deployment, memory: GpuMemory, workload: Workload | None) -> list[Flag]:
    dtype, why = cache_type(d)
    share = static_share(d, memory)
    flags = [
        Flag(
            "--mem-fraction-static",
            f"{share:g}",
            f"weights {gib(memory.weight_total)} + cache {gib(memory.free)} of "
            f"{gib(d.hardware.card.memory.value)}; the step's {gib(memory.beside)} lie outside it",
        ),
        Flag("--context-length", str(d.max_model_len), reasons.length_why(d, memory, workload)),
        Flag("--kv-cache-dtype", dtype, why),
    ]
    if d.spec.family in _PAGE:
        page = _PAGE[d.spec.family]
        flags.append(
            Flag("--page-size", str(page), f"what {d.spec.label}'s kernels read; prefixes are found in such steps")
        )
    if d.spec.family == "deepseek_v4":
        why = "windows for a tenth of all tokens: enough for long sequences, too little for thousands of short ones"
        flags.append(Flag("--swa-full-tokens-ratio", "0.1", why))
    if d.host_cache > 0:
        flags += _host_cache(d, workload)
    return flags


def _host_cache(d: Deployment, workload: Workload | None) -> list[Flag]:
    ranks = min(d.strategy.gpus * d.strategy.replicas, d.hardware.gpus)
    flags = [
        Flag("--enable-hierarchical-cache", None, "what is evicted from the GPU stays in main memory"),
        Flag(
            "--hicache-size",
            str(int(d.host_cache / ranks / 1e9)),
            f"GB a rank: {gib(d.host_cache)} of the node over {ranks} ranks, each with its own copy",
        ),
        Flag(
            "--hicache-write-policy", "write_through", "saved as soon as read: a crash or an eviction loses no document"
        ),
    ]
    if workload is not None and workload.tier == "disk" and workload.prefix > 0:
        why = f"{workload.prefix:.0%} of each prompt was read before and lies in files, one a page"
        flags.append(Flag("--hicache-storage-backend", "file", why))
    return flags


def _scheduler(d: Deployment, memory: GpuMemory, workload: Workload | None, options: Options) -> list[Flag]:
    dp, runs = d.strategy.dp, d.max_num_seqs * d.strategy.dp
    why = reasons.seqs_why(d, memory, workload)
    chunk_why = reasons.chunk_why(d)
    if dp > 1:
        why += f"; SGLang divides it by the {dp} groups"
        chunk_why += f"; SGLang divides it by the {dp} groups"
    flags = [
        Flag("--max-running-requests", str(runs), why),
        Flag("--chunked-prefill-size", str(d.chunk * dp), chunk_why),
        Flag(
            "--max-prefill-tokens", str(d.chunk * dp), "no step takes more prompt tokens than the plan's scratch is for"
        ),
        Flag("--cuda-graph-max-bs-decode", str(d.max_num_seqs), "graphs for as many sequences as may run, and no more"),
    ]
    limits = reasons.admission(d, workload, options)
    if limits is not None and not limits.problem and workload is not None:
        why = f"{reasons.queue_why(workload, limits)} = {limits.tokens:,} tokens, and the one that comes last"
        flags.append(Flag("--max-queued-requests", str(limits.requests), why))
    return flags


def _kernels(d: Deployment) -> list[Flag]:
    card, family = d.hardware.card, d.spec.family
    if card.architecture != "hopper":
        return []
    flags = []
    if reasons.expert_type(d) == "fp4":
        why = (
            "FP4 experts on Hopper: +23 % tokens/s over Marlin at 8K/1K on H200 (sglang#34550); with Marlin V4-Pro did "
            "not start at TP8 (sglang#25923)"
        )
        flags.append(Flag("--moe-runner-backend", "flashinfer_mxfp4", why))
    if family in ("deepseek_v4", "deepseek_v41"):
        flags.append(Flag("--attention-backend", "dsv4", f"{d.spec.label}'s windows and compressed rows in one kernel"))
    elif family == "deepseek_v32":
        flags.append(Flag("--attention-backend", "dsa", "the indexer and sparse MLA"))
    elif d.cache == "fp8":
        flags.append(Flag("--attention-backend", "flashmla", "reads the FP8 latent as it is stored"))
    else:
        flags.append(Flag("--attention-backend", "fa3", "FlashAttention 3 of SM90, for MLA in bfloat16"))
    return flags


def _parsers(d: Deployment, options: Options) -> list[Flag]:
    label, notation = models.name_of(d, options), models.notation_of(d, options)
    reasoning, tool = notation.sglang_reasoning, notation.sglang_tool
    flags = []
    if reasoning is not None:
        flags.append(Flag("--reasoning-parser", reasoning, f"{label}: text before </think> goes to reasoning_content"))
    if tool is not None:
        flags.append(Flag("--tool-call-parser", tool, f"{label}'s own notation of tool calls"))
    return flags


def _variables(d: Deployment, workload: Workload | None, options: Options) -> list[Variable]:
    folder = cache_folder("sglang")
    found = [
        Variable("SGLANG_CACHE_DIR", folder, "compiled results survive a restart here"),
        Variable("SGLANG_DG_CACHE_DIR", f"{folder}/deep_gemm", "DeepGEMM's kernels as well"),
        Variable("TRITON_CACHE_DIR", f"{folder}/triton", "and Triton's: the first request waits for none of them"),
    ]
    if d.host_cache > 0 and workload is not None and workload.tier == "disk" and workload.prefix > 0:
        why = "documents that were read before are kept here; put it on the fastest disk, and clear it by hand"
        found.append(Variable("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", f"{folder}/documents", why))
    if d.hardware.card.architecture in ("hopper", "blackwell"):
        why = f"GEMMs of up to {d.chunk * d.strategy.dp:,} rows are compiled before the first request, not during it"
        found.append(Variable("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "1", why))
    return found + reasons.network(d, options)


def _process(d: Deployment, options: Options, p: Process) -> Process:
    parts = parts_of(d)
    flags = [Flag("--port", str(p.port), "HTTP of this replica")]
    if parts > 1:
        flags += [
            Flag("--nnodes", str(parts), f"{parts} nodes hold one replica"),
            Flag("--node-rank", str(p.part), f"this one's place: part {p.part + 1} of {parts}"),
            Flag(
                "--dist-init-addr",
                f"{options.address(head_of(p))}:{_INIT_PORT}",
                "the replica's first node, a free port",
            ),
        ]
    return replace(p, flags=tuple(flags))


def _notes(d: Deployment, memory: GpuMemory, workload: Workload | None, options: Options, version: str) -> list[str]:
    lines = reasons.common_notes(d, memory, workload, options)
    lines.append(f"pip install sglang=={version} (torch {TORCH[version]})")
    if workload is not None and workload.concurrency > 1 and workload.isl > d.chunk:
        lines.append(
            "SGLang has one request in mid-prefill at a time (sglang#34623): short ones wait behind a long prompt"
        )
    return lines + reasons.closing_notes(d, options)
