"""From a checked body to engine requests: what a hostile body may cost before the engine sees it."""

import asyncio
import threading

import pytest

from longread.server.body import OFFLOAD_BYTES, OFFLOAD_THREADS, offload
from longread.server.prompts import Prompt
from longread.server.work import engine_requests
from longread.wire.types import ChatRequest, validate


def test_choices_share_one_grammar_and_one_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 128, "structured_outputs": {"json": {"title": "x"}}}
    requests = engine_requests(validate(ChatRequest, body), [Prompt((1, 2, 3))], "id")
    assert len({request.request_id for request in requests}) == 128
    assert len({id(request.sampling.grammar) for request in requests}) == 1
    assert len({id(request.prompt) for request in requests}) == 1


@pytest.mark.anyio
async def test_long_work_is_done_few_at_a_time_and_not_at_all_for_clients_that_left() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)
    ran: list[int] = []

    def work(i: int) -> int:
        ran.append(i)
        begun.release()
        assert release.wait(20)
        return i

    tasks = [asyncio.create_task(offload(OFFLOAD_BYTES + 1, lambda i=i: work(i))) for i in range(OFFLOAD_THREADS + 3)]
    for _ in range(OFFLOAD_THREADS):
        await asyncio.to_thread(begun.acquire)
    tasks[-1].cancel()
    await asyncio.wait([tasks[-1]])
    assert sorted(ran) == list(range(OFFLOAD_THREADS))
    release.set()
    assert await asyncio.gather(*tasks[:-1]) == list(range(OFFLOAD_THREADS + 2))
    assert OFFLOAD_THREADS + 2 not in ran
