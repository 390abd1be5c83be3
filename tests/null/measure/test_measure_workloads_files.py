"""The user's own files, good and hostile, and workloads written to files."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.cli.main import main
from longread.measure.workloads import Expected, build
from longread.measure.workloads.custom import MAX_LINE
from longread.measure.workloads.lines import row, write
from longread.spec.errors import ConfigError

GOOD = '{"prompt": "one"}'


def file(folder: Path, text: str, name: str = "own.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ('"text"', "must be an object"),
        ("{}", "needs prompt or messages"),
        ('{"prompt": "a", "messages": []}', "and not both"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": []}', "not empty"),
        ('{"prompt": [1, -1]}', "token ids"),
        ('{"prompt": [1, true]}', "token ids"),
        ('{"prompt": {"a": 1}}', "token ids"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', "messages[0] must be an object"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "messages[0].content"),
        ('{"prompt": "a", "max_tokens": 0}', "from 1 to"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 5, "output_tokens": 5}', "give one"),
        ('{"prompt": "a", "at": -1}', "at must be seconds"),
        ('{"prompt": "a", "at": NaN}', "NaN is no JSON"),
        ('{"prompt": "a", "at": "5"}', "at must be seconds"),
        ('{"prompt": "a", "session": 5}', "session must be a text"),
        ('{"prompt": "a", "think_seconds": true}', "think_seconds"),
        ('{"prompt": "a", "temperature": 0}', "body fields go into extra"),
        ('{"prompt": "a", "extra": []}', "extra must be an object"),
        ('{"prompt": "a", "extra": {"stream": false}}', "must not set stream"),
        ('{"prompt": "a", "expected": 5}', "expected must be"),
        ('{"prompt": "a", "expected": {"kind": "maybe", "text": "a"}}', "expected must be"),
        ('{"prompt": "a", "expected": {"kind": "exact", "text": "a", "critical": "b"}}', "lists of texts"),
        ('{"prompt": "a", "expected": {"kind": "critical", "text": "a"}}', "needs its values"),
        ('{"prompt": "a", "answers": true}', "needs messages and a session"),
        ('{"prompt": "a", "key": "' + "k" * 201 + '"}', "1 to 200 characters"),
        ('{"prompt": "a", "isl": 0}', "isl must be"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = file(tmp_path, f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        build("custom", {"path": path})
    assert told in str(raised.value) and "line 3" in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("name", "text", "more", "told"),
    [
        ("a.jsonl", "", {}, "no prompt in it"),
        ("a.jsonl", '{"prompt": "a", "key": "k"}\n{"prompt": "b", "key": "k"}', {}, "given in line 1"),
        ("a.json", "[5", {}, "not JSON"),
        ("a.json", "[5]", {}, "no list 'conversations'"),
        ("a.json", '[{"conversations": [{"from": "gpt", "value": "x"}]}]', {}, "no conversation that begins"),
        ("a.txt", "some text", {}, "needs questions=FILE"),
        ("a.jsonl", GOOD, {"questions": "q.txt"}, "for a text file"),
        ("a.jsonl", GOOD, {"osl": "x"}, "osl"),
    ],
)
def test_faulty_files_are_refused(tmp_path: Path, name: str, text: str, more: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build("custom", {"path": file(tmp_path, text, name), **more})
    assert told in str(raised.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    for path, told in (
        (tmp_path, "not a regular file"),
        (tmp_path / "none", "no such"),
        (tmp_path / "latin.jsonl", "iconv"),
    ):
        with pytest.raises(ConfigError, match=told):
            build("custom", {"path": path})
    with pytest.raises(ConfigError, match=f"at most {MAX_LINE:,}"):
        build("custom", {"path": file(tmp_path, GOOD + " " * MAX_LINE)})


def test_a_good_file_is_what_it_says(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "output_tokens": 7, "at": 1, "kind": "mine", "expected": "yes"},
        {"prompt": [5, 6], "session": "s", "think_seconds": 0.5, "extra": {"temperature": 1}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "key": "k"},
    ]
    path = file(tmp_path, "\ufeff" + "\r\n".join(map(json.dumps, rows)) + "\n")
    first, second, third = build("custom", {"path": path, "osl": 9}).asks
    assert (first.prompt, first.max_tokens, first.at, first.kind) == ("p", 7, 1.0, "mine")
    assert first.expected == Expected("contains", "yes")
    assert (second.prompt, second.max_tokens, second.session, second.think_seconds) == ((5, 6), 9, "s", 0.5)
    assert second.extra == {"temperature": 1} and third.key == "k" and third.messages is not None
    assert len(build("custom", {"path": path, "num_prompts": 2}).asks) == 2


def test_sharegpt_and_texts_with_questions(tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]},
    ]
    (ask,) = build("custom", {"path": file(tmp_path, json.dumps(talks), "s.json")}).asks
    assert ask.messages == ({"role": "user", "content": "q"},) and ask.expected == Expected("reference", "a")
    questions = file(tmp_path, "Who?\tMs Quist\n\nWhen?\n", "q.txt")
    one, other = build("custom", {"path": file(tmp_path, "The text.", "t.txt"), "questions": questions}).asks
    assert one.messages == ({"role": "user", "content": "The text.\nWho?"},)
    assert one.expected == Expected("contains", "Ms Quist") and other.expected is None


@settings(max_examples=60)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_workload_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        build("custom", {"path": path})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("documents", {"isl": 1024, "num_prompts": 4, "language": "mixed"}),
        ("agent", {"sessions": 2, "turns": 3}),
        ("agent", {"sessions": 2, "turns": 3, "answers": True}),
        ("random", {"vocab_size": 500, "num_prompts": 3, "isl": 20}),
    ],
)
def test_what_is_written_is_read_back(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    made, path = build(name, options), tmp_path / "w.jsonl"
    size = write(path, made.asks)
    assert size == path.stat().st_size and list(tmp_path.iterdir()) == [path]
    again = build("custom", {"path": path})
    assert list(again.asks) == list(made.asks)
    assert again.described["prompts_sha256"] == made.described["prompts_sha256"]


def test_vllms_form_and_what_it_cannot_carry(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    write(path, build("chat", {"num_prompts": 3}).asks, "vllm")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(each) for each in rows] == [{"prompt", "output_tokens"}] * 3
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="no token ids"):
        write(path, build("random", {"vocab_size": 9, "num_prompts": 1}).asks, "vllm")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match=r"ends in \.jsonl"):
        write(tmp_path / "v.json", build("chat", {"num_prompts": 1}).asks, "vllm")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        write(tmp_path / "no" / "f", build("chat", {"num_prompts": 1}).asks)
    assert "expected" in row(build("chat", {"num_prompts": 1}).asks[0])


def test_the_command_shows_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl"
    command = ["bench", "workload", "documents", "--isl", "1K", "--num-prompts", "3", "--dataset-option", "language=zh"]
    assert main([*command, "--output", str(path)]) == 0
    shown = capsys.readouterr()
    assert "3 requests, seed 0" in shown.out and "right:" in shown.out and "3 requests" in shown.err
    assert len(path.read_text().splitlines()) == 3
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["language"] == "zh"
    assert main(["bench", "workload"]) == 0 and "shared-prefix:" in capsys.readouterr().out
    assert main([*command, "isl=5"]) == 2 and "both set it" in capsys.readouterr().err
    assert main(["bench", "workload", "documents", "--dataset-option", "questions"]) == 2
