"""Garbage in the engine's process: full passes come at rest, or rarely; what loading made is never looked at again."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_worker import workers

from longread.server.worker.collecting import BUSY_SECONDS, NEVER, REST_SECONDS, Collections
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector of this process as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_the_engines_process_makes_no_full_pass_by_itself(tmp_path: Path) -> None:
    told = tmp_path / "collector"
    engine = workers(collector=str(told)).make()
    try:
        engine.submit(GenerationRequest("r", (7, 8, 9), SamplingParams(max_tokens=2)))
        while not any(isinstance(event, FinishEvent) for event in engine.read(10.0)):
            pass
    finally:
        engine.kill()
        engine.close()
    state = json.loads(told.read_text())
    assert state["threshold"][2] == NEVER
    assert state["frozen"] > 10_000, "what the modules are made of"


def test_full_passes_come_at_rest_and_seldom_without_any() -> None:
    now = [0.0]
    passes: list[float] = []

    def collect() -> int:
        passes.append(now[0])
        return 0

    collections = Collections(lambda: now[0], collect)
    busy, rest = collections.busy, collections.rest
    late = REST_SECONDS + BUSY_SECONDS
    for at, calls in (
        (1.0, (rest, busy)),
        (REST_SECONDS - 1, (rest, busy)),
        (REST_SECONDS, (busy, rest)),
        (REST_SECONDS + 1, (busy, rest)),
        (late - 1, (busy,)),
        (late, (busy,)),
    ):
        now[0] = at
        for call in calls:
            call()
    assert passes == [REST_SECONDS, late]


def test_requests_that_come_and_go_cause_no_full_pass(collector: None) -> None:
    collections = Collections()
    collections.begin()
    passes = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "start" else None)
    try:
        kept = [[GenerationRequest(f"r{i}", (1, 2, 3), SamplingParams()), {}] for i in range(100_000)]
        kept.clear()
    finally:
        gc.callbacks.pop()
    assert 1 in passes and 2 not in passes
