"""From a checkpoint on disk to an engine: memory as planned, identity, and refusals before the weights."""

import shutil
from pathlib import Path

import pytest

from longread.engine.load import load_engine, load_resolved
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import GenerationRequest, GrammarSpec, SamplingParams
from longread.spec.errors import CheckpointError, ConfigError, EngineFailedError, InvalidRequestError
from longread.weights.fixture import write_fixture


def options(path: Path, **changes: object) -> EngineOptions:
    chosen: dict[str, object] = {"max_model_len": 512, "num_gpu_blocks_override": 4, "max_num_seqs": 2} | changes
    return EngineOptions(str(path), **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["v2-lite", "v3", "v4-flash", "v4-pro"])
def test_memory_is_what_was_planned(kind: str, tmp_path: Path) -> None:
    write_fixture(tmp_path / "m", kind, quantised=True)
    seen: list[tuple[int, int]] = []
    spec = spec_from_config(read_config(tmp_path / "m"))
    config = resolve(options(tmp_path / "m"), spec, probe_machine())
    info = load_resolved(tmp_path / "m", spec, config, lambda done, total: seen.append((done, total))).info
    assert abs(info.allocated_bytes / config.memory.allocated - 1) < 0.001
    assert info.predicted_bytes == config.memory.total > config.memory.allocated
    assert seen[-1][0] == seen[-1][1]


def test_a_copy_shares_the_identity_and_other_weights_do_not(tmp_path: Path) -> None:
    write_fixture(tmp_path / "a", "v2-lite")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    write_fixture(tmp_path / "b", "v2-lite", seed=1)
    roots = {n: load_engine(options(tmp_path / n))._core.cache.index.root.key for n in ("a", "copy", "b")}
    roots["bf16"] = load_engine(options(tmp_path / "a", dtype="bfloat16"))._core.cache.index.root.key
    assert roots["a"] == roots["copy"]
    assert len(set(roots.values())) == 3


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        load_engine(options(tmp_path / "nothing"))
    write_fixture(tmp_path / "m", "v2-lite")
    with pytest.raises(ConfigError, match="max_model_len"):
        load_engine(options(tmp_path / "m", max_model_len=10**9))
    next((tmp_path / "m").glob("*.safetensors")).write_bytes(b"1234")
    with pytest.raises(CheckpointError):
        load_engine(options(tmp_path / "m"), lambda *_: pytest.fail("weights were read"))


def test_grammars_need_a_usable_tokenizer(tmp_path: Path) -> None:
    write_fixture(tmp_path / "m", "v2-lite")
    asked = GenerationRequest("r", (5,), SamplingParams(grammar=GrammarSpec("json_object")))
    tokenizer = tmp_path / "m" / "tokenizer.json"
    tokenizer.write_text("{}")
    with pytest.raises(EngineFailedError, match="tokenizer"):
        load_engine(options(tmp_path / "m")).validate(asked)
    tokenizer.unlink()
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        load_engine(options(tmp_path / "m")).validate(asked)


@pytest.mark.parametrize("kind", ["v3", "v4-flash"])
def test_bfloat16_runs_and_saves(kind: str, tmp_path: Path) -> None:
    write_fixture(tmp_path / "m", kind)
    with load_engine(options(tmp_path / "m", dtype="bfloat16")).session() as session:
        session.sync(list(range(3, 300)))
        session.save(tmp_path / "s")
        said = [session.step(SamplingParams(temperature=0.0)) for _ in range(4)]
    with load_engine(options(tmp_path / "m", dtype="bfloat16")).session(tmp_path / "s") as loaded:
        assert [loaded.step(SamplingParams(temperature=0.0)) for _ in range(4)] == said
