"""One document as one file: written from a store, checked whole, entered into another.

Knows the file's format and the chain of a document. Must not know how a store commits.

Format: MAGIC, version (uint16), length of the description (uint32), the description (JSON: layout, document, number
of records), its xxh3-128, then the records as they lie in segments, from the root to the tail, nothing after. A
document below one page may have no records.

What can be checked is checked: sizes, order, that id and tail are the hash of the token ids, that rows are finite.
What cannot: that the numbers of a payload and the text are those of the ids; whoever made the file is trusted for them.
"""

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from longread.kv.disk.catalogue import UNKNOWN
from longread.kv.disk.documents import YEAR_10000
from longread.kv.disk.format import HEADER_BYTES, RUN_BYTES_MAX, Head, fault, is_whole, pack, parse
from longread.kv.records import ID_BYTES, DocumentInfo, Layout, Record, chain_key
from longread.spec.documents import document_id
from longread.spec.errors import DocumentFileError
from longread.spec.state import PAGE_TOKENS

MAGIC = b"LONGREAD DOCUMENT\n"
VERSION = 1
_SIZES = struct.Struct("<HI")
DESCRIPTION_BYTES_MAX = 2**28
SKELETON_BYTES_MAX = 4096  # of a description without its strings: bounds how deep and how many its values can be
LABEL_MAX = 1024  # characters of a name or label; a document of a file may be called by its path
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# Little-endian unsigned view of one number of a layout's dtype, and its exponent bits: all of them set is no number.
_EXPONENT = {"float32": ("<u4", 0x7F80_0000), "bfloat16": ("<u2", 0x7F80)}
_MINUS_INFINITY = 0xFF80_0000  # float32
RINGS_BACK = 2  # pages before the tail whose rings go along: landing points for a question that begins differently


@dataclass(frozen=True, slots=True)
class Description:
    """What a document file says of itself."""

    layout: Layout
    document: DocumentInfo
    records: int


def write_file(path: Path, layout: Layout, document: DocumentInfo, records: int, source: Iterator[Record]) -> int:
    """Write a document file, for its owner alone; it appears under its name only when it is complete. Returns its
    bytes. Raises OSError; DocumentFileError for what no import would take.
    """
    text = json.dumps(_described(layout, document, records)).encode()
    if len(text) > DESCRIPTION_BYTES_MAX:
        raise DocumentFileError(
            f"{document.id}: its text and ids take {len(text):,} bytes, a document file has room for "
            f"{DESCRIPTION_BYTES_MAX:,}: ingest it in parts"
        )
    for called in (layout.label, document.name):
        try:
            _shown(called)
        except ValueError as error:
            raise DocumentFileError(
                f"{document.id} cannot be exported with such {error}; ingest it again under another (--name)"
            ) from None
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
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
    file_bytes = os.fstat(file.fileno()).st_size
    if size > min(DESCRIPTION_BYTES_MAX, file_bytes):
        raise _damaged(path, f"a description of {size:,} bytes")
    text = _exactly(file, size, path)
    if xxhash.xxh3_128_digest(text) != _exactly(file, 16, path):
        raise _damaged(path, "its description does not match its checksum")
    if len(_STRING.sub(b"", text)) > SKELETON_BYTES_MAX:
        raise _damaged(path, "its description has more in it than a description has")
    try:
        return _read_back(json.loads(text), file_bytes)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
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
    if not _finite(layout.dtype, head.kind, payload):
        raise _damaged(path, f"record {number} ({head.kind}) has values that are not finite")
    return Record(head.kind, head.key, head.parent, head.depth, run, payload), head.size


def _finite(dtype: str, kind: str, payload: bytes) -> bool:
    """Whether a payload has only numbers that a cache can have.

    Rows are all of the layout's dtype. Rings have float32 parts too (scores and maxima that begin at minus infinity):
    under bfloat16 nothing here says where those begin, so they are checked under float32 only.
    """
    if kind == "ring" and dtype != "float32":
        return True
    unsigned, exponent = _EXPONENT[dtype]
    bits = np.frombuffer(payload, unsigned, count=len(payload) // np.dtype(unsigned).itemsize)
    odd = bits[(bits & exponent) == exponent]
    return not odd.size or (kind == "ring" and bool((odd == _MINUS_INFINITY).all()))


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


def _read_back(data: Mapping, file_bytes: int) -> Description:
    """Raises KeyError, TypeError or ValueError for anything missing, of another kind, or that contradicts the rest."""
    fields, given, records = data["layout"], data["document"], data["records"]
    root, tail = bytes.fromhex(fields["root"]), bytes.fromhex(given["tail"])
    sizes = (fields["page_bytes"], fields["ring_bytes"], given["tokens"], given["text_bytes"], records)
    if len(root) != 16 or len(tail) != 16 or not all(type(size) is int and 0 <= size < 2**60 for size in sizes):
        raise ValueError("a key or a size")
    unknown = fields["dtype"] == UNKNOWN and not records  # a short document of a model that only files told of
    if not (fields["dtype"] in _EXPONENT or unknown) or not fields["page_bytes"]:
        raise ValueError("the kind of number that its model computes in")
    if given["id"] != document_id(tail):
        raise ValueError("its id: it is not that of its tail")
    created, text = given["created"], given["text"]
    if type(created) not in (int, float) or not 0 <= created < YEAR_10000:
        raise ValueError("the time of its creation")
    if not isinstance(text, str | None) or (text is not None and len(text.encode()) != given["text_bytes"]):
        raise ValueError("its text, which is not of the size it says")
    layout = Layout(root, _shown(fields["label"]), fields["dtype"], fields["page_bytes"], fields["ring_bytes"])
    document = DocumentInfo(
        given["id"],
        _shown(given["name"]),
        layout.label,
        given["tokens"],
        given["text_bytes"],
        tail,
        created=float(created),
        token_ids=_ids(given["token_ids"], given["tokens"], records, file_bytes),
        text=text,
        root=root,
    )
    return Description(layout, document, records)


def _shown(text: object) -> str:
    """A name or label. Raises ValueError if it could not be shown on one line of any terminal."""
    if not isinstance(text, str) or not 0 < len(text) <= LABEL_MAX or not text.isprintable():
        raise ValueError(f"a name or label: it must have 1 to {LABEL_MAX} printable characters")
    return text


def _ids(packed: str, tokens: int, records: int, file_bytes: int) -> bytes:
    """Token ids, unpacked to the size that they must have: each of them is in a record of the file too."""
    if not 0 < tokens * ID_BYTES <= (file_bytes if records else RUN_BYTES_MAX - ID_BYTES):
        raise ValueError("the number of its tokens")
    unpacking = zlib.decompressobj()
    ids = unpacking.decompress(base64.b64decode(packed), tokens * ID_BYTES + 1)
    if len(ids) != tokens * ID_BYTES or not unpacking.eof or unpacking.unused_data:
        raise ValueError("its token ids, which are not as many as it says")
    if int(np.frombuffer(ids, "<i4").min()) < 0:
        raise ValueError("its token ids: one is negative")
    return ids
