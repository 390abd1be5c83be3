"""Models without a checkpoint, and with fewer layers."""

import json
from pathlib import Path

import pytest

from longread.spec.errors import ConfigError
from longread.spec.inventory import inventory
from longread.spec.reduced import random_spec, reduced
from longread.spec.release_configs import V4_FLASH
from longread.spec.releases import release


def test_the_first_layers_of_v4_flash() -> None:
    """32 of 43: both window layers, and 15 each of CSA and HCA."""
    spec = random_spec("V4-Flash", "32")
    assert spec.compressed is not None
    assert [spec.compressed.ratios.count(r) for r in (0, 4, 128)] == [2, 15, 15]
    assert (spec.layers, spec.mtp_layers, spec.moe.hash_layers) == (32, 0, 3)
    assert "32 of 43" in spec.label
    names = {entry.name for entry in inventory(spec)}
    assert "layers.31.attn.wq_a.weight" in names
    assert not any(name.startswith(("layers.32.", "mtp.")) for name in names)


def test_dense_and_moe_layers_of_v3() -> None:
    spec = random_spec("DeepSeek-V3", "1+3")
    assert (spec.layers, spec.moe.first_dense) == (4, 1)
    names = {entry.name for entry in inventory(spec)}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" in names
    plain = random_spec("DeepSeek-V3", "4")
    assert (plain.layers, plain.moe.first_dense) == (4, 3)


@pytest.mark.parametrize(
    ("model", "layers", "words"),
    [
        ("V4-Flash", "44", "43"),
        ("V4-Flash", "0", "43"),
        ("V4-Flash", "1+3", "0 dense"),
        ("V3", "4+1", "3 dense"),
        ("V3", "1+59", "58 MoE"),
        ("V3", "x", "1\\+3"),
        ("V3", "-3", "1\\+3"),
        ("V3", "\u0664", "1\\+3"),
        ("V4-Flash", "1", "ask for 3 to 43"),
        ("V4-Flash", "0+2", "ask for 3 to 43"),
        ("V4.1-Flash", "4", "each other"),
    ],
)
def test_layers_that_are_not_there(model: str, layers: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reduced(release(model), layers)


def test_a_folder_with_a_config_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4_FLASH))
    assert random_spec(str(tmp_path)) == release("V4-Flash")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        random_spec(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="not a known model"):
        random_spec("no-such-model")


@pytest.mark.parametrize("model", ["V3.2", "deepseek-ai/DeepSeek-V4.1-Flash"])
def test_a_public_model_that_the_engine_cannot_run_is_only_planned_for(model: str) -> None:
    """No config.json was given, so none is blamed."""
    with pytest.raises(ConfigError, match=f"is not served: .*`longread plan {model}`") as caught:
        random_spec(model)
    assert "config.json" not in str(caught.value)
