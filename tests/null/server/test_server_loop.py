"""The event loop goes on while a prompt of half a million tokens is parsed, rendered, tokenised and hashed."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from serving import Serving, serving, wait_until

from longread.server.limits import Limits
from longread.server.options import ServerOptions

CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog, and 数 then some. " * 17_500  # 1.1 MB


@pytest.fixture
def full() -> Iterator[Serving]:
    """A server with one place left: who asks for two answers is refused behind all that comes before the engine."""
    gate = threading.Semaphore(0)
    options = ServerOptions(limits=Limits(max_num_queued_reqs=1))
    with serving(options=options, gate=gate, max_num_seqs=1, max_model_len=2**20) as running:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        holding = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=body, timeout=60))
        holding.start()
        assert wait_until(lambda: running.pending() == 1)
        yield running
        gate.release(10)
        holding.join(10)


def test_health_answers_while_long_prompts_are_prepared(full: Serving) -> None:
    codes: list[int] = []

    def ask() -> None:
        for i in range(2):
            body = {"messages": [{"role": "user", "content": f"{i} {TEXT}"}], "n": 2}
            codes.append(httpx.post(full.url + CHAT, json=body, timeout=60).status_code)

    asking = threading.Thread(target=ask)
    with httpx.Client(base_url=full.url, timeout=60) as http:
        http.get("/health")
        asking.start()
        took: list[float] = []
        while asking.is_alive():
            begun = time.perf_counter()
            assert http.get("/health").status_code == 200
            took.append(time.perf_counter() - begun)
            time.sleep(0.002)
    asking.join()
    assert codes == [429, 429]
    took.sort()
    # On the loop this work would be one silence of most of a second; beside it, what the threads of one machine take.
    assert took[len(took) * 99 // 100] < 0.25, f"p99 of {len(took)}"
    assert len(took) > 20
