"""Tokens that go straight to the writer of an answer: in order, only while it waits, and never another's failure."""

import asyncio
import json
import threading
from collections.abc import Sequence

import httpx
import pytest
from serving import serving

from longread.server.protocol import PieceWriter
from longread.server.subscription import Subscription
from longread.spec.engine import Event, FinishEvent, GenerationRequest, TokenEvent


def tokens(*ids: int) -> list[Event]:
    return [TokenEvent("a", each) for each in ids]


END = FinishEvent("a", "length", 1, 3, 0)


class Taken:
    """A task that takes all, and a writer that takes tokens while ``open``."""

    def __init__(self) -> None:
        self.subscription = Subscription([GenerationRequest("a", (7,))])
        self.subscription.direct = self.direct
        self.open = True
        self.got: list[tuple[str, list[Event]]] = []
        self.task = asyncio.create_task(self.run())

    def direct(self, events: Sequence[Event]) -> bool:
        if self.open:
            self.got.append(("direct", list(events)))
        return self.open

    async def run(self) -> None:
        while events := await self.subscription.take():
            self.got.append(("task", events))

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.mark.anyio
async def test_tokens_are_taken_at_once_and_the_end_by_the_task() -> None:
    taken = Taken()
    await taken.settle()
    taken.subscription.give(tokens(1, 2))
    assert taken.got == [("direct", tokens(1, 2))]  # before anything else has run
    taken.subscription.give([*tokens(3), END])
    await asyncio.wait_for(taken.task, 5)
    assert taken.got[1:] == [("task", [*tokens(3), END])]


@pytest.mark.anyio
async def test_what_the_writer_leaves_keeps_its_order() -> None:
    taken = Taken()
    taken.subscription.give(tokens(1))  # nobody waits yet
    await taken.settle()
    taken.open = False
    taken.subscription.give(tokens(2))
    taken.open = True
    taken.subscription.give(tokens(3))  # behind one that the task has not taken: not before it
    assert taken.subscription.unread == 2
    await taken.settle()
    taken.subscription.give(tokens(4))
    assert taken.got == [("task", tokens(1)), ("task", tokens(2, 3)), ("direct", tokens(4))]
    taken.task.cancel()


@pytest.mark.anyio
async def test_what_breaks_in_one_is_raised_in_its_own_task() -> None:
    taken = Taken()
    await taken.settle()

    def broken(events: Sequence[Event]) -> bool:
        raise ZeroDivisionError

    taken.subscription.direct = broken
    taken.subscription.give(tokens(1))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(taken.task, 5)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_is_the_same_whoever_writes_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": [7, 8, 9]} if path == "completions" else {"messages": [{"role": "user", "content": "?"}]}
    asked |= {"max_tokens": 40, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    whole = {**asked, "stream": False, "stream_options": None}
    pieces, write, texts = [], PieceWriter.write, []

    def counted(self: PieceWriter, piece: bytes) -> None:
        pieces.append(piece)
        write(self, piece)

    monkeypatch.setattr(PieceWriter, "write", counted)
    gate = threading.Semaphore(0)
    with serving(gate=gate) as running:
        for number, ready in enumerate((PieceWriter.ready, property(lambda self: False))):
            pieces.clear()
            monkeypatch.setattr(PieceWriter, "ready", ready)
            gate.release()
            lines = []
            with httpx.stream("POST", f"{running.url}/v1/{path}", json=asked) as answer:
                for line in filter(None, answer.iter_lines()):
                    lines.append(line)
                    gate.release()  # each token comes when the one before it has been read
            events = [json.loads(line[6:]) for line in lines[:-1]]
            assert lines[-1] == "data: [DONE]" and events[-1]["usage"]["completion_tokens"] == 40
            choices = [event["choices"][0] for event in events[:-1]]
            texts.append("".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices))
            assert len(pieces) > 30 if number == 0 else not pieces
        gate.release(100)
        told = httpx.post(f"{running.url}/v1/{path}", json=whole).json()["choices"][0]
        assert texts[0] == texts[1] == (told["text"] if path == "completions" else told["message"]["content"])
