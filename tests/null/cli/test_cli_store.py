"""``longread store``: every action over a small store, at the terminal and as JSON, and what it says when it cannot."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of

from longread.cli import main as cli
from longread.cli.store import _json, _when
from longread.kv.disk.format import HEADER_BYTES
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Layout, Record
from longread.spec.documents import document_id

Capture = pytest.CaptureFixture[str]
OTHER = Layout(bytes(range(16, 32)), "other", "bfloat16", page_bytes=300, ring_bytes=0)


def document(records: list[Record], ident: str, name: str) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    return DocumentInfo(ident, name, "", len(ids) // 4, 9, records[-1].key, token_ids=ids, text="some text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    for layout, idents in ((SMALL, ("doc-aa11", "doc-aa22")), (OTHER, ("doc-bb33",))):
        store = DiskStore.open(path, layout, max_bytes=2**30)
        for number, ident in enumerate(idents):
            records = chain_of([number, *range(700)], layout, rings=bool(layout.ring_bytes))
            store.write(records, document=document(records, ident, f"novel [{ident[-1]}]"))
        store.close()
    return path


def run(capsys: Capture, folder: Path, *argv: str, code: int = 0) -> str:
    got = cli.main(["store", argv[0], "--store", str(folder), *argv[1:]])
    out, err = capsys.readouterr()
    assert got == code, out + err
    return out + err


def as_json(capsys: Capture, folder: Path, *argv: str, code: int = 0) -> dict:
    return json.loads(run(capsys, folder, *argv, "--json", code=code))


def test_ls_and_show(folder: Path, capsys: Capture) -> None:
    shown = run(capsys, folder, "ls")
    assert "doc-aa11" in shown
    assert "novel [1]" in shown
    assert "tiny float32: 8 records" in shown
    assert "3 documents" in shown
    told = as_json(capsys, folder, "ls")
    assert {each["id"] for each in told["documents"]} == {"doc-aa11", "doc-aa22", "doc-bb33"}
    assert {each["label"] for each in told["models"]} == {"tiny", "other"}
    one = as_json(capsys, folder, "show", "doc-b")
    assert (one["id"], one["model"], one["tokens"], one["whole"], one["pages"]) == ("doc-bb33", "other", 701, True, 3)
    assert "doc-aa22" in run(capsys, folder, "show", "novel [2]")


def test_pin_unpin_gc_rm(folder: Path, capsys: Capture) -> None:
    assert "pinned: doc-aa11" in run(capsys, folder, "pin", "doc-aa11", "doc-bb")
    assert "pinned" in run(capsys, folder, "ls")
    assert "given back" in run(capsys, folder, "gc")
    assert as_json(capsys, folder, "gc", "--store-size", "0", code=1)["evicted"] == 4
    run(capsys, folder, "unpin", "doc-aa11")
    assert not as_json(capsys, folder, "show", "doc-aa11")["pinned"]
    assert as_json(capsys, folder, "rm", "doc-aa11")["removed"] == ["doc-aa11"]
    assert as_json(capsys, folder, "rm", "doc-bb33", "--model", "other bfloat16")["freed_bytes"] > 0
    left = as_json(capsys, folder, "ls")
    assert left["documents"] == []  # what was neither whole nor pinned went with the rest
    assert left["total"]["file_bytes"] == left["total"]["document_bytes"] == 0


def test_ls_tells_what_is_incomplete_and_what_texts_take(folder: Path, capsys: Capture) -> None:
    total = as_json(capsys, folder, "ls")["total"]
    assert total["document_bytes"] > 3 * 256
    done = as_json(capsys, folder, "gc", "--store-size", str(total["file_bytes"] + total["document_bytes"] - 1))
    assert done["evicted"] and not done["documents"]
    assert not all(each["whole"] for each in as_json(capsys, folder, "ls")["documents"])
    shown = run(capsys, folder, "ls")
    assert "incomplete" in shown and "of texts and ids" in shown


def test_export_and_import(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "one.longread"
    store = DiskStore.open(folder, SMALL, max_bytes=2**30)
    records = chain_of([0, *range(700)])
    ident = document_id(records[-1].key)
    store.write([], document=document(records, ident, "a novel"))
    store.close()
    assert "written" in run(capsys, folder, "export", ident, str(file))
    assert "--force" in run(capsys, folder, "export", ident, str(file), code=1)
    run(capsys, folder, "export", ident, str(file), "--force")
    target = tmp_path / "target"
    assert "701 tokens" in run(capsys, target, "import", str(file), "--pin")
    assert as_json(capsys, target, "show", ident)["pinned"]
    file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in run(capsys, target, "import", str(file), code=1)
    assert "No such file" in run(capsys, target, "import", str(tmp_path / "none"), code=2)


def test_what_others_named_steers_no_terminal(folder: Path, capsys: Capture) -> None:
    """Such rows cannot come by import any more; an older version, or a damaged index, can have them."""
    evil = "[/nope] \x1b]0;pwn\x07\x9b31m [red]x"
    with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as index:
        index.execute(
            "UPDATE documents SET id = ?, name = ?, created = 9e999, used = 1e300 WHERE id = ?",
            (evil, evil, "doc-aa11"),
        )
        index.execute("UPDATE roots SET label = ?", (evil,))
    shown = run(capsys, folder, "ls")
    assert shown.count(r"[/nope] \x1b]0;pwn\x07\x9b31m [red]x") >= 3
    printed = [shown, *(run(capsys, folder, *argv) for argv in (["show", evil], ["pin", evil], ["ls", "--json"]))]
    printed += [run(capsys, folder, "show", "none", code=1), run(capsys, folder, "show", "[", "--model", "x", code=1)]
    for text in printed:
        assert all(letter.isprintable() or letter == "\n" for letter in text), text
    assert evil in {each["id"] for each in as_json(capsys, folder, "ls")["documents"]}


@pytest.mark.parametrize("moment", [float("inf"), float("nan"), 1e300, -1e300])
def test_times_that_cannot_be_shown(moment: float) -> None:
    assert _when(moment) == "?"


def test_json_has_no_lone_surrogates(capsys: Capture) -> None:
    data = {"name": "\udcff é 文 \x9b \U000e0001"}
    _json(data)
    text = capsys.readouterr().out
    assert json.loads(text.encode()) == data
    assert "é 文" in text


def test_verify_and_rebuild(folder: Path, capsys: Capture) -> None:
    assert "11 records whole" in run(capsys, folder, "verify")
    segment = sorted((folder / "segments").iterdir())[0]
    with segment.open("r+b") as data:
        data.seek(HEADER_BYTES + 1100)
        data.write(b"damage")
    assert "left as it is" in run(capsys, folder, "verify", "--read-only", code=1)
    told = as_json(capsys, folder, "verify", code=1)
    assert len(told["corrupt"]) == 1
    assert len(told["broken_documents"]) == 1
    assert told["unreachable"] > 0
    (folder / "index.sqlite").write_bytes(b"no index")
    assert "--rebuild" in run(capsys, folder, "ls", code=1)
    assert "10 records" in run(capsys, folder, "verify", "--rebuild")


def test_a_lost_index_is_told_and_made_anew(folder: Path, capsys: Capture) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    (folder / "segments" / "holiday.seg").write_text("mine")
    for action in ("ls", "gc", "verify"):
        assert f"verify --rebuild --store {folder}" in run(capsys, folder, action, code=1)
    told = run(capsys, folder, "verify", "--rebuild")
    assert "11 records whole" in told
    assert "segments/holiday.seg is not the store's" in told


def test_what_it_says_when_it_cannot(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "did you mean doc-bb33" in run(capsys, folder, "show", "doc-cb33", code=1)
    assert "doc-aa11 or doc-aa22" in run(capsys, folder, "pin", "doc-aa", code=1)
    assert "it has: tiny float32, other bfloat16" in run(capsys, folder, "show", "doc-aa11", "--model", "v3", code=1)
    assert "no document" in run(capsys, folder, "show", "doc-aa11", "--model", "other", code=1)
    for action in ("ls", "gc", "verify"):
        assert "there is no store" in run(capsys, tmp_path / "none", action, code=1)
        assert not (tmp_path / "none").exists()
    assert cli.main(["store"]) == 2
    assert "verify" in capsys.readouterr().out
    assert cli.main(["store", "ls"]) == 2
    assert "--store" in capsys.readouterr().err


ACTIONS = [
    ("ls",),
    ("show", "doc"),
    ("verify",),
    ("verify", "--read-only"),
    ("verify", "--rebuild"),
    ("gc",),
    ("pin", "doc"),
    ("unpin", "doc"),
    ("rm", "doc"),
    ("export", "doc", "out.lrd"),
    ("import", "none.lrd"),
]


@pytest.mark.parametrize("words", ACTIONS, ids=" ".join)
@pytest.mark.parametrize("what", ["missing", "empty", "foreign", "file", "database", "newer"])
def test_what_is_no_store_of_ours_is_told_and_left_as_it_is(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, what: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "place"
    if what == "file":
        place.write_text("x")
    elif what != "missing":
        place.mkdir()
    if what == "foreign":
        (place / "notes.txt").write_text("x")
    if what in ("database", "newer"):
        with closing(sqlite3.connect(place / "index.sqlite")) as made:
            made.execute("CREATE TABLE t (a)")
            if what == "newer":
                made.execute(f"PRAGMA application_id = {0x4C_52_4B_56}")
                made.execute("PRAGMA user_version = 9")
            made.commit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status = cli.main(["store", *words, "--store", str(place)])
    said = capsys.readouterr().err
    assert status in (1, 2) and said.startswith("longread: error: ") and "bug" not in said
    wanted = {"database": "not a Longread store; use another folder", "newer": "of format 9; this version of longread"}
    assert ("none.lrd" if words[0] == "import" else wanted.get(what, "there is no store")) in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_ls_is_whole_in_a_pipe_and_on_a_narrow_terminal(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(capsys, folder, "ls")
    monkeypatch.setattr("longread.plan.tables.PIPED", 60)
    narrow = run(capsys, folder, "ls")
    for cell in ("doc-aa11", "doc-bb33", "novel [2]", "701", "5.1 KiB"):
        assert cell in whole
        assert cell in narrow
    assert max(len(line) for line in narrow.splitlines()[:-1]) <= 60
    assert "…" not in whole + narrow
