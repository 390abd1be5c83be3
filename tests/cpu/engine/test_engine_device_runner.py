"""The device's runner on a CPU, without graphs: it answers as the CPU engine does, whatever a step looks like."""

from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from device_answers import GREEDY, answers, prompt

from longread.engine import engine as engines
from longread.engine import load_device, slices
from longread.engine.device_runner import GRAPH_CHUNKS, batch_buckets, chunk_sizes, eager_bound, eager_bounds
from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.engine.slices import Part
from longread.models.native_step import pieces
from longread.models.native_v4 import NativeV4
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.batch import Segment
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import Event, FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.weights.fixture import write_fixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device") / "m"
    write_fixture(folder, "v4-flash", seed=3, sliding_window=128)
    return folder


def engine(model: Path, device: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LocalEngine:
    """Float32 and plain on either side; "cuda" is a CPU here."""
    spec = spec_from_config(read_config(model))
    given = {"max_model_len": 2048, "max_num_seqs": 3, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 700}
    chosen = EngineOptions(str(model), dtype="float32", device="cpu", **(given | options))
    config = resolve(chosen, spec, probe_machine())
    if device:
        monkeypatch.setattr(load_device, "cuda_device", lambda: torch.device("cpu"))
        config = replace(config, device="cuda")
    return load_resolved(model, spec, config)


def test_tokens_are_the_cpu_engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts over several chunks with landing points inside, a one-token prompt, and a second turn on cached pages."""
    first = prompt(900, 1)
    prompts = [first, prompt(1, 2), prompt(300, 3), (*first, *prompt(40, 4)), prompt(513, 5), first]
    expected = answers(engine(model, False, monkeypatch), prompts)
    device = engine(model, True, monkeypatch)
    assert answers(device, prompts) == expected
    assert device.stats().prefix_cache_hits > 0


def test_answers_go_on_from_states_kept_inside_a_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that land on page ends within another's last chunk, which was not cut there."""
    first = prompt(1350, 61)
    prompts = [first, (*first[:1290], *prompt(30, 62)), (*first[:1100], *prompt(30, 63))]
    expected = [answers(engine(model, False, monkeypatch), [one]) for one in prompts]
    device = engine(model, True, monkeypatch)
    inside: set[int] = set()
    plain = NativeV4.chunk_layers

    def spied(self: NativeV4, *args: Any) -> Any:
        inside.update(position for saves in args[4:] for position, *_ in saves)
        return plain(self, *args)

    monkeypatch.setattr(NativeV4, "chunk_layers", spied)
    for one, tokens, held in zip(prompts, expected, (0, 1280, 1024), strict=True):
        before = device.stats().prefix_cache_hits
        assert answers(device, [one]) == tokens
        assert device.stats().prefix_cache_hits - before == held
        assert {1024, 1280} <= inside


def test_seeded_sampling_does_not_see_its_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, max_tokens=8, ignore_eos=True, seed=11)
    prompts = [prompt(50, 7), prompt(260, 8), prompt(20, 9)]
    together = answers(engine(model, True, monkeypatch), prompts, sampling)
    alone = [answers(engine(model, True, monkeypatch), [one], sampling)[0] for one in prompts]
    assert together == alone
    assert len({tuple(row) for row in together}) == 3


def test_a_saved_session_goes_on_as_it_would_have(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine(model, True, monkeypatch)
    with whole.session() as session:
        session.sync(prompt(300, 21))
        before = session.logits
        session.save(tmp_path / "s")
        expected = [session.step(GREEDY) for _ in range(5)]
    with engine(model, True, monkeypatch).session(tmp_path / "s") as loaded:
        assert torch.equal(loaded.logits, before)
        assert [loaded.step(GREEDY) for _ in range(5)] == expected


def test_rows_that_need_the_host_are_the_samplers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.4, logprobs=2, ignore_eos=True)
    prompts = [prompt(40, 31)]
    expected = answers(engine(model, False, monkeypatch), prompts, sampling)
    assert answers(engine(model, True, monkeypatch), prompts, sampling) == expected


def test_rows_go_on_between_a_chunks_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one layer give a running answer a token each, and every answer is the CPU engine's."""
    monkeypatch.setattr(engines, "SLICE", 0.0)
    monkeypatch.setattr(slices, "FIRST_LAYERS", 1)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [prompt(20, 41), prompt(1500, 42), prompt(1000, 43)]
    expected = answers(engine(model, False, monkeypatch), prompts, long)
    device = engine(model, True, monkeypatch)
    assert answers(device, prompts, long) == expected
    device.submit(GenerationRequest("a", prompt(30, 44), long))
    device.step()
    device.submit(GenerationRequest("b", prompt(1500, 45), long))
    seen: list[str] = []
    while "b" not in seen:
        seen += [event.request_id for event in device.step()]
    assert seen.count("a") >= 6  # a token between any two layers of the first chunk


@pytest.mark.parametrize("way", ["cancel", "break", "session", "close"])
def test_what_happens_to_a_chunk_underway(model: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled, breaks, or has to stand by while a session takes its room: others answer as ever, and the books
    balance.
    """
    monkeypatch.setattr(engines, "SLICE", 0.0)
    monkeypatch.setattr(slices, "FIRST_LAYERS", 1)
    prompts = [prompt(20, 51), prompt(1400, 52), prompt(680, 53)]
    expected = answers(engine(model, False, monkeypatch), prompts)
    device = engine(model, True, monkeypatch)
    events: list[Event] = []
    for number, ids in enumerate(prompts[:2]):
        device.submit(GenerationRequest(str(number), ids, GREEDY))
        events += device.step()
    assert device._underway is not None
    broken = device._underway.work
    if way == "cancel":
        device.cancel("1")
        assert device._underway is None
    elif way == "break":
        monkeypatch.setattr(broken, "work", _breaks())
    elif way == "session":
        with device.session() as one, device.session() as two:
            one.sync(prompts[2])
            two.sync(prompts[0])
            assert device._underway is not None
    else:
        device.close()
        device._cache.check()
        return
    device.submit(GenerationRequest("2", prompts[2], GREEDY))
    while device.has_work():
        events += device.step()
    found = {i: [e.token_id for e in events if isinstance(e, TokenEvent) and e.request_id == str(i)] for i in range(3)}
    ends = {event.request_id: event.reason for event in events if isinstance(event, FinishEvent)}
    assert ends.pop("1") == {"cancel": "cancelled", "break": "failed", "session": "length"}[way]
    assert ends == {"0": "length", "2": "length"}
    for i in [0, 2] + [1] * (way == "session"):
        assert found[i] == expected[i]
    device._cache.check()
    device._scheduler.check()


def _breaks() -> Generator[Part, None, torch.Tensor]:
    yield Part(0, 1400)
    raise RuntimeError("on purpose")


def test_buckets_hold_what_they_are_for() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(48) == [1, 2, 4, 8, 16, 32, 64]
    assert chunk_sizes(8192)[-5:] == [4096, 5120, 6144, 7168, 8192]
    for most in (1, 16, 17, 100, 512, 700, 2048, 5000, 8192):
        sizes = chunk_sizes(most)
        assert sizes == sorted(set(sizes))
        assert most <= sizes[-1] < most + max(128, most / 2)
        assert all(b <= 2 * a for a, b in pairwise(sizes))
    for tokens in (1, 2048, 2049, 16384, 16385, 100_000, 1 << 20):
        bound = eager_bound(tokens)
        assert tokens <= bound <= max(tokens * 1.125, tokens + 2048)
        assert bound % 2048 == 0
        assert bound in eager_bounds(1 << 20)


def test_short_chunks_are_cut_where_rings_are_kept() -> None:
    segment = Segment(2, 100, 500, 7, (1, 2, 3), ((256, 9), (512, 8), (256, 5)))
    assert [(p.start, p.stop, p.inside, p.saves) for p in pieces(segment, GRAPH_CHUNKS[-1])] == [
        (100, 256, (), (9, 5)),
        (256, 512, (), (8,)),
        (512, 600, (), ()),
    ]


def test_long_chunks_are_cut_where_rings_cannot_be_kept_inside() -> None:
    """Near the start, or off the windows' ends; what is left over behind such a cut may be short."""
    saves = ((256, 9), (512, 8), (1024, 7), (256, 5), (1030, 4), (1280, 3), (1536, 2))
    segment = Segment(2, 129, 1471, 7, tuple(range(7)), saves)
    assert [(p.start, p.stop, p.inside, p.saves) for p in pieces(segment, GRAPH_CHUNKS[-1])] == [
        (129, 256, (), (9, 5)),
        (256, 1030, ((512, 8, 256), (1024, 7, 256)), (4,)),
        (1030, 1600, ((1280, 3, 1030), (1536, 2, 1030)), ()),
    ]
    segment = replace(segment, start=128, length=1472)
    assert [(p.start, p.stop) for p in pieces(segment)] == [(128, 1030), (1030, 1600)]
    ends = Segment(2, 0, 8192, 0, tuple(range(32)), ((7680, 1), (7936, 2), (8191, 3), (8192, 4)))
    assert [(p.start, p.stop, p.inside, p.saves) for p in pieces(ends, GRAPH_CHUNKS[-1])] == [
        (0, 8191, ((7680, 1, 0), (7936, 2, 0)), (3,)),
        (8191, 8192, (), (4,)),
    ]
