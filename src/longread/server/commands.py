"""What the event loop tells the engine's thread, and what the driver keeps of each request.

Plain records.
"""

import asyncio
from dataclasses import dataclass

from longread.server.subscription import Subscription
from longread.spec.engine import GenerationRequest, Standing


@dataclass(slots=True)
class Live:
    request: GenerationRequest
    subscription: Subscription
    last_token: float | None = None
    dropped: str | None = None  # why later tokens are dropped: "stop", "cancelled", or the limit that it met
    told: bool = False  # its caller knows its end; the engine's is only booked


@dataclass(slots=True, eq=False)
class Watch:
    """``tokens`` of a request's prompt that are computed or reused, as of the last step."""

    request_id: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Refresh:
    pass


@dataclass(frozen=True, slots=True)
class Gone:
    """The process of the engine is gone, or ``hangs``."""

    hangs: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """All that was submitted to an engine that is lost has ended; what is behind this is for the next one."""


@dataclass(frozen=True, slots=True)
class Explain:
    request_id: str
    answer: "asyncio.Future[Standing | None]"


Command = GenerationRequest | Cancel | Close | Refresh | Settled | Explain | Gone
