"""The command line: fast help, one-line errors with exit codes, options that name their nearest neighbour."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from longread.cli import main as cli
from longread.cli.engine_flags import options_from
from longread.cli.plan import find_spec
from longread.cli.serve import ENCODINGS, engine_options, server_options
from longread.spec.config import EngineOptions, Slo
from longread.spec.errors import ConfigError

Capture = pytest.CaptureFixture[str]


def failing(argv: list[str], capsys: Capture, code: int) -> str:
    """Run, check the exit code, return the one line of stderr."""
    assert cli.main(argv) == code
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1, lines
    assert lines[0].startswith("longread: ")
    return lines[0]


def parse(*argv: str) -> object:
    return cli.build_parser().parse_args(argv)


def _child_seconds() -> float:
    """Processor time of ended children: what the command costs, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_fast_and_loads_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from longread.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'pydantic', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert heavy <= {'torch'}, heavy\n"
    )
    best = float("inf")
    for _ in range(3):
        before = _child_seconds()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        best = min(best, _child_seconds() - before)
        assert done.returncode == 0, done.stderr
        assert "serve" in done.stdout
        if best < 0.3:
            break
    assert best < 0.3, f"{best:.3f} s"


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("longread ")


def test_no_command_prints_help(capsys: Capture) -> None:
    assert cli.main([]) == 2
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "demo", "plan", "fixture", "bench"])
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serv"], ["'serv'", "did you mean serve?"]),
        (["serve"], ["CHECKPOINT", "serve --help"]),
        (["serve", "x", "--max-modl-len", "4"], ["--max-modl-len", "did you mean --max-model-len?"]),
        (["serve", "x", "--max-model", "4"], ["unknown option --max-model"]),
        (["serve", "x", "--prot=1"], ["--prot", "--port"]),
        (["serve", "x", "y"], ["unexpected argument 'y'"]),
        (["serve", "x", "--port", "http"], ["--port", "'http'"]),
        (["serve", "x", "--port", "70000"], ["70000", "65535"]),
        (["serve", "x", "--dtype", "fp8"], ["--dtype", "float32"]),
        (["serve", "x", "--max-model-len", "many"], ["max_model_len", "many"]),
        (["serve", "x", "--max-body-bytes", "1"], ["max_body_bytes"]),
        (["serve", "x", "--allowed-origins", "*"], ["--allowed-origins", "JSON"]),
        (["serve", "x", "--default-chat-template-kwargs", "[]"], ["--default-chat-template-kwargs"]),
        (["serve", "x", "--api-key-file", "/no/such/file"], ["--api-key-file", "/no/such/file"]),
        (["serve", "/no/such/checkpoint"], ["/no/such/checkpoint"]),
        (["fixture", "/tmp/x"], ["--kind"]),
        (["fixture", "/tmp/x", "--kind", "v5"], ["v5", "v3"]),
        (["plan", "DeepSeek-V9"], ["DeepSeek-V9", "DeepSeek-V3"]),
        (["plan", "v4-flsh"], ["'v4-flsh'", "did you mean DeepSeek-V4-Flash?"]),
        (["bench"], ["KIND"]),
        (["bench", "cpu", "/no/such/checkpoint"], ["/no/such/checkpoint: no such folder"]),
        (["serve", "x", "--served-model-name", "ok", "two\nlines"], ["served_model_name", r"'two\nlines'"]),
        (["serve", "x", "--served-model-name", ""], ["served_model_name", "empty"]),
        (["serve", "x", "--shutdown-timeout", "nan"], ["shutdown_timeout", "nan", "86400"]),
        (["serve", "x", "--shutdown-timeout", "inf"], ["shutdown_timeout", "inf", "86400"]),
        (["serve", "x", "--default-chat-template-kwargs", "[" * 100_000], ["kwargs", "nested too deep"]),
        (["serve", "x", "--default-chat-template-kwargs", "9" * 5000], ["kwargs", "not JSON"]),
        (["serve", "V4-Flash", "--device", "cuda"], ["no such folder", "`longread serve V4-Flash --random-weights`"]),
        (["serve", "DeepSeek-V3.2"], ["no such folder", "cannot run this model", "`longread plan DeepSeek-V3.2`"]),
        (["serve", "V3.2", "--random-weights"], ["DeepSeek-V3.2 is not served", "`longread plan V3.2`"]),
        (["serve", "x" * 5000], ["File name too long"]),
        (["plan", "x" * 5000], ["File name too long"]),
        (["plan", ""], ["the model is empty", "V4-Flash"]),
        (["serve", __file__], [__file__, "is a file; give the folder"]),
        (["fixture", "/dev/null/x", "--kind", "v3", "--seed", "9" * 30], ["--seed", "9" * 30, str(2**60)]),
        (["fixture", "a\0b", "--kind", "v3"], ["NUL"]),
        (["--colour"], ["--colour"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv: list[str], words: list[str], capsys: Capture) -> None:
    line = failing(argv, capsys, 2)
    for word in words:
        assert word in line, line
    assert len(line) < 1000


def test_a_checkpoint_that_is_no_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    assert "config.json" in failing(["serve", str(tmp_path)], capsys, 2)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in failing(["plan", str(tmp_path)], capsys, 2)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in failing(["plan", str(tmp_path)], capsys, 2)


def test_a_bug_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(argv: list[str]) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "_run", broken)
    line = failing(["plan", "x"], capsys, 1)
    assert "ZeroDivisionError" in line and "--traceback" in line
    with pytest.raises(ZeroDivisionError):
        cli.main(["--traceback", "plan", "x"])


def test_ctrl_c_is_clean(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert failing(["plan", "x"], capsys, 130) == "longread: interrupted"


def test_ingest_reads_on_what_serve_computes_on() -> None:
    """Else a server would not find what was ingested: its cache is another's."""
    given = [
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--kv-cache-dtype",
        "bfloat16",
        "--gpu-memory-utilization",
        "0.5",
    ]
    served = cli.build_parser().parse_args(["serve", "x", "--store", "s", *given])
    read = cli.build_parser().parse_args(["ingest", "file", "--model", "x", "--store", "s", *given])
    names = ("device", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "store")
    one, other = options_from(served, "x"), options_from(read, "x")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert (other.device, other.kv_cache_dtype, other.gpu_memory_utilization) == ("cuda", "bfloat16", 0.5)
    shared = ("--device", "--kv-cache-dtype", "--gpu-memory-utilization")
    helps = [{flag: args.parser._option_string_actions[flag].help for flag in shared} for args in (served, read)]
    assert helps[0] == helps[1]


def test_plan_prints_the_release(capsys: Capture) -> None:
    code = cli.main(["plan", "DeepSeek-V2-Lite", "--max-model-len", "4K"])
    said = capsys.readouterr().out
    assert code in (0, 1)
    assert "15,706,484,224" in said
    assert "31,104.0" in said  # 27 layers * 576 * 2 bytes
    assert "on this machine" in said


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("V4-Flash", "DeepSeek-V4-Flash"),
        ("v3", "DeepSeek-V3"),
        ("r1", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "DeepSeek-V3.2"),
    ],
)
def test_plan_takes_short_names(given: str, label: str) -> None:
    assert find_spec(given).label == label


def test_serve_options_become_engine_and_server_options(tmp_path: Path) -> None:
    assert engine_options(parse("serve", "ckpt")) == EngineOptions(model="ckpt", step_target="auto")
    bounded = engine_options(parse("serve", "ckpt", "--slo", "ttft=2s,tpot=50ms", "--step-target", "none"))
    assert (bounded.slo, bounded.step_target) == (Slo(2.0, 0.05), None)
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    args = parse(
        "serve", "ckpt", "--max-model-len", "128K", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "1GiB",
        "--no-enable-prefix-caching", "--seed", "9", "--served-model-name", "a", "b", "--port", "0",
        "--api-key", "zero", "--api-key-file", str(keys), "--max-num-queued-reqs", "0", "--max-body-bytes", "1MiB",
    )  # fmt: skip
    options = engine_options(args)
    assert (options.max_model_len, options.max_num_seqs, options.kv_cache_memory_bytes) == (131072, 4, 2**30)
    assert (options.enable_prefix_caching, options.seed, options.served_model_name) == (False, 9, "a")
    http = server_options(args)
    assert http.api_key == ("zero", "one", "two")
    assert (http.served_model_name, http.port, http.limits.max_num_queued_reqs) == (("a", "b"), 0, 0)
    assert http.max_body_bytes == 2**20


def test_defaults_agree_with_the_options_they_set() -> None:
    from longread.server.options import ServerOptions

    assert server_options(parse("serve", "ckpt")) == ServerOptions()
    assert json.dumps(parse("serve", "ckpt").default_chat_template_kwargs) == "{}"


def test_every_chat_encoding_is_offered() -> None:
    from longread.wire.encoding import ENCODING_NAMES

    assert ENCODINGS == ENCODING_NAMES


def test_spinning_is_bounded_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for variable, given, spin in (
        (None, "", "10000"),
        ("GOMP_SPINCOUNT", "7", "7"),
        ("OMP_WAIT_POLICY", "ACTIVE", None),
    ):
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            # Set before it is deleted, so that what the command sets is undone after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        if variable:
            monkeypatch.setenv(variable, given)
        assert cli.main(["plan", "no such release"]) == 2
        capsys.readouterr()
        assert os.environ.get("GOMP_SPINCOUNT") == spin


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        server_options(parse("serve", "ckpt", "--api-key-file", str(keys)))
