"""A second planner's opinion, where it is installed: aiconfigurator, which knows H200 and V3 from tables of its own.

LONGREAD_AICONFIGURATOR_PYTHON names a Python that has it (it needs other versions of libraries than Longread does).
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.timing import loaded_tpot, throughput
from longread.spec.releases import release

PYTHON = os.environ.get("LONGREAD_AICONFIGURATOR_PYTHON")  # read before tests hide such variables
if PYTHON is None and importlib.util.find_spec("aiconfigurator") is not None:
    PYTHON = sys.executable
RUN = "import sys; sys.argv[0] = 'aiconfigurator'; from aiconfigurator.main import main; sys.exit(main())"
ASK = "cli estimate --no-color --model-path deepseek-ai/DeepSeek-V3 --system h200_sxm --backend sglang --isl 4000"
SPLIT = "--osl 1000 --tp-size 8 --moe-tp-size 1 --moe-ep-size 8 --batch-size"


@pytest.mark.skipif(PYTHON is None, reason="no aiconfigurator: set LONGREAD_AICONFIGURATOR_PYTHON to a Python with it")
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_v3_on_h200_against_aiconfigurator(batch: int) -> None:
    """Of its TTFT there is nothing to compare: it is of a server under load, with its own rule for how much."""
    assert PYTHON is not None
    command = [PYTHON, "-c", RUN, *ASK.split(), *SPLIT.split(), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    between, rate = (
        float(found[1])
        for found in (re.search(r"TPOT:\s+([\d.]+) ms", done.stdout), re.search(r"tokens/s:\s+([\d.]+)", done.stdout))
        if found is not None
    )
    d = Deployment(release("V3"), parse_hardware("8xH200"), Strategy(tp=8, ep=True), "sglang", cache="bfloat16")
    load = Workload(4000, 1000, concurrency=batch)
    assert loaded_tpot(d, load).holds(between / 1e3)
    assert loaded_tpot(d, load).centre == pytest.approx(between / 1e3, rel=0.35)
    assert throughput(d, load).holds(rate)
