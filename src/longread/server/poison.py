"""Prompts that were in flight when the engine died: which of them killed it, so that its clients do not do so again.

Pure but for the log; knows prompts and a clock. Must not know processes or HTTP. One death says nothing: whatever was
in flight may come again at once. What was in flight in two of the last ones is known where it was alone in that; of
several, each is tried while no other one is in flight, and the one that is there at the next death is known. What is
known is refused for a while. An answer that ends well clears its prompt.
"""

import logging
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import xxhash

from longread.spec.engine import GenerationRequest
from longread.spec.errors import OverloadedError, PoisonedPromptError

logger = logging.getLogger("longread.server")

REFUSED_SECONDS = 600.0  # a prompt that is known
SUSPECT_SECONDS = 300.0  # from the last death
RETRY_SECONDS = 5.0  # for one that has to wait for another
MAX_SUSPECTS = 4096  # the last ones
DEATHS = 2
REASONS = ("prompt_crashes_engine", "prompt_in_quarantine")

Digest = bytes


def digest_of(request: GenerationRequest) -> Digest:
    """By a prompt's ids alone: a client that tries again may send another seed or another limit. 0.3 ms for a million
    tokens.
    """
    hashed = request.hashed
    whole = hashed is not None and len(hashed.data) == 4 * len(request.prompt)
    data = hashed.data if hashed is not None and whole else array("q", request.prompt).tobytes()
    return xxhash.xxh3_128_digest(data)


class Poison:
    """What is suspected and what is known. Free of cost until an engine dies. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._deaths: OrderedDict[Digest, tuple[int, float]] = OrderedDict()  # of a suspect, and when the last one was
        self._known: OrderedDict[Digest, float] = OrderedDict()  # and until when it is refused
        self._inside: dict[str, Digest] = {}  # requests in flight whose prompts are in quarantine

    def died(self, requests: Iterable[GenerationRequest]) -> None:
        """The engine died while these were in flight."""
        now = self._clock()
        self._forget(now)
        found = {digest_of(request): request for request in _of_each_prompt(requests)}
        for digest in found:
            count, _ = self._deaths.pop(digest, (0, now))
            self._deaths[digest] = (count + 1, now)
        while len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)
        self._inside.clear()
        guilty = [digest for digest in found if self._deaths[digest][0] >= DEATHS]
        if len(guilty) > 1:
            logger.error(
                "%d prompts were in flight in %d deaths of the engine: each is tried again alone", len(guilty), DEATHS
            )
        for digest in guilty if len(guilty) == 1 else ():
            count, _ = self._deaths.pop(digest)
            self._known[digest] = now + REFUSED_SECONDS
            self._known.move_to_end(digest)
            logger.error(
                "the prompt of request %s (%d tokens) was in flight in %d deaths of the engine: it is refused for %g s",
                found[digest].request_id,
                len(found[digest].prompt),
                count,
                REFUSED_SECONDS,
            )
        while len(self._known) > MAX_SUSPECTS:
            self._known.popitem(last=False)

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises PoisonedPromptError for a prompt that is known, and OverloadedError for one that has to wait until no
        other suspect is in flight.
        """
        if not self._known and not self._deaths:
            return
        now = self._clock()
        self._forget(now)
        quarantined: set[Digest] = set()
        for request in _of_each_prompt(requests):
            digest = digest_of(request)
            if digest in self._known:
                raise _known_error(self._known[digest] - now)
            if self._in_quarantine(digest):
                quarantined.add(digest)
        if quarantined and len(quarantined | set(self._inside.values())) > 1:
            raise OverloadedError(
                f"the engine died {DEATHS} times while this prompt and others were in flight: they are tried one at a "
                f"time, and another one is; try again in {RETRY_SECONDS:g} s",
                code="prompt_in_quarantine",
                retry_after=RETRY_SECONDS,
            )

    def began(self, request: GenerationRequest) -> None:
        """A request that was checked is in flight."""
        if self._deaths and self._in_quarantine(digest := digest_of(request)):
            self._inside[request.request_id] = digest

    def ended(self, request: GenerationRequest, well: bool) -> None:
        """It is not any more; ``well``: it was answered."""
        self._inside.pop(request.request_id, None)
        if self._deaths:
            self._forget(self._clock())
            if well:
                self._deaths.pop(digest_of(request), None)

    def _in_quarantine(self, digest: Digest) -> bool:
        return self._deaths.get(digest, (0, 0.0))[0] >= DEATHS

    def _forget(self, now: float) -> None:
        """What is too long ago; the oldest come first."""
        while self._deaths and now - next(iter(self._deaths.values()))[1] > SUSPECT_SECONDS:
            self._deaths.popitem(last=False)
        while self._known and next(iter(self._known.values())) <= now:
            self._known.popitem(last=False)


def _of_each_prompt(requests: Iterable[GenerationRequest]) -> Iterable[GenerationRequest]:
    """One request of each prompt object: choices share it."""
    return {id(request.prompt): request for request in requests}.values()


def _known_error(left: float) -> PoisonedPromptError:
    seconds = math.ceil(left)
    return PoisonedPromptError(
        f"the engine died {DEATHS} times or more while it worked on this prompt, so it is not tried again for now: "
        f"send another prompt, or this one in {seconds} s; the server's log has the deaths",
        code="prompt_crashes_engine",
        retry_after=seconds,
    )
