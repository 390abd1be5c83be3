"""The driver over an engine in a process of its own that ends while somebody asks it where a request stands."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.restarts import Restarts
from longread.spec.engine import EngineInfo, EngineStats, Event, GenerationRequest, SamplingParams, Standing
from longread.spec.errors import EngineLostError

pytestmark = pytest.mark.anyio


class Silent:
    """Takes requests and says nothing, until ``die``. What was asked is answered on the thread that calls ``lost``."""

    def __init__(self) -> None:
        self.gone = False
        self.asked: list[Callable[[Standing | None], None]] = []
        self.answered_on: list[str] = []
        self.ending = threading.Event()
        self._ours, self._its = os.pipe()
        self._of = FakeEngine()

    @property
    def info(self) -> EngineInfo:
        return self._of.info

    def die(self) -> None:
        os.write(self._its, b"x")
        self.gone = True

    def lost(self, hangs: bool = False) -> EngineLostError:
        self.ending.wait(10)
        for answer in self.asked:
            self.answered_on.append(threading.current_thread().name)
            answer(None)
        return EngineLostError("it ended")

    def explain(self, request_id: str, answer: Callable[[Standing | None], None]) -> None:
        self.asked.append(answer)

    def fileno(self) -> int:
        return self._ours

    def read(self) -> Sequence[Event]:
        return ()

    def stats(self) -> EngineStats:
        return self._of.stats()

    def computed_tokens(self, request_id: str) -> int:
        return 0

    def patience(self) -> float | None:
        return None

    def flush(self) -> bool:
        return True

    def validate(self, request: GenerationRequest) -> None: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def keep_unsent(self, later: Callable[[], None] | None) -> None: ...
    def kill(self) -> None: ...
    def close(self, seconds: float) -> None:
        os.close(self._ours)
        os.close(self._its)


async def test_an_answer_that_is_given_up_on_another_thread_reaches_the_loop() -> None:
    asyncio.get_running_loop().set_debug(True)  # a future that another thread settles raises there
    engines: list[Silent] = []

    def make() -> Silent:
        engines.append(Silent())
        return engines[-1]

    driver = EngineDriver(make, restarts=Restarts())
    driver.start()
    await driver.loaded()
    driver.submit([GenerationRequest("a", (7, 8), SamplingParams(max_tokens=5))])
    before = asyncio.create_task(driver.explain("a"))
    while not engines[0].asked:
        await asyncio.sleep(0)
    engines[0].die()
    while driver.process is not None:
        await asyncio.sleep(0)
    begun = time.monotonic()
    assert await driver.explain("a") is None  # nobody is there who could tell: it does not wait
    engines[0].ending.set()
    assert await asyncio.wait_for(before, 10) is None
    assert time.monotonic() - begun < 10 and engines[0].answered_on == ["longread-engine"]
    await driver.close()
