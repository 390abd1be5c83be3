"""A real uvicorn server on a loopback port in a thread, over the fake engine, for tests that speak HTTP."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import longread
from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.calls import Call
from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.runner import Server, bind, url
from longread.server.state import ServerState
from longread.spec.documents import DocumentShelf
from longread.spec.engine import GenerationRequest
from longread.wire.encoding import ENCODINGS
from longread.wire.tokenizer import Tokenizer

MODEL = "fake"
_TOKENIZER_JSON = Path(longread.__file__).parent / "weights" / "fixture_tokenizer.json"
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def fixture_tokenizer() -> Tokenizer:
    """The fixtures' tokenizer, with the ids that their config.json gives."""
    probe = Tokenizer(_TOKENIZER_JSON.read_bytes(), bos_id=0, eos_id=1)
    bos, eos = probe.id_of(_BOS), probe.id_of(_EOS)
    assert bos is not None and eos is not None
    return Tokenizer(_TOKENIZER_JSON.read_bytes(), bos_id=bos, eos_id=eos)


@dataclass
class Answers:
    """What the fake engine says: ``text`` (markup in it becomes special tokens), or made-up ids where it is None."""

    tokenizer: Tokenizer
    text: str | None = None
    seen: list[GenerationRequest] = field(default_factory=list)

    def script(self, request: GenerationRequest) -> list[int] | None:
        self.seen.append(request)
        return None if self.text is None else self.tokenizer.encode(self.text, special=True)


@dataclass
class Serving:
    url: str
    state: ServerState
    engine: FakeEngine
    answers: Answers
    loop: asyncio.AbstractEventLoop

    def pending(self) -> int:
        """Requests that have not ended, read on the server's own loop."""

        async def read() -> int:
            return self.state.driver.pending

        return asyncio.run_coroutine_threadsafe(read(), self.loop).result(10)


def make_state(
    make: Callable[[], FakeEngine],
    tokenizer: Tokenizer,
    options: ServerOptions,
    encoding: str = "v3.1",
    shelf: DocumentShelf | None = None,
    observe: Callable[[Call], None] | None = None,
) -> ServerState:
    """A server's parts around an engine that ``make`` will return."""

    def read() -> tuple | None:
        return (driver.engine_info, driver.stats) if driver.state == "ready" else None

    metrics = ServerMetrics(MODEL, read, options.shared)
    driver = EngineDriver(make, admission=Admission(options.limits), observer=metrics)
    return ServerState(
        driver, metrics, tokenizer, ENCODINGS[encoding], options, (MODEL,), "0.0.0", observe=observe, shelf=shelf
    )


@contextmanager
def serving(
    *,
    encoding: str = "v3.1",
    options: ServerOptions | None = None,
    tokenizer: Tokenizer | None = None,
    loading: threading.Event | None = None,
    observe: Callable[[Call], None] | None = None,
    shelf: DocumentShelf | None = None,
    **engine_options: object,
) -> Iterator[Serving]:
    """``loading``: the model is "loaded" only when that event is set. ``engine_options`` go to FakeEngine."""
    tokenizer = tokenizer or fixture_tokenizer()
    answers = Answers(tokenizer)
    engine = FakeEngine(
        script=answers.script, model=MODEL, vocab=tokenizer.vocab_size, eos_id=tokenizer.eos_id, **engine_options
    )

    def make() -> FakeEngine:
        if loading is not None:
            loading.wait(30)
        return engine

    options = replace(options or ServerOptions(), port=0, shutdown_timeout=0.2)
    state = make_state(make, tokenizer, options, encoding, shelf, observe)
    driver = state.driver
    listener = bind("127.0.0.1", 0)
    server = Server(create_app(state), driver, options)
    started, loops = threading.Event(), []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        if loading is None:
            await driver.loaded()
        started.set()
        await task

    address = url(listener)
    thread = threading.Thread(target=lambda: asyncio.run(main()), name="test-server", daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield Serving(address, state, engine, answers, loops[0])
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """For what another thread does soon: polled, since a remote effect has no event to wait for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False
