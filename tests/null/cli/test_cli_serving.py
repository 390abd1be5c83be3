"""What ``longread serve`` finds out before it opens the port."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from longread.cli import serving
from longread.cli.serving import checked_defaults, reload_limits
from longread.server.admission import Admission
from longread.server.limits import Limits, from_toml
from longread.server.options import ServerOptions
from longread.spec.config import EngineOptions
from longread.spec.errors import CheckpointError, ConfigError
from longread.wire.encoding import ENCODINGS


@pytest.mark.parametrize(
    ("encoding", "given", "says"),
    [
        ("r1", {"thinking": False}, "thinking cannot be switched off"),
        ("v3", {"enable_thinking": True}, "no thinking mode"),
        ("v4", {"reasoning_effort": "low"}, "knows none, high, max, got 'low'"),
        ("v4.1", {"reasoning_effort": 101}, "got 101"),
        ("v3.1", {"drop_thinking": False}, "always drops"),
        ("v4", {"thinking": "yes"}, "got 'yes'"),
        ("v4", {"thunking": True}, "thunking"),
    ],
)
def test_defaults_that_the_encoding_cannot_do_are_refused(encoding: str, given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs") as caught:
        checked_defaults(given, ENCODINGS[encoding])
    assert says in str(caught.value)


def test_defaults_that_work_are_kept() -> None:
    assert checked_defaults({}, ENCODINGS["v3"]) is None
    defaults = checked_defaults({"thinking": True, "reasoning_effort": "max", "drop_thinking": False}, ENCODINGS["v4"])
    assert defaults is not None and defaults.reasoning_effort == "max"


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 128}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    monkeypatch.setattr(serving, "spec_of", lambda path: SimpleNamespace(bos_id=0, eos_id=1, vocab=128))
    monkeypatch.setattr(serving, "resolve", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"largest id is 128, .* vocab_size is 128"):
        serving.serve_checkpoint(EngineOptions(model=str(tmp_path)), ServerOptions(port=0), "auto", {})


def test_limits_are_replaced_as_a_whole_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, base = tmp_path / "limits.toml", Limits(max_num_queued_reqs=7)
    admission = Admission(base)
    caplog.set_level("INFO")
    file.write_text('max_num_queued_tokens = "32K"\nttft_timeout = "2s"\n')
    reload_limits(admission, lambda: from_toml(file, base))
    assert admission.limits == Limits(max_num_queued_reqs=7, max_num_queued_tokens=32768, ttft_timeout=2.0)
    assert "max_num_queued_tokens None -> 32768" in caplog.messages[-1]
    for bad in ("max_num_queued_tokens = 1\nttft_timeout = -1", "ttft_timeot = 1", "= 1", None):
        if bad is None:
            file.unlink()
        else:
            file.write_text(bad)
        reload_limits(admission, lambda: from_toml(file, base))
        assert admission.limits.max_num_queued_tokens == 32768
        assert "stay as they are" in caplog.messages[-1]
    file.write_text("")
    reload_limits(admission, lambda: from_toml(file, base))
    assert admission.limits == base
