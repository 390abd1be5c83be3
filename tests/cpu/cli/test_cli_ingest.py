"""``longread ingest`` as a user runs it: read once, killed and gone on with, asked afterwards by id and by text."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from torch import Tensor

from longread.cli import main as cli
from longread.engine.batch import Batch
from longread.engine.load import load_engine
from longread.engine.runner import Runner
from longread.kv.disk.store import DiskStore
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams
from longread.weights.fixture import write_fixture
from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.conversation import conversation
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatRequest, validate

KINDS = {"v3": "v3.1", "v4-flash": "v4"}
LINES = "".join(f"{i}. The gauge at mile {i * 37 % 101} showed {i * 7919 % 1000} feet.\n" for i in range(90))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ingest") / str(request.param)
    write_fixture(path, request.param)
    return path


def command(model: Path, store: Path, *files: Path, more: tuple[str, ...] = ()) -> list[str]:
    return ["ingest", *map(str, files), "--model", str(model), "--store", str(store), "--json", *more]


def ingest(capsys: pytest.CaptureFixture[str], *arguments: object, more: tuple[str, ...] = ()) -> list[dict]:
    assert cli.main(command(*arguments, more=more)) == 0  # type: ignore[arg-type]
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def prompt(model: Path, *parts: str) -> tuple[int, ...]:
    config = json.loads((model / "config.json").read_text())
    tokenizer = Tokenizer.open(model, bos_id=config["bos_token_id"], eos_id=config["eos_token_id"])
    content = [{"type": "text", "text": part} for part in parts]
    asked = validate(ChatRequest, {"messages": [{"role": "user", "content": content}]})
    encoding = ENCODINGS[KINDS[model.name]]
    return tuple(tokenizer.encode_prompt(encoding.render(conversation(asked, encoding.abilities)).pieces))


def answers(model: Path, store: Path | None, prompts: list[tuple[int, ...]]) -> list[tuple[list[int], FinishEvent]]:
    """Six greedy tokens behind each prompt, one after the other, on a fresh engine."""
    engine = load_engine(EngineOptions(str(model), max_num_seqs=1, store=str(store) if store is not None else None))
    found = []
    try:
        for number, ids in enumerate(prompts):
            engine.submit(GenerationRequest(str(number), ids, SamplingParams(temperature=0.0, max_tokens=6)))
            tokens, ended = [], None
            while ended is None:
                for event in engine.step():
                    if isinstance(event, FinishEvent):
                        ended = event
                    else:
                        tokens.append(event.token_id)
            found.append((tokens, ended))
    finally:
        engine.close()
    return found


def logits(model: Path, store: Path) -> Tensor:
    """Of a question about LINES, on what the store has of them."""
    engine = load_engine(EngineOptions(str(model), max_num_seqs=1, store=str(store)))
    ids = prompt(model, LINES, "How much?")
    try:
        with engine.session() as session:
            assert session.sync(ids) < 256
            return session.logits
    finally:
        engine.close()


def test_read_once_then_asked_by_another_process(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "gauges.txt", tmp_path / "store"
    file.write_text(LINES)
    (document,) = ingest(capsys, model, store, file)
    assert (document["name"], document["reused_tokens"], document["pinned"]) == ("gauges.txt", 0, False)
    # The last one has other tokens from the separator on, as questions have that begin with a line end.
    prompts = [prompt(model, LINES, "How much?"), prompt(model, LINES, " 12?"), prompt(model, LINES + "!", "And?")]
    cold = [answers(model, None, [ids])[0][0] for ids in prompts]
    warm = answers(model, store, prompts)
    assert [tokens for tokens, _ in warm] == cold
    assert warm[0][1].reuse is not None and warm[0][1].reuse.disk_tokens == document["tokens"]
    assert warm[1][1].cached_tokens == document["tokens"]
    # The last page end before, or nearly all where rows can be reused one by one.
    assert document["tokens"] - 256 <= warm[2][1].cached_tokens < document["tokens"]


def test_again_and_with_a_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "a.md", tmp_path / "store"
    file.write_text(LINES[:2000])
    (first,) = ingest(capsys, model, store, file)
    (again,) = ingest(capsys, model, store, file, more=("--name", "Gauges", "--pin"))
    assert again["id"] == first["id"]
    assert (again["name"], again["pinned"]) == ("Gauges", True)
    assert again["reused_tokens"] == first["tokens"] - 1
    opened = DiskStore.open(store, None, max_bytes=2**30, read_only=True)
    (listed,) = opened.documents()
    assert (listed.name, listed.tokens, opened.document_state(listed).whole) == ("Gauges", first["tokens"], True)
    opened.close()


def test_a_name_of_any_bytes_is_shown_as_escapes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / os.fsdecode(b"evil\x1b]0;\xff.txt")
    file.write_text("The lease ends in May.\n")
    (told,) = ingest(capsys, model, tmp_path / "store", file)
    assert told["name"] == "evil\\x1b]0;\\udcff.txt"
    assert told["path"].isprintable()
    assert cli.main([part for part in command(model, tmp_path / "store", file) if part != "--json"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_several_files_and_a_folder(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "project"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a.py").write_text("print(1)\n")
    (tree / "logo.png").write_bytes(b"\0")
    note = tmp_path / "note.txt"
    note.write_text("A note.")
    assert cli.main(command(model, tmp_path / "store", tree, note)) == 0
    captured = capsys.readouterr()
    told = [json.loads(line) for line in captured.out.splitlines()]
    assert [each["name"] for each in told] == ["project", "note.txt"]
    assert f"{tree}: skipped 1 binary (logo.png)" in captured.err


def test_asked_about_by_text_before_it_is_read(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "a.txt", tmp_path / "store"
    file.write_text(LINES)
    answers(model, store, [prompt(model, LINES, "How much?")])
    (document,) = ingest(capsys, model, store, file)
    opened = DiskStore.open(store, None, max_bytes=2**30, read_only=True)
    (listed,) = opened.documents()
    assert listed.id == document["id"] and opened.document_state(listed).whole
    assert opened.export(listed.id, tmp_path / "file") > 0
    opened.close()


@contextmanager
def reading(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-m", "longread.cli.main", *arguments]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pages_stored(store: Path) -> int:
    if not (store / "index.sqlite").exists():
        return 0
    opened = DiskStore.open(store, None, max_bytes=2**30, read_only=True)
    try:
        return opened.stats().records.get("page", 0)
    finally:
        opened.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_it_goes_on(
    model: Path, number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if model.name == "v3":
        pytest.skip("a process each: the model with rings has more to lose")
    file, store = tmp_path / "long.txt", tmp_path / "store"
    text = LINES * 3
    file.write_text(text)
    more = ("--snapshot-interval", "256", "--max-num-batched-tokens", "128")
    with reading(command(model, store, file, more=more)) as process:
        deadline = time.monotonic() + 60
        while pages_stored(store) < 4:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        said = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + signal.SIGTERM), said
    assert said[0] == ""
    if number == signal.SIGTERM:
        assert "the same command goes on from there" in said[1]
    kept = pages_stored(store)
    (document,) = ingest(capsys, model, store, file, more=more)
    assert document["reused_tokens"] >= 256
    assert document["reused_tokens"] >= (kept - 3) * 256  # all but what no landing point was behind
    warm = answers(model, store, [prompt(model, text, "How much?")])[0]
    assert warm[1].cached_tokens == document["tokens"]
    assert warm[0] == answers(model, None, [prompt(model, text, "How much?")])[0][0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_step_waits_for_its_end(
    model: Path,
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that was read is kept, and gone on from to the same state, up to rounding (pages lie elsewhere)."""
    file, more = tmp_path / "a.txt", ("--max-num-batched-tokens", "128")
    file.write_text(LINES)
    (whole,) = ingest(capsys, model, tmp_path / "whole", file, more=more)
    forward, calls = Runner.forward, []

    def signalled(self: Runner, batch: Batch) -> Tensor:
        calls.append(batch)
        if len(calls) == 3:
            signal.raise_signal(number)
        return forward(self, batch)

    handler = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Runner, "forward", signalled)
            arguments = command(model, tmp_path / "store", file, more=more)
            if number == signal.SIGTERM:
                with pytest.raises(SystemExit, match=str(128 + number)):
                    cli.main(arguments)
            else:
                assert cli.main(arguments) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(calls) == 3 and "the same command goes on from there" in capsys.readouterr().err
    (document,) = ingest(capsys, model, tmp_path / "store", file, more=more)
    assert (document["id"], document["reused_tokens"]) == (whole["id"], 3 * 128)
    difference = (logits(model, tmp_path / "store") - logits(model, tmp_path / "whole")).abs().max().item()
    assert difference <= 2e-5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.txt"], "none.txt: no such file"),
        (["a.txt", "b.txt", "--name", "x"], "--name is for one FILE, 2 are given"),
        (["a.txt", "--name", ""], "--name must have 1 to 200"),
        (["blank.txt"], "blank.txt: text: the document is empty"),
        (["binary.bin"], "is a binary file"),
        (["a.txt", "--kv-cache-memory-bytes", "1500KiB"], ""),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(
    model: Path, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (("a.txt", LINES.encode() * 40), ("b.txt", b"b"), ("blank.txt", b" \n"), ("binary.bin", b"\0")):
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("longread.engine.load.load_resolved", lambda *arguments: pytest.fail("the model was loaded"))
    assert cli.main(["ingest", *arguments, "--model", str(model), "--store", "store"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error
    assert not (tmp_path / "store").exists()


def test_a_store_without_room_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.md"
    file.write_text(LINES)
    assert cli.main(command(model, tmp_path / "store", file, more=("--store-size", "300KiB"))) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "could not keep it: give it more room (--store-size)" in captured.err.splitlines()[-1]


def test_a_store_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ingest", "a.txt"]) == 2
    assert "--store" in capsys.readouterr().err


@contextmanager
def served(model: Path, store: Path) -> Iterator[str]:
    arguments = ["serve", str(model), "--port", "0", "--max-num-seqs", "2", "--store", str(store)]
    program = [sys.executable, "-m", "longread.cli.main", *arguments]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail(process.stderr.read())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def ask(url: str, *parts: object) -> dict:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ingested_here_and_asked_of_a_server(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By id and by text, then a document that the server itself reads in, asked of the next server."""
    file, store = tmp_path / "gauges.txt", tmp_path / "store"
    file.write_text(LINES)
    (document,) = ingest(capsys, model, store, file)
    named = {"type": "document", "document_id": document["id"]}
    with served(model, store) as url:
        by_id = ask(url, named, "How much?")
        assert by_id["usage"]["prompt_tokens_details"]["cached_tokens"] == document["tokens"]
        by_text = ask(url, LINES, "How much?")
        assert by_text["choices"][0]["message"] == by_id["choices"][0]["message"]
        assert by_text["usage"]["prompt_tokens"] == by_id["usage"]["prompt_tokens"]
        listed = httpx.get(f"{url}/v1/longread/documents").json()["data"]
        assert [(each["id"], each["name"]) for each in listed] == [(document["id"], "gauges.txt")]
        body = {"text": LINES * 2, "name": "twice", "pinned": True}
        second = httpx.post(f"{url}/v1/longread/documents", json=body, timeout=60).json()
        assert second["status"] == "ready"
        assert httpx.delete(f"{url}/v1/longread/documents/{document['id']}").json()["deleted"] is True
    with served(model, store) as url:
        listed = httpx.get(f"{url}/v1/longread/documents").json()["data"]
        assert [(each["id"], each["pinned"]) for each in listed] == [(second["id"], True)]
        answer = ask(url, {"type": "document", "document_id": second["id"]}, "How much?")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == second["tokens"]
