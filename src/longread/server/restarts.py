"""When an engine that died is made again, and when that is given up.

Pure: knows seconds, no clock and no process.
"""

FIRST_SECONDS = 0.5
MOST_SECONDS = 30.0
DEATHS = 5
USEFUL_SECONDS = 60.0


class Restarts:
    """The wait doubles from ``first`` to ``most`` seconds with each death in a row; an engine that has served for
    ``useful`` seconds begins a new row. ``deaths`` of them that have together served for less than that are a crash
    loop.
    """

    def __init__(
        self,
        first: float = FIRST_SECONDS,
        most: float = MOST_SECONDS,
        deaths: int = DEATHS,
        useful: float = USEFUL_SECONDS,
    ):
        self._first, self._most, self._deaths, self._useful = first, most, deaths, useful
        self._lives: list[float] = []
        self._row = 0

    def died(self, life: float) -> float | None:
        """Seconds to wait before the next one is made, after one that served for ``life`` seconds; None: give up."""
        self._row = 1 if life >= self._useful else self._row + 1
        self._lives = [*self._lives, life][-self._deaths :]
        if len(self._lives) == self._deaths and sum(self._lives) < self._useful:
            return None
        return min(self._most, self._first * 2 ** (self._row - 1))

    def told(self) -> str:
        """What a crash loop is, for a log."""
        return f"{self._deaths} times within {self._useful:g} s of service"
