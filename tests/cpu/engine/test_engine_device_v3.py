"""V2 and V3 behind the device's runner on a CPU, without graphs: answers as the CPU engine's, and nothing read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_answers import GREEDY, answers, prompt

from longread.cli.checkpoint import locate
from longread.engine import engine as engines
from longread.engine import load_device, slices
from longread.engine.device_runner import DeviceRunner
from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.kernels.mla.device_ref import KEYS, LEAST_KEYS, PAGE
from longread.kernels.places import Chunk
from longread.measure.reading import write
from longread.models.native_v3 import ABSORBED, NativeV3, NativeV3Layer
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import SamplingParams
from longread.spec.reduced import random_spec
from longread.weights.fixture import tiny_config, write_fixture
from longread.wire.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["v3", "v2-lite"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device") / "m"
    write_fixture(folder, request.param, seed=3)
    return folder


def engine(path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **device: Any) -> LocalEngine:
    """On a CPU in float32; with ``device``, changes of the configuration, by the device's runner."""
    given: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 3, "num_gpu_blocks_override": 24}
    chosen = EngineOptions(str(path), dtype="float32", device="cpu", max_num_batched_tokens=700, **(given | options))
    spec = random_spec(str(path), chosen.layers) if chosen.random_weights else spec_from_config(read_config(path))
    config = resolve(chosen, spec, probe_machine())
    if device:
        monkeypatch.setattr(load_device, "cuda_device", lambda: torch.device("cpu"))
        config = replace(config, **device)
    return load_resolved(path, spec, config)


def test_tokens_are_the_cpu_engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of both forms of attention, begun within pages and not, one token, a second turn on cached pages."""
    first = prompt(900, 1)
    prompts = [first, prompt(1, 2), prompt(300, 3), (*first, *prompt(40, 4)), prompt(513, 5), prompt(1700, 6), first]
    expected = answers(engine(model, monkeypatch, {}), prompts)
    told: list[tuple[int, Chunk]] = []
    plain = NativeV3.chunk_layers

    def spied(self: NativeV3, ids: torch.Tensor, where: Chunk, *args: Any) -> Any:
        told.append((ids.shape[0], where))
        return plain(self, ids, where, *args)

    monkeypatch.setattr(NativeV3, "chunk_layers", spied)
    device = engine(model, monkeypatch, {}, device="cuda")
    assert answers(device, prompts) == expected
    assert device.stats().prefix_cache_hits > 0
    long = [where for tokens, where in told if tokens > ABSORBED]
    assert long and len(long) < len(told)
    assert any(where.meta[0] % PAGE for where in long), "a long chunk that begins within a page"
    for where in long:  # the device's numbers are the host's, so that none is read back
        assert where.extent == (int(where.meta[0]), int(where.meta[1]))


def test_rows_go_on_between_a_chunks_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SLICE", 0.0)
    monkeypatch.setattr(slices, "FIRST_LAYERS", 1)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [prompt(20, 41), prompt(1500, 42), prompt(1000, 43)]
    expected = answers(engine(model, monkeypatch, {}), prompts, long)
    assert answers(engine(model, monkeypatch, {}, device="cuda"), prompts, long) == expected


def test_the_reader_in_fp8_says_what_it_says_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored weights, FP8 activations, and a packed cache of 656 bytes a token at V3's widths (here 196)."""
    path = Path(locate("reader-v3"))
    tokenizer = Tokenizer.open(path, bos_id=0, eos_id=1)
    texts = [write(seed, 70, "en", "contract").text for seed in (7, 8)]
    prompts = [tuple(tokenizer.encode(text))[:length] for text, length in zip(texts, (1100, 630), strict=True)]
    expected = answers(engine(path, monkeypatch, {}), prompts)
    for cache in ("fp8", "model"):
        device = engine(path, monkeypatch, {}, device="cuda", dtype="bfloat16", kv_cache=cache)
        (latent,) = device._core.state.values()
        assert (latent.dtype, latent.shape[-1]) == ((torch.uint8, 196) if cache == "fp8" else (torch.bfloat16, 160))
        found = answers(device, prompts)
        same = sum(a == b for own, ours in zip(expected, found, strict=True) for a, b in zip(own, ours, strict=True))
        assert same >= 20, (expected, found)  # of 24


def test_random_weights_of_many_layers_stay_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("v3", quantised=True, kv_lora_rank=128, num_hidden_layers=30)
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = {"random_weights": True, "layers": "1+25", "max_num_seqs": 1}
    device = engine(tmp_path, monkeypatch, drawn, device="cuda", dtype="bfloat16", kv_cache="fp8")
    with device.session() as session:
        session.sync(prompt(600, 9))
        for _ in range(3):
            assert session.logits.isfinite().all()
            assert 0.3 < session.logits.std() < 3
            session.step(GREEDY)


def cut(context: int) -> set[int]:
    """Numbers of keys that a context of whole pages is expanded in: KEYS, then what is left by its binary digits."""
    rest = context % KEYS
    sizes = {1 << bit for bit in range(KEYS.bit_length()) if rest >> bit & 1}
    return sizes | ({KEYS} if context >= KEYS else set())


@pytest.mark.parametrize("longest", [1, 2, 256, 512, 768, 1023, 2048, 3072, 16384, 16640, 163840])
def test_warm_starts_meet_all_numbers_of_keys(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For chunks that begin at a page's start, and for those that begin within a page."""
    starts = NativeV3.starts(None, longest)  # type: ignore[arg-type]
    assert all(0 <= start < longest for start in starts)
    for within in (False, True):
        met = {size for start in starts if bool(start % PAGE) == within for size in cut(start // PAGE * PAGE)}
        wanted = {size for first in range(0, longest - within, PAGE) for size in cut(first)}
        assert all(size >= LEAST_KEYS for size in wanted)
        assert wanted <= met


def test_preparing_runs_each_size_at_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixture(tmp_path / "m", "v3", seed=3, num_hidden_layers=2)
    runner = engine(tmp_path / "m", monkeypatch, {}, device="cuda")._core.runner
    assert isinstance(runner, DeviceRunner)
    begun: set[tuple[int, int]] = set()
    plain = NativeV3.chunk_layers

    def spied(self: NativeV3, ids: torch.Tensor, where: Chunk, state: Any, last: bool, *args: Any) -> Any:
        assert where.extent is not None and sum(where.extent) <= where.bound
        begun.add((ids.shape[0], where.extent[0]))
        return plain(self, ids, where, state, last, *args)

    monkeypatch.setattr(NativeV3, "chunk_layers", spied)
    for _, run in runner._eager_work():
        run()
    assert {(size, start) for size in (640, 768) for start in (768, 769, 1024, 1025)} <= begun


def test_rehearsals_run_a_layer_of_each_kind_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fixture(tmp_path / "m", "v3", seed=3, num_hidden_layers=6, first_k_dense_replace=3)
    runner = engine(tmp_path / "m", monkeypatch, {}, device="cuda")._core.runner
    assert isinstance(runner, DeviceRunner) and isinstance(runner._model, NativeV3)
    few, state = runner._model.abridged(runner._state)
    assert [layer.routed is None for layer in few.layers] == [True, False, False]
    assert few.layers[-1] is runner._model.layers[-1]
    assert len(runner._model.layers) == 6 and state["latent"].shape[0] == 3
    ran: list[bool] = []
    plain = NativeV3Layer.feed_forward

    def spied(self: NativeV3Layer, *args: Any) -> torch.Tensor:
        ran.append(self.routed is None)
        return plain(self, *args)

    monkeypatch.setattr(NativeV3Layer, "feed_forward", spied)
    runner._rehearse(640, 2048)
    assert ran == [True, False, False, True, False]  # with logits, and without: the last layer keeps its latents only
    ids = tuple(range(2, 702))
    with_all = engine(tmp_path / "m", monkeypatch, {})
    assert answers(engine(tmp_path / "m", monkeypatch, {}, device="cuda"), [ids]) == answers(with_all, [ids])
