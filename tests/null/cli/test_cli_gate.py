"""``longread gate``: what it refuses before any work, its exit codes, and the files it leaves."""

import json
import signal
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from toy_server import Toy

from longread.cli.main import main


@pytest.fixture
def toy() -> Iterator[tuple[Toy, str]]:
    """The toy server on a real socket."""
    made = Toy()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            request = httpx.Request(self.command, f"http://toy{self.path}", content=self.rfile.read(size))
            response = made.handle(request)
            if made.interrupted_at and len(made.requests) == made.interrupted_at:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.send_response(response.status_code)
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, *what: object) -> None:
            """Silent."""

    socketserver.TCPServer.request_queue_size = 64
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield made, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def flags(url: str) -> list[str]:
    return ["--base-url", f"{url}/v1", "--lengths", "512", "--documents", "3", "--style", "plain"]


def test_base_run_and_compare(toy: tuple[Toy, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, url = toy
    base, other, result = (str(tmp_path / name) for name in ("base.json", "other.json", "gate.json"))
    assert main(["gate", "base", *flags(url), "--levels", "1,4", "-o", base]) == 0
    code = main(["gate", "run", *flags(url), "--levels", "1", "--base", base, "--profile", "lossless", "-o", result])
    shown = capsys.readouterr().out
    document = json.loads(Path(result).read_text())
    assert code == {"PASS": 0, "INCONCLUSIVE": 3}[document["verdict"]] and "kl_mean at 512" in shown
    lines = [json.loads(line) for line in (tmp_path / "gate.jsonl").read_text().splitlines()]
    assert lines and all(line["key"] for line in lines)
    assert document["provenance"]["model"] == "toy" and document["provenance"]["base"]["model"] == "toy"
    made.noise = 1.5
    assert main(["gate", "run", *flags(url), "--levels", "1", "--base", base]) == 1
    assert main(["gate", "base", "--base-url", url, "--like", base, "--levels", "1,4", "-o", other]) == 0
    assert main(["gate", "compare", base, other]) == 1
    assert main(["gate", "compare", base, base]) in (0, 3)


def test_ctrl_c_keeps_what_was_measured(
    toy: tuple[Toy, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, url = toy
    made.interrupted_at = 36
    result, part = tmp_path / "gate.json", tmp_path / "base.json"
    assert main(["gate", "run", *flags(url), "--levels", "2,3", "-o", str(result)]) == 130
    document = json.loads(result.read_text())
    assert document["interrupted"] and len(document["levels"]) == 2
    assert len((tmp_path / "gate.jsonl").read_text().splitlines()) >= 10
    assert "stopped: interrupted" in capsys.readouterr().out
    made.requests.clear()
    assert main(["gate", "base", *flags(url), "-o", str(part)]) == 130
    assert not json.loads(part.read_text())["complete"] and "not complete: interrupted" in capsys.readouterr().out


def test_without_log_probabilities_the_exit_code_is_3(toy: tuple[Toy, str], capsys: pytest.CaptureFixture[str]) -> None:
    made, url = toy
    made.hidden = frozenset(["logprobs"])
    assert main(["gate", "run", *flags(url), "--levels", "1"]) == 3
    assert "not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "--base-url"),
        (["run", "--base-url", "toy:80"], "http://"),
        (["run", "--base-url", "http://x", "--profile", "losless"], "did you mean lossless"),
        (["run", "--base-url", "http://x", "--levels", "0,9"], "--levels"),
        (["run", "--base-url", "http://x", "--levels", "zero"], "no list"),
        (["run", "--base-url", "http://x", "--lengths", "12"], "512"),
        (["run", "--base-url", "http://x", "--budget", "soon"], "no time"),
        (["run", "--base-url", "http://x", "-o", "/no/such/folder/x.json"], "cannot be written"),
        (["run", "--base-url", "http://x", "--base", "/no/such/base.json"], "gate base"),
        (["run", "--base-url", "http://x", "--bugdet", "1m"], "did you mean --budget"),
        (["compare", "/no/such/a.json", "/no/such/b.json"], "gate base"),
        (["profiles", "/no/such.toml"], "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "run", "--base-url", "http://127.0.0.1:9", "--levels", "2"]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_profiles_are_printed_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "profiles"]) == 0
    shown = capsys.readouterr().out
    assert "kl_mean" in shown and "scoreboard" in shown and "int4-class" in shown
