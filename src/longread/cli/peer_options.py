"""Options that users of vLLM and SGLang reach for, and what there is instead: a line each.

Knows: names and words. Where an option means the same here it has the same name, and is not in this table.
"""

from collections.abc import Mapping

_SPLIT = (
    "the engine runs in one process on a CPU or one GPU, with nothing to split; `longread plan MODEL "
    "--hardware 8xH20-96 --emit vllm` writes a launch for cards"
)
_CHUNKS = (
    "prompts are always read in chunks beside the others' tokens: --max-num-batched-tokens is the most of a step, "
    "--slo and --step-target make them shorter"
)
_SHARED_STEPS = f"several prompts are read at once, short ones first; {_CHUNKS.partition(': ')[2]}"
_BELOW = "--host-cache-size (main memory) and --store (disk) keep what leaves the cache"
_EAGER = "decode steps and short chunks are graphs on a GPU, all else is launched step by step: nothing to choose"
_KERNELS = "each operation has one implementation, compared with a reference; there is none to choose"
_PARSED = "always on, by the model's family"
_LOADED = "the checkpoint's folder is read as DeepSeek publishes it (config.json, tokenizer.json, *.safetensors)"
_CONFIG = "config.json is read as it is; change it there (cached state of the old one is then not used)"
_DRAFTS = "there is no speculative decoding; MTP weights are not loaded"
_ORDER = "requests go by `priority`, fair shares of their API keys, and age; `longread explain` says why one waits"
_NO_TLS = "there is no TLS; put a proxy before it, and listen on 127.0.0.1"
_ALWAYS = "always on"
_GRAMMAR = f"{_ALWAYS} (llguidance): response_format and structured_outputs in a request"
_LOGS = "warnings go to stderr; requests are not logged: `longread trace` lists the last 512"

# By what there is instead. Names without dashes in front.
_GROUPS: tuple[tuple[str, str], ...] = (
    (_SPLIT, "tensor-parallel-size tp-size tp pipeline-parallel-size pp-size pp data-parallel-size dp-size dp"),
    (_SPLIT, "decode-context-parallel-size dcp prefill-context-parallel-size pcp enable-dp-attention"),
    (_SPLIT, "enable-expert-parallel expert-parallel-size ep-size ep distributed-executor-backend nnodes node-rank"),
    (_SPLIT, "dist-init-addr disaggregation-mode"),
    ("--gpu-memory-utilization", "mem-fraction-static"),
    (_BELOW, "kv-offloading-size kv-transfer-config swap-space enable-hierarchical-cache hicache-ratio hicache-size"),
    (_BELOW, "hicache-storage-backend"),
    ("the weights are in main memory anyway; for the cache: " + _BELOW, "cpu-offload-gb"),
    (_CHUNKS, "enable-chunked-prefill chunked-prefill-size max-prefill-tokens enable-mixed-chunk"),
    (_SHARED_STEPS, "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold"),
    (f"{_LOADED}, its own quantisation with it; --dtype is the type it is computed in", "quantization q load-format"),
    (_EAGER, "enforce-eager disable-cuda-graph cuda-graph-max-bs compilation-config enable-torch-compile O cc"),
    (_EAGER, "max-cudagraph-capture-size optimization-level performance-mode"),
    ("a page is 256 tokens, always: stored documents are found by it", "block-size page-size"),
    ("--no-enable-prefix-caching", "disable-radix-cache"),
    ("always a chained hash over weights, format and tokens", "prefix-caching-hash-algo"),
    (_ORDER, "scheduling-policy schedule-policy schedule-conservativeness"),
    ("--max-num-seqs", "max-running-requests"),
    ("--max-model-len", "context-length"),
    ("--kv-cache-memory-bytes, or --num-gpu-blocks-override in pages of 256 tokens", "max-total-tokens"),
    ("--max-num-queued-reqs", "max-queued-requests"),
    ("--seed", "random-seed"),
    ("--step-timeout", "watchdog-timeout"),
    ("the checkpoint is the first argument: longread serve CHECKPOINT", "model model-path"),
    (_LOADED, "tokenizer tokenizer-path tokenizer-mode skip-tokenizer-init"),
    ("no code of a checkpoint is ever run, so none needs trust", "trust-remote-code"),
    ("nothing is downloaded: give a folder that is here", "revision download-dir"),
    (_CONFIG, "hf-overrides json-model-override-args"),
    ("generation_config.json is not read: a request says what it wants", "generation-config"),
    ("a request says what it wants; there are no server-wide defaults", "override-generation-config"),
    ("--chat-encoding: DeepSeek's own encodings are built in", "chat-template"),
    (f"{_PARSED}: thinking comes in `reasoning_content`", "reasoning-parser"),
    (f"{_PARSED}: tool calls come in `tool_calls`", "tool-call-parser enable-auto-tool-choice"),
    (_GRAMMAR, "structured-outputs-config grammar-backend"),
    ("there are no adapters", "enable-lora lora-modules lora-paths"),
    (_DRAFTS, "speculative-config speculative-algorithm speculative-num-steps speculative-eagle-topk"),
    (_DRAFTS, "speculative-num-draft-tokens"),
    (_KERNELS, "attention-backend moe-backend moe-runner-backend"),
    (f"{_ALWAYS}: GET /metrics", "enable-metrics"),
    (f"{_ALWAYS}: usage.prompt_tokens_details.cached_tokens", "enable-prompt-tokens-details enable-cache-report"),
    (f"{_ALWAYS}: X-Request-Id is on every response", "enable-request-id-headers"),
    (_LOGS, "enable-log-requests disable-log-requests log-requests log-level uvicorn-log-level"),
    ("set OTEL_EXPORTER_OTLP_ENDPOINT (with the extra longread[otel])", "otlp-traces-endpoint"),
    (_NO_TLS, "ssl-keyfile ssl-certfile"),
    ("the API's paths begin at /v1; a proxy may put them elsewhere", "root-path"),
    ("one process answers HTTP, another computes", "api-server-count"),
    ("--allowed-origins is all there is of CORS", "allow-credentials allowed-methods allowed-headers"),
)
PEER_OPTIONS: Mapping[str, str] = {name: instead for instead, names in _GROUPS for name in names.split()}
