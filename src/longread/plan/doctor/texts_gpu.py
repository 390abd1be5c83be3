"""What a known text is, and those of memory, communication and CUDA.

See ``known_texts``.
"""

import re
from dataclasses import dataclass

from longread.plan.doctor.finding import Severity

SGLANG_TUNING = "SGLang hyperparameter tuning guide"
NCCL_GUIDE = "NCCL troubleshooting guide"


@dataclass(frozen=True, slots=True)
class Known:
    """``needles``: one of them is in the line. ``excluding``: none of them is. ``pattern``: named groups become the
    hit's values; where it does not fit, the text still counts. ``statement`` and ``remedy`` may name groups in braces:
    those that are not there read "?". ``worked_out``: another module computes the finding.
    """

    kind: str
    subject: str
    needles: tuple[bytes, ...]
    severity: Severity
    statement: str = ""
    remedy: str = ""
    source: str = ""
    pattern: re.Pattern[str] | None = None
    excluding: tuple[bytes, ...] = ()

    @property
    def worked_out(self) -> bool:
        return not self.statement


MEMORY = (
    Known(
        "cuda oom",
        "CUDA out of memory",
        (b"CUDA out of memory. Tried to allocate",),
        "error",
        pattern=re.compile(
            r"Tried to allocate (?P<wanted>\d{1,9}(?:\.\d{1,6})? [KMGT]?i?B|\d{1,15} bytes)"
            r"(?:\. GPU (?P<gpu>\d{1,3}) has a total capacity of (?P<total>\d{1,9}(?:\.\d{1,6})? [KMGT]?i?B)"
            r" of which (?P<free>\d{1,9}(?:\.\d{1,6})? (?:[KMGT]i?B|bytes)) is free)?"
        ),
        source="PyTorch CUDA caching allocator",
    ),
    Known(
        "cuda oom bare",
        "CUDA out of memory",
        (b"CUDA error: out of memory", b"cudaErrorMemoryAllocation", b"CUDA_ERROR_OUT_OF_MEMORY"),
        "error",
        "the driver had no memory left, outside torch's own pool (a context, a graph, NCCL or another process took it)",
        "look who uses the GPU (`nvidia-smi`); leave more: vLLM --gpu-memory-utilization, SGLang "
        "--mem-fraction-static down by 0.03",
        "CUDA runtime error 2",
    ),
    Known(
        "vllm no cache",
        "KV cache",
        (b"No available memory for the cache blocks",),
        "error",
        "vLLM: weights, activations and graphs alone fill the memory it may use; nothing is left for the KV cache",
        "raise --gpu-memory-utilization (0.9 -> 0.95) if nothing else runs there; lower --max-num-batched-tokens and "
        "--max-num-seqs (activations), or spread the weights over more GPUs",
        "vLLM v1/core/kv_cache_utils.py; vllm-project/vllm#2248",
    ),
    Known(
        "vllm cache too small",
        "KV cache",
        (b"To serve at least one request with the model",),
        "error",
        pattern=re.compile(
            r"max seq len \((?P<length>\d{1,12})\), \(?(?P<needed>\d{1,9}(?:\.\d{1,6})?) GiB KV cache is needed.{0,80}?"
            r"memory \((?P<available>\d{1,9}(?:\.\d{1,6})?) GiB\)"
            r"(?:.{0,60}?maximum model length is (?P<fits>\d{1,12}))?"
        ),
        source="vLLM v1/core/kv_cache_utils.py; vllm-project/vllm#51041",
    ),
    Known(
        "vllm cache too small, old",
        "KV cache",
        (b"is larger than the maximum number of tokens that can be stored in KV cache",),
        "error",
        pattern=re.compile(r"max seq len \((?P<length>\d{1,12})\) is larger .{0,60}KV cache \((?P<fits>\d{1,12})\)"),
        source="deepseek-ai/DeepSeek-V2#83; vllm-project/vllm#12890",
    ),
    Known(
        "vllm free memory",
        "GPU memory at start",
        (b"on startup is less than",),
        "error",
        pattern=re.compile(
            r"\((?P<free>\d{1,9}(?:\.\d{1,6})?)/(?P<total>\d{1,9}(?:\.\d{1,6})?) GiB\) on startup is less than .{0,80}?"
            r"\((?P<share>\d(?:\.\d{1,6})?), (?P<wanted>\d{1,9}(?:\.\d{1,6})?) GiB\)"
        ),
        source="vLLM v1/worker/utils.py; vllm-project/vllm#20305",
    ),
    Known(
        "sglang not enough",
        "KV cache",
        (b"Not enough memory. Please try to increase --mem-fraction-static",),
        "error",
        "SGLang: weights fill the share of memory that weights and KV cache may take; nothing is left for the cache",
        "here --mem-fraction-static must go up (it goes down for out of memory while serving); if it then runs out "
        "there: smaller --chunked-prefill-size and --cuda-graph-max-bs, or more GPUs. Value now: {share}",
        "sgl-project/sglang#322, #4330",
        re.compile(r"mem_fraction_static=(?P<share>\d(?:\.\d{1,6})?)"),
    ),
    Known(
        "graph capture",
        "CUDA graphs",
        (b"Capture cuda graph failed", b"Capture CUDA graph failed"),
        "error",
        "capturing CUDA graphs failed: {why}",
        "out of memory: SGLang --mem-fraction-static down by 0.03, or a smaller --cuda-graph-max-bs; vLLM: fewer "
        "--cudagraph-capture-sizes. With DeepEP, graphs take about 20 GB (sgl-project/sglang#24947). Switching graphs "
        "off (--disable-cuda-graph, --enforce-eager) starts, and decodes slowly",
        "sgl-project/sglang#5285; vllm-project/vllm#45416",
        re.compile(r"Capture (?:cuda|CUDA) graph failed: (?P<why>.{1,120})"),
    ),
    Known(
        "sglang pool",
        "KV cache",
        (b"ut of memory. Try to lower your batch size",),
        "error",
        "SGLang: no tokens were left in the pool for a batch that had been admitted; the scheduler then ends",
        "on DeepSeek-V4 the sliding-window pool is often the one: raise --swa-full-tokens-ratio; else lower "
        "--max-running-requests or raise --mem-fraction-static",
        "SGLang mem_cache/common.py; sgl-project/sglang#11581",
    ),
    Known(
        "kv full",
        "KV cache",
        (b"KV cache pool is full. Retract requests", b"is preempted by PreemptionMode", b"Preemptions: "),
        "warning",
        "the KV cache ran full while serving: requests were thrown out and must be read again",
        "SGLang: --schedule-conservativeness 1.3; vLLM: lower --max-num-seqs or raise --gpu-memory-utilization; "
        "now and then (once a minute) is harmless",
        f"{SGLANG_TUNING}; sgl-project/sglang#26248 (throughput / 14 after it)",
        re.compile(r"(?:#retracted_reqs: |Preemptions: )(?P<number>\d{1,9})"),
    ),
)
COMMUNICATION = (
    Known(
        "nccl shm",
        "NCCL shared memory",
        (
            b"Error while creating shared memory segment",
            b"Error while attaching to shared memory segment",
            b"insufficient shared memory (shm)",
        ),
        "error",
        "NCCL or torch found no room in /dev/shm",
        "`docker run --ipc=host` or `--shm-size=16g`; in Kubernetes an emptyDir with medium: Memory at /dev/shm",
        f"{NCCL_GUIDE}, shared memory; vllm-project/vllm#18831",
    ),
    Known(
        "peer access",
        "peer-to-peer",
        (b"peer access is not supported between these two devices",),
        "error",
        "the GPUs cannot read each other's memory, and NCCL tried to",
        "`nvidia-smi topo -p2p r`; in a virtual machine or with ACS on: switch ACS off, iommu=pt; "
        "NCCL_P2P_DISABLE=1 starts at the price of speed (Ray workers need it in their own environment)",
        f"{NCCL_GUIDE}; vllm-project/vllm#406, #51513",
    ),
    Known(
        "nccl cuda",
        "NCCL",
        (b"ncclUnhandledCudaError", b"unhandled cuda error"),
        "error",
        "a CUDA call inside NCCL failed; its own reason stands on another line",
        "run with NCCL_DEBUG=WARN and read the line with 'NCCL WARN'; often peer access, or a GPU lost (Xid)",
        f"{NCCL_GUIDE}; vllm-project/vllm#406",
    ),
    Known(
        "nccl system",
        "NCCL",
        (b"unhandled system error", b"ncclSystemError"),
        "error",
        "a system call inside NCCL failed: usually /dev/shm too small, or no usable network interface",
        "check /dev/shm (`df -h /dev/shm`), NCCL_SOCKET_IFNAME and `ulimit -l`; NCCL_DEBUG=WARN names it",
        f"{NCCL_GUIDE}; vllm-project/vllm#4618, #6574",
    ),
    Known(
        "nccl remote",
        "NCCL",
        (b"ncclRemoteError",),
        "error",
        "another rank ended first: this is a consequence",
        "look for the first error in the logs of the other ranks and nodes",
        NCCL_GUIDE,
    ),
    Known(
        "nccl watchdog",
        "NCCL timeout",
        (b"Watchdog caught collective operation timeout",),
        "error",
        "a rank waited {timeout} ms in {operation} for the others: one of them hangs, died, or compiles kernels",
        "py-spy dump of all ranks while it hangs; compile kernels beforehand (SGLang: python3 -m "
        "sglang.compile_deep_gemm); NCCL_P2P_DISABLE=1 as a test shows whether peer-to-peer hangs (ACS, IOMMU)",
        "torch ProcessGroupNCCL; sgl-project/sglang#9867, vllm-project/vllm#6042",
        re.compile(r"OpType=(?P<operation>\w{1,40}).{0,120}?Timeout\(ms\)=(?P<timeout>\d{1,12})"),
    ),
    Known(
        "scheduler watchdog",
        "SGLang watchdog",
        (b"atchdog timeout (self.watchdog_timeout=",),
        "error",
        "a step of SGLang's scheduler took longer than {timeout} s, and the server ends itself",
        "if it was compiling: compile beforehand, or a longer --watchdog-timeout; else a collective hangs: look at all "
        "ranks with py-spy (CUDA sync or NCCL)",
        "sgl-project/sglang#3752, #9867",
        re.compile(r"watchdog_timeout=(?P<timeout>\d{1,9})"),
    ),
    Known(
        "broadcast wait",
        "vLLM workers",
        (b"No available shared memory broadcast block found",),
        "warning",
        "vLLM's workers did not take up work for {seconds} s: a kernel is compiled, weights are read slowly, or a rank "
        "hangs",
        "normal a few times at the first start; if it comes while serving: let compile caches outlive the container, "
        "and look at the workers with py-spy",
        "vLLM shm_broadcast.py; vllm-project/vllm#27313, #16841",
        re.compile(r"in (?P<seconds>\d{1,9}) seconds"),
    ),
    Known(
        "custom all-reduce",
        "all-reduce",
        (b"Custom allreduce is disabled because",),
        "note",
        "vLLM's own all-reduce is off ({why}): small batches decode more slowly over NCCL",
        "right for PCIe-only cards; on NVLink machines check links and fabric (`longread doctor` there)",
        "vllm-project/vllm#56128",
        re.compile(r"is disabled because (?P<why>.{1,80}?)(?:\. |$)"),
    ),
)
CUDA = (
    Known(
        "no kernel image",
        "GPU architecture",
        (b"no kernel image is available for execution on",),
        "error",
        "a library holds no code for this GPU",
        "compare `python -c 'import torch; print(torch.cuda.get_arch_list())'` with the card (H20, H100, H200: sm_90; "
        "B200: sm_100; RTX 5090: sm_120); install builds for it, and rebuild extensions with TORCH_CUDA_ARCH_LIST",
        "pytorch/pytorch RELEASE.md",
    ),
    Known(
        "torch architecture",
        "GPU architecture",
        (b"is not compatible with the current PyTorch installation",),
        "error",
        "torch has no code for this card ({card}, sm_{code})",
        "install torch built for another CUDA: sm_100 and sm_120 need 12.8 or newer, sm_60 and older 12.6 or older",
        "pytorch/pytorch RELEASE.md",
        re.compile(r"(?P<card>[\w -]{1,60}) with CUDA capability sm_(?P<code>\d{1,3})"),
    ),
    Known(
        "torch list",
        "GPU architecture",
        (b"The current PyTorch install supports CUDA capabilities",),
        "note",
        "torch was built for {list}",
        "",
        "torch/cuda/__init__.py",
        re.compile(r"supports CUDA capabilities (?P<list>[\w ]{1,200})"),
    ),
    Known(
        "driver too old",
        "driver",
        (
            b"CUDA driver version is insufficient for CUDA runtime version",
            b"The NVIDIA driver on your system is too old",
            b"the provided PTX was compiled with an unsupported toolchain",
        ),
        "error",
        "the driver is older than the CUDA that the program was built for (driver serves CUDA {version})",
        "a newer driver (CUDA 12.x: 525, CUDA 13.x: 580 or newer), or packages built for an older CUDA; data centre "
        "cards: the cuda-compat package",
        "NVIDIA CUDA compatibility guide",
        re.compile(r"found version (?P<version>\d{1,6})"),
    ),
    Known(
        "illegal access",
        "illegal memory access",
        (b"an illegal memory access was encountered", b"CUDA_ERROR_ILLEGAL_ADDRESS"),
        "error",
        "a kernel wrote or read outside its memory; the place where it is reported is often not the place where it "
        "happened, and every rank must be restarted",
        "find it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; try without CUDA graphs, then without speculation; "
        "newer engine versions fix many: search for the kernel's name",
        "sgl-project/sglang#11671, #3423 (H20)",
    ),
    Known(
        "device assert",
        "device-side assert",
        (b"device-side assert triggered",),
        "error",
        "a kernel met a value it forbids: often a token or page number out of range",
        "the line with 'Assertion' above says which; CUDA_LAUNCH_BLOCKING=1 gives the right place; check that the "
        "tokenizer belongs to the model",
        "CUDA runtime error 710",
    ),
    Known(
        "not initialised",
        "fabric",
        (b"system not yet initialized", b"cudaErrorSystemNotReady"),
        "error",
        "CUDA says 802: on NVSwitch machines the fabric manager is not running or does not match the driver",
        "`systemctl status nvidia-fabricmanager`: its version must be the driver's",
        "NVIDIA Fabric Manager user guide",
    ),
    Known(
        "no gpus",
        "GPUs",
        (b"No CUDA GPUs are available", b"no CUDA-capable device is detected"),
        "error",
        "the program sees no GPU",
        "`nvidia-smi` in the same container; `--gpus all`, CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES",
        "CUDA runtime error 100",
    ),
    Known(
        "ecc",
        "memory errors",
        (b"uncorrectable ECC error encountered",),
        "error",
        "a memory error that ECC could not correct stopped the program",
        "`nvidia-smi -q -d ECC,ROW_REMAPPER`; drain, reset the GPU, then `dcgmi diag -r 3`",
        "NVIDIA GPU Memory Error Management",
    ),
    Known(
        "launch failure",
        "CUDA",
        (b"unspecified launch failure",),
        "error",
        "a kernel crashed on the GPU",
        "`dmesg | grep -i xid` at that time; then as for an illegal memory access",
        "CUDA runtime error 719",
    ),
)
