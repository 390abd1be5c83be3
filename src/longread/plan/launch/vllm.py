"""``vllm serve`` for DeepSeek models, versions 0.26.0 and 0.33.0.

Flags and limits were read from those two wheels (engine/arg_utils.py, config/, models/deepseek_v4*, v1/worker/gpu).
"""

from dataclasses import replace

from longread.plan import engine_limits
from longread.plan.deployment import Deployment, Workload
from longread.plan.figures import gib
from longread.plan.gpu_memory import GIB, GpuMemory
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

VERSIONS = engine_limits.VERSIONS["vllm"]
TORCH = {"0.26.0": "2.11.0", "0.33.0": "2.14.0"}
_MASTER_PORT, _RPC_PORT = 29501, 13345
_TILE = 64  # query heads that FlashMLA's sparse kernels of SM90 work on at once
# Experts of V3's width with a tuned Triton table in both wheels (fused_moe/configs), by card: (experts, columns).
_TUNED = {
    "H20-96": {(256, 128), (256, 256)},
    "H20-141": {(256, 256)},
    "H200": {(256, 256), (256, 512), (32, 2048)},
}


def vllm_launch(d: Deployment, workload: Workload | None, options: Options) -> Launch:
    """Raises ``ConfigError`` for what this vLLM cannot do."""
    d = replace(d, engine="vllm")
    version = version_of(options, VERSIONS, "vLLM")
    memory = reasons.checked(d, workload, options, version)
    cache_type(d)
    flags = [
        *_address(d, options),
        *_parallel(d, options),
        *_memory(d, memory, workload),
        *_scheduler(d, memory, workload, options, version),
        *_kernels(d),
        *_parsers(d, options),
    ]
    processes = tuple(_process(d, options, p) for p in place(d, options))
    return Launch(
        "vllm",
        version,
        f"{models.name_of(d, options)} on {d.hardware.label}, {d.strategy.label}",
        ("vllm", "serve", models.model_of(d, options)),
        tuple(flags),
        tuple(_variables(d, options)),
        processes,
        tuple(_notes(d, memory, workload, options, version)),
        d.hardware.gpus,
        max(p.node for p in processes) + 1,
        d.host_cache,
    )


def cache_type(d: Deployment) -> tuple[str, str]:
    """vLLM's --kv-cache-dtype for the plan's packing, and why. Raises ``ConfigError``."""
    cache, family = d.cache, d.spec.family
    datacentre = d.hardware.card.compute_capability is not None and d.hardware.card.compute_capability[0] == 10
    if family in ("deepseek_v2", "deepseek_v3"):
        if cache == "bfloat16":
            return "bfloat16", "latent and RoPE channels as computed, 1,152 B a layer and token: nothing is rounded"
        if cache == "fp8":
            return "fp8", "576 B a layer and token, half of bfloat16; one scale for all (1.0): gate the answers first"
        cure = "bfloat16 or fp8 (fp8_ds_mla is the record of sparse models)"
    elif family == "deepseek_v32":
        if cache in ("bfloat16", "fp8_ds_mla"):
            size = "656 B a layer and token" if cache == "fp8_ds_mla" else "1,152 B a layer and token"
            return cache, f"{size} and 132 B of index key; FlashMLA's sparse kernels read this record"
        cure = "fp8_ds_mla or bfloat16"
    elif cache == "fp8_ds_mla":
        return "fp8", "becomes fp8_ds_mla, 584 B a compressed row, the only record that V4's kernels read on Hopper"
    elif cache in ("nvfp4", "fp8_ds_mla_mxfp4") and datacentre:
        cure = "fp8_ds_mla (its FP4 records are not written by this launch yet)"
    else:
        cure = "fp8_ds_mla (FP4 records need SM100: no FP4 tensor cores and no such kernels on Hopper)"
    raise ConfigError(f"vLLM cannot keep {d.spec.label}'s cache as {cache} on {d.hardware.card.name}; plan with {cure}")


def _address(d: Deployment, options: Options) -> list[Flag]:
    name = models.name_of(d, options)
    return [
        Flag("--served-model-name", name, 'what clients write in "model"'),
        Flag("--host", options.host, reasons.HOST_WHY),
    ]


def _parallel(d: Deployment, options: Options) -> list[Flag]:
    s, flags = d.strategy, []
    tp = s.tp // s.dp
    flags.append(Flag("--tensor-parallel-size", str(tp), reasons.split_why(d)))
    if s.pp > 1:
        layers = -(-d.spec.layers // s.pp)
        flags.append(
            Flag(
                "--pipeline-parallel-size",
                str(s.pp),
                f"{d.spec.layers} layers, at most {layers} a stage; one send a stage",
            )
        )
    if s.dp > 1:
        why = f"{s.dp} groups of {tp} GPUs keep the caches of their own sequences; experts stay split over all {s.tp}"
        flags.append(Flag("--data-parallel-size", str(s.dp), why))
    if s.cp > 1:
        why = f"a prompt's tokens are split over {s.cp} groups of {tp} GPUs (needs the V2 model runner, 0.33's default)"
        flags.append(Flag("--prefill-context-parallel-size", str(s.cp), why))
        why = f"the same {s.cp} groups share the cache, 1/{s.cp} of the tokens each; without it every GPU keeps all"
        flags.append(Flag("--decode-context-parallel-size", str(s.cp), why))
    if s.ep:
        flags.append(Flag("--enable-expert-parallel", None, reasons.experts_why(d)))
    return flags


def _memory(d: Deployment, memory: GpuMemory, workload: Workload | None) -> list[Flag]:
    dtype, why = cache_type(d)
    flags = [
        Flag("--gpu-memory-utilization", f"{d.memory_share:g}", reasons.memory_why(d, memory)),
        Flag("--max-model-len", str(d.max_model_len), reasons.length_why(d, memory, workload)),
        Flag("--kv-cache-dtype", dtype, why),
    ]
    if d.spec.compressed is not None:
        why = "a page of 256 tokens is 64 rows of CSA and 2 of HCA: the unit in which all of V4's caches line up"
        flags.append(Flag("--block-size", "256", why))
    elif d.spec.indexer is not None or d.cache == "fp8":
        flags.append(Flag("--block-size", "64", "FlashMLA's page; a prefix is found again in steps of 64 tokens"))
    flags.append(Flag("--enable-prefix-caching", None, _prefix_why(workload)))
    if d.host_cache > 0:
        share = d.host_cache * parts_of(d) / _per_node(d) / d.strategy.dp
        why = (
            f"GiB over all ranks of one engine, {gib(d.host_cache)} of main memory a node: for evicted blocks; "
            "its pinned buffers are taken at start (memlock)"
        )
        flags.append(Flag("--kv-offloading-size", f"{share / GIB:.1f}", why))
        flags.append(Flag("--kv-offloading-backend", "native", "vLLM's own CPU offload: no further server needed"))
    return flags


def _per_node(d: Deployment) -> int:
    """Replicas that share one node's main memory."""
    return min(max(d.hardware.gpus // d.strategy.gpus, 1), d.strategy.replicas)


def _prefix_why(workload: Workload | None) -> str:
    if workload is None or not workload.cached:
        return "a document that comes again costs a look-up instead of its prefill; hashing costs some 5 us a block"
    new = workload.isl - workload.cached
    return f"{workload.cached:,} of {workload.isl:,} tokens were read before: only {new:,} are computed"


def _scheduler(
    d: Deployment, memory: GpuMemory, workload: Workload | None, options: Options, version: str
) -> list[Flag]:
    flags = [
        Flag("--max-num-seqs", str(d.max_num_seqs), reasons.seqs_why(d, memory, workload)),
        Flag("--max-num-batched-tokens", str(d.chunk), reasons.chunk_why(d)),
        Flag("--enable-chunked-prefill", None, "a long prompt is read in such steps and decoding goes on between them"),
    ]
    # A cap of half a step: long enough to keep experts busy, and half is left for whoever comes meanwhile.
    threshold = d.chunk // 2
    alone = workload is not None and workload.concurrency == 1
    if d.max_num_seqs > 1 and not alone and d.max_model_len > d.chunk and threshold > 0:
        rows = threshold * d.spec.moe.top_k / d.spec.moe.routed
        lone = (
            "a lone prompt still takes whole steps" if version != "0.26.0" else "a lone prompt reads in such steps too"
        )
        why = (
            f"one long prompt takes {threshold:,} tokens a step ({rows:.0f} an expert), the rest is for others; {lone}"
        )
        flags.append(Flag("--long-prefill-token-threshold", str(threshold), why))
    return flags + _admission(d, workload, options, version)


def _admission(d: Deployment, workload: Workload | None, options: Options, version: str) -> list[Flag]:
    limits = reasons.admission(d, workload, options)
    if limits is None or limits.problem or workload is None or version == "0.26.0":
        return []
    running = d.max_num_seqs * d.strategy.dp
    return [
        Flag(
            "--max-num-queued-tokens",
            str(limits.tokens),
            f"{reasons.queue_why(workload, limits)}; whoever comes while more is waiting gets 503",
        ),
        Flag(
            "--max-num-queued-reqs",
            str(running + limits.requests),
            f"waiting and running together: {running} may run, {limits.requests} of {workload.isl:,} tokens may wait",
        ),
    ]


def _kernels(d: Deployment) -> list[Flag]:
    card, experts = d.hardware.card, reasons.expert_type(d)
    flags = []
    if card.architecture == "hopper" and experts == "fp4":
        if d.spec.family == "deepseek_v4":
            why = "FP4 experts: Marlin runs them as bfloat16; Humming gave +19.9 % on 4x H20-3e (V4-Flash, vllm#52318)"
            flags.append(Flag("--moe-backend", "humming", why))
        else:
            why = "FP4 experts on Hopper are dequantised to bfloat16; 128K cold took 17.3 s on 8x H20 so (vllm#42284)"
            flags.append(Flag("--moe-backend", "marlin", why))
    if card.architecture == "hopper" and d.spec.family == "deepseek_v32":
        heads = d.spec.heads // (d.strategy.tp // d.strategy.dp)
        pad = f"pads {heads} heads a GPU to {_TILE} (recipes#234)" if heads < _TILE else f"{heads} heads fill its tile"
        flags.append(Flag("--attention-backend", "FLASHMLA_SPARSE", f"sparse MLA of SM90; {pad}"))
    if card.architecture == "hopper" and d.spec.family in ("deepseek_v2", "deepseek_v3"):
        name = "FLASHMLA" if d.cache == "fp8" else "FLASH_ATTN_MLA"
        why = "reads the FP8 latent as it is stored" if d.cache == "fp8" else "FA3 of SM90, vLLM's first choice there"
        flags.append(Flag("--attention-backend", name, why))
    return flags


def _parsers(d: Deployment, options: Options) -> list[Flag]:
    label, notation = models.name_of(d, options), models.notation_of(d, options)
    flags = []
    if notation.encoder is not None:
        why = f"{label} ships no chat template: vLLM's own encoder writes its prompts"
        flags.append(Flag("--tokenizer-mode", notation.encoder, why))
    if notation.reasoning is not None:
        flags.append(Flag("--reasoning-parser", notation.reasoning, f"{label}: text before </think> goes to reasoning"))
    if notation.tool is not None:
        flags.append(Flag("--tool-call-parser", notation.tool, f"{label}'s own notation of tool calls"))
        flags.append(Flag("--enable-auto-tool-choice", None, "lets the model call tools unasked; the parser needs it"))
    if d.spec.family == "deepseek_v41":
        why = "text only: the vision tower is not loaded, nor counted in this plan"
        flags.append(Flag("--language-model-only", None, why))
    return flags


def _variables(d: Deployment, options: Options) -> list[Variable]:
    folder = cache_folder("vllm")
    found = [
        Variable("VLLM_CACHE_ROOT", folder, "torch.compile and DeepGEMM results survive a restart here"),
        Variable("TRITON_CACHE_DIR", f"{folder}/triton", "Triton's kernels as well"),
        Variable("VLLM_ENGINE_READY_TIMEOUT_S", "3600", "loading and compiling may take longer than the default 600 s"),
        Variable("VLLM_PLUGINS", "", "no plug-in that happens to be installed changes what was planned"),
        Variable("VLLM_NO_USAGE_STATS", "1", "nothing is reported to anybody"),
    ]
    if d.hardware.card.architecture != "hopper":
        return found + reasons.network(d, options)
    tuned = _tuned(d)
    if d.hardware.card.name.startswith("H20-") and reasons.expert_type(d) == "fp8" and tuned:
        why = f"H20: Triton has a tuned table for {tuned}; DeepGEMM's experts can be slower there (recipes V3.2)"
        found.append(Variable("VLLM_MOE_USE_DEEP_GEMM", "0", why))
    why = f"GEMM kernels for up to {d.chunk:,} rows are compiled before the first request, not during it"
    found.append(Variable("VLLM_DEEP_GEMM_WARMUP", "relax", why))
    return found + reasons.network(d, options)


def _tuned(d: Deployment) -> str | None:
    """The tuned Triton table that fits this cut of the experts, if the wheels have one."""
    cards, moe = d.strategy.tp * d.strategy.cp, d.spec.moe
    shape = (moe.routed // cards, moe.intermediate) if d.strategy.ep else (moe.routed, moe.intermediate // cards)
    return f"E={shape[0]},N={shape[1]}" if shape in _TUNED.get(d.hardware.card.name, set()) else None


def _process(d: Deployment, options: Options, p: Process) -> Process:
    parts, dp = parts_of(d), d.strategy.dp
    flags = [Flag("--port", str(p.port), "HTTP of this replica")] if p.part == 0 else []
    if parts == 1:
        return replace(p, flags=tuple(flags))
    head = options.address(head_of(p))
    if dp == 1:
        flags += [
            Flag("--nnodes", str(parts), f"{parts} nodes hold one replica"),
            Flag("--node-rank", str(p.part), f"this one's place: layers or heads {p.part + 1} of {parts}"),
            Flag("--master-addr", head, "the replica's first node"),
            Flag("--master-port", str(_MASTER_PORT), "free on that node"),
        ]
    else:
        flags += _spread_groups(d, p, head, parts)
    if p.part > 0:
        flags.append(Flag("--headless", None, "works for the first node, answers no HTTP"))
    return replace(p, flags=tuple(flags))


def _spread_groups(d: Deployment, p: Process, head: str, parts: int) -> list[Flag]:
    dp = d.strategy.dp
    if dp % parts:
        raise ConfigError(
            f"dp={dp} groups over {parts} nodes: vLLM wants whole groups on each node; use a dp that {parts} divides"
        )
    flags = [
        Flag("--data-parallel-size-local", str(dp // parts), f"of {dp} groups, those on this node"),
        Flag("--data-parallel-address", head, "the replica's first node"),
        Flag("--data-parallel-rpc-port", str(_RPC_PORT), "free on that node"),
    ]
    if p.part > 0:
        start = p.part * dp // parts
        flags.append(Flag("--data-parallel-start-rank", str(start), f"groups before it: {start}"))
    return flags


def _notes(d: Deployment, memory: GpuMemory, workload: Workload | None, options: Options, version: str) -> list[str]:
    lines = reasons.common_notes(d, memory, workload, options)
    lines.append(f"pip install vllm=={version} (torch {TORCH[version]})")
    if version == "0.26.0" and (limits := reasons.admission(d, workload, options)) and not limits.problem:
        lines.append(
            f"admission: {version} cannot refuse by queue (0.33.0 can); let the gateway hold at most {limits.tokens:,} "
            "prompt tokens waiting"
        )
    return lines + reasons.closing_notes(d, options)
