"""Emitted commands run as they are pasted, name only flags that the version has, and say why."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from launches import COLD, LOAD, Case, plan, run_script, sglang_cases, vllm_cases

from longread.cli.main import build_parser
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.launch import Options, emit, launch
from longread.plan.launch.sglang import VERSIONS as SGLANG
from longread.plan.launch.vllm import VERSIONS as VLLM
from longread.spec.errors import ConfigError
from longread.spec.releases import release

KNOWN = Path(__file__).parent / "known_flags"


def known(engine: str, version: str) -> set[str]:
    lines = (KNOWN / f"{engine}-{version}.txt").read_text().split("\n")
    return {line for line in lines if line.startswith("-")}


def every() -> list[tuple[str, str, str, Case]]:
    """Engine, version, name, case: all that is not refused for the version."""
    found = []
    for engine, versions, cases in (("vllm", VLLM, vllm_cases()), ("sglang", SGLANG, sglang_cases())):
        for version in versions:
            newest = version == versions[-1]
            marks = ("0.33", "0.5.23")
            found += [(engine, version, n, c) for n, c in cases.items() if newest or not n.endswith(marks)]
    return found


EVERY = every()
IDS = [f"{engine} {version}: {name}" for engine, version, name, _ in EVERY]


def emitted(engine: str, version: str, case: Case, target: str = "") -> str:
    d, workload, options = case
    return emit(replace(d, engine=engine), workload, target or engine, replace(options, engine_version=version))  # type: ignore[arg-type]


@pytest.mark.parametrize(("engine", "version", "name", "case"), EVERY, ids=IDS)
def test_flags_are_known_to_the_version(engine: str, version: str, name: str, case: Case) -> None:
    d, workload, options = case
    made = launch(replace(d, engine=engine), workload, replace(options, engine_version=version))  # type: ignore[arg-type]
    flags = known(engine, version)
    assert len(flags) > 300
    for process in made.processes:
        names = [flag.name for flag in (*made.flags, *process.flags)]
        assert not set(names) - flags
        assert len(names) == len(set(names)), "a flag is given twice"
    for reason in [flag.why for flag in made.flags] + [v.why for v in made.variables]:
        assert len(reason) > 15, "why is not said"


@pytest.mark.parametrize(("engine", "version", "name", "case"), EVERY, ids=IDS)
def test_pasted_script_starts_exactly_the_launch(
    engine: str, version: str, name: str, case: Case, tmp_path: Path
) -> None:
    d, workload, options = case
    made = launch(replace(d, engine=engine), workload, replace(options, engine_version=version))  # type: ignore[arg-type]
    script = emitted(engine, version, case)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    for node in range(made.nodes):
        here = [p for p in made.processes if p.node == node]
        calls = run_script(script, tmp_path, (made.program[0],), node if made.nodes > 1 else None)
        assert sorted(call["argv"] for call in calls) == sorted(made.words(p) for p in here)  # type: ignore[type-var]
        for call in calls:
            environment = call["env"]
            assert isinstance(environment, dict)
            assert {v.name: v.value for v in made.variables}.items() <= environment.items()


def test_every_flag_has_its_reason_above_it() -> None:
    script = emit(*vllm_cases()["v4 tp8 host"][:2], "vllm").splitlines()
    start = script.index("arguments=(")
    block = script[start + 1 : script.index(")", start)]
    for before, line in zip(["", *block], block, strict=False):
        if line.strip().startswith("--"):
            assert before.strip().startswith("#"), line


def test_reasons_have_the_deployments_numbers() -> None:
    script = emit(*vllm_cases()["v4 tp8 host"][:2], "vllm")
    assert "8,192 x 6 of 256 experts = 192 tokens an expert" in script
    assert "# DeepSeek-V4-Flash on 8xH20-96, TP8: vLLM 0.33.0" in script
    assert "--kv-offloading-size 200.0" in script and "--block-size 256" in script
    assert "117,600 of 120,000 tokens were read before" in script


def test_script_without_its_nodes_number_says_so_and_starts_nothing(tmp_path: Path) -> None:
    script = emit(*vllm_cases()["v4-pro two nodes pp"][:2], "vllm")
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, timeout=30)
    assert "NODE_RANK" in done.stderr


def test_two_nodes_of_vllm() -> None:
    d, workload, options = vllm_cases()["v4-pro two nodes dp"]
    first, second = launch(d, workload, options).processes
    flags = {f.name: f.value for f in first.flags}
    other = {f.name: f.value for f in second.flags}
    assert flags["--data-parallel-size-local"] == other["--data-parallel-size-local"] == "8"
    assert flags["--data-parallel-address"] == other["--data-parallel-address"] == "10.0.0.1"
    assert other["--data-parallel-start-rank"] == "8" and "--headless" in other and "--headless" not in flags
    d, workload, options = vllm_cases()["v4-pro two nodes pp"]
    first, second = launch(d, workload, options).processes
    ranks = [{f.name: f.value for f in p.flags}["--node-rank"] for p in (first, second)]
    assert ranks == ["0", "1"] and {f.name for f in second.flags} >= {"--headless", "--master-addr"}


def test_replicas_share_a_node_by_cards_and_ports() -> None:
    d, workload, options = vllm_cases()["v4 replicas"]
    one, two = launch(d, workload, options).processes
    assert (one.port, two.port) == (8000, 8001) and one.node == two.node == 0
    assert [p.variables[0].value for p in (one, two)] == ["0,1,2,3", "4,5,6,7"]


def test_admission_follows_the_target_and_the_rate() -> None:
    d = plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8))
    load = Workload(30000, 512, 0.0, 8, ttft_target=12.0)
    flags = {f.name: f.value for f in launch(d, load, Options(prefill_rate=10000)).flags}
    # 30,000 tokens at 10,000/s are 3 s alone: 9 s of others may wait before them.
    assert flags["--max-num-queued-tokens"] == "90000"
    assert flags["--max-num-queued-reqs"] == str(16 + 4)
    warm = launch(d, replace(load, prefix=0.5), Options(prefill_rate=10000)).flags
    assert {f.name: f.value for f in warm}["--max-num-queued-tokens"] == str(int((12 - 1.5) * 20000))
    old = emit(d, load, "vllm", Options(prefill_rate=10000, engine_version="0.26.0"))
    assert "--max-num-queued" not in old and "gateway hold at most 90,000" in old
    sglang = launch(replace(d, engine="sglang"), load, Options(prefill_rate=10000)).flags
    assert {f.name: f.value for f in sglang}["--max-queued-requests"] == "4"
    predicted = {f.name: f.value for f in launch(d, load).flags}
    assert predicted["--max-num-queued-tokens"] is not None and int(predicted["--max-num-queued-tokens"]) > 0


def test_sglang_divides_what_it_divides_by_groups() -> None:
    d = plan("DeepSeek-V3.2", "8xH20-141", Strategy(8, dp=4, ep=True), engine="sglang")
    flags = {f.name: f.value for f in launch(d, LOAD).flags}
    assert flags["--tp-size"] == "8" and flags["--attn-dp-size"] == "4" and flags["--ep-size"] == "8"
    assert flags["--chunked-prefill-size"] == str(4 * 8192) and flags["--max-running-requests"] == str(4 * 16)
    old = {f.name: f.value for f in launch(d, LOAD, Options(engine_version="0.5.17")).flags}
    assert old["--dp-size"] == "4" and "--enable-dp-attention" in old and "--attn-dp-size" not in old


def test_longread_command_is_what_its_own_parser_takes(tmp_path: Path) -> None:
    d = cpu("DeepSeek-V2-Lite", host_cache=2**30)
    script = emit(d, Workload(4096, 64, 0.5, 2, tier="disk"), "longread", Options(model="/m/v2"))
    (call,) = run_script(script, tmp_path, ("longread",))
    argv = call["argv"]
    assert isinstance(argv, list) and argv[0] == "longread"
    args = build_parser().parse_args(argv[1:])
    assert args.max_model_len == "8192" and args.dtype == "bfloat16" and args.checkpoint == "/m/v2"
    assert args.store == "/var/cache/longread" and args.host_cache_size == str(2**30)


def cpu(model: str, **options: object) -> Deployment:
    options = {"engine": "longread", "cache": "bfloat16", "max_model_len": 8192, "max_num_seqs": 4} | options
    return Deployment(release(model), parse_hardware("cpu"), Strategy(1), **options)  # type: ignore[arg-type]


V4, V3, V32, V41 = "DeepSeek-V4-Flash", "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4.1-Flash"
REFUSED: list[tuple[str, Deployment, Workload | None, Options, str]] = [
    ("nonsense", plan(V4, "8xH20-96", Strategy(8)), None, Options(), "choose one of longread"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), None, Options(engine_version="0.30.0"), "0.26.0 and 0.33.0"),
    ("sglang", plan(V4, "8xH20-96", Strategy(8)), None, Options(engine_version="0.6"), "0.5.17 and 0.5.23"),
    ("longread", plan(V4, "8xH20-96", Strategy(8)), None, Options(), "does not run on GPUs yet.*emit vllm"),
    ("longread", cpu(V32), None, Options(), "does not run DeepSeek-V3.2 yet"),
    ("longread", cpu(V41), None, Options(), "does not run DeepSeek-V4.1-Flash yet"),
    ("longread", cpu(V4, cache="fp8_ds_mla"), None, Options(), "bfloat16 or float32"),
    ("vllm", cpu(V3), None, Options(), "for GPUs.*emit longread"),
    ("vllm", plan(V4, "8xH20-96", Strategy(1, cp=8)), None, Options(), "no context parallelism.*use dp"),
    ("vllm", plan(V3, "8xH200", Strategy(4, cp=2)), None, Options(), "decode_context_parallel=2"),
    (
        "vllm",
        plan(V32, "8xH200", Strategy(4, cp=2)),
        None,
        Options(engine_version="0.26.0"),
        "use engine version 0.33.0",
    ),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), None, Options(decode_context_parallel=2), "log-sum-exp"),
    ("vllm", plan(V3, "8xH200", Strategy(8)), None, Options(decode_context_parallel=3), "must divide the 8"),
    ("vllm", plan(V41, "8xH20-141", Strategy(8)), None, Options(engine_version="0.26.0"), "since 0.30"),
    (
        "sglang",
        plan(V41, "8xH20-141", Strategy(8)),
        None,
        Options(engine_version="0.5.17"),
        "use engine version 0.5.23",
    ),
    ("vllm", plan(V3, "8xH200", Strategy(8), cache="fp8_ds_mla"), None, Options(), "plan with bfloat16 or fp8"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8), cache="nvfp4"), None, Options(), "SM100"),
    ("sglang", plan(V4, "8xH20-96", Strategy(8), cache="bfloat16"), None, Options(), "plan with fp8_ds_mla"),
    ("vllm", plan(V4, "8xH200", Strategy(8), experts="fp8"), None, Options(), "converted checkpoint"),
    ("vllm", plan(V4, "8xA100-80", Strategy(8)), None, Options(), "start with Hopper"),
    ("sglang", plan(V4, "8xH20-96", Strategy(2, cp=4)), None, Options(), "use tp=1 with cp=8"),
    ("sglang", plan(V3, "8xH200", Strategy(4, cp=2)), None, Options(), "use pp"),
    ("sglang", plan(V32, "2x8xH200", Strategy(1, cp=16)), None, Options(), "at most 8 GPUs"),
    ("sglang", plan(V3, "8xH200", Strategy(8)), None, Options(decode_context_parallel=8), "vLLM only"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8), max_model_len=65536), LOAD, Options(), "do not fit max_model_len"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), replace(LOAD, tier="host"), Options(), "host_cache=0"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), replace(LOAD, ttft_target=0.001), Options(), "cannot be kept"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), LOAD, Options(prefill_rate=0.0), "must be above 0"),
    ("vllm", plan("DeepSeek-V2-Lite", "H20-96", Strategy(1)), None, Options(draft_tokens=2), "no drafter"),
    ("vllm", plan(V3, "8xH20-96", Strategy(8)), COLD, Options(), "use more cards|too much"),
    ("vllm", plan(V4, "3x8xH200", Strategy(12, 1, dp=3, ep=True)), None, Options(), "12"),
    ("compose", cpu("DeepSeek-V2-Lite"), None, Options(), "no image of longread"),
]


@pytest.mark.parametrize(("target", "d", "load", "options", "words"), REFUSED, ids=[f"{r[0]}: {r[4]}" for r in REFUSED])
def test_what_the_engine_cannot_do_is_refused_with_a_way_out(
    target: str, d: Deployment, load: Workload | None, options: Options, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        emit(d, load, target, options)


def test_converted_experts_are_taken_with_their_checkpoint() -> None:
    d = plan(V4, "8xH200", Strategy(8), experts="fp8", engine="sglang")
    assert "--model-path sgl-project/V4-FP8" in emit(d, LOAD, "sglang", Options(model="sgl-project/V4-FP8"))


def test_a_model_without_a_public_name_needs_its_folder() -> None:
    d = plan(V4, "8xH20-96", Strategy(8))
    d = replace(d, spec=replace(d.spec, label="custom deepseek_v4"))
    with pytest.raises(ConfigError, match="name the folder"):
        emit(d, LOAD, "vllm")
    assert "vllm serve '/my models/v4'" in emit(d, LOAD, "vllm", Options(model="/my models/v4"))


def test_r1_thinks_always_and_is_known_by_its_name() -> None:
    d, load, options = vllm_cases()["r1 dp ep mtp"]
    assert "--reasoning-parser deepseek_r1" in emit(d, load, "vllm", options)
    assert "--reasoning-parser deepseek-r1" in emit(d, load, "sglang", options)
    assert "--reasoning-parser" not in emit(d, load, "vllm")


def test_documents_on_disk_have_a_folder() -> None:
    d, load, options = sglang_cases()["v4 disk"]
    script = emit(d, load, "sglang", options)
    assert "--hicache-storage-backend file" in script
    assert "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/var/cache/sglang/documents" in script
