"""One document as one file: written from a store, checked whole, entered into another.

Knows the file's format and the chain of a document. Must not know how a store commits.

Format: MAGIC, version (uint16), length of the description (uint32), the description (JSON: layout, document, number
of records), its xxh3-128, then the records as they lie in segments, from the root to the tail, nothing after. A
document below one page may have no records.
"""

import base64
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from longread.kv.disk.format import HEADER_BYTES, RUN_BYTES_MAX, Head, fault, is_whole, pack, parse
from longread.kv.records import DocumentInfo, Layout, Record, chain_key
from longread.spec.errors import DocumentFileError
from longread.spec.state import PAGE_TOKENS

MAGIC = b"LONGREAD DOCUMENT\n"
VERSION = 1
_SIZES = struct.Struct("<HI")
DESCRIPTION_BYTES_MAX = 2**30
RINGS_BACK = 2  # pages before the tail whose rings go along: landing points for a question that begins differently


@dataclass(frozen=True, slots=True)
class Description:
    """What a document file says of itself."""

    layout: Layout
    document: DocumentInfo
    records: int


def write_file(path: Path, layout: Layout, document: DocumentInfo, records: int, source: Iterator[Record]) -> int:
    """Write a document file, for its owner alone; it appears under its name only when it is complete. Returns its
    bytes. Raises OSError.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            text = json.dumps(_described(layout, document, records)).encode()
            file.write(MAGIC + _SIZES.pack(VERSION, len(text)) + text + xxhash.xxh3_128_digest(text))
            for record in source:
                file.write(pack(record, layout.root))
                file.write(record.payload)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def read_description(file: BinaryIO, path: Path) -> Description:
    """The beginning of a document file. Raises DocumentFileError."""
    if file.read(len(MAGIC)) != MAGIC:
        raise DocumentFileError(f"{path}: not a document that `longread store export` wrote")
    version, size = _SIZES.unpack(_exactly(file, _SIZES.size, path))
    if version != VERSION:
        raise DocumentFileError(
            f"{path}: a document file of format {version}; this version of longread reads format {VERSION}: export it "
            f"again with this version"
        )
    if size > DESCRIPTION_BYTES_MAX:
        raise _damaged(path, f"a description of {size:,} bytes")
    text = _exactly(file, size, path)
    if xxhash.xxh3_128_digest(text) != _exactly(file, 16, path):
        raise _damaged(path, "its description does not match its checksum")
    try:
        return _read_back(json.loads(text))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise _damaged(path, f"its description lacks or garbles {error}") from None


def read_records(file: BinaryIO, path: Path, description: Description) -> Iterator[Record]:
    """The records, each checked before it is given: checksum, identity, order, sizes, and that the runs are the
    document's ids. Whoever consumes them must not keep any until the iterator has ended without DocumentFileError.
    """
    layout, document = description.layout, description.document
    left = os.fstat(file.fileno()).st_size - file.tell()
    key, depth, ids = layout.root, 0, bytearray()
    for number in range(description.records):
        record, size = _one(file, path, layout, left, number)
        left -= size
        if record.kind == "ring":
            if record.key != key:
                raise _damaged(path, f"record {number} is a ring that belongs to no page before it")
        else:
            if record.parent != key or record.depth != depth + 1 or len(ids) != depth * PAGE_TOKENS * 4:
                raise _damaged(path, f"record {number} does not follow the one before it")
            key, depth = record.key, record.depth
            ids += record.run
        yield record
    if left:
        raise _damaged(path, f"{left:,} bytes too many")
    if not description.records and len(document.token_ids) < RUN_BYTES_MAX:  # too short to have been worth a record
        key, ids = chain_key(layout.root, document.token_ids), bytearray(document.token_ids)
    if key != document.tail or bytes(ids) != document.token_ids:
        raise _damaged(path, "its records are not those of its document")


def _one(file: BinaryIO, path: Path, layout: Layout, left: int, number: int) -> tuple[Record, int]:
    header = _exactly(file, HEADER_BYTES, path)
    head: Head | None = parse(header)
    if head is None or head.size > left:
        raise _damaged(path, f"record {number} has no sound header")
    if head.root != layout.root or head.payload_bytes != layout.payload_bytes(head.kind):
        raise _damaged(path, f"record {number} is of another model or format than the file")
    run = _exactly(file, head.run_bytes, path)
    payload = _exactly(file, head.payload_bytes, path)
    if not is_whole(header, run, payload):
        raise _damaged(path, f"record {number} ({head.kind}) does not match its checksum")
    wrong = fault(head.kind, head.key, head.parent, head.depth, run)
    if wrong is not None:
        raise _damaged(path, f"record {number}: {wrong}")
    return Record(head.kind, head.key, head.parent, head.depth, run, payload), head.size


def _exactly(file: BinaryIO, size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise _damaged(path, "it ends too early")
    return data


def _damaged(path: Path, what: str) -> DocumentFileError:
    return DocumentFileError(f"{path}: damaged: {what}; nothing was imported: copy or export it again")


def _described(layout: Layout, document: DocumentInfo, records: int) -> dict[str, object]:
    return {
        "layout": {
            "root": layout.root.hex(),
            "label": layout.label,
            "dtype": layout.dtype,
            "page_bytes": layout.page_bytes,
            "ring_bytes": layout.ring_bytes,
        },
        "document": {
            "id": document.id,
            "name": document.name,
            "tokens": document.tokens,
            "text_bytes": document.text_bytes,
            "tail": document.tail.hex(),
            "created": document.created,
            "token_ids": base64.b64encode(zlib.compress(document.token_ids)).decode(),
            "text": document.text,
        },
        "records": records,
    }


def _read_back(data: Mapping) -> Description:
    """Raises KeyError, TypeError or ValueError for anything missing or of another kind."""
    layout, document = data["layout"], data["document"]
    root, tail = bytes.fromhex(layout["root"]), bytes.fromhex(document["tail"])
    sizes = (layout["page_bytes"], layout["ring_bytes"], document["tokens"], document["text_bytes"], data["records"])
    if len(root) != 16 or len(tail) != 16 or not all(type(size) is int and 0 <= size < 2**60 for size in sizes):
        raise ValueError("a key or a size")
    texts = (layout["label"], layout["dtype"], document["id"], document["name"])
    if not all(isinstance(text, str) for text in texts) or not isinstance(document["text"], str | None):
        raise ValueError("a text")
    return Description(
        Layout(root, layout["label"], layout["dtype"], layout["page_bytes"], layout["ring_bytes"]),
        DocumentInfo(
            document["id"],
            document["name"],
            layout["label"],
            document["tokens"],
            document["text_bytes"],
            tail,
            created=float(document["created"]),
            token_ids=zlib.decompress(base64.b64decode(document["token_ids"])),
            text=document["text"],
            root=root,
        ),
        data["records"],
    )
