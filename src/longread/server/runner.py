"""Runs an app on a socket until it is told to stop.

Knows: uvicorn, sockets, signals. Must not know: routes, models. Port first, model second: a taken port is found before
minutes of loading, and whoever watches ``/ready`` gets 503 instead of a refused connection.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from longread.server.driver import EngineDriver
from longread.server.options import ServerOptions
from longread.server.protocol import BoundedProtocol, Patience
from longread.server.stats_line import log_stats
from longread.spec.engine import EngineInfo, EngineStats
from longread.spec.errors import ConfigError

_BACKLOG = 2048
_LAST_WORDS_SECONDS = 1  # for the errors of what was cut off to reach their clients
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, or they meet one that just closed


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had; ``port`` 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no internationalised name can be
        raise ConfigError(f"host {host[:100]!r} cannot be resolved: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; free the port or choose another with --port"
        ) from error
    return listener


def url(listener: socket.socket) -> str:
    """The address to open in a client on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: ASGIApp,
    driver: EngineDriver,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[EngineInfo], None],
    on_hangup: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; open requests get ``options.shutdown_timeout`` seconds, a second signal none.

    Raises what loading the model raised, and what ended the engine for good. ``on_ready`` is called once, when requests
    are accepted; ``on_hangup`` at each SIGHUP, on the loop's thread. Without it a SIGHUP ends the process, as usual.
    """
    asyncio.run(_serve(app, driver, options, listener, on_ready, on_hangup))


async def _serve(
    app: ASGIApp,
    driver: EngineDriver,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[EngineInfo], None],
    on_hangup: Callable[[], None] | None,
) -> None:
    if on_hangup is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    server = Server(app, driver, options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(driver.loaded())
    failing = asyncio.create_task(driver.failed())
    logging_stats = None if options.disable_log_stats else asyncio.create_task(log_stats(partial(_stats, driver)))
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not server.should_exit:
            await loading
            on_ready(driver.engine_info)
        await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loading.cancel()
        failing.cancel()
        if logging_stats is not None:
            logging_stats.cancel()
        # Without an engine nothing will ever be answered: whoever watches this process starts it again, or is told.
        if driver.state == "failed":
            server.should_exit = True
        await serving
    if driver.state == "failed" and driver.error is not None:
        raise driver.error


def _stats(driver: EngineDriver) -> tuple[EngineStats, int] | None:
    current = driver.current
    return None if current is None else (current[1], driver.admission.queued_tokens)


class Server(uvicorn.Server):
    """uvicorn, which drains the engine before it closes connections, and ends without re-raising the signal."""

    def __init__(self, app: ASGIApp, driver: EngineDriver, options: ServerOptions):
        # As of when a client begins not to read: limits may change meanwhile.
        patience = Patience(lambda: driver.admission.limits.stream_timeout, lambda: driver.cut_off("time"))
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                http=partial(BoundedProtocol, patience=patience),  # type: ignore[arg-type]
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._driver = driver
        self._drain_seconds = options.shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # the second one: at once
            self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._driver.hurry)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # While this drains, new requests are still answered: 503, "shutting down".
        begun = time.monotonic()
        await self._driver.close(self._drain_seconds)
        # One limit for both: what the engine took is not given again to connections that do not read their end.
        left = self._drain_seconds - (time.monotonic() - begun)
        self.config.timeout_graceful_shutdown = max(_LAST_WORDS_SECONDS, int(left))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the app's end out then, and its log shows where that was cut off
            await self.lifespan.shutdown()
