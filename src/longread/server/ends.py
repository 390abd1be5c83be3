"""How requests end that the engine did not end: what their callers are told.

Knows: errors, events. Must not know: threads, HTTP.
"""

import time

from longread.spec.engine import FinishEvent, GenerationRequest
from longread.spec.errors import DeadlineError, EngineFailedError, OverloadedError, RequestError, RequestTimeoutError


def overflow_error(unread: int, limit: int) -> RequestTimeoutError:
    """A client takes less of its stream than comes."""
    return RequestTimeoutError(
        f"{unread} tokens of the answer were not read, max_stream_buffer is {limit}: read the stream faster",
        code="slow_reader",
    )


def left_until(deadline: float) -> float:
    """Seconds until the monotonic time ``deadline``. Raises DeadlineError where it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(
            f"the deadline that came with the request passed {-left:.3g} s ago, before the engine was given it: give "
            "it more time",
            code="client_deadline",
        )
    return left


def shutting_down_error() -> OverloadedError:
    """For new requests, and for those that are cut off."""
    return OverloadedError("the server is shutting down: ask another one, or try again later", code="shutting_down")


def restarting_error(next_engine: float) -> OverloadedError:
    """``next_engine``: monotonic time at which the next one may be there."""
    return OverloadedError(
        "the engine ended and is being started again: send the request again, as soon as /ready answers 200",
        code="engine_restarting",
        retry_after=next_engine - time.monotonic(),
    )


def broken_error(error: BaseException | None) -> EngineFailedError:
    """What clients are told: not the error's text, which may name this machine's files."""
    return EngineFailedError(
        f"the engine has failed ({type(error).__name__}) and must be restarted; the server's log says why",
        code="engine_failed",
    )


def failed_event(request: GenerationRequest, error: RequestError) -> FinishEvent:
    """The end of a request for its caller, where the engine's own does not come, or comes too late."""
    return FinishEvent(
        request_id=request.request_id,
        reason="failed",
        prompt_tokens=len(request.prompt),
        completion_tokens=0,
        cached_tokens=0,
        error=error.message,
    )
