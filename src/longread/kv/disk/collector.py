"""Garbage collection: evict down to a size, give the space back, clear up behind processes that died.

Knows segments, index and ages. Must not know who asks, nor what a record means.

Space comes free by deleting segments: those without a live record at once, others after their live records have been
copied to a new one. A segment whose writer lives is left alone; that process will collect it later.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from longread.kv.disk import documents
from longread.kv.disk.catalogue import Catalogue, Row, agrees, damaged, delete, enter_segments
from longread.kv.disk.eviction import DOCUMENT, NODE_TYPES, Node, leading_to, unreachable, victims
from longread.kv.disk.segments import (
    Place,
    SegmentReader,
    SegmentWriter,
    is_segment_name,
    segment_files,
    unwritten,
)

LIVE_AFTER_EVICTION = 0.85  # of the limit: eviction goes further than it must, so that not every write evicts
DEAD_SHARE = 0.5  # a segment with more dead bytes than this is compacted even when there is room
ROUNDS = 4


@dataclass(slots=True)
class Collected:
    """What one collection did."""

    evicted: int = 0
    documents: int = 0  # forgotten: their state was gone
    evicted_bytes: int = 0
    unreachable: int = 0
    corrupt: int = 0
    segments_deleted: int = 0
    freed_bytes: int = 0
    file_bytes: int = 0  # of all segments afterwards
    counted_bytes: int = 0  # with the documents' texts and ids


class Collector:
    """Collects one store. One thread of one process at a time, which the caller sees to."""

    def __init__(self, folder: Path, catalogue: Catalogue, reader: SegmentReader, writer: SegmentWriter):
        self.folder = folder
        self.catalogue = catalogue
        self.reader = reader
        self.writer = writer

    def tidy(self) -> int:
        """Delete what no index row names and no process writes: files and ends of files. Returns the bytes freed."""
        known = [name for name, _, _ in self._segments()]
        freed = 0
        for path in segment_files(self.folder):
            with unwritten(self.folder, path.name) as file:
                if file is None:
                    continue
                # Asked again under the lock: its writer may have committed and gone since the list was made.
                row = self.catalogue.query("SELECT bytes FROM segments WHERE name = ?", (path.name,), (int,))
                size = os.fstat(file).st_size
                if not row:
                    path.unlink(missing_ok=True)
                    freed += size
                elif size > row[0][0]:
                    os.ftruncate(file, row[0][0])
                    freed += size - row[0][0]
        present = set(os.listdir(self.folder))  # which fails where a look at each would say "not there"
        gone = [name for name in known if name not in present]
        if gone:
            self._forget_missing(gone)
        return freed

    def collect(self, limit: int, room: int, ends: Sequence[bytes]) -> Collected:
        """Evict and compact until segments and documents together leave ``room`` bytes below ``limit``, as far as it
        goes. A document whose state is gone goes itself in its turn, by when it was last asked for.

        Pinned documents stay, and so do the chains that lead to ``ends``.
        """
        done = Collected(freed_bytes=self.tidy())
        self._drop_unreachable(done)
        goal = max(limit - room, 0)
        for _ in range(ROUNDS):
            live, stuck = self._live_bytes()
            if live + stuck > goal:
                wanted = max(min(int(limit * LIVE_AFTER_EVICTION) - room, goal) - stuck, 0)
                if not self._evict(live - wanted, ends, done):
                    self._compact(goal, done)
                    break
            self._compact(goal, done)
            if self.counted_bytes() <= goal:
                break
        done.file_bytes = self.file_bytes()
        done.counted_bytes = self.counted_bytes()
        return done

    def file_bytes(self) -> int:
        """Bytes of all segments, as committed."""
        return int(self.catalogue.query("SELECT coalesce(sum(bytes), 0) FROM segments")[0][0])

    def counted_bytes(self) -> int:
        """What the limit is for: all segments, and the documents' texts and ids."""
        return self.file_bytes() + documents.bytes_stored(self.catalogue)[1]

    def nodes(self) -> list[Node]:
        sql = "SELECT id, kind, key, parent, depth, size, used FROM records"
        return [Node(*row) for row in self.catalogue.query(sql, (), NODE_TYPES)]

    def _live_bytes(self) -> tuple[int, int]:
        """Bytes of indexed records and documents, and dead bytes that cannot be had because somebody still writes
        there.
        """
        live, stuck = documents.bytes_stored(self.catalogue)[1], 0
        for name, size, used in self._segments():
            live += used
            if size > used:
                with unwritten(self.folder, name) as file:
                    stuck += 0 if file is not None else size - used
        return live, stuck

    def _segments(self) -> list[tuple[str, int, int]]:
        """Name, length and live bytes of each segment."""
        sql = (
            "SELECT s.name, s.bytes, coalesce((SELECT sum(r.size) FROM records r WHERE r.segment = s.id), 0) "
            "FROM segments s ORDER BY s.id"
        )
        rows = self.catalogue.query(sql, (), (str, int, int))
        for name, _, _ in rows:
            if not is_segment_name(name):
                raise damaged(self.catalogue.path, f"a segment is called {name[:40]!r}")
        return rows

    def _drop_unreachable(self, done: Collected) -> None:
        lost = unreachable(self.nodes())
        if lost:
            with self.catalogue.transaction() as write:
                delete(write, [node.id for node in lost])
            done.unreachable += len(lost)

    def _evict(self, excess: int, ends: Sequence[bytes], done: Collected) -> bool:
        nodes = self.nodes()
        keep = documents.pinned_keys(self.catalogue) | leading_to(nodes, ends)
        chosen = victims([*nodes, *documents.forgettable(self.catalogue)], keep, excess)
        records = [node for node in chosen if node.kind != DOCUMENT]
        if chosen:
            with self.catalogue.transaction() as write:
                delete(write, [node.id for node in records])
                documents.forget(write, [node.id for node in chosen if node.kind == DOCUMENT])
            done.evicted += len(records)
            done.evicted_bytes += sum(node.size for node in records)
            done.documents += len(chosen) - len(records)
        return bool(chosen)

    def _compact(self, goal: int, done: Collected) -> None:
        total = self.counted_bytes()
        segments = sorted(self._segments(), key=lambda each: each[2] / max(each[1], 1))
        small = {name for name, size, _ in segments if size < self.writer.segment_bytes // 4}
        if len(small) <= 8:
            small = set()  # each process leaves one; only when they pile up are they joined
        for name, size, live in segments:
            dead = size - live
            if live and not (dead and (total > goal or dead > size * DEAD_SHARE)) and name not in small:
                continue
            with unwritten(self.folder, name) as file:
                if file is None:
                    continue
                total -= size - self._move_out(name, done)
                done.segments_deleted += 1
                done.freed_bytes += dead
        self.writer.finish()  # else the copies would lie where this process itself keeps collection out

    def _move_out(self, name: str, done: Collected) -> int:
        """Copy a segment's live records elsewhere and delete it, under its lock. Returns the bytes copied."""
        moved: list[tuple[int, Place]] = []
        bad: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.writer.rollback)
            for row in self._rows(name):
                found = self.reader.record(row.place)
                if found is None or not agrees(row, found[0], found[1].run):
                    bad.append(row.id)
                else:
                    moved.append((row.id, self.writer.append(found[1], found[0].root)))
            lengths = self.writer.sync()
            with self.catalogue.transaction() as write:
                numbers = enter_segments(write, lengths)
                # A record that was evicted while it was copied has no row any more: its copy is dead from the start.
                write.executemany(
                    "UPDATE records SET segment = ?, offset = ? WHERE id = ?",
                    [(numbers[place.segment], place.offset, number) for number, place in moved],
                )
                delete(write, bad)
                delete(write, [number for (number,) in write.execute(_LEFT, (name,)).fetchall()])
                write.execute("DELETE FROM segments WHERE name = ?", (name,))
            undo.pop_all()
        self.writer.commit()
        (self.folder / name).unlink(missing_ok=True)
        self.reader.forget(name)
        done.corrupt += len(bad)
        return sum(place.size for _, place in moved)

    def _rows(self, name: str) -> Iterator[Row]:
        return self.catalogue.every("s.name = ?", (name,))

    def _forget_missing(self, names: list[str]) -> None:
        with self.catalogue.transaction() as write:
            for name in names:
                delete(write, [number for (number,) in write.execute(_LEFT, (name,)).fetchall()])
                write.execute("DELETE FROM segments WHERE name = ?", (name,))


_LEFT = "SELECT r.id FROM records r JOIN segments s ON s.id = r.segment WHERE s.name = ?"
