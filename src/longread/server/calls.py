"""What became of the last calls: one record each, while it runs and after it has ended, bounded in number and size.

Knows: the engine's events, clocks, the tokenizer (for the texts around a difference). Must not know: routes' shapes,
HTTP. A record keeps no prompt and no answer; of a prompt that differs from one read before it keeps the few token ids
around the first difference. What it tells of that goes to the caller, who may be one of several parties: then it tells
nothing of other prompts that is finer than a page.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from longread.server.clock import Clock, Timing, timing
from longread.spec.engine import FinishEvent, FirstToken, RequestTimes
from longread.spec.errors import RequestError
from longread.spec.reuse import Excerpt, MissReason, Reuse
from longread.wire.responses import Json

MAX_RECORDS = 512
WITHHELD = "withheld"
PAGE_FINE: frozenset[MissReason] = frozenset({"complete", "corrupt record", "store failed", "caching off"})
MAX_PROMPTS = 16  # of one call whose reuse is kept apart; the sum counts them all

Decode = Callable[[tuple[int, ...]], str]


@dataclass(slots=True)
class Call:
    """One HTTP call that the engine was given. Belongs to the loop thread.

    ``request_id`` is the X-Request-Id, ``answer_id`` the answer's own; ``key``: which API key it came with.
    ``shared``: several parties may ask, so its answer and record withhold what would tell of another's prompt.
    ``prompt_tokens``: of all its prompts, ``produced``: tokens of answers that have come so far.
    ``choices_per_prompt``: only the first choice of each prompt tells what was reused, the others find its pages.
    """

    request_id: str
    answer_id: str
    route: str
    model: str
    stream: bool
    choices: int
    choices_per_prompt: int
    clock: Clock
    key: int | None = None
    shared: bool = False
    traceparent: str | None = None
    prompt_tokens: int | None = None
    produced: int = 0
    created: float = field(default_factory=time.time)
    state: str = "running"
    error: str | None = None
    completion_tokens: int | None = None
    preemptions: int = 0
    _first: RequestTimes | None = None
    _finished: float = 0.0
    _reuse: dict[int, Reuse] = field(default_factory=dict)
    _beyond: Reuse | None = None  # the sum of the prompts that are not kept apart

    def began(self, index: int, first: FirstToken) -> None:
        """Choice ``index`` has its first token."""
        if self._first is None or first.times.first_token < self._first.first_token:
            self._first = first.times
        self._explained(index, first.reuse)

    def ended(self, index: int, event: FinishEvent) -> None:
        """Choice ``index`` has ended; its times are whole now."""
        if event.times.first_token:
            self.began(index, FirstToken(event.times, event.reuse))
        self._explained(index, event.reuse)
        self._finished = max(self._finished, event.times.finished)
        self.completion_tokens = (self.completion_tokens or 0) + event.completion_tokens
        self.preemptions += event.preemptions
        prompt, choice = divmod(index, self.choices_per_prompt)
        if event.reuse is not None and choice == 0 and prompt >= MAX_PROMPTS:
            self._beyond = event.reuse if self._beyond is None else _sum(event.reuse, [self._beyond, event.reuse])

    def failed(self, error: RequestError) -> None:
        """It ended with this error."""
        self.state, self.error = "failed", error.code or error.kind

    def _explained(self, index: int, reuse: Reuse | None) -> None:
        prompt, choice = divmod(index, self.choices_per_prompt)
        if reuse is not None and choice == 0 and prompt < MAX_PROMPTS:
            self._reuse.setdefault(prompt, reuse)

    @property
    def timing(self) -> Timing:
        """Its parts as far as they are known."""
        times = self._first
        return timing(self.clock, None if times is None else replace(times, finished=self._finished))

    @property
    def elapsed_ms(self) -> float | None:
        """Since its first byte came, while it runs; None once it has ended."""
        return round((time.monotonic() - self.clock.begun) * 1000, 3) if self.state == "running" else None

    @property
    def reuse(self) -> Reuse | None:
        """Tokens of all its prompts; why and where of the first one that was not reused whole. None: not known yet."""
        found = [self._reuse[i] for i in sorted(self._reuse)] + ([self._beyond] if self._beyond is not None else [])
        if not found:
            return None
        return _sum(next((reuse for reuse in found if reuse.reason != "complete"), found[0]), found)

    def extension(self) -> Json:
        """``{"longread": {...}}``, beside an answer's own fields. No text of other prompts: it goes to any client."""
        reuse: Json | None = None if self.reuse is None else reuse_json(self.reuse, self.shared)
        if reuse is not None and len(self._reuse) > 1:
            reuse["prompts"] = [reuse_json(self._reuse[i], self.shared) for i in sorted(self._reuse)]
        return {"longread": {"request_id": self.request_id, "reuse": reuse, "timing": self.timing.json()}}

    def summary(self) -> Json:
        """One line of the list of records."""
        reuse, times = self.reuse, self.timing.json()
        return {
            "id": self.answer_id,
            "request_id": self.request_id,
            "route": self.route,
            "model": self.model,
            "created": round(self.created, 3),
            "state": self.state,
            "prompt_tokens": reuse.prompt_tokens if reuse is not None else self.prompt_tokens,
            "reused_tokens": reuse.reused_tokens if reuse is not None else None,
            "reason": told_reason(reuse.reason, self.shared) if reuse is not None else None,
            "ttft_ms": times["ttft_ms"],
            "total_ms": times["total_ms"],
            "elapsed_ms": self.elapsed_ms,
        }

    def record(self, decode: Decode) -> Json:
        """All that is kept; texts of prompts only where one party asks."""
        told: Json = self.summary()
        told |= {
            "stream": self.stream,
            "choices": self.choices,
            "completion_tokens": self.produced if self.state == "running" else self.completion_tokens,
            "preemptions": self.preemptions,
            "error": self.error,
        }
        told |= self.extension()
        excerpt = self.reuse.excerpt if self.reuse is not None else None
        if self.shared:  # said whether there is a difference or not: that there is one is the secret
            told["difference"] = {"withheld": True}
        else:
            told["difference"] = None if excerpt is None else difference(excerpt, decode)
        return told


def _sum(told: Reuse, parts: Sequence[Reuse]) -> Reuse:
    """The tokens of all ``parts`` with the reason that ``told`` gives."""
    return replace(
        told,
        prompt_tokens=sum(reuse.prompt_tokens for reuse in parts),
        device_tokens=sum(reuse.device_tokens for reuse in parts),
        host_tokens=sum(reuse.host_tokens for reuse in parts),
        disk_tokens=sum(reuse.disk_tokens for reuse in parts),
        recomputed_tokens=sum(reuse.recomputed_tokens for reuse in parts),
    )


def told_reason(reason: MissReason, shared: bool) -> str:
    """Why no more was reused. ``shared``: only what the token counts imply, since all other reasons depend on where
    the first token stands that is not another's: tried token by token, they would spell the other's prompt.
    """
    return WITHHELD if shared and reason not in PAGE_FINE else reason


def reuse_json(reuse: Reuse, shared: bool) -> Json:
    """Counts, reason and position; no ids and no text. ``shared``: no position, and the reason as ``told_reason``."""
    return {
        "prompt_tokens": reuse.prompt_tokens,
        "device_tokens": reuse.device_tokens,
        "host_tokens": reuse.host_tokens,
        "disk_tokens": reuse.disk_tokens,
        "recomputed_tokens": reuse.recomputed_tokens,
        "reason": told_reason(reuse.reason, shared),
        "at": None if shared else reuse.at,
        "note": "" if shared else reuse.note,
    }


def difference(excerpt: Excerpt, decode: Decode) -> Json:
    """The two texts around the first differing token: ``same`` before it, then ``asked`` and ``known``.

    The three are decoded apart; where a character's bytes are cut by the difference, its place holder is shown.
    """
    pairs = zip(excerpt.asked, excerpt.known, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(excerpt.asked), len(excerpt.known)))
    return {
        "start": excerpt.start,
        "at": excerpt.start + same,
        "same": decode(excerpt.asked[:same]),
        "asked": decode(excerpt.asked[same:]),
        "known": decode(excerpt.known[same:]),
        "asked_ids": list(excerpt.asked),
        "known_ids": list(excerpt.known),
        "withheld": False,
    }


class Calls:
    """The last ``limit`` calls, by answer id and by request id. A request id that comes again with the same API key
    means the newest; another key's is another call.

    ``observers`` are told of each call when it ends.
    """

    def __init__(self, observers: Sequence[Callable[[Call], None]] = (), limit: int = MAX_RECORDS):
        self._limit = limit
        self._observers = tuple(observers)
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._named: dict[tuple[int | None, str], str] = {}  # clients choose request ids: each key has its own

    def add(self, call: Call) -> None:
        """Keep a call; the oldest goes when there are too many."""
        self._calls[call.answer_id] = call
        self._named[call.key, call.request_id] = call.answer_id
        if len(self._calls) > self._limit:
            old_id, old = self._calls.popitem(last=False)
            if self._named.get((old.key, old.request_id)) == old_id:
                del self._named[old.key, old.request_id]

    def end(self, call: Call) -> None:
        """Nothing more will happen to it; one that still ran was left by its client."""
        if call.state == "running":
            call.state = "cancelled"
        for observe in self._observers:
            observe(call)

    def find(self, name: str, key: int | None) -> Call | None:
        """By either id, among the calls that came with the same API key."""
        mine = self._calls.get(name)
        return mine if mine is not None and mine.key == key else self._calls.get(self._named.get((key, name), ""))

    def newest(self, limit: int, key: int | None) -> list[Call]:
        """Newest first."""
        found: list[Call] = []
        for call in reversed(self._calls.values()):
            if len(found) == limit:
                break
            if call.key == key:
                found.append(call)
        return found
