"""Document files that somebody made on purpose: whole by their checksums, and refused without a trace in the store."""

import base64
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from recordmaker import SMALL, chain_of

from longread.kv.disk import transfer
from longread.kv.disk.store import DiskStore
from longread.kv.disk.transfer import MAGIC, write_file
from longread.kv.records import DocumentInfo, Layout, Record
from longread.spec.documents import document_id
from longread.spec.errors import DocumentFileError, StoreError

BIG = 2**30
RECORDS = chain_of(range(600))
HALF = Layout(bytes(range(16, 32)), "half", "bfloat16", page_bytes=600, ring_bytes=0)


def info_of(records: list[Record], **fields: object) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    tail = records[-1].key
    info = DocumentInfo(document_id(tail), "novel", "", len(ids) // 4, 4, tail, token_ids=ids, text="text")
    return replace(info, **fields)  # type: ignore[arg-type]


def forge(path: Path, change: Callable[[dict[str, Any]], object], raw: bytes | None = None) -> Path:
    """An export of RECORDS with its description changed and signed again."""
    write_file(path, SMALL, info_of(RECORDS), len(RECORDS), iter(RECORDS))
    data = path.read_bytes()
    size = struct.unpack_from("<HI", data, len(MAGIC))[1]
    begin = len(MAGIC) + 6
    told = json.loads(data[begin : begin + size])
    change(told)
    text = json.dumps(told).encode() if raw is None else raw
    head = MAGIC + struct.pack("<HI", 1, len(text)) + text + xxhash.xxh3_128_digest(text)
    path.write_bytes(head + (data[begin + size + 16 :] if told["records"] else b""))
    return path


def untouched(store: DiskStore) -> bool:
    return not store.documents() and not store.models() and store.stats().file_bytes == 0


def nothing(told: dict[str, Any]) -> None:
    pass


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


FORGED: list[dict[str, Any]] = [
    {"layout": {"page_bytes": 4096}},
    {"layout": {"page_bytes": 0}},
    {"layout": {"dtype": "?"}},
    {"layout": {"label": "tiny [/nope]\x1b[31m"}},
    {"layout": {"label": ""}},
    {"document": {"id": "doc-other"}},
    {"document": {"id": "../../x\x1b]0;pwn\x07"}},
    {"document": {"tail": RECORDS[0].key.hex()}},
    {"document": {"tail": RECORDS[0].key.hex(), "id": document_id(RECORDS[0].key)}},
    {"document": {"name": "evil\x1b]0;pwn\x07"}},
    {"document": {"name": "\udcff"}},
    {"document": {"name": ""}},
    {"document": {"text": "a lone \udcff", "text_bytes": 10}},
    {"document": {"text_bytes": 0}},
    {"document": {"tokens": 2**59}},
    {"document": {"tokens": 599}},
    {"document": {"tokens": True}},
    {"document": {"created": float("inf")}},
    {"document": {"created": float("nan")}},
    {"document": {"created": 10**400}},
    {"document": {"created": -1}},
    {"document": {"token_ids": packed(bytes(2**24))}},  # more than it says
    {"document": {"token_ids": packed(b"\xff" * 2400)}},  # negative
    {"document": {"tokens": 0, "token_ids": packed(b""), "tail": SMALL.root.hex()}, "records": 0},
    {"document": {"text": "EVIL"}, "records": 0},  # 600 tokens are worth records
    {"records": 2**50},
]


@pytest.mark.parametrize("fields", FORGED, ids=range(len(FORGED)))
def test_a_forged_description_leaves_nothing_behind(tmp_path: Path, fields: dict[str, Any]) -> None:
    def change(told: dict[str, Any]) -> None:
        for name, value in fields.items():
            told[name] = told[name] | value if isinstance(value, dict) else value

    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    with pytest.raises(DocumentFileError, match="nothing was imported") as caught:
        store.import_(forge(tmp_path / "forged", change))
    assert str(caught.value).isprintable()
    assert untouched(store)
    store.import_(forge(tmp_path / "honest", nothing))
    assert store.documents()[0].id == info_of(RECORDS).id
    store.close()
    DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG).close()


@pytest.mark.parametrize(
    "raw", [b"[" * 200_000, b'{"layout":' * 200_000, b"[" + b"{}," * 100_000 + b"{}]", b"[" * 900, b'"' + b"\\" * 99]
)
def test_a_description_of_another_shape_is_refused(tmp_path: Path, raw: bytes) -> None:
    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    with pytest.raises(DocumentFileError, match="nothing was imported"):
        store.import_(forge(tmp_path / "forged", nothing, raw))
    assert untouched(store)
    store.close()


def test_ids_are_never_unpacked_beyond_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, unpacking = 0, zlib.decompressobj

    class Watched:
        def __init__(self) -> None:
            self._inner = unpacking()

        def decompress(self, data: bytes, limit: int) -> bytes:
            nonlocal most
            found = self._inner.decompress(data, limit)
            most = max(most, len(found))
            return found

    monkeypatch.setattr(transfer.zlib, "decompressobj", Watched)
    monkeypatch.setattr(transfer.zlib, "decompress", None)
    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    bomb = packed(bytes(2**24))
    with pytest.raises(DocumentFileError):
        store.import_(forge(tmp_path / "forged", lambda told: told["document"].update(token_ids=bomb)))
    assert most == 2401
    store.close()


def test_a_document_that_is_here_is_never_replaced(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    info = info_of(RECORDS, pinned=True, created=5.0)
    store.write(RECORDS, document=info)
    evil = forge(tmp_path / "evil", lambda told: told["document"].update(text="EVIL", name="evil"))
    with pytest.raises(DocumentFileError, match="another text"):
        store.import_(evil)
    store.import_(forge(tmp_path / "renamed", lambda told: told["document"].update(name="other")))
    found = store.document(info.id)
    assert found is not None
    assert (found.text, found.name, found.pinned, found.created) == ("text", "novel", True, 5.0)
    store.close()


@pytest.mark.parametrize("layout", [SMALL, HALF])
@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("low", [0x80, 0xC0])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, layout: Layout, sign: int, low: int) -> None:
    """Little-endian: the last two bytes of a number have its sign, its exponent, and the top of its fraction."""
    records = chain_of(range(600), layout, rings=bool(layout.ring_bytes))
    payload = bytearray(records[1].payload)
    payload[198:200] = bytes([low, sign | 0x7F])
    records[1] = replace(records[1], payload=bytes(payload))
    write_file(tmp_path / "file", layout, info_of(records), len(records), iter(records))
    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    with pytest.raises(DocumentFileError, match="not finite"):
        store.import_(tmp_path / "file")
    assert untouched(store)
    store.close()


@pytest.mark.parametrize(("number", "right"), [(b"\x00\x00\x80\xff", True), (b"\x00\x00\x80\x7f", False)])
def test_a_ring_may_have_minus_infinity_only(tmp_path: Path, number: bytes, right: bool) -> None:
    ring = replace(RECORDS[-1], payload=number + bytes(RECORDS[-1].payload)[4:])
    records = [*RECORDS[:-1], ring]
    write_file(tmp_path / "file", SMALL, info_of(records), len(records), iter(records))
    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    if right:
        store.import_(tmp_path / "file")
    else:
        with pytest.raises(DocumentFileError, match="not finite"):
            store.import_(tmp_path / "file")
    store.close()


def test_a_file_without_records_does_not_settle_the_sizes_of_a_model(tmp_path: Path) -> None:
    short = chain_of(range(20), rings=False)
    forged = replace(SMALL, page_bytes=4096)
    write_file(tmp_path / "short", forged, info_of(short), 0, iter([]))
    store = DiskStore.open(tmp_path / "store", None, max_bytes=BIG)
    store.import_(tmp_path / "short")
    store.export(info_of(short).id, tmp_path / "again")
    store.import_(tmp_path / "again")
    store.import_(forge(tmp_path / "honest", nothing))
    assert [each.layout for each in store.models()] == [SMALL]
    with pytest.raises(StoreError, match="pages of 4096"):
        store.import_(tmp_path / "short")
    store.close()
    DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG).close()


def test_nothing_is_exported_that_no_import_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    for layout, name in ((SMALL, "evil\x1b"), (SMALL, ""), (replace(SMALL, label="x" * 2000), "novel")):
        with pytest.raises(DocumentFileError, match="printable characters"):
            write_file(file, layout, info_of(RECORDS, name=name), len(RECORDS), iter(RECORDS))
    monkeypatch.setattr(transfer, "DESCRIPTION_BYTES_MAX", 400)
    with pytest.raises(DocumentFileError, match="in parts"):
        write_file(file, SMALL, info_of(RECORDS), len(RECORDS), iter(RECORDS))
    assert not list(tmp_path.iterdir())


def test_nothing_is_evicted_for_a_file_that_is_refused(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path / "store", HALF, max_bytes=9000)
    held = chain_of(range(900), HALF, rings=False)
    store.write(held)
    file = forge(tmp_path / "cut", nothing)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DocumentFileError):
        store.import_(file)
    assert all(store.get(each.kind, each.key) for each in held)
    store.close()


def test_times_and_texts_that_cannot_be_are_tolerated(tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    store.write(RECORDS, document=info_of(RECORDS, created=float("inf"), used=1e300))
    assert (store.documents()[0].created, store.documents()[0].used < 1e11) == (0.0, True)
    with pytest.raises(StoreError, match="no Unicode"):
        store.write([], document=info_of(RECORDS, name="\udcff"))
    with pytest.raises(StoreError, match="no Unicode"):
        store.write([], document=info_of(RECORDS, text="\udcff"))
    store.close()
