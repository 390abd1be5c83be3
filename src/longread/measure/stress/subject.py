"""The server under test, and what a run of tests may still spend on it.

Knows how asks are sent (measure/load) and made (measure/workloads). Must not know what any test concludes.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from longread.measure.load.outcome import Outcome, Run
from longread.measure.load.run import Limits as RunLimits
from longread.measure.load.run import Progress, Stop, run
from longread.measure.load.schedule import Schedule
from longread.measure.load.target import Target
from longread.measure.stress.memory import Memory, Sample, told_by
from longread.measure.workloads import build
from longread.measure.workloads.ask import Ask

DOMAINS = "report,manual"
SHORT_TOKENS = 256
LONG_ROOM = 96  # tokens beside a document: markup, instruction, question


class Control:
    """Time that is left, and the user's patience. ``interrupt`` once: nothing new is begun, what is in flight is waited
    for; twice: that is cancelled too.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.ends = clock, clock() + seconds
        self.interrupted = asyncio.Event()
        self._share_ends = self.ends
        self._stop: Stop | None = None

    def interrupt(self) -> None:
        self.interrupted.set()
        if self._stop is not None:
            self._stop.ask()

    def share(self, of: int) -> None:
        """From now on a test is on, with one ``of``-th of the time that is left."""
        self._share_ends = self.clock() + max(self.ends - self.clock(), 0.0) / of

    @property
    def left(self) -> float:
        """Seconds of the test that is on."""
        return max(self._share_ends - self.clock(), 0.0)

    @property
    def over(self) -> bool:
        return self.interrupted.is_set() or self.left <= 0

    @property
    def why(self) -> str | None:
        """Why a test ended early, if it did."""
        if self.interrupted.is_set():
            return "interrupted"
        return "its share of the budget is spent" if self.left <= 0 else None

    def close(self) -> None:
        """Nothing more is sent by the run that is on; what is in flight is waited for."""
        if self._stop is not None and not self._stop.asked:
            self._stop.ask()

    def cancel(self) -> None:
        """What is in flight is given up."""
        while self._stop is not None and self._stop.asked < 2:
            self._stop.ask()

    def begin(self) -> Stop:
        self._stop = Stop()
        if self.interrupted.is_set():
            self._stop.ask()
        return self._stop

    def end(self) -> None:
        self._stop = None

    async def sleep(self, seconds: float) -> None:
        """Shorter when interrupted."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.interrupted.wait(), seconds)


@dataclass(slots=True)
class Subject:
    """``target`` is whom to ask. ``memory``: of its processes. ``tokenizer``: for lengths, None: they are estimated.
    ``max_model_len``: as the server tells. ``tell``: a line of progress. ``timeout``: seconds of one request.
    """

    target: Target
    control: Control
    memory: Memory
    tokenizer: str | None = None
    max_model_len: int | None = None
    timeout: float = 600.0
    seed: int = 0
    style: Mapping[str, object] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda words: None
    kept: Callable[[Outcome, str], None] = lambda outcome, phase: None

    async def run(
        self,
        asks: Sequence[Ask],
        schedule: Schedule | None = None,
        phase: str = "",
        seen: Callable[[Outcome], None] | None = None,
        share: float = 1.0,
    ) -> Run:
        """All asks, or those that the time allows (``share`` of what is left); nothing is sent twice. ``seen`` is told
        of each end at once.
        """
        control = self.control
        limits = RunLimits(min(self.timeout, max(control.left, 1.0) + 60.0), max(control.left * share, 0.001), 0)

        class Told(Progress):
            def finished(own, outcome: Outcome, in_flight: int) -> None:  # noqa: N805
                self.kept(outcome, phase)
                if seen is not None:
                    seen(outcome)

        try:
            return await run(asks, self.target, schedule or Schedule(), limits, Told(), control.begin())
        finally:
            control.end()

    async def one_by_one(self, asks: Sequence[Ask], phase: str = "", share: float = 1.0) -> list[Outcome]:
        """One request at a time, in order."""
        done = await self.run(asks, Schedule(max_concurrency=1), phase, share=share)
        return sorted(done.outcomes, key=lambda each: each.index)

    async def sample(self) -> Sample:
        """Memory now; by /metrics where no process is known."""
        found = self.memory.sample()
        if found.own is not None or self.memory.pid is not None:
            return found
        async with httpx.AsyncClient(timeout=10.0, trust_env=not self.target.local) as client:
            try:
                page = (await client.get(f"{self.target.base_url}/metrics", headers=dict(self.target.headers))).text
            except httpx.HTTPError:
                return found
        told = told_by(page)
        return Sample(told, told, found.gpu)

    def fitting(self, tokens: int, answer: int) -> int:
        """``tokens``, or as many as the server takes with an answer of ``answer``; estimated lengths get a margin."""
        if self.max_model_len is None:
            return tokens
        room = self.max_model_len - answer - LONG_ROOM
        return min(tokens, room if self.tokenizer is not None else int(room * 0.7))

    def documents(self, count: int, tokens: int, answer: int, use: int, questions: int = 1) -> Sequence[Ask]:
        """Long asks. ``use`` tells the texts of phases apart: another one gives other documents."""
        length = self.fitting(tokens, answer)
        options = {"num_prompts": count, "isl": length, "osl": answer, "questions": questions, "domains": DOMAINS}
        return self._built("documents", options, use)

    def chats(self, count: int, answer: int, use: int) -> Sequence[Ask]:
        """Short asks."""
        return self._built("chat", {"num_prompts": count, "isl": SHORT_TOKENS, "osl": answer}, use)

    def _built(self, name: str, options: Mapping[str, object], use: int) -> Sequence[Ask]:
        more = {"seed": (self.seed * 1009 + use) % 2**32, "tokenizer": self.tokenizer}
        asks = build(name, {**options, **more}).asks
        return Dressed(asks, self.style) if self.style else asks


class Dressed(Sequence[Ask]):
    """Asks with further body fields."""

    def __init__(self, asks: Sequence[Ask], fields: Mapping[str, object]):
        self._asks, self._fields = asks, dict(fields)

    def __len__(self) -> int:
        return len(self._asks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ask = self._asks[index]
        return replace(ask, extra={**ask.extra, **self._fields})


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def ttft_or_never(outcome: Outcome) -> float:
    """Milliseconds; infinite where no first token came."""
    return math.inf if outcome.ttft is None else outcome.ttft * 1000


def row(outcome: Outcome) -> dict[str, Any]:
    """A request, for the books."""
    return {
        "key": outcome.key,
        "kind": outcome.kind,
        "status": outcome.status,
        "failure": outcome.failure,
        "ttft_ms": milliseconds(outcome.ttft),
        "e2el_ms": milliseconds(outcome.e2el),
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
        "finish_reason": outcome.finish_reason,
    }
