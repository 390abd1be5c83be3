"""POST /start_profile and /stop_profile: where the engine's steps spend their time.

Knows: the driver's process. Must not know: what a profile holds. The names are vLLM's, ``num_steps`` is SGLang's; both
answer 404 unless the server was started with --profiler-config. Beginning returns at once, ending returns the profile
as JSON; a profile ends by itself after its steps, and waits to be fetched.
"""

import asyncio
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import BODY_SECONDS
from longread.server.errors import json_response
from longread.server.state import ServerState, state_of
from longread.server.worker.engine import Profiled
from longread.spec.errors import (
    InvalidRequestError,
    OverloadedError,
    RecordNotFoundError,
    RequestError,
    RequestTimeoutError,
)
from longread.spec.profiler import MOST_STEPS, ProfilerConfig

BODY_BYTES = 4096
SECONDS = 150.0  # for the step that runs, and for what is told at the end


@runtime_checkable
class CanProfile(Protocol):
    """An engine in a process of its own that can be asked for a profile."""

    def profile(self, num_steps: int, answer: Profiled) -> None: ...


async def start(request: Request) -> Response:
    """With ``{"num_steps": N}``, or an empty body for as many as --profiler-config says."""
    state = state_of(request)
    config = _allowed(state)
    steps = _steps(await _body(request), config)
    await _ask(state, steps)
    return json_response({"status": "started", "num_steps": steps})


async def stop(request: Request) -> Response:
    state = state_of(request)
    _allowed(state)
    return json_response(await _ask(state, 0))


def _allowed(state: ServerState) -> ProfilerConfig:
    if state.options.profiler is None:
        raise RecordNotFoundError(
            "the profiler is off, since it slows the engine: start the server with "
            '--profiler-config \'{"profiler": "torch"}\'',
            code="profiler_off",
        )
    return state.options.profiler


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > BODY_BYTES:
                    raise InvalidRequestError(f'the body is larger than {BODY_BYTES:,} bytes; it is {{"num_steps": N}}')
    except TimeoutError:
        raise RequestTimeoutError(f"the body was not whole within {BODY_SECONDS:g} s", code="request_timeout") from None
    try:
        found = orjson.loads(data) if data.strip() else {}
    except orjson.JSONDecodeError:
        raise InvalidRequestError('the body is not JSON; it is {"num_steps": N}') from None
    if not isinstance(found, dict):
        raise InvalidRequestError('the body is no JSON object; it is {"num_steps": N}')
    return found


def _steps(body: dict[str, Any], config: ProfilerConfig) -> int:
    for name in body:
        if name != "num_steps":
            raise InvalidRequestError(f'{str(name)[:60]!r} is not honoured; the body is {{"num_steps": N}}', param=name)
    steps = body.get("num_steps", config.max_iterations)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
        raise InvalidRequestError(f"num_steps: {steps!r:.60}; it must be from 1 to {MOST_STEPS}", param="num_steps")
    return steps


async def _ask(state: ServerState, steps: int) -> Any:
    """Raises RequestError: what the engine says against it, or that there is none."""
    engine = state.driver.process
    if not isinstance(engine, CanProfile):
        raise OverloadedError("there is no engine to profile now: wait until /ready answers 200", code="model_loading")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(told: dict[str, Any] | None, error: RequestError | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(told)

    def answered(told: dict[str, Any] | None, error: RequestError | None) -> None:
        """On whatever thread: a process that has died is told of on another."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, told, error)

    engine.profile(steps, answered)
    try:
        return await asyncio.wait_for(answer, SECONDS)
    except TimeoutError:
        raise OverloadedError(f"the engine did not answer within {SECONDS:g} s", code="busy") from None
