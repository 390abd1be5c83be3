"""A second Ctrl-C: the server ends at once, and in order."""

import asyncio
import logging
import signal
import time

import pytest
from fake_worker import workers
from worker_serving import worker_state

from longread.server.app import create_app
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import Server, bind

pytestmark = pytest.mark.anyio


async def test_a_second_signal_while_the_model_loads_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    made = workers(load_seconds=60)
    options = ServerOptions(port=0, shutdown_timeout=30)
    state, _ = worker_state(made, options, Restarts())
    server = Server(create_app(state), state.driver, options)
    serving = asyncio.create_task(server.serve(sockets=[bind("127.0.0.1", 0)]))
    while not server.started:
        await asyncio.sleep(0.01)
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR):
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        await serving
        open_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in open_tasks if "LifespanOn.main" in repr(task)]
    assert not caplog.records and time.monotonic() - begun < 20
    made.stop()
    await asyncio.to_thread(state.driver.join, 10)
