"""Reading a chain's records ahead of who loads them: in portions, by several threads, each record checked.

Knows places, segments and rooms of memory. Must not know the index, nor what becomes of a record that is not whole.

A portion is what one room holds: payloads one behind the other, headers and runs aside, so that a device can be given a
room as one stretch. What lies together in a segment is read by one call, up to ``STRETCH_BYTES``: checked while it is
still in the processor's cache. Reading and checksums run without the interpreter's lock.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from longread.kv.disk.format import HEADER_BYTES, RUN_BYTES_MAX, is_record
from longread.kv.disk.segments import Place, SegmentReader, is_segment_name
from longread.kv.records import KEY_BYTES, Kind, Layout

STRETCH_BYTES = 2 * 2**20  # read by one call; a larger record is a stretch of its own
READERS = 4  # threads at most: one alone is kept from the disk's rate by copies and checksums


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a record lies, and what must be there. ``number``: of its row in the index."""

    number: int
    kind: Kind
    key: bytes
    parent: bytes
    depth: int
    place: Place


@dataclass(slots=True, eq=False)
class Portion:
    """Records [first, last) of those wanted, the spots of them (None: not known), and where their payloads lie in
    ``room``. ``whole`` once it is ``done``; ``wanted``: somebody still waits for it.
    """

    first: int
    spots: list[Spot | None]
    slots: list[tuple[int, int]]
    room: memoryview = field(default_factory=lambda: memoryview(b""))
    whole: list[bool] = field(default_factory=list)
    error: Exception | None = None
    wanted: bool = True
    done: threading.Event = field(default_factory=threading.Event)

    def payload(self, at: int) -> memoryview:
        start, end = self.slots[at]
        return self.room[start:end]


def portions(spots: Sequence[tuple[Spot | None, int]], size: int) -> Iterator[Portion]:
    """Cut records, each with the bytes of its payload, into what rooms of ``size`` bytes hold."""
    now, at = Portion(0, [], []), 0
    for number, (spot, payload_bytes) in enumerate(spots):
        if now.slots and at + payload_bytes > size:
            yield now
            now, at = Portion(number, [], []), 0
        now.spots.append(spot)
        now.slots.append((at, at + payload_bytes))
        at += payload_bytes
    if now.slots:
        yield now


def read_ahead(
    segments: SegmentReader, layout: Layout, wanted: Sequence[Portion], rooms: Sequence[memoryview]
) -> Generator[Portion, None, None]:
    """The portions in order, each read into a room that is its own until the next one is asked for. Raises OSError
    where a segment cannot be read now, which says nothing about its records. Let go of, it waits for what is being
    read: nobody writes to the rooms afterwards.
    """
    if len(wanted) < 2 or len(rooms) < 2:
        for portion in wanted:
            portion.room = rooms[0]
            _read(segments, layout, portion)
            yield _read_well(portion)
        return
    jobs: SimpleQueue[Portion | None] = SimpleQueue()
    readers = [
        threading.Thread(target=_work, args=(segments, layout, jobs), name=f"longread-read-{n}", daemon=True)
        for n in range(min(READERS, len(rooms) - 1, len(wanted)))
    ]
    free, coming, todo = deque(rooms), deque[Portion](), iter(wanted)
    try:
        with suppress(RuntimeError):  # the system has no more threads to give; those that did start read it all
            for each in readers:
                each.start()
        if readers[0].ident is None:
            readers.clear()
            for portion in wanted:
                portion.room = rooms[0]
                _read(segments, layout, portion)
                yield _read_well(portion)
            return
        for portion in wanted:
            while free and (ahead := next(todo, None)) is not None:
                ahead.room = free.popleft()
                coming.append(ahead)
                jobs.put(ahead)
            portion.done.wait()
            coming.popleft()
            yield _read_well(portion)
            free.append(portion.room)
    finally:
        for portion in coming:
            portion.wanted = False
        for _ in readers:
            jobs.put(None)
        for each in readers:
            if each.ident is not None:  # it did start
                each.join()


def _work(segments: SegmentReader, layout: Layout, jobs: "SimpleQueue[Portion | None]") -> None:
    while (portion := jobs.get()) is not None:
        _read(segments, layout, portion)


def _read(segments: SegmentReader, layout: Layout, portion: Portion) -> None:
    try:
        portion.whole = [False] * len(portion.spots)
        for run in _stretches(portion):
            if not portion.wanted:
                break
            _read_stretch(segments, layout, portion, run)
    except Exception as error:  # noqa: BLE001  a thread's edge: whoever waits for the portion is told
        portion.error = error
    finally:
        portion.done.set()


def _read_well(portion: Portion) -> Portion:
    if portion.error is not None:
        raise portion.error
    return portion


def _stretches(portion: Portion) -> Iterator[range]:
    """Records of a portion that lie one behind the other."""
    first, size, last = 0, 0, None
    for at, spot in enumerate(portion.spots):
        if last is not None and (
            spot is None
            or (last.segment, last.offset + last.size) != (spot.place.segment, spot.place.offset)
            or size + spot.place.size > STRETCH_BYTES
        ):
            yield range(first, at)
            last = None
        if spot is not None:
            if last is None:
                first, size = at, 0
            size, last = size + spot.place.size, spot.place
    if last is not None:
        yield range(first, len(portion.spots))


def _read_stretch(segments: SegmentReader, layout: Layout, portion: Portion, run: range) -> None:
    spots = [spot for spot in portion.spots[run.start : run.stop] if spot is not None]
    heads, parts = [], []
    for at, spot in zip(run, spots, strict=True):
        start, end = portion.slots[at]
        head = memoryview(bytearray(spot.place.size - (end - start)))
        heads.append(head)
        parts += [head, portion.payload(at)]
    left = segments.fill(spots[0].place, parts)
    for at, spot, head in zip(run, spots, heads, strict=True):
        left -= spot.place.size
        if left < 0:  # the file ends before it, or the disk cannot read it
            return
        portion.whole[at] = is_record(
            head[:HEADER_BYTES],
            head[HEADER_BYTES:],
            portion.payload(at),
            (spot.kind, spot.key, spot.parent, spot.depth),
            layout.root,
        )


def spot_of(kind: Kind, found: tuple) -> Spot | None:
    """From number, key, parent, depth, segment, offset and size of the record, and length of the segment, as the index
    has them; None if they cannot be one's.
    """
    number, key, parent, depth, name, offset, size, length = found
    if not (isinstance(number, int) and isinstance(depth, int) and isinstance(name, str) and isinstance(offset, int)):
        return None
    if not (isinstance(size, int) and isinstance(length, int) and isinstance(key, bytes) and isinstance(parent, bytes)):
        return None
    if len(parent) != KEY_BYTES or not 0 < depth < 2**32 or not is_segment_name(name):
        return None
    if offset < 0 or not HEADER_BYTES <= size <= length - offset:
        return None
    return Spot(number, kind, key, parent, depth, Place(name, offset, size))


def fits(spot: Spot, layout: Layout) -> bool:
    """Whether a record of this model can be as long as its place, before memory is taken for it."""
    run_bytes = spot.place.size - HEADER_BYTES - layout.payload_bytes(spot.kind)
    return 0 <= run_bytes <= RUN_BYTES_MAX
