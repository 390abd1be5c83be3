"""Limits: what they refuse, and how a file changes them."""

import os
from pathlib import Path

import pytest

from longread.cli.main import build_parser
from longread.cli.serve import server_options
from longread.server.limits import LEAST_BUFFER, Limits, from_mapping, from_toml
from longread.spec.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_num_queued_reqs": -1}, "negative"),
        ({"max_num_queued_tokens": 0}, "below 1"),
        ({"max_stream_buffer": LEAST_BUFFER - 1}, "below 256"),
        ({"ttft_timeout": 0.0}, "not above 0"),
        ({"queue_timeout": float("nan")}, "not above 0"),
        ({"request_timeout": 1e9}, "at most 86400"),
    ],
)
def test_limits_that_cannot_work_are_refused(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limits(**values)


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        'max-num-queued-tokens = "32K"\nttft_timeout = "1500ms"\nqueue_timeout = 3\nstream_timeout = "none"\n'
    )
    base = Limits(max_num_queued_reqs=7, request_timeout=9.0)
    assert from_toml(file, base) == Limits(
        max_num_queued_reqs=7,
        max_num_queued_tokens=32768,
        queue_timeout=3.0,
        ttft_timeout=1.5,
        request_timeout=9.0,
        stream_timeout=None,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_timeot = 3", "did you mean ttft_timeout"),
        ("ttft_timeout = 'soon'", "is no time"),
        ("ttft_timeout = true", "must be seconds"),
        ("max_num_queued_reqs = 1.5", "whole number"),
        ("max_num_queued_reqs = [1]", "whole number"),
        ("max_stream_buffer = 'none'", "fill the memory"),
        ("[section]\nttft_timeout = 3", "unknown limit"),
        ("ttft_timeout = ", "cannot be read"),
        ("request_timeout = '-3s'", "not above 0"),
        ("request_timeout = 'infs'", "must be seconds"),
        ("request_timeout = " + "9" * 400, "must be seconds"),
        ("max_num_queued_reqs = " + "9" * 5000, "cannot be read"),
        ("max_num_queued_tokens = " + "9" * 400, "at most"),
        ("max_stream_buffer = 1000000000000000", "at most"),
        ("x = " + "[" * 5000, "cannot be read"),
        ("a" + ".a" * 3000 + " = 1", "unknown limit"),
        ("#" * 10000, "at most 8,192 bytes"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        from_toml(file)
    assert "limits.toml" in str(caught.value)


def test_a_pipe_could_make_the_server_wait_and_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "limits.toml")
    with pytest.raises(ConfigError, match="must be a file"):
        from_toml(tmp_path / "limits.toml")


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_toml(tmp_path / "none.toml")


def test_names_may_be_written_as_flags() -> None:
    assert from_mapping({"max-stream-buffer": 512, "max_num_queued_reqs": "none"}) == Limits(
        None, max_stream_buffer=512
    )


def test_flags_and_file_together(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("ttft_timeout = 2\n")
    flags = ["--ttft-timeout", "5s", "--max-num-queued-tokens", "1M", "--limits", str(file)]
    options = server_options(build_parser().parse_args(["serve", "demo", *flags]))
    assert options.limits == Limits(max_num_queued_tokens=2**20, ttft_timeout=2.0)
    assert server_options(build_parser().parse_args(["serve", "demo"])).limits == Limits()
