"""The index over the segments: an SQLite database in WAL mode, shared by all processes of a host.

Knows rows and transactions. Must not know segment files beyond their names and lengths, nor what to evict.

Look-ups, scans and writes have a connection each, so that a look-up waits for neither a commit nor a long scan. A write
is one transaction. The record in its segment is the truth: a row that contradicts it, or itself, is a miss.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import UnionType

from longread.kv.disk.ahead import Spot
from longread.kv.disk.format import HEADER_BYTES, Head, fault
from longread.kv.disk.keys import BATCH, Keys
from longread.kv.disk.segments import Place, is_segment_name
from longread.kv.records import CONTENT_ROOT, KINDS, Kind, Known, Layout, Record, chain_key
from longread.spec.errors import StoreDamagedError, StoreError, StoreFullError, StoreReadOnlyError, StoreVersionError

APPLICATION = 0x4C_52_4B_56  # "LRKV" in the file's header: what tells a store from any other SQLite file
SCHEMA = 1
BUSY_SECONDS = 10.0
RING = KINDS.index("ring")
TAIL = KINDS.index("tail")
Types = Sequence[type | UnionType | None]
LAYOUT_TYPES: Types = (int, bytes, str, str, int, int)
UNKNOWN = "?"  # dtype of a root whose description was lost with a damaged index
CACHED_ROWS = 16_384  # of about 1.5 KB each

_TABLES = """
CREATE TABLE roots (
    id INTEGER PRIMARY KEY, root BLOB NOT NULL UNIQUE, label TEXT NOT NULL, dtype TEXT NOT NULL,
    page_bytes INTEGER NOT NULL, ring_bytes INTEGER NOT NULL);
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, root INTEGER NOT NULL, kind INTEGER NOT NULL, key BLOB NOT NULL,
    parent BLOB NOT NULL, depth INTEGER NOT NULL, content BLOB, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    size INTEGER NOT NULL, used INTEGER NOT NULL, UNIQUE (key, kind));
CREATE INDEX records_by_parent ON records (parent);
CREATE INDEX records_by_content ON records (content) WHERE content IS NOT NULL;
CREATE INDEX records_by_segment ON records (segment, size);
CREATE TABLE runs (record INTEGER PRIMARY KEY, run BLOB NOT NULL);
CREATE TABLE documents (
    id TEXT NOT NULL, root INTEGER NOT NULL, name TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    tail BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL, pinned INTEGER NOT NULL,
    token_ids BLOB NOT NULL, text BLOB, PRIMARY KEY (id, root));
"""
# The long runs have a table of their own, so that what eviction scans stays small.
_ROWS = """
SELECT r.id, r.kind, r.key, r.parent, r.depth, coalesce(u.run, x''), s.name, r.offset, r.size,
       EXISTS (SELECT 1 FROM records g WHERE g.key = r.key AND g.kind = 2), s.bytes
FROM records r JOIN segments s ON s.id = r.segment LEFT JOIN runs u ON u.record = r.id
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An index row: what is known of a record, and where it lies."""

    id: int
    known: Known
    place: Place


def now() -> int:
    """Microseconds since 1970, the unit of ``used``."""
    return time.time_ns() // 1000


class Catalogue:
    """Index rows by key, parent and content. Safe from any thread."""

    def __init__(self, path: Path, read_only: bool, may_make: bool = True):
        """Without ``may_make`` an index with no tables is damaged, not new. Raises StoreError and its kinds."""
        self.path = path
        self.read_only = read_only
        self._unsound: set[int] = set()  # rows found that cannot be what was written, to be deleted by the next write
        self._unsound_lock = threading.Lock()  # look-ups and scans add, on threads of their own
        self._read_lock = threading.Lock()
        self._scan_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._cache: dict[tuple[int, bytes], Row] = {}
        self._keys = Keys()
        self._version = -1
        with translated(path), ExitStack() as opened:
            self._writer = None
            if not read_only:
                if may_make:
                    _make_file(path)
                self._writer = opened.enter_context(closing(_connect(path, write=True)))
                if may_make:
                    _prepare(self._writer)
            self._reader = opened.enter_context(closing(_connect_reader(path, not read_only)))
            self._scanner = opened.enter_context(closing(_connect_reader(path, not read_only)))
            if not may_make and not _has_tables(self._reader):
                raise damaged(path, "it is empty, and there are records")
            _check_schema(self._reader, path)
            opened.pop_all()

    def close(self) -> None:
        with self._write_lock, self._scan_lock, self._read_lock, translated(self.path):
            self._reader.close()
            self._scanner.close()
            if self._writer is not None:
                self._writer.close()

    def into_one_file(self) -> None:
        """Put all that was committed into the database itself, on the disk, so that the file can be renamed."""
        with self._write_lock, translated(self.path):
            if self._writer is None:
                return
            busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if busy:
                raise StoreError(f"{self.path}: somebody else has it open; try again")

    def shorten_log(self) -> None:
        """Begin the log anew if nobody reads in it: the next transaction then has the room of the last ones."""
        with self._write_lock, translated(self.path):
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: all of it or nothing. Raises StoreError."""
        with self._write_lock, translated(self.path):
            if self._writer is None:
                raise StoreReadOnlyError(f"{self.path.parent}: the store was opened for reading only")
            with _all_or_nothing(self._writer):
                yield self._writer

    def query(self, sql: str, parameters: Sequence[object] = (), types: Types | None = None) -> list[tuple]:
        """All rows of a read, each value of its type (None: any). Raises StoreError; StoreDamagedError for another."""
        with self._scan_lock, translated(self.path):
            rows = self._scanner.execute(sql, parameters).fetchall()
        if types is not None:
            for row in rows:
                for value, wanted in zip(row, types, strict=True):
                    if wanted is not None and not isinstance(value, wanted):
                        raise damaged(self.path, f"it has {str(value)[:40]!r} where {wanted} belongs")
        return rows

    def get(self, kind: Kind, key: bytes) -> Row | None:
        number = KINDS.index(kind)
        with self._read_lock, translated(self.path):
            self._refresh()
            row = self._cache.get((number, key))
            if row is None:
                found = self._reader.execute(_ROWS + "WHERE r.key = ? AND r.kind = ?", (key, number)).fetchone()
                row = self._accept(found) if found else None
            return row

    def get_many(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows of those keys that are there."""
        number, rows = KINDS.index(kind), {}
        with self._read_lock, translated(self.path):
            self._refresh()
            missing = []
            for key in keys:
                row = self._cache.get((number, key))
                if row is None:
                    missing.append(key)
                else:
                    rows[key] = row
            for start in range(0, len(missing), BATCH):
                part = missing[start : start + BATCH]
                marks = ",".join("?" * len(part))
                sql = f"{_ROWS}WHERE r.key IN ({marks}) AND r.kind = {number}"
                for found in self._reader.execute(sql, part):
                    row = self._accept(found)
                    if row is not None:
                        rows[row.known.key] = row
        return rows

    def numbers(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The numbers of the rows of those keys that are there: a small part of the time of ``get_many``, and a row
        that contradicts itself is among them until somebody has read it whole.
        """
        with self._read_lock, translated(self.path):
            self._refresh()
            found = self._keys.numbers(self._reader, kind, keys)
        return {key: number for key, number in found.items() if number not in self._unsound}

    def spots(self, kind: Kind, keys: Sequence[bytes]) -> list[Spot]:
        """Where the records of those keys lie that are there, in any order: what is needed to read them."""
        with self._read_lock, translated(self.path):
            self._refresh()
            found = list(self._keys.spots(self._reader, kind, keys))
        for each in found:
            if not isinstance(each, Spot):
                self._note_unsound(each)
        return [each for each in found if isinstance(each, Spot)]

    def nearest(self, parent: bytes, ahead: bytes) -> list[Row]:
        """The pages and tails after ``parent`` whose runs stand next to ``ahead`` in the order of bytes, on both sides:
        however many there are, one of these two shares the longest beginning with it.
        """
        where = f"WHERE r.parent = ? AND r.kind <> {RING}"
        found: list[tuple] = []
        with self._read_lock, translated(self.path):
            self._refresh()
            for side, order in (("<=", "DESC"), (">", "ASC")):
                sql = f"{_ROWS}{where} AND u.run {side} ? ORDER BY u.run {order} LIMIT 1"
                found += self._reader.execute(sql, (parent, ahead)).fetchall()
            rows = [self._accept(each) for each in found]
        return [row for row in rows if row is not None]

    def tails(self, ahead: Mapping[bytes, bytes]) -> list[Row]:
        """Tails with a ring after any parent of ``ahead``, whose run is a beginning of what is ahead there."""
        rows, asked = [], list(ahead.items())
        with self._read_lock, translated(self.path):
            self._refresh()
            for start in range(0, len(asked), BATCH // 2):
                part = asked[start : start + BATCH // 2]
                values = ",".join(["(?, ?)"] * len(part))
                sql = (
                    f"WITH asked (parent, ahead) AS (VALUES {values}) {_ROWS}JOIN asked a ON r.parent = a.parent "
                    f"WHERE r.kind = {TAIL} AND u.run = substr(a.ahead, 1, length(u.run)) "
                    f"AND EXISTS (SELECT 1 FROM records g WHERE g.key = r.key AND g.kind = {RING})"
                )
                found = self._reader.execute(sql, [value for pair in part for value in pair]).fetchall()
                rows += [row for row in map(self._accept, found) if row is not None]
        return rows

    def every(self, where: str = "1", parameters: Sequence[object] = ()) -> Iterator[Row]:
        """All rows that make sense, in the order in which they lie on the disk; not cached."""
        after = (-1, -1)
        while True:
            with self._scan_lock, translated(self.path):
                sql = f"{_ROWS}WHERE (r.segment, r.offset) > (?, ?) AND {where} ORDER BY r.segment, r.offset LIMIT 256"
                sql = sql.replace("SELECT r.id", "SELECT r.segment, r.id", 1)
                found = self._scanner.execute(sql, (*after, *parameters)).fetchall()
            if not found:
                return
            after = (found[-1][0], found[-1][8])
            for each in found:
                row = row_of(each[1:])
                if row is not None:
                    yield row
                else:
                    self._note_unsound(each[1])

    def root_id(self, layout: Layout) -> int:
        """The number of a cache root, entered if it is new; -1 if it is new and nothing can be entered.

        Raises StoreError if it is known with other sizes.
        """
        sql = "SELECT id, page_bytes, ring_bytes, dtype FROM roots WHERE root = ?"
        types = (int, int, int, str)
        found = self.query(sql, (layout.root,), types)
        if not self.read_only and (not found or found[0][3] == UNKNOWN):
            with self.transaction() as write:
                write.execute(
                    "INSERT INTO roots (root, label, dtype, page_bytes, ring_bytes) VALUES (?, ?, ?, ?, ?) ON CONFLICT "
                    "(root) DO UPDATE SET label = excluded.label, dtype = excluded.dtype, "
                    "page_bytes = excluded.page_bytes, ring_bytes = excluded.ring_bytes WHERE dtype = ?",
                    (layout.root, layout.label, layout.dtype, layout.page_bytes, layout.ring_bytes, UNKNOWN),
                )
            found = self.query(sql, (layout.root,), types)
        if not found:
            return -1
        if found[0][1:3] != (layout.page_bytes, layout.ring_bytes):
            raise StoreError(
                f"{self.path.parent}: the store has {layout.label} with pages of {found[0][1]} and rings of "
                f"{found[0][2]} bytes, this process makes {layout.page_bytes} and {layout.ring_bytes}; "
                f"use another store folder"
            )
        return int(found[0][0])

    def layouts(self) -> dict[int, Layout]:
        sql = "SELECT id, root, label, dtype, page_bytes, ring_bytes FROM roots"
        return {row[0]: Layout(*row[1:]) for row in self.query(sql, (), LAYOUT_TYPES)}

    @property
    def unsound(self) -> int:
        """Rows that were found unsound and wait to be deleted."""
        return len(self._unsound)

    def take_unsound(self) -> set[int]:
        """Their numbers, once."""
        with self._unsound_lock:
            taken, self._unsound = self._unsound, set()
        return taken

    def _note_unsound(self, number: object) -> None:
        if isinstance(number, int):
            with self._unsound_lock:
                self._unsound.add(number)

    def _refresh(self) -> None:
        """Forget cached rows once anybody has committed anything: another process may have dropped them."""
        version = self._reader.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._cache.clear()
            self._keys.forget()

    def _accept(self, found: tuple) -> Row | None:
        row = row_of(found)
        if row is None:
            self._note_unsound(found[0])
            return None
        if len(self._cache) >= CACHED_ROWS:
            self._cache.clear()
        self._cache[found[1], row.known.key] = row
        return row


def agrees(row: Row, head: Head, run: bytes) -> bool:
    """Whether the record that lies at a row's place is the one that the row means."""
    known = row.known
    return (head.kind, head.key, head.parent, head.depth, run) == (
        known.kind,
        known.key,
        known.parent,
        known.depth,
        known.run,
    )


def row_of(found: tuple) -> Row | None:
    """A row as the queries above give it; None if it contradicts itself (bits of the database have changed)."""
    number, kind, key, parent, depth, run, name, offset, size, has_ring, length = found
    # Spelt out, since this runs for each page of a prompt that is looked up.
    if not (isinstance(number, int) and isinstance(kind, int) and isinstance(depth, int) and isinstance(name, str)):
        return None
    if not (isinstance(offset, int) and isinstance(size, int) and isinstance(length, int)):
        return None
    if not (isinstance(key, bytes) and isinstance(parent, bytes) and isinstance(run, bytes)):
        return None
    if not 0 <= kind < len(KINDS) or fault(KINDS[kind], key, parent, depth, run) is not None:
        return None
    if offset < 0 or not HEADER_BYTES + len(run) <= size <= length - offset or not is_segment_name(name):
        return None
    known = Known(KINDS[kind], key, parent, depth, run, bool(has_ring))
    return Row(number, known, Place(name, offset, size))


def enter_imported_root(write: sqlite3.Connection, layout: Layout, records: int) -> int:
    """The number of a cache root that a file tells of, entered if it is new. Inside a transaction.

    Without records nothing shows that the file's sizes are the model's: they are entered as unknown, for the first
    process that has the model to correct. Raises StoreError if the root is known with other sizes.
    """
    write.execute(
        "INSERT INTO roots (root, label, dtype, page_bytes, ring_bytes) VALUES (?, ?, ?, ?, ?) ON CONFLICT (root) DO "
        "UPDATE SET label = excluded.label, dtype = excluded.dtype, page_bytes = excluded.page_bytes, ring_bytes = "
        "excluded.ring_bytes WHERE dtype = ? AND NOT EXISTS (SELECT 1 FROM records r WHERE r.root = roots.id)",
        (
            layout.root,
            layout.label,
            layout.dtype if records else UNKNOWN,
            layout.page_bytes,
            layout.ring_bytes,
            UNKNOWN,
        ),
    )
    sql = "SELECT id, page_bytes, ring_bytes FROM roots WHERE root = ?"
    number, page_bytes, ring_bytes = write.execute(sql, (layout.root,)).fetchone()
    if (page_bytes, ring_bytes) != (layout.page_bytes, layout.ring_bytes):
        raise StoreError(
            f"the file has {layout.label} with pages of {layout.page_bytes} and rings of {layout.ring_bytes} bytes, "
            f"the store has it with {page_bytes} and {ring_bytes}; nothing was imported: export it again where the "
            f"model of this store has read it"
        )
    return int(number)


def enter_segments(write: sqlite3.Connection, lengths: Mapping[str, int]) -> dict[str, int]:
    """Enter segments with the lengths that are committed; returns their numbers. Inside a transaction."""
    numbers: dict[str, int] = {}
    for name, size in lengths.items():
        write.execute(
            "INSERT INTO segments (name, bytes) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET bytes = excluded.bytes",
            (name, size),
        )
        numbers[name] = write.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()[0]
    return numbers


def insert(
    write: sqlite3.Connection, root: int, placed: Iterable[tuple[Record, Place]], lengths: Mapping[str, int]
) -> int:
    """Enter records and the lengths of their segments, inside a transaction. Returns the bytes that are new: what
    another process has entered meanwhile stays its own.
    """
    segments = enter_segments(write, lengths)
    contents: dict[bytes, bytes | None] = {}
    beginning = write.execute("SELECT root FROM roots WHERE id = ?", (root,)).fetchone()[0]
    used, total = now(), 0
    for record, place in placed:
        content = _content(write, contents, record, beginning)
        done = write.execute(
            "INSERT INTO records (root, kind, key, parent, depth, content, segment, offset, size, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, kind) DO NOTHING",
            (
                root,
                KINDS.index(record.kind),
                record.key,
                record.parent,
                record.depth,
                content,
                segments[place.segment],
                place.offset,
                place.size,
                used,
            ),
        )
        if done.rowcount:
            total += place.size
            if record.run:
                write.execute("INSERT INTO runs (record, run) VALUES (?, ?)", (done.lastrowid, record.run))
    return total


def delete(write: sqlite3.Connection, numbers: Sequence[int]) -> int:
    """Take records out of the index, inside a transaction. Returns how many were there."""
    rows = [(number,) for number in numbers]
    write.executemany("DELETE FROM runs WHERE record = ?", rows)
    return max(write.executemany("DELETE FROM records WHERE id = ?", rows).rowcount, 0)


def _content(
    write: sqlite3.Connection, contents: dict[bytes, bytes | None], record: Record, root: bytes
) -> bytes | None:
    """The content key of a page or tail; None for a ring, where the page before it has none, and under a salted root:
    no other model may tell that its text was read.
    """
    if record.kind == "ring":
        return None
    before = CONTENT_ROOT if record.parent == root else None
    if record.depth > 1:
        if record.parent not in contents:
            found = write.execute("SELECT content FROM records WHERE key = ? AND kind = 0", (record.parent,)).fetchone()
            contents[record.parent] = found[0] if found else None
        before = contents[record.parent]
    contents[record.key] = None if before is None else chain_key(before, record.run)
    return contents[record.key]


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's and the system's errors as ours, with what to do next."""
    folder = path.parent
    try:
        yield
    except UnicodeDecodeError as error:  # what sqlite3 raises when it quotes damaged SQL in a message
        raise damaged(path, error) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # What the index's users share in memory is a file, too: without room for it SQLite has an I/O error to tell of.
        if code == sqlite3.SQLITE_FULL or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE:
            raise StoreFullError(f"{folder}: the disk is full; free space, or give the store a smaller size") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path, error) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise StoreReadOnlyError(f"{folder}: the store cannot be written to ({error})") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreError(
                f"{folder}: another process has kept the index locked for {BUSY_SECONDS:.0f} s; try again"
            ) from error
        raise StoreError(f"{path}: {error}") from error


def damaged(path: Path, error: object) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path}: the index is damaged ({error}); `longread store verify --rebuild --store {path.parent}` makes it "
        f"anew from the records"
    )


def check_marks(path: Path) -> None:
    """Raises StoreVersionError for a database that is not of this program and version, StoreDamagedError for one that
    cannot be read. One that is not there, or has no tables yet, is neither.
    """
    if path.is_file():
        with translated(path), closing(_connect_reader(path, writable=False)) as reader:
            if _has_tables(reader):
                _check_schema(reader, path)


def _make_file(path: Path) -> None:
    """For its owner alone; SQLite gives the files that it puts beside it the same mode. One that is there is not even
    opened: closing it would let go of the locks that SQLite holds on it in this process.
    """
    if not path.exists():
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _connect(path: Path, *, write: bool, immutable: bool = False) -> sqlite3.Connection:
    mode = "rwc" if write else "ro"
    uri = f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if immutable else ''}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    with ExitStack() as undo:
        undo.callback(connection.close)
        # Sorting and temporary tables stay in memory: the disk may be full or read-only.
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cell_size_check = ON")
        if write:
            connection.execute("PRAGMA journal_mode = WAL")
            # A power cut must not bring back rows whose segments were deleted after the commit.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA fullfsync = ON")  # macOS only: through the drive's cache, as locks.sync_data
        undo.pop_all()
    return connection


def _connect_reader(path: Path, writable: bool) -> sqlite3.Connection:
    reader = _connect(path, write=False)
    try:
        reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        return reader
    except sqlite3.OperationalError:
        reader.close()
        log = path.with_name(path.name + "-wal")
        if writable or (log.exists() and log.stat().st_size):
            raise
        # A folder that nobody can write to has no place for WAL's shared memory; with no log left, none is needed.
        return _connect(path, write=False, immutable=True)


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def _prepare(writer: sqlite3.Connection) -> None:
    """Make the tables in a new database. Two processes may try at once: one transaction decides."""
    if _has_tables(writer):
        return
    with _all_or_nothing(writer):
        if not _has_tables(writer):
            for statement in _TABLES.split(";"):
                writer.execute(statement)
            writer.execute(f"PRAGMA application_id = {APPLICATION}")
            writer.execute(f"PRAGMA user_version = {SCHEMA}")


@contextmanager
def _all_or_nothing(writer: sqlite3.Connection) -> Iterator[None]:
    writer.execute("BEGIN IMMEDIATE")
    try:
        yield
        writer.execute("COMMIT")
    finally:
        if writer.in_transaction:
            writer.execute("ROLLBACK")


def _check_schema(reader: sqlite3.Connection, path: Path) -> None:
    application = reader.execute("PRAGMA application_id").fetchone()[0]
    version = reader.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise StoreVersionError(f"{path}: an SQLite database, but not a Longread store; use another folder")
    if version != SCHEMA:
        raise StoreVersionError(
            f"{path}: a store of format {version}; this version of longread reads format {SCHEMA}: use another folder, "
            f"or the version that wrote it"
        )
