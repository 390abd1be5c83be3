"""Documents that are being read into the store: each once, whoever asks for it, beside all other requests.

Knows: the driver, the shelf. Must not know: routes, encodings. To the engine a document is a request like any other,
for one token: its prefill is what is wanted, its end is a landing point. A reading goes on when its client goes away,
since a client that lost patience asks for the same document again.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from longread.server.commands import Watch
from longread.server.driver import EngineDriver
from longread.server.output import error_of
from longread.server.subscription import Subscription
from longread.spec.documents import Document, DocumentShelf
from longread.spec.engine import INGEST_PRIORITY, EngineStats, FinishEvent, GenerationRequest, SamplingParams
from longread.spec.errors import ContextLengthError, EngineFailedError, OverloadedError, RequestError, StoreError
from longread.spec.state import HashedTokens

logger = logging.getLogger("longread.server")

FAILED_KEPT = 64  # so that whoever comes back for one learns why
OFFLOAD_TOKENS = 16 * 1024
STORE_SECONDS = 60.0  # in which what was read must be on the disk
FAULT_SECONDS = 2.0  # the same once the store has failed to write something, maybe something else
STORE_PAUSE = 0.02  # seconds between two looks at the store
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(slots=True, eq=False)
class Reading:
    """One document on its way. ``ids``: the prompt prefix that it stands for. ``owner``: who asked first. ``error`` is
    set where it failed.
    """

    id: str
    name: str
    text: str
    ids: tuple[int, ...]
    hashed: HashedTokens | None
    pinned: bool
    owner: str = ""
    created: float = field(default_factory=time.time)
    state: Literal["reading", "ready", "failed"] = "reading"
    document: Document | None = None
    reused_tokens: int | None = None
    error: RequestError | None = None
    dropped: bool = False  # somebody removed the document meanwhile
    size: int = field(init=False)
    tokens: int = field(init=False)
    task: "asyncio.Task[None] | None" = None
    subscription: Subscription | None = None
    progress: Watch | None = None
    before: EngineStats = field(default_factory=EngineStats)  # when it began

    def __post_init__(self) -> None:
        self.size, self.tokens = len(self.text.encode()), len(self.ids)

    def release(self) -> None:
        """Keep only what is told of one that failed: a few of its size would be most of a server's memory."""
        self.text, self.ids, self.hashed, self.subscription, self.progress = "", (), None, None, None


class Readings:
    """The readings that go on, and the last that failed. Belongs to the loop thread, but for ``text``."""

    def __init__(self, driver: EngineDriver, limit: int):
        self._driver = driver
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[str, Reading] = {}
        self._failed: OrderedDict[str, Reading] = OrderedDict()
        self._entering = asyncio.Lock()  # one that was dropped is taken out again before its successor is entered

    def find(self, document_id: str) -> Reading | None:
        """One that goes on, or one that failed."""
        return self._open.get(document_id) or self._failed.get(document_id)

    def text(self, document_id: str) -> str | None:
        """The text of one that goes on; from any thread."""
        reading = self._open.get(document_id)
        return reading.text if reading is not None else None

    def all(self) -> list[Reading]:
        """The newest first."""
        return sorted([*self._open.values(), *self._failed.values()], key=lambda reading: -reading.created)

    async def begin(self, reading: Reading, shelf: DocumentShelf) -> Reading:
        """Start it, or join the one that goes on. Raises RequestError for what the engine refuses, and OverloadedError
        where too much is being read.
        """
        request = GenerationRequest(
            f"{reading.id}-{time.monotonic_ns()}",
            reading.ids,
            ONE_TOKEN,
            reading.hashed,
            priority=INGEST_PRIORITY,  # whoever waits for an answer comes first, but never alone
            owner=reading.owner,
        )
        try:
            if len(reading.ids) > OFFLOAD_TOKENS:
                await asyncio.to_thread(self._driver.validate, request)
            else:
                self._driver.validate(request)
        except ContextLengthError as error:
            raise ContextLengthError(error.message, "text") from None
        going = self._open.get(reading.id)
        if going is not None:
            going.name, going.pinned = reading.name, going.pinned or reading.pinned
            return going
        held = sum(other.size for other in self._open.values())
        if self._open and held + reading.size > self._limit:
            raise OverloadedError(
                f"documents of {held} bytes are being read, the limit is {self._limit}: try again later",
                code="too_many_documents",
            )
        reading.before = self._driver.stats
        reading.subscription = self._driver.submit([request])
        reading.progress = self._driver.watch(request.request_id)
        self._failed.pop(reading.id, None)
        self._open[reading.id] = reading
        reading.task = asyncio.create_task(self._run(reading, shelf))
        self._tasks.add(reading.task)  # a loop alone would not keep it
        reading.task.add_done_callback(self._tasks.discard)
        return reading

    def stop(self, document_id: str) -> bool:
        """End a reading without a trace, or forget one that failed; False where there is none."""
        reading = self._open.pop(document_id, None)
        if reading is None:
            return self._failed.pop(document_id, None) is not None
        reading.dropped = True
        if reading.subscription is not None:
            self._driver.cancel(reading.subscription)
        return True

    async def _run(self, reading: Reading, shelf: DocumentShelf) -> None:
        try:
            ended = await _end(reading.subscription)
            reading.reused_tokens = ended.cached_tokens
            await self._stored(reading, shelf)
            async with self._entering:
                await self._enter(reading, shelf)
            reading.state = "ready"
        except RequestError as error:
            reading.error = error
        except StoreError as error:
            logger.error("document %s was read, but cannot be stored: %s", reading.id, error)
            reading.error = store_failed(error)
        finally:
            if reading.state != "ready":
                reading.state = "failed"
            if not reading.dropped:
                del self._open[reading.id]
            if reading.state == "failed":
                reading.release()
            if reading.state == "failed" and not reading.dropped:
                self._failed[reading.id] = reading
                if len(self._failed) > FAILED_KEPT:
                    self._failed.popitem(last=False)

    async def _stored(self, reading: Reading, shelf: DocumentShelf) -> None:
        """Wait until the disk has what was read; it is written behind the engine's steps. Raises OverloadedError where
        the store does not keep it, and StoreError.
        """
        begun = time.monotonic()
        faulty: float | None = None
        while not reading.dropped and not await asyncio.to_thread(shelf.holds, reading.ids):
            now, stats = time.monotonic(), self._driver.stats
            failed = stats.store_errors > reading.before.store_errors
            if faulty is None and (failed or stats.store_skipped_writes > reading.before.store_skipped_writes):
                faulty = now
            if now - begun > STORE_SECONDS or (faulty is not None and now - faulty > FAULT_SECONDS):
                raise _not_kept(failed)
            self._driver.refresh()
            await asyncio.sleep(STORE_PAUSE)

    async def _enter(self, reading: Reading, shelf: DocumentShelf) -> None:
        if reading.dropped:
            raise _removed()
        reading.document = await asyncio.to_thread(
            shelf.add, reading.text, name=reading.name, tokens=reading.ids, pinned=reading.pinned
        )
        if reading.dropped:
            if reading.id not in self._open:  # else somebody wants it again
                await asyncio.to_thread(shelf.remove, reading.id)
            raise _removed()


def _not_kept(failed: bool) -> RequestError:
    why = "writing failed, see the server's log" if failed else "the writer is too far behind, or there is no room"
    return OverloadedError(
        f"the document was read, but the store does not keep it: {why}; give the store more room (--store-size, or "
        "unpin or remove documents) or try again later, or send the text instead",
        code="document_not_kept",
    )


def _removed() -> RequestError:
    return OverloadedError("the document was removed while it was read", code="document_removed")


async def _end(subscription: Subscription | None) -> FinishEvent:
    """The request's end. Raises the error of one that did not end by itself."""
    assert subscription is not None
    while events := await subscription.take():
        for event in events:
            if isinstance(event, FinishEvent):
                if event.reason in ("failed", "cancelled"):
                    raise error_of(event, subscription)
                return event
    raise EngineFailedError("the engine ended without an answer", code="request_failed")


def store_failed(error: StoreError) -> RequestError:
    """What clients are told: the kind of failure, without the paths in the message."""
    return OverloadedError(
        f"the document store cannot be used now ({type(error).__name__}); the server's log says why: send the text "
        "instead, or try again later",
        code="store_failed",
    )
