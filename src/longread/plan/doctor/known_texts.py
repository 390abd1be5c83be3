"""Texts that engines, torch, NCCL and the kernel write, and what they mean.

One entry a text: what a line must hold, what it says in numbers, severity, meaning, remedy and where that is known
from. Texts were checked against vLLM 0.32's source, SGLang's source and the threads named; meanings and remedies are in
words of our own. Knows: texts. Must not know: files. Entries whose remedy is a number to work out have no
statement here: ``checks_logs`` computes it.

Every needle is looked for as plain bytes, every pattern is tried on one shortened line and has no nested repetition.
"""

import re

from longread.plan.doctor.texts_gpu import COMMUNICATION, CUDA, MEMORY, Known

QUALITY = (
    Known(
        "fp8 attention scales",
        "FP8 scales",
        (b"Using uncalibrated q_scale",),
        "warning",
        "attention runs in FP8 with scales of 1 that nobody calibrated: answers may be worse, or garbage",
        "compare answers with --kv-cache-dtype auto; use a checkpoint that brings q and prob scales",
        "vLLM quantization/kv_cache.py; vllm-project/vllm#33638 (V3.1, FP8 cache, garbled)",
    ),
    Known(
        "fp8 cache scales",
        "FP8 scales",
        (b"Using KV cache scaling factor 1.0 for fp8", b"Using FP8 KV cache but no scaling factors provided"),
        "note",
        "the FP8 KV cache uses a scale of 1: usual for DeepSeek; if answers are garbled, suspect it first",
        "compare answers with a BF16 cache (vLLM --kv-cache-dtype auto; SGLang refuses BF16 for DeepSeek-V4)",
        "vllm-project/vllm#33638",
    ),
    Known(
        "ue8m0",
        "FP8 scales",
        (b"the scale_fmt of checkpoint is not ue8m0",),
        "note",
        "on Blackwell, DeepGEMM rounds these scales to powers of two and accuracy can suffer; not on Hopper",
        "on Blackwell: a checkpoint with ue8m0 scales, or another FP8 GEMM back end",
        "SGLang configs/model_config.py",
    ),
    Known(
        "nan logits",
        "NaN",
        tuple(b"Corrupted: %d" % digit for digit in range(1, 10)),  # 0 is written too
        "error",
        "logits held NaN in {number} requests: their answers are garbage",
        "try a BF16 KV cache and the default MoE back end; check the GPUs' memory errors",
        "vLLM VLLM_COMPUTE_NANS_IN_LOGITS; vllm-project/vllm#33638",
        re.compile(r"Corrupted: (?P<number>[1-9]\d{0,8}) reqs"),
    ),
    Known(
        "block size",
        "tensor parallelism x FP8 blocks",
        (b"divisible by weight quantization block",),
        "error",
        "with this tensor parallelism a shard of {part} columns is no multiple of the FP8 block of {block}",
        "a smaller --tensor-parallel-size (DeepSeek: 8 within a node), pipeline parallelism between nodes, or "
        "--enable-expert-parallel, which keeps experts whole",
        "sgl-project/sglang#23602; vllm-project/vllm#17569",
        re.compile(r"= (?P<part>\d{1,9}) is not divisible by weight quantization block_[nk] = (?P<block>\d{1,6})"),
    ),
)
SLOW = (
    Known(
        "default table",
        "tuned tables",
        (b"erformance might be sub-optimal! Config file not found at",),
        "warning",
        "no tuned kernel table for this card and shape ({table}): a default is taken, which is slower",
        "tune with the engine's benchmark_moe (SGLang: tuning_fused_moe_triton), or copy a near card's table; without "
        "effect where MoE runs on Marlin or DeepGEMM",
        "vllm-project/vllm#44152, #17619, #42284; sgl-project/sglang#6835, #17133",
        re.compile(r"(?P<table>[EN]=\d{1,6},[\w=,.\[\]-]{1,160}?)\.json"),
    ),
    Known(
        "older table",
        "tuned tables",
        (b"Fallback to triton version",),
        "note",
        "the tuned MoE table is of another Triton ({version}): usually fine, a new one may be a little faster",
        "",
        "sgl-project/sglang#19003",
        re.compile(r"Fallback to triton version (?P<version>[\d.]{1,20})"),
    ),
    Known(
        "fp4 on marlin",
        "FP4 weights",
        (b"does not have native support for FP4 computation",),
        "note",
        "FP4 experts are unpacked to BF16 and multiplied there (Marlin): right for H20 and H200, which have no FP4; "
        "the FP8 tensor cores idle, so long prefills pay most",
        "no flag repairs it; an FP8 checkpoint (twice the memory), or on 4 x H20-3e the Humming MoE back end (+20 %)",
        "vllm-project/vllm#42284, #52318, #56603",
    ),
    Known(
        "fp8 on marlin",
        "FP8 weights",
        (b"does not have native support for FP8 computation",),
        "warning",
        "FP8 weights are unpacked and multiplied in 16 bits: the card is older than Ada, or torch sees it so",
        "expected on A100 and A800; on H20, H100, H200 check which device is used (MIG, CUDA_VISIBLE_DEVICES)",
        "vLLM marlin_utils_fp8.py; vllm-project/vllm#10142",
    ),
    Known(
        "eager",
        "CUDA graphs",
        (b"Enforce eager set, disabling", b"Cudagraph is disabled under eager mode", b"cuda graph: False"),
        "warning",
        "steps run without CUDA graphs: decoding waits for kernel launches",
        "start without --enforce-eager / --disable-cuda-graph; if only large batches run so (SGLang): a larger "
        "--cuda-graph-max-bs",
        "vLLM config/vllm.py",
    ),
    Known(
        "deepgemm missing",
        "DeepGEMM",
        (
            b"DeepGEMM backend is unavailable",
            b"Vendored deep_gemm not found either",
            b"Failed to import vendored deep_gemm",
            b"DeepGEMM is not available",
        ),
        "warning",
        "DeepGEMM is not there: FP8 products take a slower path, and sparse attention (V3.2, V4) may refuse",
        "vLLM's own wheel carries it: install the official wheel and nvcc for its compiler; SGLang: sgl-deep-gemm "
        "(on H20, VLLM_USE_DEEP_GEMM=0 can even be faster)",
        "vLLM utils/deep_gemm.py; vllm-project/recipes (DeepSeek-V3.2)",
    ),
    Known(
        "offload",
        "weights in host memory",
        (b"Total CPU offloaded parameters:",),
        "warning",
        "weights lie in host memory ({size} GiB) and come over PCIe in every step",
        "start without --cpu-offload-gb; if it then does not fit: fewer sequences, a shorter maximum, more GPUs",
        "vllm-project/vllm#42284 (8 x H20: 2,434 tokens/s without, 120 with 35 GB)",
        re.compile(r"parameters: (?P<size>\d{1,9}(?:\.\d{1,6})?)"),
    ),
    Known(
        "deepgemm jit",
        "kernel compilation",
        (b"Entering DeepGEMM JIT Pre-Compile session",),
        "note",
        "SGLang compiles DeepGEMM kernels: 10 to 20 minutes at the first start, or long first requests",
        "python3 -m sglang.compile_deep_gemm with the server's arguments; a cache that outlives the container",
        "sgl-project/sglang#9867, #29170",
    ),
    Known(
        "jit while serving",
        "kernel compilation",
        (b"This causes a latency spike; consider extending warmup",),
        "warning",
        "a kernel was compiled while serving ({kernel}): that request's first token waited for it",
        "warm up with the longest prompts and batches you serve; keep the compile caches over restarts",
        "vLLM utils/jit_monitor.py",
        re.compile(r"during inference: (?P<kernel>[\w.<>-]{1,80})"),
    ),
)
START = (
    Known(
        "port",
        "port",
        (b"ddress already in use", b"EADDRINUSE"),
        "error",
        "the port is taken: another server, or one that has not ended",
        "`ss -ltnp` shows who; another --port (torch's own: MASTER_PORT, --dist-init-addr)",
        "errno 98",
    ),
    Known(
        "transformers",
        "transformers",
        (b"Transformers does not recognize this architecture",),
        "error",
        "the installed transformers does not know the model type {model}",
        "the engine version that first serves the model brings the right one: deepseek_v4 from vLLM 0.20, deepseek_v32 "
        "from transformers 5.11; update the engine rather than transformers alone",
        "vllm-project/vllm#40954; huggingface/transformers#42590",
        re.compile(r"model type `(?P<model>[\w.-]{1,60})`"),
    ),
    Known(
        "architecture",
        "model",
        (b"are not supported for now. Supported architectures",),
        "error",
        "this engine version does not serve the model's architecture ({model})",
        "a newer engine (DeepSeek-V4: vLLM 0.20 or newer; V4.1: 0.30)",
        "vLLM models/registry.py; vllm-project/recipes",
        re.compile(r"Model architectures \[(?P<model>[\w', ]{1,120})\]"),
    ),
    Known(
        "tokenizer",
        "tokenizer",
        (b"does not exist or is not currently imported",),
        "error",
        "the tokenizer's class ({model}) is not in the installed transformers",
        "install the transformers that the engine names, or start with the engine's own --tokenizer-mode",
        "transformers tokenization_auto.py",
        re.compile(r"Tokenizer class (?P<model>\w{1,80})"),
    ),
    Known(
        "engine ended",
        "engine",
        (
            b"Engine core initialization failed",
            b"EngineCore encountered an issue",
            b"Received sigquit from a child process",
        ),
        "error",
        "the engine ended; the reason is an earlier line",
        "read upwards to the first error; the findings beside this one come from there, if its text is known",
        "vLLM v1/engine/utils.py; SGLang launch_server",
    ),
)
HOST = (
    Known(
        "oom killer",
        "host memory",
        (b"ut of memory: Killed process",),
        "error",
        "the kernel ran out of memory and killed {name} (process {pid})",
        "a control group's limit (Memory cgroup) or the machine's: raise it, or lower host caches (SGLang "
        "--hicache-ratio, vLLM KV offloading, Longread --host-cache-size) and parallel loading of weights",
        "Linux mm/oom_kill.c",
        re.compile(r"Killed process (?P<pid>\d{1,9}) \((?P<name>[\w:. -]{1,40})\)"),
    ),
    Known(
        "killed",
        "host memory",
        (b"exit code: -9)", b"OOMKilled"),
        "error",
        "a worker was killed from outside (signal 9): usually the kernel's or the container's memory limit",
        "`dmesg -T | grep -i 'out of memory'`; `kubectl describe pod` (OOMKilled)",
        "signal(7)",
    ),
    Known(
        "disk full",
        "disk",
        (b"No space left on device",),
        "error",
        "a disk (or /dev/shm) is full",
        "`df -h`, `df -i`; compile caches, core dumps and logs grow unnoticed; `longread store gc --store DIR`",
        "errno 28",
        excluding=(b"shared memory segment",),
    ),
    Known(
        "files",
        "ulimit nofile",
        (b"Too many open files",),
        "error",
        "the limit of open files is reached: connections are refused",
        "`ulimit -n 65536`, LimitNOFILE= in systemd, or `--ulimit nofile=65536` in Docker",
        "errno 24",
        excluding=(b"Found ulimit of",),
    ),
    Known(
        "few files",
        "ulimit nofile",
        (b"Found ulimit of",),
        "note",
        "the limit of open files is {number} and could not be raised",
        "`ulimit -n 65536` before the start",
        "vLLM utils/system_utils.py",
        re.compile(r"Found ulimit of (?P<number>\d{1,12})"),
    ),
    Known(
        "no memory",
        "host memory",
        (b"Cannot allocate memory",),
        "error",
        "the system refused memory: host memory, locked memory or the overcommit limit is used up",
        "`free -h`, `ulimit -l`, vm.overcommit_memory",
        "errno 12",
    ),
    Known(
        "disk errors",
        "disk",
        (b"blk_update_request: I/O error", b"critical medium error", b"I/O error, dev "),
        "error",
        "a disk reports read or write errors",
        "`smartctl -a`; replace it, and read the store again (`longread store verify`)",
        "Linux block layer",
    ),
)
KNOWN: tuple[Known, ...] = (*MEMORY, *COMMUNICATION, *CUDA, *QUALITY, *SLOW, *START, *HOST)
BY_KIND = {known.kind: known for known in KNOWN}
