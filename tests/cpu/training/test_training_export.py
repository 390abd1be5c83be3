"""Exported checkpoints: read back, run by the served model, and equal to the twin with rounded weights."""

import json
from pathlib import Path

import oracle_v3
import oracle_v4
import pytest
import torch
from torch import Tensor
from training import export
from training.configs import CONFIGS
from training.saved import Progress, save_weights
from training.state import load_weights, twin_for

from longread.models.deepseek_v3 import DeepseekV3
from longread.models.deepseek_v4 import DeepseekV4
from longread.spec.config_json import read_config, spec_from_config
from longread.weights.fixture import random_weights
from longread.weights.reader import Checkpoint

LENGTH = 150
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["reader-v3", "reader-v4"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reader's name, its configuration cut to a few layers of each kind."""
    short: dict[str, object] = {"num_hidden_layers": 2}
    if request.param == "reader-v4":
        short = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "index_topk": 16}
    monkeypatch.setitem(CONFIGS, request.param, CONFIGS[request.param] | short)
    return request.param


@pytest.fixture
def state(reader: str, tmp_path: Path) -> Path:
    """A training state's folder with random weights."""
    folder = tmp_path / "state"
    folder.mkdir()
    save_weights(folder, random_weights(spec_from_config(CONFIGS[reader])), Progress(reader))
    return folder


def served(path: Path, ids: list[int]) -> Tensor:
    """Logits [T, vocab] of the served model over a checkpoint."""
    spec = spec_from_config(read_config(path))
    weights = Checkpoint.open(path).load(spec, torch.float32)
    with torch.inference_mode():
        if spec.family == "deepseek_v4":
            return oracle_v4.Driver(spec, DeepseekV4(spec, weights, torch.float32)).step([(0, ids)])[0]
        return oracle_v3.Driver(spec, DeepseekV3(spec, weights, torch.float32)).step([(0, ids)])[0]


def read_by_twin(reader: str, path: Path, ids: list[int], rounded: bool) -> Tensor:
    twin = twin_for(CONFIGS[reader])
    twin.load_native(load_weights(path))
    twin.eager, twin.fake_quant, twin.selection = True, rounded, "topk"
    with torch.inference_mode():
        return twin.logits(twin.hidden(torch.tensor([ids])))[0]


def test_the_export_is_the_twin_with_rounded_weights(reader: str, state: Path, tmp_path: Path) -> None:
    export.main([reader, "--state", str(state), "--output", str(tmp_path / "q"), "--bf16", str(tmp_path / "master")])
    ids = oracle_v3.prompt(LENGTH, 4096)
    quantised, master = served(tmp_path / "q", ids), served(tmp_path / "master", ids)
    torch.testing.assert_close(quantised, read_by_twin(reader, state, ids, True), atol=TOLERANCE, rtol=0)
    # A checkpoint read into a twin is rounded already.
    torch.testing.assert_close(quantised, read_by_twin(reader, tmp_path / "q", ids, False), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(master, read_by_twin(reader, tmp_path / "master", ids, False), atol=TOLERANCE, rtol=0)
    assert (quantised - master).abs().mean() > 0.01  # rounding changes something, so the comparison can fail


def test_the_export_has_the_release_files(reader: str, state: Path, tmp_path: Path) -> None:
    export.main([reader, "--state", str(state), "--output", str(tmp_path / "q"), "--bf16", str(tmp_path / "master")])
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in (tmp_path / "q").iterdir()) == files
    assert json.loads((tmp_path / "q" / "config.json").read_text()) == CONFIGS[reader]
    assert not set(export.QUANTISATION) & set(json.loads((tmp_path / "master" / "config.json").read_text()))
    assert export.folder_bytes(tmp_path / "q") < 0.75 * export.folder_bytes(tmp_path / "master")
    assert (tmp_path / "q" / "tokenizer.json").read_bytes() == export.TOKENIZER.read_bytes()


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither config"):
        load_weights(tmp_path)
