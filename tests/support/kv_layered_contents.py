"""Contents of a storage on a device whose loads arrive layer by layer, late: only when somebody waits for them, or when
the test lets the link go on. Until then a page that is on its way holds garbage, and what is computed on it fails.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from kv_contents import GARBAGE
from kv_late_contents import LateContents
from late_link import LateLink

from longread.kv.arrivals import Arrival, Arrivals
from longread.spec.state import PAGE_TOKENS, StateGroup


@dataclass
class Write:
    """One group's rows of one page, from a record that must still be what it was when this is carried out."""

    page: int
    group: int
    record: memoryview
    was: bytes


class LayeredContents(LateContents):
    """Each rows group is a layer."""

    loads = 0  # begun by any of them

    def __init__(self, groups: Sequence[StateGroup], num_pages: int, num_slots: int, num_snapshots: int):
        super().__init__(groups, num_pages, num_slots, num_snapshots)
        self.link = LateLink(len(self.grains))
        self.arrivals = Arrivals(self.link, range(len(self.grains)))

    def layered(self, pages: Sequence[int], data: Sequence[memoryview]) -> Callable[[], Arrival] | None:
        if not all(any(each.obj is memory for memory in self._memory) for each in data):
            return None
        return lambda: self._begin(pages, data)

    def _begin(self, pages: Sequence[int], data: Sequence[memoryview]) -> Arrival:
        type(self).loads += 1
        for page in pages:
            self.pages[page] = [[GARBAGE] * len(rows) for rows in self.pages[page]]
        ended = self.link.begin()
        for group in range(len(self.grains)):
            for page, record in zip(pages, data, strict=True):
                self.link.run(partial(self._carry_out, Write(page, group, record, bytes(record))))
            self.link.mark(group)
        return ended()

    def finish(self) -> None:
        super().finish()
        self.link.finish()

    def taken(self, pages: Sequence[int]) -> None:
        self.arrivals.touch(pages)

    def copy_page(self, source: int, target: int) -> None:
        self.arrivals.touch((source, target))
        super().copy_page(source, target)

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        self.arrivals.touch((page,))
        super().read_page(page, into, tokens)

    def compute(
        self,
        pages: Sequence[int],
        slot: int,
        tokens: Sequence[int],
        start: int,
        saves: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """As the engine's runner does it: one token is a row, more are a chunk."""
        if len(tokens) - start == 1:
            self.arrivals.touch(pages)
            layers = self._layers(pages)
        else:
            layers = self.arrivals.layers(self._layers(pages), pages)
        for _ in layers:
            pass
        super().compute(pages, slot, tokens, start, saves)

    def spoil(self, pages: Sequence[int], position: int, saves: Iterable[int] = ()) -> None:
        self.arrivals.touch(pages)
        super().spoil(pages, position, saves)

    def differences(self, pages: Sequence[int], tokens: Sequence[int], known: list[int], first: int = 0) -> list[str]:
        """Of what the pages hold or will hold."""
        now = {page: self.pages[page] for page in pages}
        for page in now:
            self.pages[page] = list(self.pages[page])
        for write in self._pending():
            if write.page in now:
                self._carry_out(write)
        found = super().differences(pages, tokens, known, first)
        for page, rows in now.items():
            self.pages[page] = rows
        return found

    def _layers(self, pages: Sequence[int]) -> Generator[None, None, None]:
        for layer in range(len(self.grains)):
            early = [write.page for write in self._pending() if write.group == layer and write.page in pages]
            assert not early, f"layer {layer} is computed before pages {early} are there"
            if layer + 1 < len(self.grains):
                yield

    def _pending(self) -> list[Write]:
        return [work.args[0] for work in self.link.pending() if isinstance(work, partial)]

    def _carry_out(self, write: Write) -> None:
        assert bytes(write.record) == write.was, "a record was changed while it was still to be read"
        counts = [PAGE_TOKENS // grain for grain in self.grains]
        start = sum(counts[: write.group])
        rows = write.record.cast("q").tolist()
        self.pages[write.page][write.group] = rows[start : start + counts[write.group]]
