"""Engines without a checkpoint: they run, and their cache is nobody else's."""

import json
from pathlib import Path

import pytest

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.spec.config import EngineOptions
from longread.spec.engine import GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import ConfigError
from longread.weights.fixture import tiny_config, write_fixture


def engine(model: Path, **options: object) -> LocalEngine:
    small = {"max_num_seqs": 1, "max_model_len": 512, "num_gpu_blocks_override": 4, "device": "cpu"}
    return load_engine(EngineOptions(str(model), **(small | options)))  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("v4-flash")))
    return folder


def test_a_config_is_enough(config: Path) -> None:
    running = engine(config, random_weights=True, layers="4")
    running.submit(GenerationRequest("a", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    tokens: list[int] = []
    while running.has_work():
        tokens += [event.token_id for event in running.step() if isinstance(event, TokenEvent)]
    assert len(tokens) == 3


def test_cache_identities_differ(config: Path, tmp_path: Path) -> None:
    write_fixture(tmp_path / "m", "v4-flash")
    drawn = {seed: engine(config, random_weights=True, seed=seed).info.cache_root for seed in (0, 1)}
    fewer = engine(config, random_weights=True, layers="4").info.cache_root
    assert len({*drawn.values(), fewer, engine(tmp_path / "m").info.cache_root}) == 4
    assert engine(config, random_weights=True).info.cache_root == drawn[0]


def test_layers_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    write_fixture(tmp_path / "m", "v4-flash")
    with pytest.raises(ConfigError, match="random_weights"):
        engine(tmp_path / "m", layers="4")
