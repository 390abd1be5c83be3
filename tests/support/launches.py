"""Deployments that every launch test goes through, and running an emitted script against a program that only notes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.launch import Options
from longread.spec.hardware import Figure
from longread.spec.releases import release

Case = tuple[Deployment, Workload | None, Options]

# Writes its arguments and what the launch put into the environment, one JSON object a line.
_STUB = """#!{python}
import json, os, sys
line = json.dumps({{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "env": dict(os.environ)}})
with open({log!r}, "a") as log:
    log.write(line + chr(10))
"""


def plan(model: str, hardware: str, strategy: Strategy, **options: object) -> Deployment:
    spec = release(model)
    cache = "bfloat16" if spec.family in ("deepseek_v2", "deepseek_v3") else "fp8_ds_mla"
    options = {"engine": "vllm", "cache": cache, "max_model_len": min(131072, spec.max_position)} | options
    return Deployment(spec, parse_hardware(hardware), strategy, **options)  # type: ignore[arg-type]


LOAD = Workload(120000, 512, 0.98, 8, ttft_target=30.0)
COLD = Workload(32768, 512, 0.0, 8, ttft_target=60.0)


def vllm_cases() -> dict[str, Case]:
    """By name; everything is run for both versions but what 0.26.0 refuses (names with "0.33")."""
    host, r1 = 200 * 2**30, Options(name="DeepSeek-R1")
    return {
        "v3 tp8": (plan("DeepSeek-V3", "8xH200", Strategy(8)), COLD, Options()),
        "v3 fp8": (plan("DeepSeek-V3", "8xH200", Strategy(8), cache="fp8"), COLD, Options()),
        "v3.1 two nodes pp": (plan("DeepSeek-V3.1", "2x8xH20-96", Strategy(8, 2)), COLD, Options(interface="bond0")),
        "v2-lite": (plan("DeepSeek-V2-Lite", "H20-96", Strategy(1)), None, Options()),
        "r1 dp ep": (plan("DeepSeek-R1", "8xH200", Strategy(8, dp=8, ep=True)), COLD, r1),
        "v3.2 dp": (plan("DeepSeek-V3.2", "8xH20-141", Strategy(8, dp=4, ep=True)), LOAD, Options()),
        "v3.2 cp 0.33": (plan("DeepSeek-V3.2", "8xH200", Strategy(4, cp=2)), LOAD, Options()),
        "v4 tp8 host": (plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8), host_cache=host), LOAD, Options()),
        "v4 replicas": (plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(4, replicas=2)), LOAD, Options()),
        "v4 0731": (plan("DeepSeek-V4-Flash-0731", "4xH20-141", Strategy(4)), LOAD, Options()),
        "v4-pro two nodes dp": (
            plan("DeepSeek-V4-Pro", "2x8xH200", Strategy(16, dp=16, ep=True), max_num_seqs=4),
            LOAD,
            Options(nodes=("10.0.0.1", "10.0.0.2")),
        ),
        "v4.1 tp8 0.33": (plan("DeepSeek-V4.1-Flash", "8xH20-141", Strategy(8)), LOAD, Options()),
    }


def sglang_cases() -> dict[str, Case]:
    """The same; "0.5.23": refused by 0.5.17."""
    cases = {
        name.replace("0.33", "0.5.23"): (replace(d, engine="sglang"), workload, options)
        for name, (d, workload, options) in vllm_cases().items()
        if "cp" not in name
    }
    v4, v32 = "DeepSeek-V4-Flash", "DeepSeek-V3.2"
    cases["v4 cp8"] = (plan(v4, "8xH20-96", Strategy(1, cp=8), engine="sglang"), LOAD, Options())
    cases["v4 cp8 pp2"] = (plan(v4, "2x8xH20-96", Strategy(1, 2, cp=8), engine="sglang"), LOAD, Options())
    cases["v3.2 tp2 cp4 0.5.23"] = (plan(v32, "8xH200", Strategy(2, cp=4), engine="sglang"), LOAD, Options())
    disk = replace(LOAD, tier="disk")
    stored = plan(v4, "8xH200", Strategy(8), engine="sglang", host_cache=2**38)
    read = Figure(5e9, "press", "the table's machines have no disk whose rate a prediction could rest on")
    cases["v4 disk"] = (replace(stored, hardware=replace(stored.hardware, disk_read=read)), disk, Options())
    stages = plan("DeepSeek-V4-Pro", "2x8xH20-141", Strategy(8, 2), engine="sglang")
    cases["v4-pro two nodes pp"] = (stages, LOAD, Options())
    return cases


def run_script(
    script: str, folder: Path, programs: tuple[str, ...], node: int | None = None
) -> list[dict[str, object]]:
    """What ``script`` starts: each call's ``argv`` (program first) and ``env``. Fails where bash says anything."""
    log, bin_folder = folder / "calls.jsonl", folder / "bin"
    log.unlink(missing_ok=True)
    bin_folder.mkdir(exist_ok=True)
    for program in programs:
        stub = bin_folder / program
        stub.write_text(_STUB.format(python=sys.executable, log=str(log)))
        stub.chmod(0o755)
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}"} | ({} if node is None else {"NODE_RANK": str(node)})
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == "" and done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]
