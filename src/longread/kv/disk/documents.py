"""Documents: named texts and the chains of records that stand for them.

Knows the documents table and how a chain hangs together. Must not know segment files.
"""

import sqlite3
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from longread.kv.disk.catalogue import Catalogue, Types
from longread.kv.disk.eviction import DOCUMENT, Node
from longread.kv.disk.format import RUN_BYTES_MAX
from longread.kv.records import DocumentInfo, chain_key
from longread.spec.errors import DocumentFileError, StoreError
from longread.spec.state import PAGE_TOKENS

_DIGEST_BYTES = 16
ROW_BYTES = 256  # of a document's row beside its text and ids
# What a row counts for against the store's limit: SQLite knows a blob's length without reading it.
_SIZE = f"{ROW_BYTES} + coalesce(length(d.token_ids), 0) + coalesce(length(d.text), 0)"
YEAR_10000 = 253_402_300_800.0  # seconds since 1970
# From a tail (or any key) back to the first page: every run is found under its key, pages by the parent of the next.
_CHAIN = """
WITH RECURSIVE chain (id, key, parent, depth) AS (
    SELECT id, key, parent, depth FROM records WHERE key = ? AND kind <> 2
    UNION ALL
    SELECT r.id, r.key, r.parent, r.depth FROM records r JOIN chain c ON r.key = c.parent AND r.kind = 0
    AND r.depth = c.depth - 1)
"""
# A key and everything after it.
_BELOW = """
WITH RECURSIVE below (key) AS (
    SELECT ? UNION SELECT r.key FROM records r JOIN below b ON r.parent = b.key AND r.kind <> 2)
SELECT key FROM below
"""
_TYPES: Types = (str, str, str, int, int, bytes, int, float, float, bytes)  # of these columns:
_COLUMNS = "d.id, d.name, o.label, d.tokens, d.bytes, d.tail, d.pinned, d.created, d.used, o.root"


@dataclass(frozen=True, slots=True)
class DocumentState:
    """What of a document is in the store: all of it or not, and the bytes of its chain (which others may share). One
    below a page is whole without any record: it is computed faster than a record of it is worth.
    """

    whole: bool
    pages: int
    rings: int
    bytes_stored: int


def enter(write: sqlite3.Connection, root: int, document: DocumentInfo) -> None:
    """Enter a document, or anew: its first creation time stays, and so does a pin. Inside a transaction.

    Raises StoreError for a name or text with lone surrogates, which no encoding has.
    """
    moment = time.time()
    try:
        document.name.encode()
        text = None if document.text is None else _packed(document.text.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"{document.id}: its name or text is no Unicode ({error.reason}); give another") from None
    write.execute(
        "INSERT INTO documents (id, root, name, tokens, bytes, tail, created, used, pinned, token_ids, text) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id, root) DO UPDATE SET name = excluded.name, "
        "tokens = excluded.tokens, bytes = excluded.bytes, tail = excluded.tail, used = excluded.used, "
        "pinned = max(pinned, excluded.pinned), token_ids = excluded.token_ids, text = excluded.text",
        (
            document.id,
            root,
            document.name,
            document.tokens,
            document.text_bytes,
            document.tail,
            document.created or moment,
            document.used or moment,
            int(document.pinned),
            _packed(document.token_ids),
            text,
        ),
    )


def enter_imported(write: sqlite3.Connection, root: int, document: DocumentInfo) -> None:
    """Enter a document that came in a file; one that is here stays as it is. Inside a transaction.

    Raises DocumentFileError if the one here has another content: an id stands for one text for ever.
    """
    sql = "SELECT tail, tokens, bytes, token_ids, text FROM documents WHERE id = ? AND root = ?"
    row = write.execute(sql, (document.id, root)).fetchone()
    if row is None:
        enter(write, root, document)
        return
    text = None if document.text is None else document.text.encode()
    given = (document.tail, document.tokens, document.text_bytes, document.token_ids, text)
    if (*row[:3], _unpacked(row[3]), _unpacked(row[4])) != given:
        raise DocumentFileError(
            f"{document.id} is here with another text; nothing was imported: `longread store rm {document.id}` first "
            f"if the file's is the right one"
        )


def listed(catalogue: Catalogue) -> list[DocumentInfo]:
    """All documents without ids and texts, the newest first. ``used``: of the document or of the end of its chain."""
    sql = f"""
    SELECT {_COLUMNS}, (SELECT max(r.used) FROM records r WHERE r.key = d.tail
        OR r.key = (SELECT t.parent FROM records t WHERE t.key = d.tail AND t.kind <> 2))
    FROM documents d JOIN roots o ON o.id = d.root ORDER BY d.created DESC, d.id"""
    return [_info(row[:10], row[10]) for row in catalogue.query(sql, (), (*_TYPES, int | None))]


def found(catalogue: Catalogue, document: str, root: int, content: bool = True) -> DocumentInfo | None:
    """One document with its ids and text if ``content``, of cache root number ``root``, or (-1) the newest of any.

    Ids or a text that are damaged are left out.
    """
    blobs = "d.token_ids, d.text" if content else "NULL, NULL"
    rows = catalogue.query(
        f"SELECT {_COLUMNS}, {blobs} FROM documents d JOIN roots o ON o.id = d.root "
        f"WHERE d.id = ? AND (d.root = ? OR ? = -1) ORDER BY d.created DESC LIMIT 1",
        (document, root, root),
        (*_TYPES, None, None),
    )
    if not rows:
        return None
    info, ids, text = _info(rows[0][:10], None), _unpacked(rows[0][10]), _unpacked(rows[0][11])
    return DocumentInfo(
        info.id,
        info.name,
        info.label,
        info.tokens,
        info.text_bytes,
        info.tail,
        info.pinned,
        info.created,
        info.used,
        ids or b"",
        None if text is None else _decoded(text),
        info.root,
    )


def set_pinned(write: sqlite3.Connection, document: str, root: int, pinned: bool) -> bool:
    """False: there is no such document. Inside a transaction."""
    sql = "UPDATE documents SET pinned = ? WHERE id = ? AND (root = ? OR ? = -1)"
    return write.execute(sql, (int(pinned), document, root, root)).rowcount > 0


def remove(write: sqlite3.Connection, document: str, root: int) -> list[int] | None:
    """Take a document out, inside a transaction. Returns the numbers of the records to be deleted with it.

    Those are its pages that no other document has, and all that hangs on them (the questions asked about it). None:
    there is no such document.
    """
    where = "WHERE id = ? AND (root = ? OR ? = -1)"
    if not write.execute(f"SELECT 1 FROM documents {where}", (document, root, root)).fetchone():
        return None
    own = _keys(write, where, (document, root, root))
    write.execute(f"DELETE FROM documents {where}", (document, root, root))
    kept = set(_keys(write))
    doomed: dict[bytes, None] = {}
    for key in own:  # from the root on, so that the first takes most others along
        if key not in kept and key not in doomed:
            doomed |= dict.fromkeys(each for (each,) in write.execute(_BELOW, (key,)))
    return [number for key in doomed for (number,) in write.execute("SELECT id FROM records WHERE key = ?", (key,))]


def chain_keys(catalogue: Catalogue, tail: bytes) -> list[tuple[bytes, int]]:
    """Keys and depths from the tail back towards the root, as far as they are there."""
    return catalogue.query(f"{_CHAIN} SELECT key, depth FROM chain ORDER BY depth DESC", (tail,), (bytes, int))


def pinned_keys(catalogue: Catalogue) -> set[bytes]:
    """Every key on the chain of a pinned document, those too that are not there at present."""
    with catalogue.transaction() as write:
        return set(_keys(write, "WHERE pinned"))


def _keys(write: sqlite3.Connection, where: str = "", parameters: tuple[object, ...] = ()) -> list[bytes]:
    """Keys on the chains of documents, from the root on. A chain with a gap is made again from the document's ids."""
    keys: list[bytes] = []
    for number, tail in write.execute(f"SELECT rowid, tail FROM documents {where}", parameters).fetchall():
        chain = write.execute(f"{_CHAIN} SELECT key, depth FROM chain ORDER BY depth", (tail,)).fetchall()
        if not chain or chain[0][1] != 1:
            sql = "SELECT o.root, d.token_ids FROM documents d JOIN roots o ON o.id = d.root WHERE d.rowid = ?"
            parent, packed = write.execute(sql, (number,)).fetchone() or (b"", None)
            ids, chain = _unpacked(packed) or b"", [*chain]
            for start in range(0, len(ids) if isinstance(parent, bytes) else 0, RUN_BYTES_MAX):
                parent = chain_key(parent, ids[start : start + RUN_BYTES_MAX])
                chain.append((parent, 0))
        keys += [key for key, _ in chain]
    return keys


def state(catalogue: Catalogue, document: DocumentInfo, with_rings: bool) -> DocumentState:
    """``with_rings``: whether the document is only usable with a ring behind its tail."""
    rows = catalogue.query(
        f"{_CHAIN} SELECT c.depth, c.key, r.kind, r.size FROM chain c JOIN records r ON r.key = c.key",
        (document.tail,),
        (int, bytes, int, int),
    )
    depths = {depth for depth, _, kind, _ in rows if kind != 2}
    ring = any(kind == 2 and key == document.tail for _, key, kind, _ in rows)
    chained = bool(depths) and depths == set(range(1, max(depths) + 1)) and (ring or not with_rings)
    whole = chained or document.tokens < PAGE_TOKENS
    return DocumentState(whole, len(depths), sum(1 for row in rows if row[2] == 2), sum(size for _, _, _, size in rows))


def bytes_stored(catalogue: Catalogue) -> tuple[int, int]:
    """How many documents there are, and the bytes of their texts and ids in the index."""
    rows = catalogue.query(f"SELECT count(*), coalesce(sum({_SIZE}), 0) FROM documents d", (), (int, int))
    return rows[0][0], rows[0][1]


def most_bytes(document: DocumentInfo) -> int:
    """What entering it takes at most."""
    return ROW_BYTES + document.text_bytes + len(document.token_ids)


def forgettable(catalogue: Catalogue) -> list[Node]:
    """Documents that may go: neither pinned nor whole, or below a page, whose state was never kept. As nodes that stand
    among the records, since by their age it is decided what goes first.
    """
    sql = f"""
    SELECT d.rowid, {_SIZE}, d.used FROM documents d JOIN roots o ON o.id = d.root WHERE NOT d.pinned AND (
        d.tokens < ? OR NOT EXISTS (SELECT 1 FROM records r WHERE r.key = d.tail AND r.kind <> 2)
        OR (o.ring_bytes > 0 AND NOT EXISTS (SELECT 1 FROM records g WHERE g.key = d.tail AND g.kind = 2)))"""
    return [
        Node(number, DOCUMENT, b"document %d" % number, b"", 0, size, int(_moment(used) * 1e6))
        for number, size, used in catalogue.query(sql, (PAGE_TOKENS,), (int, int, float))
    ]


def forget(write: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Take documents out by the numbers of their nodes, inside a transaction."""
    write.executemany("DELETE FROM documents WHERE rowid = ?", [(number,) for number in numbers])


def touch(write: sqlite3.Connection, used: Mapping[str, float]) -> None:
    """Note when documents were asked for by their ids. Inside a transaction."""
    rows = [(moment, ident, moment) for ident, moment in used.items()]
    write.executemany("UPDATE documents SET used = ? WHERE id = ? AND used < ?", rows)


def whole_ones(catalogue: Catalogue) -> set[tuple[str, bytes]]:
    """Ids and cache roots of all documents that are ``whole`` as ``state`` has it, in one pass over their chains."""
    sql = """
    WITH RECURSIVE chain (document, key, parent, depth) AS (
        SELECT d.rowid, r.key, r.parent, r.depth FROM documents d JOIN records r ON r.key = d.tail AND r.kind <> 2
        UNION ALL
        SELECT c.document, r.key, r.parent, r.depth FROM records r JOIN chain c ON r.key = c.parent AND r.kind = 0
        AND r.depth = c.depth - 1)
    SELECT d.id, o.root FROM documents d JOIN roots o ON o.id = d.root WHERE d.tokens < ? OR (
        1 = (SELECT min(c.depth) FROM chain c WHERE c.document = d.rowid) AND (o.ring_bytes = 0
            OR EXISTS (SELECT 1 FROM records g WHERE g.key = d.tail AND g.kind = 2)))"""
    return {(row[0], row[1]) for row in catalogue.query(sql, (PAGE_TOKENS,), (str, bytes))}


def _info(row: tuple, used: int | None) -> DocumentInfo:
    ident, name, label, tokens, text_bytes, tail, pinned, created, at, root = row
    last = max(_moment(at), _moment((used or 0) / 1e6))
    return DocumentInfo(ident, name, label, tokens, text_bytes, tail, bool(pinned), _moment(created), last, root=root)


def _moment(seconds: float) -> float:
    """A time that can be shown: 0 for one that is not a number, or beyond the year 9999 (a damaged index)."""
    return seconds if 0 <= seconds < YEAR_10000 else 0.0


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _packed(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data) + zlib.compress(data, 6)


def _unpacked(data: bytes | None) -> bytes | None:
    if not isinstance(data, bytes) or len(data) < _DIGEST_BYTES:
        return None
    try:
        plain = zlib.decompress(data[_DIGEST_BYTES:])
    except zlib.error:
        return None
    return plain if xxhash.xxh3_128_digest(plain) == data[:_DIGEST_BYTES] else None
