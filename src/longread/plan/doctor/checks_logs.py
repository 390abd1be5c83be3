"""What the known texts of logs mean for serving, with numbers worked out where the text has them.

Pure: facts in, findings out.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from longread.plan.doctor.facts import Facts, LogHit
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.known_texts import BY_KIND
from longread.plan.doctor.texts_gpu import Known

GIB = 2**30
UNITS = {
    "bytes": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": GIB,
    "TiB": 2**40,
}
# Texts that say the same as an option of a server whose options are known: that finding is enough.
SAID_BY_OPTION = {"eager": ("--enforce-eager", "--disable-cuda-graph"), "offload": ("--cpu-offload-gb",)}
CONSEQUENCES = ("engine ended", "nccl remote", "nccl cuda", "nccl system")

# Whose allocation failed, what that memory is, and what makes it smaller.
PARTS: dict[str, tuple[str, str, str]] = {
    "weights": (
        "while loading weights",
        "more GPUs (tensor or pipeline parallelism), expert parallelism, or a smaller checkpoint (FP4 instead of FP8)",
        "deepseek-ai/DeepSeek-V3#212",
    ),
    "activations": (
        "in the profiling step, which takes the largest batch",
        "vLLM: lower --max-num-batched-tokens (halving it halves this) and --max-num-seqs",
        "vLLM v1/worker/gpu_worker.py",
    ),
    "KV cache": (
        "while allocating the KV cache",
        "vLLM: lower --gpu-memory-utilization by 0.02-0.05; SGLang: --mem-fraction-static likewise",
        "vLLM v1/worker/gpu_worker.py",
    ),
    "graphs": (
        "while capturing CUDA graphs",
        "SGLang: lower --mem-fraction-static or --cuda-graph-max-bs; vLLM: fewer --cudagraph-capture-sizes",
        "sgl-project/sglang#5285; vllm-project/vllm#45416",
    ),
    "indexer": (
        "for the indexer's scores, [chunk, context / 4] in FP32, which the memory budget leaves out",
        "a smaller chunk (half of it, half the buffer): vLLM --max-num-batched-tokens, SGLang --chunked-prefill-size",
        "sgl-project/sglang#35201; vllm-project/vllm#45663",
    ),
    "vocabulary logits": (
        "for logits over the vocabulary",
        "lower --max-num-seqs / --max-running-requests; do not ask for prompt logprobs of long prompts",
        "PyTorch CUDA caching allocator",
    ),
    "experts": (
        "for the experts' intermediate results, which grow with the chunk",
        "a smaller chunk: vLLM --max-num-batched-tokens, SGLang --chunked-prefill-size",
        "PyTorch CUDA caching allocator",
    ),
    "hyper-connections": (
        "for the hyper-connections' buffers, which profiling leaves out",
        "a smaller chunk: vLLM --max-num-batched-tokens, or --gpu-memory-utilization down by 0.02",
        "wtdcode/vllm-backport#94",
    ),
}


def check_logs(facts: Facts) -> Iterator[Finding]:
    """One finding a text and phase; a text that only says that something else failed is a note where that is known."""
    logs = facts.logs
    if logs is None:
        return
    causes = any(
        BY_KIND[hit.kind].severity == "error" and hit.kind not in CONSEQUENCES for hit in logs if hit.kind in BY_KIND
    )
    for hit in logs:
        known = BY_KIND.get(hit.kind)
        if known is None:  # a newer version's report
            continue
        options = SAID_BY_OPTION.get(hit.kind, ())
        if any(server.value(option) not in (None, "0", "0.0") for server in facts.servers or () for option in options):
            continue
        found = WORKED_OUT[hit.kind](hit, known) if known.worked_out else _stated(hit, known)
        if causes and hit.kind in CONSEQUENCES:
            found = Finding("note", found.subject, found.statement, found.evidence, found.remedy, found.source)
        yield found
    if not logs:
        yield Finding("ok", "logs", "no text that is known to mean trouble")


def evidence(hit: LogHit) -> str:
    times = f"{hit.count:,} times, first " if hit.count > 1 else ""
    phase = {"start": " (at start)", "serving": " (while serving)"}.get(hit.phase, "")
    return f"{times}{hit.file}:{hit.line}{phase}: {hit.text}"


class _Open(dict[str, str]):
    """A text's groups; those that its pattern did not give read "?"."""

    def __missing__(self, key: str) -> str:
        return "?"


def _stated(hit: LogHit, known: Known) -> Finding:
    values = _Open(hit.values)
    statement, remedy, source = known.statement, known.remedy, known.source
    if hit.kind == "illegal access" and hit.around == "indexer":
        statement += "; here near the sparse indexer, a known place at long contexts"
        source = "sgl-project/sglang#34718 (8 x H20-96, V4-Flash); vllm-project/vllm#51970"
    return Finding(
        known.severity, known.subject, statement.format_map(values), evidence(hit), remedy.format_map(values), source
    )


def size(text: str | None) -> float | None:
    """``"2.50 GiB"`` in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ([KMGT]?i?B|bytes)", text or "")
    return float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else None


def _shown(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def _cuda_oom(hit: LogHit, known: Known) -> Finding:
    wanted, total, free = (size(hit.values.get(name)) for name in ("wanted", "total", "free"))
    when, remedy, source = PARTS.get(hit.around, ("", "", ""))
    if not when:
        when = {"start": "at start", "serving": "while serving"}.get(hit.phase, "")
        remedy = {
            "start": "vLLM: lower --max-num-batched-tokens and --max-num-seqs; SGLang: --chunked-prefill-size and "
            "--cuda-graph-max-bs",
            "serving": "vLLM: lower --gpu-memory-utilization; SGLang: lower --mem-fraction-static; both: a smaller "
            "chunk (--max-num-batched-tokens, --chunked-prefill-size)",
        }.get(
            hit.phase,
            "leave more beside the KV cache: vLLM --gpu-memory-utilization, SGLang --mem-fraction-static down",
        )
        source = known.source
    if hit.phase == "serving":
        when = f"{when}, while serving" if hit.around else "while serving (the engine ends, and all requests with it)"
    if wanted is not None and total and free is not None:
        short = wanted - free
        card = f"GPU {hit.values.get('gpu', '?')}"
        statement = f"torch could not get {_shown(wanted)} on {card} {when}".rstrip()
        statement += f": {_shown(free)} of {_shown(total)} were free"
        if short > 0:
            share = -(-(short + wanted) * 100 // total) / 100  # the next allocation will be as large
            remedy += f". Missing: {_shown(short)}; with one more such block as a margin, {share:.2f} of the card"
        else:
            remedy += ". Enough was free but not in one piece: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    else:
        statement = f"torch could not get {hit.values.get('wanted', 'memory')} {when}".rstrip()
    return Finding("error", known.subject, statement, evidence(hit), remedy, source)


def _numbers(hit: LogHit) -> dict[str, float]:
    """The values that are numbers: those of a report need not be what the pattern finds."""
    return {name: float(text) for name, text in hit.values.items() if re.fullmatch(r"\d{1,15}(?:\.\d{1,9})?", text)}


def _too_small(hit: LogHit, known: Known) -> Finding:
    numbers = _numbers(hit)
    fits = numbers.get("fits")
    length = f"{numbers['length']:,.0f} tokens" if "length" in numbers else "the maximum length"
    statement = f"vLLM: one request of {length} does not fit into the KV cache"
    if {"needed", "available"} <= numbers.keys():
        statement += f": it needs {numbers['needed']:.2f} GiB, {numbers['available']:.2f} GiB are there"
    elif fits is not None:
        statement += f", which holds {fits:,.0f} tokens"
    remedy = f"--max-model-len {fits:.0f}" if fits is not None else "a smaller --max-model-len"
    remedy += ", or more memory for the cache"
    if {"needed", "available"} <= numbers.keys():
        remedy += f" ({numbers['needed'] - numbers['available']:.2f} GiB a GPU more)"
    remedy += (
        ": --gpu-memory-utilization, --kv-cache-dtype fp8, fewer --max-num-seqs and batched tokens. On DeepSeek-V4 the "
        "need is a fixed part and a part per token: `longread plan` works it out"
    )
    return Finding(known.severity, known.subject, statement, evidence(hit), remedy, known.source)


def _free_memory(hit: LogHit, known: Known) -> Finding:
    numbers = _numbers(hit)
    statement = "another process holds memory that vLLM was told to use"
    remedy = "stop what uses the GPU (`nvidia-smi`), or lower --gpu-memory-utilization"
    if {"free", "total", "wanted"} <= numbers.keys() and numbers["total"] > 0:
        free, total = numbers["free"], numbers["total"]
        statement = (
            f"vLLM was told to use {numbers['wanted']:g} GiB of a GPU, and only {free:g} of {total:g} GiB are free: "
            "another process holds the rest"
        )
        fits = int(free / total * 100) / 100 - 0.01
        remedy = (
            f"`nvidia-smi` shows who holds {total - free:.1f} GiB (a server that did not end?); else "
            f"--gpu-memory-utilization {max(fits, 0):.2f} at most"
        )
    return Finding(known.severity, known.subject, statement, evidence(hit), remedy, known.source)


WORKED_OUT: Mapping[str, Callable[[LogHit, Known], Finding]] = {
    "cuda oom": _cuda_oom,
    "vllm cache too small": _too_small,
    "vllm cache too small, old": _too_small,
    "vllm free memory": _free_memory,
}


def check_conflicts(facts: Facts) -> Iterator[Finding]:
    for conflict in facts.conflicts:
        yield Finding(
            "warning",
            "files",
            f"the files say different things of {conflict.field}: are they of one machine? The first was taken",
            f"{conflict.first} ({conflict.first_from}), {conflict.second} ({conflict.second_from})",
            "give the files of one machine only, saved at one time",
        )
