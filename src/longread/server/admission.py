"""Whether a request is accepted: decided before any work is done for it, from what waits and what a step costs.

Knows limits, counts, and seconds that others measured; must not know threads or HTTP. What is refused leaves nothing
behind. A refusal names the limit and the value, and says when there will be room as far as the step cost can tell.

The wait of a new prompt is predicted as the time in which the prompts that come before it are read, beside what decodes
now, and, where no slot is free, the time until enough of the running requests end. Under ``--slo ttft=`` an interactive
request may wait for others as long as the target, or as long as its own prompt takes to read where that is longer: a
short prompt is never refused because a book is being read, since it passes the book, and a book is not refused because
of a target that it cannot meet alone.

Where several owners (API keys) have been seen, one alone cannot fill the queue: an eighth is kept for the others.

Room for one is told to many: whoever is refused while others have been told to come back is told a later time, spread
over as long as their work takes, up to ``SPREAD_SECONDS``; else all would come in the same second, again and again.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longread.server.backlog import MAX_KNOWN_PAGES, Backlog, KnownPages, Progress, Unread
from longread.server.limits import TIMEOUTS, Limits
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import EngineInfo, FinishEvent, GenerationRequest, class_of
from longread.spec.errors import AdmissionError, InvalidRequestError
from longread.spec.state import PAGE_TOKENS
from longread.spec.step_target import LEAST_TOKENS, bounds, least_seconds

logger = logging.getLogger("longread.server")

REASONS = ("queue_full", "queued_tokens", "predicted_wait", "deadline")
REFERENCE_TOKENS = 4096  # the prompt that rates are told for; longer ones are read more slowly
LEAST_RATE = 1e-6
OWNERS_PART = 8  # 1/8 of the queue is for others than the owner who fills it
MAX_RETRY_SECONDS = 600
SPREAD_SECONDS = 30.0
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly over 0..1, however many there are
USUAL_RATE = 0.1  # weight of the newest request in the mean prompt
HOLD_RATE = 0.1  # weight of the newest ended request in the mean time that one keeps its slot
TOLD_CHANGE = 0.25  # of a derived limit: more is worth a line in the log
FOLLOWED_TOKENS = 1024  # a prompt of more is followed while it is read


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast prompts are read: with steps of ``budget`` tokens that cost ``cost``, beside ``decodes`` (rows, tokens
    of their contexts), no longer than ``slo`` and ``step_target`` (seconds) have the schedule make them.
    """

    cost: StepCost
    budget: int
    decodes: tuple[int, int] = (0, 0)
    slo: Slo = field(default_factory=Slo)
    step_target: float | None = None

    def rate(self) -> float:
        """Prompt tokens a second, above 0; ``inf`` where nothing costs time."""
        prefix = REFERENCE_TOKENS // 2
        tokens = max(self.budget - self.decodes[0], 1)
        beside = self.cost.seconds(self.decodes)
        target = bounds(self.slo, self.step_target, self.cost, self.decodes[0]).target
        if target is not None:
            within = max(target, least_seconds(self.cost, self.decodes, prefix)) - beside
            tokens = int(min(tokens, max(self.cost.tokens_within(within, prefix), LEAST_TOKENS)))
        seconds = self.cost.seconds(self.decodes, [(tokens, prefix)])
        return max(tokens / seconds, LEAST_RATE) if seconds > 0 else math.inf


class ReturnTimes:
    """Spreads the times at which those who were refused come back. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._work = 0.0  # seconds of work that was told to come back, as of ``_at``
        self._at = 0.0
        self._count = 0

    def delay(self, work: float) -> float:
        """Seconds to add for one more, whose own work takes ``work`` seconds."""
        now = self._clock()
        window = max(self._work - (now - self._at), 0.0)
        self._work, self._at, self._count = min(window + work, SPREAD_SECONDS), now, self._count + 1
        return window * (self._count * GOLDEN % 1)


class Admission:
    """The books of what was accepted, and the decision. ``slo``: the engine's targets. ``limits`` may be replaced at
    any time; what is in flight stays. ``clock``: seconds, for who was told when to come back.

    While nobody knows what a step costs, nobody is refused for a time that is only guessed; counts of requests and
    tokens hold, and who is refused for them is told that the time is not known, and to come back soon.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        slo: Slo | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits or Limits()
        self._slo = slo or Slo()
        self._returns = ReturnTimes(clock)
        self._backlog = Backlog()
        self._known = KnownPages()
        self._caching = True
        self._reading: dict[str, Unread] = {}  # requests that have their first token
        self._of_owner: dict[str, int] = {}  # requests in flight; an owner once seen stays
        self._context = 0  # of those, together
        self._hold: float | None = None  # mean seconds that a request keeps its slot
        self._usual = 1.0  # mean tokens that a request has to have computed
        self._told: int | None = None  # prompt tokens that fit the TTFT target, as last said

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._backlog) + len(self._reading)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of accepted requests that are still to be computed."""
        return self._backlog.tokens

    def admit(
        self,
        requests: Sequence[GenerationRequest],
        info: EngineInfo,
        cost: StepCost | None,
        client: float | None = None,
    ) -> None:
        """Accept one call's requests, all or none; ``cost``: what a step costs as known now, None: not known;
        ``client``: seconds that the client still gives them.

        Raises AdmissionError, which says when to try again, and InvalidRequestError for more than can ever be held.
        """
        self._known.limit = min(info.num_pages, MAX_KNOWN_PAGES)
        unread = self._unread(requests)
        self._check_count(unread, info, cost)
        self._check_tokens(unread, info, cost)
        self._check_wait(unread, info, cost, client)
        for request, each in zip(requests, unread, strict=True):
            self._backlog.add(request.request_id, each)
            self._of_owner[each.owner] = self._of_owner.get(each.owner, 0) + 1
            self._usual += USUAL_RATE * (each.tokens - self._usual)
            if each.hashed is not None:
                self._known.add(each.hashed.hashes)
        self._tell_change(info, cost)

    def check_room(self, owner: str, info: EngineInfo, cost: StepCost | None) -> None:
        """Raises AdmissionError where ``admit`` would for any request of an owner, so that no body is read in vain."""
        anybody = [Unread("interactive", owner, int(self._usual), int(self._usual))]
        self._check_count(anybody, info, cost)
        self._check_tokens(anybody, info, cost)

    def wants_progress(self, request: GenerationRequest) -> bool:
        """Whether it matters how far an accepted request's prompt is before it is read."""
        unread = self._backlog.get(request.request_id)
        return unread is not None and unread.tokens > FOLLOWED_TOKENS

    def follow(self, request_id: str, progress: Progress) -> None:
        """From where to learn how far an accepted request's prompt is."""
        unread = self._backlog.get(request_id)
        if unread is not None:
            unread.progress = progress

    def first_token(self, request_id: str) -> None:
        """A request's prompt is read."""
        unread = self._backlog.pop(request_id)
        if unread is not None:
            self._reading[request_id] = unread
            self._context += unread.prompt

    def ended(self, event: FinishEvent) -> None:
        """A request ended, however."""
        unread, read = self._backlog.pop(event.request_id), self._reading.pop(event.request_id, None)
        if unread is not None and unread.hashed is not None and not event.times.first_token:
            done = unread.progress.tokens if unread.progress is not None else 0
            self._known.forget(unread.hashed.hashes[max(done, unread.prompt - unread.tokens) // PAGE_TOKENS :])
        if read is not None:
            self._context -= read.prompt
        for each in (unread, read):
            if each is not None:
                self._of_owner[each.owner] -= 1
        if event.reuse is not None and event.reuse.reason == "caching off":
            self._caching = False
            self._known.clear()
        held = event.times.finished - event.times.scheduled
        if event.times.scheduled and held >= 0:
            self._hold = held if self._hold is None else self._hold + HOLD_RATE * (held - self._hold)

    def lost(self) -> None:
        """The engine is gone, with all that it had read."""
        self._known.clear()
        self._hold = None

    def predicted_wait(self, info: EngineInfo, cost: StepCost | None) -> float | None:
        """Seconds that an interactive prompt of ``REFERENCE_TOKENS`` would wait for others; None: nobody knows."""
        if cost is None:
            return None
        return self._wait([Unread("interactive", "", REFERENCE_TOKENS, REFERENCE_TOKENS)], info, cost)[0]

    def outlook(self, info: EngineInfo, cost: StepCost | None) -> dict[str, float | None]:
        """The gauges of the queue by name; None where nobody knows."""
        given = self.limits.max_num_queued_tokens
        return {
            "num_queued_tokens": self.queued_tokens,
            "predicted_queue_seconds": self.predicted_wait(info, cost),
            "max_num_queued_tokens": given if given is not None else self._derived(info, cost),
        }

    def told(self, info: EngineInfo, cost: StepCost | None) -> str:
        """What limits the queue and why, in one line for whoever starts the server."""
        limits = self.limits
        parts = [
            "requests are not limited"
            if limits.max_num_queued_reqs is None
            else f"{limits.max_num_queued_reqs:,} requests may wait (max_num_queued_reqs)"
        ]
        if limits.max_num_queued_tokens is not None:
            parts.append(f"{limits.max_num_queued_tokens:,} prompt tokens (max_num_queued_tokens, as given)")
        derived = self._derived(info, cost)
        if derived is not None and cost is not None:
            self._told = derived
            rate = self._pace(info, cost, idle=True).rate()
            parts.append(
                f"{derived:,} prompt tokens before an interactive one (--slo ttft={self._slo.ttft:g}s at {rate:,.0f} "
                f"tokens/s for prompts of {REFERENCE_TOKENS:,}, measured)"
            )
        elif self._slo.ttft is not None and cost is None:
            parts.append("prompt tokens before an interactive one are limited once it is known what steps take")
        elif limits.max_num_queued_tokens is None:
            parts.append("prompt tokens are not limited (no --slo ttft=, no --max-num-queued-tokens)")
        return "; ".join(parts)

    def _unread(self, requests: Sequence[GenerationRequest]) -> list[Unread]:
        """What each has to compute. Choices of one prompt wait for the first one's pages: they count one token."""
        found: list[Unread] = []
        seen: set[int] = set()
        for request in requests:
            prompt = len(request.prompt)
            tokens = prompt - self._known.tokens(request.hashed, prompt) if self._caching else prompt
            if self._caching and id(request.prompt) in seen:
                tokens = 1
            seen.add(id(request.prompt))
            hashed = request.hashed if self._caching else None
            found.append(Unread(class_of(request.priority), request.owner, prompt, tokens, hashed))
        return found

    def _pace(self, info: EngineInfo, cost: StepCost, idle: bool = False) -> Pace:
        decodes = (0, 0) if idle else (min(len(self._reading), info.max_num_seqs), self._context)
        return Pace(cost, info.max_num_batched_tokens, decodes, self._slo, info.step_target)

    def _wait(self, unread: Sequence[Unread], info: EngineInfo, cost: StepCost) -> tuple[float, float]:
        """Seconds until a call's first prompt is being read beside nothing that comes before it, and of these how many
        are for prompts' reading.
        """
        own, first = sum(each.tokens for each in unread), unread[0]
        rate = self._pace(info, cost).rate()
        lacking = self.in_flight + 1 - info.max_num_seqs
        reading = self._backlog.ahead(own, first.request_class, first.owner, passing=lacking <= 0) / rate
        slots = self._hold * lacking / info.max_num_seqs if lacking > 0 and self._hold is not None else 0.0
        return max(reading, slots), reading

    def _refusal(
        self,
        reason: str,
        message: str,
        seconds: float | None,
        unread: Sequence[Unread],
        info: EngineInfo,
        cost: StepCost | None,
    ) -> AdmissionError:
        """``seconds`` until there is room, None: not known."""
        work = sum(each.tokens for each in unread) / self._pace(info, cost).rate() if cost is not None else 0.0
        if self._hold is not None:
            work = max(work, self._hold * len(unread) / info.max_num_seqs)
        wait = (seconds or 0.0) + self._returns.delay(work)
        retry = min(max(math.ceil(wait), 1), MAX_RETRY_SECONDS) if wait < math.inf else MAX_RETRY_SECONDS
        unknown = "; when there will be room is not known yet" if seconds is None else ""
        return AdmissionError(f"{message}{unknown}; try again in {retry} s", code=reason, retry_after=retry)

    def _check_count(self, unread: Sequence[Unread], info: EngineInfo, cost: StepCost | None) -> None:
        queued, count = self.limits.max_num_queued_reqs, len(unread)
        if queued is None:
            return
        most = info.max_num_seqs + queued
        if count > most:
            raise InvalidRequestError(
                f"the request asks for {count} answers at once, but this server holds at most {most} "
                f"(max_num_seqs {info.max_num_seqs}, max_num_queued_reqs {queued}): lower n",
                param="n",
            )
        excess = self.in_flight + count - most
        if excess > 0:
            raise self._refusal(
                "queue_full",
                f"the queue is full: {self.in_flight} requests are in flight, max_num_seqs is {info.max_num_seqs} and "
                f"max_num_queued_reqs is {queued}",
                self._seconds_until_ended(excess, info, cost),
                unread,
                info,
                cost,
            )

        mine, share = self._of_owner.get(unread[0].owner, 0), info.max_num_seqs + queued - queued // OWNERS_PART
        if len(self._of_owner.keys() | {unread[0].owner}) > 1 and mine + count > share:
            raise self._refusal(
                "queue_full",
                f"the queue is full for you: {mine} of your requests are in flight, of {most} that the server holds "
                f"{share} may be one API key's (max_num_seqs {info.max_num_seqs}, max_num_queued_reqs {queued})",
                self._seconds_until_ended(mine + count - share, info, cost),
                unread,
                info,
                cost,
            )

    def _seconds_until_ended(self, count: int, info: EngineInfo, cost: StepCost | None) -> float | None:
        """Until so many of those in flight have ended, as far as one can tell."""
        if self._hold is not None:
            return self._hold * count / info.max_num_seqs
        return self._backlog.tokens / self._pace(info, cost).rate() if cost is not None else None

    def _check_tokens(self, unread: Sequence[Unread], info: EngineInfo, cost: StepCost | None) -> None:
        limit = self.limits.max_num_queued_tokens
        if limit is None or self._backlog.below(limit):
            return
        queued = self._backlog.tokens_before(unread[0].request_class)
        if queued >= limit:
            rest = self._backlog.tokens - limit + 1  # in whichever order it is read
            raise self._refusal(
                "queued_tokens",
                f"{queued} prompt tokens wait to be read, max_num_queued_tokens is {limit}",
                rest / self._pace(info, cost).rate() if cost is not None else None,
                unread,
                info,
                cost,
            )

    def _check_wait(
        self, unread: Sequence[Unread], info: EngineInfo, cost: StepCost | None, client: float | None
    ) -> None:
        """The deadlines that the call would miss for the sake of others."""
        allowed = self._allowed(unread, info, cost)
        if client is not None:
            allowed.append((client, "deadline", f"and its own deadline leaves {client:.2g} s"))
        if cost is None or not allowed or (not self._backlog and self.in_flight < info.max_num_seqs):
            return
        most, reason, name = min(allowed)
        rate, passing = self._pace(info, cost).rate(), self.in_flight < info.max_num_seqs
        if passing and self._backlog.below(most * rate):  # most of the time there is nothing to look at
            return
        seconds, reading = self._wait(unread, info, cost)
        if seconds <= most:
            return
        rest = 0.0
        if reading > most:
            own = sum(each.tokens for each in unread)
            rest = self._backlog.excess(most * rate, own, unread[0].request_class, passing) / rate
        told = f"this request would wait about {seconds:.2g} s for others, {name}"
        raise self._refusal(reason, told, max(seconds - most, rest), unread, info, cost)

    def _allowed(
        self, unread: Sequence[Unread], info: EngineInfo, cost: StepCost | None
    ) -> list[tuple[float, str, str]]:
        """(seconds, reason, limit in words) of each limit on a call's wait for others."""
        limits = self.limits
        found: list[tuple[float, str, str]] = []
        if unread[0].request_class == "ingest":
            return found
        for name in TIMEOUTS:
            seconds: float | None = getattr(limits, name)
            begins = name == "queue_timeout" and self.in_flight < info.max_num_seqs  # at once, beside the others
            if seconds is not None and not begins:
                found.append((seconds, "deadline", f"{name} is {seconds:g} s"))
        ttft = self._slo.ttft
        if ttft is not None and cost is not None and unread[0].request_class == "interactive":
            own = sum(each.tokens for each in unread) / self._pace(info, cost).rate()
            most = max(ttft, own)
            found.append((most, "predicted_wait", f"--slo ttft={ttft:g}s and its own prompt allow {most:.2g} s"))
        return found

    def _derived(self, info: EngineInfo, cost: StepCost | None) -> int | None:
        """Prompt tokens that are read within the TTFT target while nothing decodes."""
        if cost is None or self._slo.ttft is None:
            return None
        rate = self._pace(info, cost, idle=True).rate()
        return int(rate * self._slo.ttft) if math.isfinite(rate) else None

    def _tell_change(self, info: EngineInfo, cost: StepCost | None) -> None:
        derived = self._derived(info, cost)
        if derived is None or (self._told is not None and abs(derived - self._told) <= TOLD_CHANGE * self._told):
            return
        if self._told is not None:
            logger.info(
                "prompt tokens before an interactive one: now %d, not %d: prompts are read at another speed than told "
                "before (--slo ttft=%gs)",
                derived,
                self._told,
                self._slo.ttft,
            )
        self._told = derived
