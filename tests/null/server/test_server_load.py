"""The overload of scripts/overload.py, short: five times what a fake engine of a known speed can do, from real clients.

What is demanded does not depend on how fast this machine is: no answer hangs or is unclean, the engine's steps are
full, memory and books are as the script demands. Rates are compared by the script; here only roughly, since other tests
run beside.
"""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "overload.py"


def test_an_overload_ends_clean_and_leaves_nothing_behind() -> None:
    options = ["--seconds", "3", "--best-seconds", "1", "--step-ms", "25", "--goodput", "0.4", "--rate", "80"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, told["broken"]) == (0, [])
    assert told["overload"]["requests"]["429"] > told["overload"]["requests"]["served"]
    assert told["fullness"] > 0.9
