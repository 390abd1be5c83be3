"""The bodies of a run, made before it and kept out of the way: building a long document while others are timed would
be seen in their figures.

Knows asks and a temporary file. Must not know when or how they are sent.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from longread.measure.load.target import Target
from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError

MEMORY_BYTES = 256 * 2**20  # above, bodies lie in a file
MOST_BYTES = 16 * 2**30


@dataclass(frozen=True, slots=True)
class Stub:
    """What is left in memory of an ask. ``open_turns``: it waits for answers, so its body is made when it is sent."""

    key: str
    kind: str
    session: str | None
    isl: int | None
    open_turns: bool
    offset: int
    length: int


class Bodies:
    """Bodies by index, as a context that removes them. An ask that wants its session's answers is built when it is
    taken, from ``asks``.
    """

    def __init__(self, asks: Sequence[Ask], target: Target, tell: Callable[[int], None] = lambda _: None):
        """Makes them all; ``tell`` is told how many are done. Raises ConfigError: an ask that the target's backend
        cannot carry, or more bytes than the temporary folder may be asked to hold.
        """
        self._asks, self._target = asks, target
        self.stubs: list[Stub] = []
        with ExitStack() as open_files:
            self._file = open_files.enter_context(tempfile.SpooledTemporaryFile(MEMORY_BYTES))
            self._fill(tell)
            self._open = open_files.pop_all()

    def _fill(self, tell: Callable[[int], None]) -> None:
        size = 0
        for number in range(len(self._asks)):
            ask = self._asks[number]
            body = b"" if ask.answers else self._target.body(ask)
            try:
                self._file.write(body)
            except OSError as error:
                raise ConfigError(
                    f"no room for the requests' bodies in {tempfile.gettempdir()} ({os.strerror(error.errno or 0)}, "
                    f"{size / 2**20:,.0f} MiB so far): set TMPDIR to a larger disk, or ask for fewer prompts"
                ) from error
            self.stubs.append(Stub(ask.key, ask.kind, ask.session, ask.isl, ask.answers, size, len(body)))
            size += len(body)
            if size > MOST_BYTES:
                raise ConfigError(
                    f"the requests' bodies are more than {MOST_BYTES // 2**30} GiB at ask {number + 1:,} of "
                    f"{len(self._asks):,}: ask for fewer prompts or shorter ones"
                )
            tell(number + 1)

    def body(self, index: int, answers: Sequence[str]) -> bytes:
        """Raises ConfigError where the session has fewer answers than the ask wants."""
        stub = self.stubs[index]
        if stub.open_turns:
            return self._target.body(self._asks[index], answers)
        self._file.seek(stub.offset)
        return self._file.read(stub.length)

    def __enter__(self) -> "Bodies":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()
