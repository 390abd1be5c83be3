"""``longread fixture``: every kind, stored as floats and as the releases store them, is read back as what it says."""

from pathlib import Path

import pytest
import torch

from longread.cli import fixture
from longread.cli import main as cli
from longread.cli.checkpoint import spec_of
from longread.weights.fixture import KINDS
from longread.weights.reader import Checkpoint

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [[], ["--quantised"]], ids=["floats", "quantised"])
def test_every_kind_is_written_and_readable(kind: str, stored: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "new" / kind
    assert cli.main(["fixture", str(path), "--kind", kind, "--shards", "2", *stored]) == 0
    said = capsys.readouterr().out
    size = sum(file.stat().st_size for file in path.iterdir())
    assert f"wrote a {kind} fixture, {size:,} bytes" in said and f"longread serve {path}" in said
    assert len(list(path.glob("*.safetensors"))) == 2
    spec = spec_of(path)
    assert spec.family.removeprefix("deepseek_") == kind.partition("-")[0]
    checkpoint = Checkpoint.open(path)
    assert bool(stored) == ("quantization_config" in checkpoint.config)
    weights = checkpoint.load(spec, torch.float32)
    assert all(torch.isfinite(value).all() for value in weights.values() if value.is_floating_point())


def test_the_command_offers_every_kind() -> None:
    assert fixture.KINDS == KINDS


def test_a_seed_is_a_checkpoint(tmp_path: Path) -> None:
    def weights(name: str, seed: str) -> bytes:
        assert cli.main(["fixture", str(tmp_path / name), "--kind", "v2-lite", "--seed", seed]) == 0
        return next((tmp_path / name).glob("*.safetensors")).read_bytes()

    assert weights("a", "1") == weights("b", "1") != weights("c", "2")


@pytest.mark.parametrize("path", ["/dev/null/x", "/proc/x", "x" * 5000])
def test_a_path_that_cannot_be_written_is_the_user_s_mistake(path: str, capsys: Capture) -> None:
    assert cli.main(["fixture", path, "--kind", "v2-lite"]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and path[:20] in line and "bug" not in line and len(line) < 400


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "mine.txt"
    kept.write_text("keep me")
    for target in (tmp_path, kept):
        assert cli.main(["fixture", str(target), "--kind", "v3"]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line and str(target) in line and "empty" in line
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"] and kept.read_text() == "keep me"
