"""What a server says while it ends: at once what it waits for, how long at most, and how to stop it now."""

import asyncio

import pytest

from longread.server import draining
from longread.server.draining import drained, ended, writing_seconds

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(draining, "TELL_SECONDS", 0.02)
    monkeypatch.setattr(draining, "QUIET_SECONDS", 0.01)


async def test_it_says_at_once_what_it_waits_for_and_then_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    left, idle = [3], asyncio.Event()
    waiting = asyncio.create_task(drained(lambda: left[0], idle, 30.0))
    await asyncio.sleep(0)
    assert caplog.messages == ["stopping: 3 requests may go on for 30 s; a second signal (Ctrl-C again) stops at once"]
    left[0] = 1
    while len(caplog.messages) < 3:
        await asyncio.sleep(0.005)
    assert caplog.messages[2] == "stopping: 1 request left, for 30 s at most"
    left[0] = 0
    idle.set()
    await asyncio.wait_for(waiting, 5)
    assert not any(record.levelname == "WARNING" for record in caplog.records)


async def test_what_does_not_end_in_time_is_named(caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.wait_for(drained(lambda: 2, asyncio.Event(), 0.05), 5)
    assert caplog.messages[-1] == "2 requests did not end in time and are cut off"


async def test_an_engine_that_writes_says_how_long_and_one_that_ends_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ended(asyncio.sleep(0), 10.0)
    assert caplog.messages == []
    await ended(asyncio.sleep(0.08), 10.0)
    assert "for 10 s at most; a second signal" in caplog.messages[0]
    assert len(caplog.messages) > 1 and "second signal" not in caplog.messages[1]
    with pytest.raises(ZeroDivisionError):
        await ended(broken(), 1.0)


async def broken() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("given", "writing"), [(0.0, 5.0), (10.0, 10.0), (3600.0, 45.0)])
async def test_writing_has_a_limit_of_its_own(given: float, writing: float) -> None:
    assert writing_seconds(given) == writing
