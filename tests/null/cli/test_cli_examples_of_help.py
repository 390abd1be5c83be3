"""Examples in help texts keep their lines and are accepted as they stand."""

from pathlib import Path

import pytest

from longread.cli.main import build_parser, main
from longread.cli.parser import EXAMPLE


def test_the_experiment_of_the_help_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["experiment", "--help"])
    page = capsys.readouterr().out.partition("Such")[2]
    example = "\n".join(line[len(EXAMPLE) :] for line in page.splitlines() if line.startswith(EXAMPLE))
    file = tmp_path / "steps.toml"
    file.write_text(example)
    assert main(["experiment", str(file), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "6 visits, 6 to be made" in told and "--step-target none" in told
