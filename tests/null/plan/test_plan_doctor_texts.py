"""Known error texts: each is recognised in the line that its program writes, and explained with its numbers."""

from pathlib import Path

import pytest

from longread.plan.doctor.checks_logs import CONSEQUENCES, check_logs, size
from longread.plan.doctor.facts import Facts
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.known_texts import BY_KIND, KNOWN
from longread.plan.doctor.saved.log import read_log
from longread.plan.doctor.saved.text import Saved

GIB = 2**30
# Three lines a text: its kind, the line as its program writes it, what the finding must say.
FILE = Path(__file__).parents[2] / "support" / "known_lines.txt"
LINES = [tuple(record.strip().split("\n")) for record in FILE.read_text(encoding="utf-8").split("\n\n")]
OOM = LINES[0][1]
SOUND = """(APIServer pid=1) INFO [api_utils.py:286] non-default args: {'model_tag': '/m/V3', 'dtype': 'auto'}
(EngineCore pid=2) INFO 11-29 18:03:52 [core.py:133] Initializing a V1 LLM engine (v0.26.0) with config: model='/m/V3'
(Worker pid=3) INFO 11-29 18:04:00 [gpu_worker.py:298] Available KV cache memory: 11.17 GiB
(EngineCore pid=2) INFO 11-29 18:04:00 [kv_cache_utils.py:2327] GPU KV cache size: 233,008 tokens
INFO [gpu_worker.py:1013] Free memory on device (94.32/95.00 GiB) on startup. Desired GPU memory utilization is
(APIServer pid=1) INFO:     Application startup complete.
INFO Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%
[2026-05-24 03:51:44 TP0] Decode batch, #running-req: 4, token usage: 0.50, cuda graph: True, #queue-req: 0
[2026-05-24 03:51:44 TP0] Capture cuda graph end. Time elapsed: 56.90 s. mem usage=6.22 GB. avail mem=5.61 GB.
INFO Engine 000: Running: 3 reqs, GPU KV cache usage: 10.0%, Corrupted: 0 reqs
INFO: 127.0.0.1:58310 - "POST /v1/chat/completions HTTP/1.1" 200 OK
"""


def facts_of(text: str) -> Facts:
    data = text.encode()
    return read_log(Saved(name="server.log", data=data, size=len(data)))


def findings(text: str) -> list[Finding]:
    return list(check_logs(facts_of(text)))


def told(finding: Finding) -> str:
    return " ".join((finding.statement, finding.remedy, finding.evidence))


@pytest.mark.parametrize(("kind", "line", "says"), LINES)
def test_each_text_is_recognised_alone_and_explained(kind: str, line: str, says: str) -> None:
    facts = facts_of(f"INFO before\n{line}\nINFO after\n")
    assert [hit.kind for hit in facts.logs or ()] == [kind]
    (finding,) = check_logs(facts)
    assert says in told(finding)
    assert finding.severity == BY_KIND[kind].severity
    assert "server.log:2: " in finding.evidence and finding.source
    assert "{" not in finding.statement + finding.remedy


def test_no_text_is_without_a_line_here() -> None:
    assert {kind for kind, _, _ in LINES} == {known.kind for known in KNOWN}
    assert len(BY_KIND) == len(KNOWN)


def test_a_sound_log_says_nothing() -> None:
    assert [(f.severity, f.subject) for f in findings(SOUND)] == [("ok", "logs")]
    assert list(check_logs(Facts())) == []  # no log, no judgement


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ('File "/x/vllm/v1/worker/gpu_model_runner.py", line 5, in load_model', "while loading weights"),
        ('File "/x/vllm/v1/worker/gpu_worker.py", line 5, in determine_available_memory', "in the profiling step"),
        (
            'File "/x/vllm/v1/worker/gpu_model_runner.py", line 5, in initialize_kv_cache',
            "while allocating the KV cache",
        ),
        ('File "/x/sglang/srt/model_executor/cuda_graph_runner.py", line 5, in capture', "while capturing CUDA graphs"),
        ("Exception: Capture cuda graph failed: CUDA out of memory:", "while capturing CUDA graphs"),
        ('File "/x/vllm/model_executor/layers/sparse_attn_indexer.py", line 5, in f', "the indexer's scores"),
        ('File "/x/sglang/srt/layers/logits_processor.py", line 5, in _get_logits', "logits over the vocabulary"),
        ('File "/x/vllm/model_executor/layers/fused_moe/fused_moe.py", line 5, in fused_experts', "the experts'"),
    ],
)
def test_out_of_memory_names_the_allocation_that_the_traceback_shows(frame: str, says: str) -> None:
    # The frame nearest to the error decides: every traceback of a start passes through load_model's neighbours.
    outer = '  File "/x/vllm/v1/worker/gpu_worker.py", line 1, in load_model\n'
    found = findings(f"INFO\n{outer}  {frame}\n    x = torch.empty(n)\n{OOM}\n")
    finding = next(f for f in found if f.subject == "CUDA out of memory")
    assert says in finding.statement


def test_out_of_memory_at_start_and_at_run_time_are_two_things() -> None:
    log = f"{SOUND.split('(Worker', 1)[0]}{OOM}\n{SOUND}{OOM}\n{OOM}\n"
    found = [f for f in findings(log) if f.subject == "CUDA out of memory"]
    assert len(found) == 2
    assert "at start" in found[0].statement and "while serving" in found[1].statement
    assert found[1].evidence.startswith("2 times, first server.log:")


def test_out_of_memory_says_how_much_is_missing() -> None:
    (finding,) = findings(OOM)
    # 2.50 wanted, 1.25 free: 1.25 missing, and 2.50 as a margin, of 95.
    assert "Missing: 1.25 GiB; with one more such block as a margin, 0.04 of the card" in finding.remedy
    (fragmented,) = findings(OOM.replace("1.25 GiB is free", "9.25 GiB is free"))
    assert "expandable_segments" in fragmented.remedy


def test_consequences_are_notes_where_the_cause_is_known() -> None:
    ended = "RuntimeError: Engine core initialization failed. See root cause above."
    assert [f.severity for f in findings(ended)] == ["error"]
    assert [f.severity for f in findings(f"{OOM}\n{ended}")] == ["error", "note"]
    assert all(kind in BY_KIND for kind in CONSEQUENCES)


def test_an_illegal_access_near_the_indexer_names_the_known_thread() -> None:
    line = "RuntimeError: CUDA error: an illegal memory access was encountered"
    (near,) = findings(f'  File "/x/deep_gemm/__init__.py", line 9, in fp8_paged_mqa_logits\n{line}\n')
    assert "sgl-project/sglang#34718" in near.source
    assert "34718" not in findings(line)[0].source


def test_a_log_names_the_server_its_version_and_no_secret() -> None:
    facts = facts_of(
        "INFO [utils.py:233] non-default args: {'model_tag': '/m/V4', 'api_key': 'sk-secret', "
        "'tensor_parallel_size': 16, "
        "'enforce_eager': True, 'cpu_offload_gb': 0.0, 'speculative_config': None}\n"
        "INFO [core.py:133] Initializing a V1 LLM engine (v0.26.0) with config: model='/m/V4'\n"
    )
    assert facts.servers is not None and facts.servers[0].value("--tensor-parallel-size") == "16"
    assert facts.servers[0].value("--enforce-eager") == "" and facts.servers[0].value("--speculative-config") is None
    assert facts.versions is not None and facts.versions.packages is not None
    assert facts.versions.packages["vllm"].version == "0.26.0"
    assert "sk-secret" not in str(facts)
    sglang = facts_of(
        "[2026] server_args=ServerArgs(model_path='/m', tp_size=8, disable_cuda_graph=True, moe_a2a_backend='none')\n"
    )
    assert sglang.servers is not None and sglang.servers[0].engine == "sglang"
    assert sglang.servers[0].value("--disable-cuda-graph") is not None
    command = facts_of("+ exec python3 -m sglang.launch_server --model-path /m --tp 16\nINFO\n")
    assert command.servers is not None and command.servers[0].value("--tp") == "16"
    assert facts_of("INFO use vllm serve with --enable-scale-out to enable them.\n").servers is None


def test_what_a_servers_options_say_already_is_not_said_twice() -> None:
    eager = "WARNING [vllm.py:1698] Enforce eager set, disabling torch.compile and CUDAGraphs.\n"
    assert [f.subject for f in findings(eager)] == ["CUDA graphs"]
    assert findings("INFO [utils.py:233] non-default args: {'enforce_eager': True}\n" + eager) == []


def test_sizes() -> None:
    assert size("2.50 GiB") == 2.5 * GIB and size("448.00 KiB") == 448 * 1024 and size("12 bytes") == 12
    assert size(None) is None and size("much") is None


def test_values_of_a_log_cannot_format_themselves(tmp_path: Path) -> None:
    (finding,) = findings("Exception: Capture cuda graph failed: {0.__class__} {evil} \x1b[31mred\x1b[0m\n")
    assert "{0.__class__} {evil} red" in finding.statement
    assert "\x1b" not in told(finding)
