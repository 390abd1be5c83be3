"""vLLM's OpenAI server with a random Llama of one layer, for benchmarks/http_layer.py. Nothing is downloaded."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from http_server import TOKENIZER
from spent import Spent

START_SECONDS = 300.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def write_model(folder: Path) -> None:
    """config.json and a tokenizer; weights are made up by ``--load-format dummy``."""
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in json.loads(TOKENIZER.read_text())["added_tokens"]}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
    }
    (folder / "config.json").write_text(json.dumps(config))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@contextmanager
def vllm_serving(python: str, streams: int) -> Iterator[tuple[tuple[str, int], Spent]]:
    """Its address, and what it spends. Ends the program where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        command = [
            python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            name,
            "--load-format",
            "dummy",
            "--port",
            str(port),
        ]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--served-model-name", "fake"]
        command += ["--max-num-seqs", str(streams), "--host", "127.0.0.1"]
        log = folder / "log"
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | QUIET)
        try:
            end = time.monotonic() + START_SECONDS
            while not _ready(port):
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"vLLM did not start: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield ("127.0.0.1", port), Spent(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
