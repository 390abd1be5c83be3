"""The torture of the store in small: processes that ingest and evict are killed; nothing wrong is ever served.

In a process of its own, since it forks: a test run has threads. ``scripts/torture_store.py --kills 200`` is the same.
"""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "torture_store.py"
KILLS = 16


def test_killed_while_it_ingests_and_evicts_nothing_wrong_is_served() -> None:
    command = [sys.executable, "-W", "error", str(SCRIPT), "--kills", str(KILLS), "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert sum(told["killed_while"].values()) == told["kills"] == KILLS
    assert told["records_read_back"] > KILLS
    assert sum(told["went_on_from"].values()) > told["went_on_from"].get("nothing", 0)  # where, is the kills' chance
