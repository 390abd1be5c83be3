"""The plan against the real engine: the cache to the byte, a process's peak within 5 %."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longread.cli.checkpoint import BUNDLED, locate
from longread.engine.load import load_resolved
from longread.kernels.indexer import ref as indexer
from longread.kernels.mla import ref as mla
from longread.models import v4_attention
from longread.plan import memory
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.releases import release
from longread.weights.fixture import write_fixture

PROGRAM = Path(__file__).parents[2] / "support" / "serve_and_measure.py"
KINDS = ["v2-lite", "v3", "v4-flash", "v4-pro"]


def test_scratch_limits_are_those_of_the_kernels() -> None:
    ours = (memory.SCORE_FLOATS, memory.INDEX_FLOATS, memory.GATHER_FLOATS, memory.V4_MIN_BLOCK, memory.V4_MAX_BLOCK)
    a = v4_attention
    assert ours == (a.SCORE_FLOATS, a.INDEX_FLOATS, a.GATHER_FLOATS, a.MIN_BLOCK, a.MAX_BLOCK)
    assert memory.INDEX_SCRATCH_FLOATS == indexer.SCRATCH_FLOATS
    assert (memory.MLA_SCORES, memory.MLA_QUERY_BLOCK, memory.MLA_KEY_BLOCK) == (
        mla.SCORES,
        mla.QUERY_BLOCK,
        mla.KEY_BLOCK,
    )
    for spec in (
        spec_from_config(read_config(locate("reader-v3"))),
        release("DeepSeek-V3"),
        release("DeepSeek-V2-Lite"),
    ):
        assert spec.mla is not None
        assert min(memory.crossover(spec.mla), 1 << 40) == min(mla.crossover(spec.mla), 1 << 40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [*KINDS, *BUNDLED])
def test_the_engine_allocates_what_was_planned(model: str, dtype: str, tmp_path: Path) -> None:
    path = locate(model) if model in BUNDLED else tmp_path / model
    if model in KINDS:
        write_fixture(path, model)
    spec = spec_from_config(read_config(path), label=model)
    options = EngineOptions(
        model=str(path), dtype=dtype, num_gpu_blocks_override=16, max_num_seqs=3, max_num_batched_tokens=256
    )
    config = resolve(options, spec, probe_machine())
    engine = load_resolved(path, spec, config)
    assert engine._core.cache._store.nbytes == config.memory.kv_cache  # exact, not within 1 %
    assert engine.info.allocated_bytes == pytest.approx(config.memory.allocated, rel=0.01)
    assert engine.info.predicted_bytes == config.memory.total


def served(model: str, sizes: dict[str, int], prompt: int) -> dict[str, int]:
    """What a process of its own said after serving."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(locate(model)), json.dumps({"dtype": "float32"} | sizes), str(prompt)],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize(("model", "cache", "prompt"), [("reader-v4", 2**30, 1300), ("reader-v3", 5 * 2**28, 1300)])
def test_peak_of_a_serving_process(model: str, cache: int, prompt: int) -> None:
    """A bundled reader with a cache that a long document fills, a chunked prompt and decode with all sequences.

    The plan counts a server beside the engine, which this process has not. Below some 1 GiB in all the bounds of a step
    weigh more than 5 %, and so they do where max_model_len allows a context far beyond what is asked.
    """
    pages = cache // memory.page_bytes(spec_from_config(read_config(locate(model))), "float32")
    sizes = {"num_gpu_blocks_override": pages, "max_num_seqs": 4, "max_model_len": 4096, "max_num_batched_tokens": 1024}
    # The very first run on a machine compiles kernels, which takes some 70 MiB once and is not in the plan.
    served(model, sizes | {"num_gpu_blocks_override": 16}, prompt)
    said = served(model, sizes, prompt)
    assert said["allocated"] == pytest.approx(said["planned"], rel=0.01)
    predicted = said["predicted"] - memory.SERVER_BYTES
    assert said["peak"] <= predicted
    assert predicted == pytest.approx(said["peak"], rel=0.05)
