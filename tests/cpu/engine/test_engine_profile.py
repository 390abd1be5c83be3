"""Profiled steps: rows that add up, calls counted by hand, work that a formula gives, and the same answers."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.engine.profile import ProfiledEngine, table
from longread.engine.profile_counts import GROUPS, Shape, counts, group_of
from longread.kernels.dispatch import TABLE, kernel, name_ops
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import ConfigError
from longread.spec.profiler import MOST_STEPS, ProfileError, ProfilerConfig, Profiling, profiler_config
from longread.weights.fixture import write_fixture

PROMPT = tuple(range(20, 340))


@pytest.fixture(scope="module", params=["v3", "v4-flash"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("profile") / str(request.param)
    write_fixture(path, request.param)
    return path


@pytest.fixture(autouse=True)
def plain_kernels_afterwards() -> Iterator[None]:
    yield
    name_ops(False)


def engine(folder: Path, profiler: ProfilerConfig | None) -> LocalEngine:
    spec = spec_from_config(read_config(folder), label=folder.name)
    options = EngineOptions(str(folder), dtype="float32", max_model_len=1024, max_num_seqs=2)
    return load_resolved(folder, spec, resolve(options, spec, probe_machine()), None, profiler)


def answer(engine: LocalEngine, name: str, prompt: tuple[int, ...] = PROMPT, count: int = 6) -> list[int]:
    engine.submit(GenerationRequest(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
    found = []
    while engine.has_work():
        found += [event.token_id for event in engine.step() if isinstance(event, TokenEvent)]
    return found


def test_rows_add_up_and_calls_are_the_models(folder: Path, tmp_path: Path) -> None:
    plain, profiled = engine(folder, None), engine(folder, ProfilerConfig("torch", str(tmp_path / "traces")))
    assert isinstance(profiled, ProfiledEngine)
    assert isinstance(profiled, Profiling)
    assert not isinstance(plain, Profiling)
    profiled.start_profile(4)
    assert answer(profiled, "a") == answer(plain, "a")  # recording changes no token
    told = profiled.stop_profile()

    assert (told["steps"], told["wanted_steps"]) == (4, 4)
    assert told["shapes"] == [{"segments": s} for s in ([[0, 320]], [[320, 1]], [[321, 1]], [[322, 1]])]
    assert sum(row["self_ms"] for row in told["rows"]) == pytest.approx(told["step_ms"], rel=1e-6)
    assert sum(row["prompt_ms"] for row in told["rows"]) == pytest.approx(told["prompt_step_ms"], rel=1e-6)
    assert sum(row["share"] for row in told["rows"]) == pytest.approx(1)
    assert all(row["self_ms"] >= 0 for row in told["rows"])
    assert told["prompt_steps"] == 1
    assert 0 < told["prompt_step_ms"] < told["step_ms"]
    assert {row["group"] for row in told["rows"]} <= set(GROUPS)
    spec = spec_from_config(read_config(folder), label="")
    calls = {row["op"]: row["calls"] for row in told["rows"]}
    assert (calls["sampler"], calls["model, between ops"], calls["schedule and books"]) == (4, 4, 4)
    assert calls["moe.experts"] == 4 * (spec.layers - spec.moe.first_dense)
    if spec.mla is not None:
        assert calls["mla.attend"] == calls["mla.write"] == 4 * spec.layers
    assert told["inner"][0]["self_ms"] > 0
    assert told["trace"].endswith(".pt.trace.json.gz")
    with gzip.open(tmp_path / "traces" / told["trace"]) as trace:
        assert any(each.get("name") == "longread::op::moe.experts" for each in json.load(trace)["traceEvents"])
    plain.close()
    profiled.close()


def test_the_work_counted_is_the_formulas(folder: Path) -> None:
    spec = spec_from_config(read_config(folder), label="")
    steps = [Shape(((0, 320),), 1), Shape(((320, 1), (100, 1)), 2), Shape(((200, 1), (0, 64)), 1)]
    told = counts(spec, "float32", steps)
    moe = told["routed experts"]
    tokens = 320 + 2 + 65
    each = 2 * 3 * spec.hidden * spec.moe.intermediate * spec.moe.top_k
    layers = spec.layers - spec.moe.first_dense
    assert moe["flops"] == pytest.approx(each * tokens * layers)
    one = layers * spec.moe.routed * 3 * spec.hidden * spec.moe.intermediate * 4
    assert moe["bytes"] <= 3 * one * (1 + 1e-9)  # weights once a step, though the last has a decode and a prompt
    assert moe["bytes"] > one * 0.9
    head = 2 * spec.hidden * spec.vocab
    alone = counts(spec, "float32", [Shape(((0, 64),), 0)])["linears"]["flops"]
    assert counts(spec, "float32", [Shape(((0, 64),), 1)])["linears"]["flops"] - alone == pytest.approx(head)
    assert told["linears"]["rate"] == "fp32"
    assert counts(spec, "bfloat16", steps)["linears"]["bytes"] * 2 == pytest.approx(told["linears"]["bytes"])
    assert counts(spec, "float32", []) == {}


def test_a_profile_is_begun_and_ended_once(folder: Path) -> None:
    profiled = engine(folder, ProfilerConfig("torch"))
    assert isinstance(profiled, ProfiledEngine)
    with pytest.raises(ProfileError, match="no profile was started"):
        profiled.stop_profile()
    for steps in (0, -1, MOST_STEPS + 1):
        with pytest.raises(ProfileError, match="from 1 to 32"):
            profiled.start_profile(steps)
    profiled.start_profile(MOST_STEPS)
    with pytest.raises(ProfileError, match="under way"):
        profiled.start_profile(1)
    answer(profiled, "a", PROMPT[:20], 3)
    profiled.step()  # at rest: not a step of the model
    told = profiled.stop_profile()
    assert (told["steps"], told["wanted_steps"], told["trace"]) == (3, MOST_STEPS, None)
    profiled.start_profile(2)
    assert profiled.stop_profile()["steps"] == 0
    profiled.start_profile(2)
    answer(profiled, "b", PROMPT[:30], 6)  # it ends by itself, and waits
    assert profiled.stop_profile()["steps"] == 2
    profiled.start_profile(5)
    profiled.close()


def test_kernels_are_themselves_where_nobody_profiles() -> None:
    for reference, row in TABLE.items():
        assert kernel(reference, "cpu") is row["cpu"]
        assert group_of(".".join((reference.__module__.split(".")[-2], reference.__name__))) in GROUPS


def event(name: str, start: float, took: float, *children: SimpleNamespace) -> SimpleNamespace:
    own = took - sum(each.time_range.elapsed_us() for each in children)
    span = SimpleNamespace(start=start, elapsed_us=lambda: took)
    return SimpleNamespace(name=name, time_range=span, cpu_children=list(children), self_cpu_time_total=own)


def test_own_time_is_what_no_inner_range_has() -> None:
    inside = event("longread::op::norm.rms_norm", 130, 10, event("aten::mul", 131, 4))
    op = event("longread::op::moe.experts", 120, 60, event("aten::mm", 121, 5), event("aten::x", 128, 20, inside))
    model = event("longread::model", 110, 100, op)
    step = event("longread::step", 100, 150, model, event("longread::sampler", 220, 20))
    idle = event("longread::step", 300, 50)
    told = table([idle, step, op, inside], [Shape(((0, 9),), 1)])
    rows = {row["op"]: row["self_ms"] * 1000 for row in told["rows"]}
    assert rows == pytest.approx(
        {"schedule and books": 30, "model, between ops": 40, "sampler": 20, "moe.experts": 50, "norm.rms_norm": 10}
    )
    assert told["step_ms"] * 1000 == pytest.approx(150)
    assert {each["op"]: each["calls"] for each in told["inner"]} == {"aten::mm": 1, "aten::mul": 1, "aten::x": 1}
    assert sum(each["self_ms"] for each in told["inner"]) * 1000 == pytest.approx(5 + 4 + 10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "names no profiler"),
        ({"profiler": "cuda"}, "known is 'torch'"),
        ({"profiler": "torch", "torch_profiler_with_stak": True}, "not honoured"),
        ({"profiler": "torch", "max_iteration": 3}, "did you mean max_iterations"),
        ({"profiler": "torch", "max_iterations": 0}, "from 1 to 32"),
        ({"profiler": "torch", "max_iterations": True}, "from 1 to 32"),
        ({"profiler": "torch", "torch_profiler_dir": "traces"}, "absolute"),
        ({"profiler": ["torch"]}, "known is 'torch'"),
    ],
)
def test_a_configuration_that_is_not_honoured_is_refused(given: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        profiler_config(given)
