"""A real server on a loopback port, in a thread, whose engine is a fake one in a process of its own."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from fake_worker import workers
from serving import MODEL, fixture_tokenizer, wait_until

from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import Server, bind, url
from longread.server.state import ServerState
from longread.server.worker.engine import WorkerEngine
from longread.server.worker.supervise import Workers
from longread.wire.encoding import ENCODINGS


@dataclass
class WorkerServing:
    url: str
    state: ServerState
    made: list[WorkerEngine]

    def kill(self) -> None:
        """kill -9 of the engine's process that is the newest."""
        os.kill(self.made[-1].pid, signal.SIGKILL)

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200

    def wait_ready(self) -> None:
        assert wait_until(self.ready, 20.0), "the engine did not come back"


def worker_state(made: Workers, options: ServerOptions, restarts: Restarts) -> tuple[ServerState, list[WorkerEngine]]:
    """A server's parts, and the engines that its driver has made."""
    engines: list[WorkerEngine] = []

    def make() -> WorkerEngine:
        engines.append(made.make())
        return engines[-1]

    metrics = ServerMetrics(MODEL, lambda: driver.current, options.shared)
    driver = EngineDriver(make, admission=Admission(options.limits), observer=metrics, restarts=restarts)
    tokenizer = fixture_tokenizer()
    return ServerState(driver, metrics, tokenizer, ENCODINGS["v3.1"], options, (MODEL,), "0.0.0"), engines


@contextmanager
def worker_serving(
    *,
    options: ServerOptions | None = None,
    restarts: Restarts | None = None,
    step_timeout: float = 0.0,
    **task: object,
) -> Iterator[WorkerServing]:
    """``task``: the fake worker's. Restarts are quick and endless unless given."""
    tokenizer = fixture_tokenizer()
    engine = {"vocab": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "model": MODEL, **task.pop("engine", {})}
    made = workers(step_timeout=step_timeout, engine=engine, **task)
    options = replace(options or ServerOptions(), port=0, shutdown_timeout=0.2)
    state, engines = worker_state(made, options, restarts or Restarts(first=0.05, most=0.1, deaths=10**9))
    listener = bind("127.0.0.1", 0)
    server = Server(create_app(state), state.driver, options)

    async def main() -> None:
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="test-server", daemon=True)
    thread.start()
    try:
        serving = WorkerServing(url(listener), state, engines)
        serving.wait_ready()
        yield serving
    finally:
        server.should_exit = True
        thread.join(20)
        made.stop()
        assert not thread.is_alive(), "the server did not stop"
