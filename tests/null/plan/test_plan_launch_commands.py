"""Emitted commands run as they are pasted, name only flags that the version has, and say why."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from launches import COLD, LOAD, Case, plan, run_script, sglang_cases, vllm_cases

from longread.cli.engine_flags import options_from
from longread.cli.main import build_parser
from longread.plan.calibrate import Factors
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.launch import Options, emit, launch
from longread.plan.launch.reasons import admission, chunk_why
from longread.plan.launch.sglang import VERSIONS as SGLANG
from longread.plan.launch.vllm import VERSIONS as VLLM
from longread.plan.machine import Gpu, Machine
from longread.plan.resolve import resolve
from longread.plan.timing import ttft_cold
from longread.spec.errors import ConfigError
from longread.spec.reduced import reduced
from longread.spec.releases import release, release_names

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


def test_the_reason_for_a_chunk_argues_for_it() -> None:
    d = vllm_cases()["v4 tp8 host"][0]
    full, small = (chunk_why(replace(d, chunk=chunk)) for chunk in (8192, 2048))
    assert full.endswith("192 tokens an expert, GEMM tiles of 128 rows are full")
    assert "48 tokens an expert, which do not fill GEMM tiles of 128 rows" in small
    assert "in exchange no decoding request waits long" in small


def test_reasons_have_the_deployments_numbers() -> None:
    script = emit(*vllm_cases()["v4 tp8 host"][:2], "vllm")
    assert "8,192 x 6 of 256 experts = 192 tokens an expert" in script
    assert "# DeepSeek-V4-Flash on 8xH20-96, TP8: vLLM 0.33.0" in script
    assert "--kv-offloading-size 200.0" in script and "--block-size 256" in script
    assert "117,600 of 120,000 tokens were read before" in script


def test_script_without_its_nodes_number_says_so_and_starts_nothing(tmp_path: Path) -> None:
    script = emit(*vllm_cases()["v3.1 two nodes pp"][:2], "vllm")
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
    d, workload, options = vllm_cases()["v3.1 two nodes pp"]
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
    limits = admission(d, load, Options())
    assert limits is not None and not limits.problem
    flags = {f.name: f.value for f in launch(d, load).flags}
    alone = ttft_cold(d, 30000).total.centre
    assert flags["--max-num-queued-tokens"] == str(limits.tokens) == str(int((12 - alone) * limits.rate))
    assert flags["--max-num-queued-reqs"] == str(16 + limits.tokens // 30000 + 1)
    old = emit(d, load, "vllm", Options(engine_version="0.26.0"))
    assert "--max-num-queued" not in old and f"gateway hold at most {limits.tokens:,}" in old
    sglang = launch(replace(d, engine="sglang"), load).flags
    assert int({f.name: f.value for f in sglang}["--max-queued-requests"] or 0) >= 1


def test_calibrated_factors_reach_the_admission_limits() -> None:
    d, load = plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8)), Workload(30000, 512, 0.0, 8, ttft_target=30.0)
    published, none = admission(d, load, Options()), admission(d, load, Options(factors=Factors([])))
    assert published is not None and none is not None and published.rate != none.rate


@pytest.mark.parametrize("target", ["vllm", "compose", "systemd"])
def test_a_target_that_is_missed_is_a_note_and_no_flag(target: str) -> None:
    d, load = plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8)), replace(LOAD, ttft_target=0.001)
    for engine in ("vllm", "sglang"):
        text = emit(replace(d, engine=engine), load, engine if target == "vllm" else target)  # type: ignore[arg-type]
        assert "ttft=0.001s is likely missed" in " ".join(text.replace("#", " ").split())
        assert "queued-tokens" not in text and "queued-requests" not in text


@pytest.mark.parametrize("name", release_names())
def test_the_model_that_was_asked_for_is_launched(name: str) -> None:
    """Releases of one architecture have one spec: repository, parsers and served name follow the name."""
    spec = release(name)
    hardware, split = ("8xB200", Strategy(8)) if spec.layers > 30 else ("H200", Strategy(1))
    for engine, parser in (("vllm", "deepseek_r1"), ("sglang", "deepseek-r1")):
        d = plan(name, hardware, split, engine=engine, max_model_len=8192)
        made = launch(d, None, Options(name=name))
        assert f"deepseek-ai/{name}" in made.program
        flags = {f.name: f.value for f in made.flags}
        assert flags["--served-model-name"] == name
        assert (flags.get("--reasoning-parser") == parser) == ("R1" in name)
        assert ("--reasoning-parser" in flags) == (name not in ("DeepSeek-V3", "DeepSeek-V3-0324") and "V2" not in name)
        tool = (flags.get("--tool-call-parser") or "").replace("_", "")
        wanted = {"V2": "", "R1": "deepseekv3", "V3.1": "deepseekv31", "V3.2-Exp": "deepseekv31", "V3.2": "deepseekv32"}
        wanted |= {"V4.1": "deepseekv41", "V4": "deepseekv4", "V3": "deepseekv3"}
        assert tool == next(value for start, value in wanted.items() if name.startswith(f"DeepSeek-{start}"))
        assert ("--tokenizer-mode" in flags) == (engine == "vllm" and name[9:13] in ("V3.2", "V4-F", "V4-P", "V4.1")
                                                 and not name.endswith("Exp"))  # fmt: skip


def test_a_folder_whose_name_does_not_tell_gets_a_note() -> None:
    d = plan("DeepSeek-V3", "8xH200", Strategy(8))
    assert "may hold any of DeepSeek-V3, DeepSeek-V3-0324, DeepSeek-R1" in " ".join(
        emit(d, None, "vllm", Options(model="/data/weights")).replace("#", " ").split()
    )
    assert "may hold any" not in emit(d, None, "vllm", Options(model="/data/DeepSeek-R1"))
    assert "deepseek_r1" in emit(d, None, "vllm", Options(model="/data/DeepSeek-R1"))


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


def card(model: str, hardware: str, layers: str | None = None, **options: object) -> Deployment:
    spec = release(model) if layers is None else reduced(release(model), layers)
    options = {"engine": "longread", "cache": "bfloat16", "max_model_len": 8192, "max_num_seqs": 4} | options
    return Deployment(spec, parse_hardware(hardware), Strategy(1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("d", "options", "checkpoint", "cache"),
    [
        (card("V2-Lite", "H200"), Options(), "/models/DeepSeek-V2-Lite", "bfloat16"),
        (card("V2-Lite", "H20-96", cache="fp8", host_cache=2**30), Options(model="/m/v2"), "/m/v2", "fp8"),
        (
            card("V4-Flash", "H200", "32", cache="fp8_ds_mla", max_model_len=2**19, chunk=4096),
            Options(name="DeepSeek-V4-Flash", layers="32"),
            "DeepSeek-V4-Flash",
            "fp8",
        ),
        (card("V3", "H100", "1+3"), Options(name="DeepSeek-V3", layers="1+3"), "DeepSeek-V3", "bfloat16"),
    ],
    ids=["V2-Lite", "V2-Lite in FP8 from a folder", "32 layers of V4-Flash", "1+3 layers of V3"],
)
def test_longread_on_one_hopper_card_starts(
    d: Deployment, options: Options, checkpoint: str, cache: str, tmp_path: Path
) -> None:
    """The command as pasted, by its own parser and its own rules, on a card of that size."""
    (call,) = run_script(emit(d, None, "longread", options), tmp_path, ("longread",))
    argv = call["argv"]
    assert isinstance(argv, list)
    args = build_parser().parse_args(argv[1:])
    assert args.checkpoint == checkpoint and args.layers == options.layers
    asked = options_from(args, args.checkpoint)
    found = d.hardware.card
    gpu = Gpu(found.name, int(found.memory.value), int(found.usable.value), (9, 0))
    resolved = resolve(asked, d.spec, Machine(256 * 2**30, 128 * 2**30, "the machine"), gpu)
    assert resolved.device == "cuda" and resolved.max_model_len == d.max_model_len
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (d.max_num_seqs, d.chunk)
    assert (resolved.kv_cache == "fp8") == (cache == "fp8") and asked.random_weights == (options.layers is not None)


def cpu(model: str, **options: object) -> Deployment:
    options = {"engine": "longread", "cache": "bfloat16", "max_model_len": 8192, "max_num_seqs": 4} | options
    return Deployment(release(model), parse_hardware("cpu"), Strategy(1), **options)  # type: ignore[arg-type]


V4, V3, V32, V41 = "DeepSeek-V4-Flash", "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4.1-Flash"
REFUSED: list[tuple[str, Deployment, Workload | None, Options, str]] = [
    ("nonsense", plan(V4, "8xH20-96", Strategy(8)), None, Options(), "choose one of longread"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), None, Options(engine_version="0.30.0"), "0.26.0 and 0.33.0"),
    ("sglang", plan(V4, "8xH20-96", Strategy(8)), None, Options(engine_version="0.6"), "0.5.17 and 0.5.23"),
    ("longread", plan(V4, "8xH20-96", Strategy(8)), None, Options(), "on one GPU at most, not TP8.*emit vllm"),
    ("longread", card("V2-Lite", "A100-80"), None, Options(), "kernels for Hopper GPUs, not for A100-80"),
    ("longread", card("V2-Lite", "B200"), None, Options(), "kernels for Hopper GPUs, not for B200"),
    ("longread", card("V2-Lite", "H200"), None, Options(layers="3"), "finds no model called"),
    ("longread", card("V2-Lite", "H200", cache="nvfp4"), None, Options(), "in fp8_ds_mla, fp8, bfloat16, not nvfp4"),
    ("longread", card("V2-Lite", "H200", experts="fp8"), None, Options(), "as they are stored, not as fp8"),
    ("longread", card("V2-Lite", "H200", max_num_seqs=9000), None, Options(), "would refuse.*is below max_num_seqs"),
    (
        "longread",
        card(V4, "H200", cache="fp8_ds_mla"),
        None,
        Options(),
        "longread serve would refuse this plan on 1xH200",
    ),
    ("vllm", card("V2-Lite", "H200"), None, Options(layers="8"), "only longread serve draws a model that is cut"),
    ("longread", cpu(V32), None, Options(), "does not run DeepSeek-V3.2 yet"),
    ("longread", cpu(V41), None, Options(), "does not run DeepSeek-V4.1-Flash yet"),
    ("longread", cpu(V4, cache="fp8_ds_mla"), None, Options(), "bfloat16 or float32"),
    ("vllm", cpu(V3), None, Options(), "for GPUs.*on a CPU longread runs"),
    ("vllm", plan(V4, "8xH20-96", Strategy(1, cp=8)), None, Options(), "no context parallelism.*use dp"),
    ("vllm", plan(V3, "8xH200", Strategy(4, cp=2)), None, Options(), "sparse MLA only; use tp or pp"),
    ("vllm", plan(V4, "2x8xH200", Strategy(8, 2)), None, Options(), "no pipeline parallelism for V4"),
    (
        "vllm",
        plan(V32, "8xH200", Strategy(4, cp=2)),
        None,
        Options(engine_version="0.26.0"),
        "use engine version 0.33.0",
    ),
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
    ("vllm", plan(V4, "8xA100-80", Strategy(8)), None, Options(), "compute capability 9.0 and 10.x; A100-80 has 8.0"),
    ("sglang", plan(V4, "8xH20-96", Strategy(2, cp=4)), None, Options(), "use tp=1 with cp=8"),
    ("sglang", plan(V3, "8xH200", Strategy(4, cp=2)), None, Options(), "use pp"),
    ("sglang", plan(V32, "2x8xH200", Strategy(1, cp=16)), None, Options(), "at most 8 GPUs"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8), max_model_len=65536), LOAD, Options(), "do not fit max_model_len"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), replace(LOAD, tier="host"), Options(), "host_cache=0"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), None, Options(nodes=("a", "b")), "2 addresses for 1 nodes"),
    ("vllm", plan(V4, "8xH20-96", Strategy(8)), None, Options(interface="bond0"), "there is one node"),
    ("vllm", plan(V4, "8xH20-96", Strategy(4, replicas=2)), None, Options(port=65535), "2 replicas take as many ports"),
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


def test_documents_on_disk_have_a_folder() -> None:
    d, load, options = sglang_cases()["v4 disk"]
    script = emit(d, load, "sglang", options)
    assert "--hicache-storage-backend file" in script
    assert "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/var/cache/sglang/documents" in script


BAD = ["a\n[Service]", "a\rb", "a\x00", "", " ", "-x"]


@pytest.mark.parametrize("text", BAD)
def test_what_no_file_can_hold_is_refused(text: str) -> None:
    for field in ("model", "host", "interface"):
        with pytest.raises(ConfigError):
            Options(**{field: text})  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Options(nodes=("a", text))
