"""A StateStore and RecordStore that models contents: each row and ring holds a digest of exactly the token prefix that
it was computed from.

Torch-free. ``expected_*`` say what must be there for a token sequence, so a wrong hit shows as a differing digest.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from longread.kv.arrivals import Arrival, Arrivals
from longread.spec.state import PAGE_TOKENS, StateGroup

ROWS_ONLY = (StateGroup("latent", "rows", (0, 1), 4),)
WITH_RINGS = (
    StateGroup("csa", "rows", (0,), 4, tokens_per_row=4),
    StateGroup("hca", "rows", (1,), 4, tokens_per_row=128),
    StateGroup("window", "ring", (0, 1), 4, ring_rows=128),
)
FRESH = -1  # what a reset ring holds
GARBAGE = -2


def digests(tokens: Sequence[int]) -> list[int]:
    """digests(t)[n] identifies the first n tokens; [0] is the fresh state."""
    out, value = [FRESH], 0x9E3779B97F4A7C15
    for token in tokens:
        value = ((value ^ (token + 1)) * 0x100000001B3 + 0x1234567) & (2**61 - 1)
        out.append(value)
    return out


class Contents:
    """Pages, slots and snapshots as digests. ``fail`` names one that raises."""

    def __init__(self, groups: Sequence[StateGroup], num_pages: int, num_slots: int, num_snapshots: int):
        self.grains = [group.tokens_per_row for group in groups if group.kind == "rows"]
        self.rings = any(group.kind == "ring" for group in groups)
        self.pages = [[[GARBAGE] * (PAGE_TOKENS // grain) for grain in self.grains] for _ in range(num_pages)]
        self.slots = [GARBAGE] * num_slots
        self.saved = [GARBAGE] * num_snapshots
        self.fail: str | None = None
        self.page_bytes = 8 * sum(PAGE_TOKENS // grain for grain in self.grains)
        self.ring_bytes = 8 if self.rings else 0
        self.pages_at_once = 1
        self.arrivals = Arrivals()

    def _enter(self, name: str) -> None:
        if self.fail == name:
            raise OSError(f"{name} failed")

    def reset_slot(self, slot: int) -> None:
        self._enter("reset_slot")
        self.slots[slot] = FRESH

    def copy_page(self, source: int, target: int) -> None:
        self._enter("copy_page")
        self.pages[target] = [list(rows) for rows in self.pages[source]]

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        self._enter("save_snapshot")
        self.saved[snapshot] = self.slots[slot]

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        self._enter("load_snapshot")
        self.slots[slot] = self.saved[snapshot]

    def copy_slot(self, source: int, target: int) -> None:
        self._enter("copy_slot")
        self.slots[target] = self.slots[source]

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        """As a record: eight bytes a row, zeros behind ``tokens``."""
        rows: list[int] = []
        for grain, values in zip(self.grains, self.pages[page], strict=True):
            valid = tokens // grain
            rows += values[:valid] + [0] * (len(values) - valid)
        into[:] = array("q", rows).tobytes()

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview], tokens: Sequence[int]) -> None:
        for page, record, count in zip(pages, into, tokens, strict=True):
            self.read_page(page, record, count)

    def write_page(self, page: int, data: memoryview) -> None:
        rows = data.cast("q").tolist()
        for grain, values in zip(self.grains, self.pages[page], strict=True):
            values[:], rows = rows[: PAGE_TOKENS // grain], rows[PAGE_TOKENS // grain :]

    def write_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        for page, record in zip(pages, data, strict=True):
            self.write_page(page, record)

    def rooms(self) -> Sequence[memoryview]:
        return ()

    def layered(self, pages: Sequence[int], data: Sequence[memoryview]) -> Callable[[], Arrival] | None:
        return None

    def taken(self, pages: Sequence[int]) -> None: ...

    def finish(self) -> None: ...

    def settle(self) -> None: ...

    def fence(self) -> object:
        return None

    def after(self, fence: object) -> None: ...

    def read_ring(self, snapshot: int, into: memoryview) -> None:
        into[:] = array("q", [self.saved[snapshot]]).tobytes()

    def write_ring(self, snapshot: int, data: memoryview) -> None:
        self.saved[snapshot] = data.cast("q")[0]

    def compute(
        self,
        pages: Sequence[int],
        slot: int,
        tokens: Sequence[int],
        start: int,
        saves: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """What a forward pass over tokens[start:] writes: the rows whose window closes, the ring, and the rings of
        positions inside that are to be saved.
        """
        known = digests(tokens)
        if self.rings and self.slots[slot] != known[start]:
            raise AssertionError(f"the ring of slot {slot} is not the state at {start}")
        for grain, of_page in ((grain, i) for i, grain in enumerate(self.grains)):
            for row in range(start // grain, len(tokens) // grain):
                end = (row + 1) * grain
                page = self.pages[pages[row * grain // PAGE_TOKENS]]
                page[of_page][row % (PAGE_TOKENS // grain)] = known[end]
        self.slots[slot] = known[-1]
        for position, row in saves.items():
            assert start < position < len(tokens)
            self.saved[row] = known[position]

    def spoil(self, pages: Sequence[int], position: int, saves: Iterable[int] = ()) -> None:
        """What a failed step may leave: any row that closes behind ``position``, on the pages that were reserved, and
        anything in the snapshot rows that it was to save rings to.
        """
        for row in saves:
            self.saved[row] = GARBAGE
        for i, grain in enumerate(self.grains):
            for row in range(position // grain, len(pages) * PAGE_TOKENS // grain):
                self.pages[pages[row * grain // PAGE_TOKENS]][i][row % (PAGE_TOKENS // grain)] = GARBAGE

    def differences(self, pages: Sequence[int], tokens: Sequence[int], known: list[int], first: int = 0) -> list[str]:
        """Rows of tokens[first page * 256:] on ``pages`` that do not hold what was computed from exactly that
        prefix."""
        wrong = []
        for i, grain in enumerate(self.grains):
            rows_per_page = PAGE_TOKENS // grain
            for at, page in enumerate(pages):
                low = (first + at) * rows_per_page
                high = min(low + rows_per_page, len(tokens) // grain)
                want = known[(low + 1) * grain : high * grain + 1 : grain]
                if high > low and self.pages[page][i][: high - low] != want:
                    wrong.append(f"page {page}, rows of {grain} tokens, from token {low * grain}")
        return wrong
