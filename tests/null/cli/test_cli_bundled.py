"""Bundled models are found by name, a folder of that name comes first, and what is missing is said in one line."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from longread.cli import checkpoint
from longread.cli import main as cli
from longread.cli.checkpoint import BUNDLED, locate, origin, spec_of
from longread.cli.plan import find_spec
from longread.cli.serve import engine_options
from longread.spec.errors import CheckpointError, ConfigError
from longread.spec.release_configs import CONFIGS
from longread.wire.encoding import encoding_for

Capture = pytest.CaptureFixture[str]
RELEASE = {"reader-v3": "DeepSeek-V3", "reader-v4": "DeepSeek-V4-Flash"}
ENCODING = {"reader-v3": "v3.1", "reader-v4": "v4"}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed ``longread_models`` whose configs are those of releases; the working directory is empty."""
    package = tmp_path / "site" / "longread_models"
    for name in BUNDLED:
        write_config(package / name, name)
    (package / "__init__.py").write_text("raise AssertionError('finding data runs no code')\n")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "longread_models", raising=False)
    monkeypatch.chdir(tmp_path)
    return package


def write_config(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text(json.dumps(CONFIGS[RELEASE[name]]))


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_name_is_its_folder_and_speaks_its_encoding(name: str, models: Path) -> None:
    path = locate(name)
    assert path == models / name and origin(path) == f"{path} (bundled)"
    spec = spec_of(path)
    assert spec.label == name and find_spec(name) == spec
    encoding, why = encoding_for("auto", spec.family, spec.label, path.name, has_think=True)
    assert encoding.name == ENCODING[name] and "guess" not in why
    assert encoding.abilities.thinking == "switch"


@pytest.mark.parametrize("name", BUNDLED)
def test_weights_of_a_bundled_model_can_be_drawn(name: str, models: Path) -> None:
    args = cli.build_parser().parse_args(["serve", name, "--random-weights"])
    assert engine_options(args).model == str(models / name)
    args = cli.build_parser().parse_args(["serve", "deepseek-ai/DeepSeek-V4-Flash", "--random-weights"])
    assert engine_options(args).model == "deepseek-ai/DeepSeek-V4-Flash"


def test_a_path_of_that_name_comes_first_and_says_so(models: Path) -> None:
    write_config(Path("reader-v4"), "reader-v3")
    path = locate("reader-v4")
    assert path == Path("reader-v4") and "the bundled model of that name is not used" in origin(path)
    assert spec_of(path).label == find_spec("reader-v4").label == "DeepSeek-V3"
    assert origin(models / "reader-v4").endswith("(bundled)")  # the folder itself, given as a path


def test_serve_takes_the_name(models: Path) -> None:
    args = cli.build_parser().parse_args(["serve", "reader-v3"])
    assert engine_options(args).model == str(models / "reader-v3")  # and serves it as the folder's name


def test_what_is_not_installed_says_how(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    shutil.rmtree(models / "reader-v4")
    with pytest.raises(CheckpointError, match="longread-models has no files of it"):
        locate("reader-v4")
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    for command in (["serve"], ["plan"], ["bench", "cpu"]):
        assert cli.main([*command, "reader-v3"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "pip install ./models" in said


@pytest.mark.parametrize("command", [["serve"], ["bench", "cpu"], ["plan"]])
def test_a_near_name_is_asked_back(command: list[str], models: Path, capsys: Capture) -> None:
    assert cli.main([*command, "reeder-v4"]) == 2
    assert "did you mean reader-v4?" in capsys.readouterr().err


def test_an_unknown_name_lists_the_bundled_ones(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"DeepSeek-V3.*bundled: reader-v4, reader-v3"):
        find_spec("llama")
    with pytest.raises(CheckpointError, match=r"bundled model \(reader-v4, reader-v3\)"):
        spec_of(locate("llama"))


def test_the_distribution_has_a_folder_and_a_card_of_each() -> None:
    package = Path(__file__).parents[3] / "models" / "src" / "longread_models"
    assert {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"} == set(BUNDLED)
    assert all(
        (package / name / "MODEL_CARD.md").read_text(encoding="utf-8").startswith(f"# {name}") for name in BUNDLED
    )
