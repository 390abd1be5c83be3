"""Garbage collection: evict down to a size, give the space back, clear up behind processes that died.

Knows segments, index and ages. Must not know who asks, nor what a record means.

Space comes free by deleting segments: those without a live record at once, others after their live records have been
copied to a new one. A segment whose writer lives is left alone; that process will collect it later. On a full disk it
goes on in small portions: records are forgotten some at a time, and copied from the end of a segment, which is cut off
before the next ones are.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from longread.kv.disk import documents
from longread.kv.disk.catalogue import Catalogue, Row, agrees, damaged, delete, enter_segments
from longread.kv.disk.eviction import DOCUMENT, NODE_TYPES, Node, leading_to, unreachable, victims
from longread.kv.disk.reserve import Reserve
from longread.kv.disk.segments import (
    Place,
    SegmentReader,
    SegmentWriter,
    is_segment_name,
    segment_files,
    unwritten,
)
from longread.spec.errors import StoreFullError

LIVE_AFTER_EVICTION = 0.85  # of the limit: eviction goes further than it must, so that not every write evicts
DEAD_SHARE = 0.5  # a segment with more dead bytes than this is compacted even when there is room
ROUNDS = 4
PORTION = 256  # records forgotten by one transaction: each changes about six pages of the index, of 4 KiB


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
    counted_bytes: int = 0  # with the documents' texts and ids, and the reserve


class Collector:
    """Collects one store. One thread of one process at a time, which the caller sees to."""

    def __init__(
        self, folder: Path, catalogue: Catalogue, reader: SegmentReader, writer: SegmentWriter, reserve: Reserve
    ):
        self.folder = folder
        self.catalogue = catalogue
        self.reader = reader
        self.writer = writer
        self.reserve = reserve

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

    def collect(self, limit: int, room: int, ends: Sequence[bytes], done: Collected) -> None:
        """Evict and compact until segments and documents together leave ``room`` bytes below ``limit``, as far as it
        goes. A document whose state is gone goes itself in its turn, by when it was last asked for.

        Pinned documents stay, and so do the chains that lead to ``ends``. What is done is added to ``done`` as it is.
        Raises StoreFullError or OSError on a disk without any room.
        """
        done.freed_bytes += self.tidy()
        self._drop_unreachable(done)
        goal = max(limit - room, 0)
        for _ in range(ROUNDS):
            live, stuck = self._live_bytes(limit)
            if live + stuck > goal:
                wanted = max(min(int(limit * LIVE_AFTER_EVICTION) - room, goal) - stuck, 0)
                if not self._evict(live - wanted, ends, done):
                    self._compact(limit, goal, done)
                    break
            self._compact(limit, goal, done)
            if self.counted_bytes(limit) <= goal:
                break

    def file_bytes(self) -> int:
        """Bytes of all segments, as committed."""
        return int(self.catalogue.query("SELECT coalesce(sum(bytes), 0) FROM segments")[0][0])

    def counted_bytes(self, limit: int) -> int:
        """What the limit is for: all segments, the documents' texts and ids, and the reserve."""
        return self.file_bytes() + documents.bytes_stored(self.catalogue)[1] + self.reserve.within(limit)

    def nodes(self) -> list[Node]:
        sql = "SELECT id, kind, key, parent, depth, size, used FROM records"
        return [Node(*row) for row in self.catalogue.query(sql, (), NODE_TYPES)]

    def _live_bytes(self, limit: int) -> tuple[int, int]:
        """Bytes of indexed records and documents, and what cannot be had: dead bytes where somebody still writes,
        and the reserve.
        """
        live, stuck = documents.bytes_stored(self.catalogue)[1], self.reserve.within(limit)
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
        for gone in self._forget(unreachable(self.nodes())):
            done.unreachable += len(gone)

    def _evict(self, excess: int, ends: Sequence[bytes], done: Collected) -> bool:
        nodes = self.nodes()
        keep = documents.pinned_keys(self.catalogue) | leading_to(nodes, ends)
        chosen = victims([*nodes, *documents.forgettable(self.catalogue)], keep, excess)
        for gone in self._forget(chosen):
            records = [node for node in gone if node.kind != DOCUMENT]
            done.evicted += len(records)
            done.evicted_bytes += sum(node.size for node in records)
            done.documents += len(gone) - len(records)
        return bool(chosen)

    def _forget(self, nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
        """Take records and documents out of the index, in order. Yields those that are out, some at a time: fewer
        where the disk has no room for a longer log. Raises StoreFullError if it has none for one of them.
        """
        at, portion = 0, PORTION
        while at < len(nodes):
            part = nodes[at : at + portion]
            try:
                with self.catalogue.transaction() as write:
                    delete(write, [node.id for node in part if node.kind != DOCUMENT])
                    documents.forget(write, [node.id for node in part if node.kind == DOCUMENT])
            except StoreFullError:
                if portion == 1:
                    raise
                portion //= 4
                with suppress(StoreFullError):
                    self.catalogue.shorten_log()
                continue
            yield part
            at += portion

    def _compact(self, limit: int, goal: int, done: Collected) -> None:
        total = self.counted_bytes(limit)
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
                total -= size - self._move_out(name, file, done)
                done.segments_deleted += 1
                done.freed_bytes += dead
        self.writer.finish()  # else the copies would lie where this process itself keeps collection out

    def _move_out(self, name: str, file: int, done: Collected) -> int:
        """Copy a segment's live records elsewhere and delete it, under its lock. Returns the bytes copied.

        Where there is no room for all of them beside the segment, they are moved from its end on, and what is behind
        the rest is cut off. A reader who still looks there finds that the record's row has changed.
        """
        rows, copied = list(self._rows(name)), 0
        while sum(row.place.size for row in rows) > self._room():
            count, budget = 0, self._room() // 2
            while count < len(rows) and (not count or budget >= rows[-count - 1].place.size):
                budget -= rows[-count - 1].place.size
                count += 1
            cut = rows[-count].place.offset
            copied += self._move(name, rows[-count:], cut, done)
            os.ftruncate(file, cut)
            del rows[-count:]
        copied += self._move(name, rows, 0, done)
        (self.folder / name).unlink(missing_ok=True)
        self.reader.forget(name)
        return copied

    def _room(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def _move(self, name: str, rows: Sequence[Row], left: int, done: Collected) -> int:
        """Copy these records of a segment, in one transaction that leaves ``left`` bytes of it, or nothing."""
        moved: list[tuple[int, Place]] = []
        bad: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.writer.rollback)
            for row in rows:
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
                if left:
                    write.execute("UPDATE segments SET bytes = ? WHERE name = ?", (left, name))
                else:
                    delete(write, [number for (number,) in write.execute(_LEFT, (name,)).fetchall()])
                    write.execute("DELETE FROM segments WHERE name = ?", (name,))
            undo.pop_all()
        self.writer.commit()
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
