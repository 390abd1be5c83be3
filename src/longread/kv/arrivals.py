"""Pages that are published while their bytes are still on their way, and who waits for what of them.

A load from pinned memory is begun whole: its copies stand on a stream of their own, range after range of the model's
layers, with a mark behind each range. From then on its pages are like any others in the books. The rule that makes this
right, for everything that is put on the model's stream:

- What may touch a page that is on its way first has the stream wait for the last mark (``touch``): decoding rows,
  copies of pages, records that are read, and whoever is given such a page anew. What touches none waits for nothing,
  but for captured chunks: a graph waits for the marks as they are when it is launched, whoever's load they are of, at
  most as long as that load takes (20 ms a GB), and so do the rows behind it.
- Only a prompt's chunk may wait layer by layer (``layers``): before the first layer of each range, for its mark. Behind
  its last layer the stream has waited for all that was on its way when it began.
- Marks are made anew by each load, in the order of one stream: waiting for a mark is waiting for the newest load's, so
  for all loads before it, too.

Not part of this, since it is copied when a sequence opens: rings and tails, which a load brings first and waits for.
And the memory that a load reads must stay as it is until its ``Arrival`` is over; the tiers see to that.

Knows page numbers, layers and marks; not what a mark is made of. All of it belongs to the thread that runs the model.
"""

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Marks(Protocol):
    """What a load makes behind each range of layers."""

    def wait(self, mark: int) -> None:
        """What is put on the current stream from here on comes behind that mark as it was last made."""
        ...


class Arrival(Protocol):
    """One load on its way."""

    def over(self) -> bool:
        """Whether its last byte is there."""
        ...

    def seconds(self) -> float:
        """From its first byte to its last, once it is over."""
        ...


class Arrivals:
    """``firsts``: the first layer of each range, ascending. Without ``marks`` nothing is ever on its way."""

    def __init__(self, marks: Marks | None = None, firsts: Sequence[int] = ()):
        self._marks = marks
        self._firsts = {layer: mark for mark, layer in enumerate(firsts)}
        self._coming: dict[Arrival, frozenset[int]] = {}

    def begun(self, arrival: Arrival, pages: Iterable[int]) -> None:
        """From now on others may be given these pages. All marks of the load have been made."""
        self._coming[arrival] = frozenset(pages)

    def meets(self, pages: Collection[int]) -> bool:
        """Whether any of these is on its way."""
        for arrival in [each for each in self._coming if each.over()]:
            del self._coming[arrival]
        return any(not coming.isdisjoint(pages) for coming in self._coming.values())

    def touch(self, pages: Collection[int]) -> None:
        """Call it before anything but a chunk that may read or write these pages is put on the current stream."""
        if self._coming and self.meets(pages):
            assert self._marks is not None
            self._marks.wait(len(self._firsts) - 1)
            self._coming.clear()

    def layers(
        self, steps: Generator[None, None, Result], pages: Collection[int] | None = None
    ) -> Generator[None, None, Result]:
        """A chunk on these pages; ``steps`` launch a layer each, the last one as they return. Waits for each layer's
        part of what is on its way. ``pages`` None: waits in any case, as what is captured for any chunk must.
        """
        if self._marks is None or (pages is not None and not self.meets(pages)):
            return (yield from steps)
        known = list(self._coming)  # marks of what is published later may be behind layers that were not kept waiting
        layer = 0
        while True:
            if layer in self._firsts:
                self._marks.wait(self._firsts[layer])
            try:
                next(steps)
            except StopIteration as end:
                self._passed(known)
                result: Result = end.value
                return result
            yield
            layer += 1

    def replayed(self) -> None:
        """A captured chunk was put on the current stream: it has waited for all that is on its way."""
        self._passed(list(self._coming))

    def _passed(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self._coming.pop(arrival, None)
