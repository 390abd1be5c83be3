"""``longread explain`` and the record of a call that runs: where it stands and why; whose time it takes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import httpx
import pytest
from serving import MODEL, Serving, serving, wait_until
from shelf import MemoryShelf

from longread.cli import main as cli
from longread.cli.describe import step_line
from longread.measure import standing as drawing
from longread.server.fake import FakeEngine
from longread.server.options import ServerOptions
from longread.server.records import standing_json
from longread.spec.engine import Standing, WaitReason, class_of

Capture = pytest.CaptureFixture[str]
CHAT, RECORDS = "/v1/chat/completions", "/v1/longread/requests"
WAITING = Standing(
    request_id="a-0",
    phase="waiting",
    reason="prefix",
    detail="a running request computes what its prompt begins with",
    request_class="batch",
    position=3,
    num_waiting=5,
    num_running=2,
    prompt_tokens=1000,
    computed_tokens=0,
    preemptions=1,
    waited=0.25,
    starts_in=1.5,
)


def body(text: str, **options: object) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **options}


@contextmanager
def one_slot() -> Iterator[tuple[Serving, threading.Semaphore, list[threading.Thread]]]:
    """A server whose engine has one slot and takes a step only when it is let: nothing ends by itself."""
    gate = threading.Semaphore(0)
    threads: list[threading.Thread] = []
    with serving(max_num_seqs=1, gate=gate) as server:
        try:
            yield server, gate, threads
        finally:
            gate.release(10_000)
            for thread in threads:
                thread.join(20)


def post(server: Serving, threads: list[threading.Thread], name: str, **options: object) -> None:
    """Ask in a thread, and wait until the server has given it to the engine."""
    before = server.pending()
    thread = threading.Thread(
        target=lambda: httpx.post(
            server.url + CHAT, json=body("hi", **options), headers={"X-Request-Id": name}, timeout=30
        )
    )
    thread.start()
    threads.append(thread)
    assert wait_until(lambda: server.pending() == before + 1)


def test_a_running_call_is_explained(capsys: Capture) -> None:
    with one_slot() as (server, gate, threads):
        post(server, threads, "first", max_tokens=3000)
        post(server, threads, "second", priority=7)
        gate.release(1)
        told: dict[str, dict] = {}

        def look() -> None:
            for name in ("first", "second"):
                told[name] = httpx.get(f"{server.url}{RECORDS}/{name}", timeout=30).json()
            assert cli.main(["explain", "second", "--url", server.url]) == 0

        looking = threading.Thread(target=look)
        looking.start()
        while looking.is_alive():  # an engine is asked between two steps
            gate.release(1)
            looking.join(0.02)
        (first,), (second,) = told["first"]["standing"], told["second"]["standing"]
    assert (first["phase"], first["class"], first["choice"]) == ("decode", "interactive", 0)
    assert (second["phase"], second["reason"], second["class"], second["position"]) == ("waiting", "slots", "batch", 0)
    assert second["num_running"] == 1 and second["waited_ms"] > 0
    said = capsys.readouterr().out
    assert "all 1 slots are taken" in said and "--max-num-seqs" in said and "class batch" in said


def test_a_call_that_has_ended_stands_nowhere(capsys: Capture) -> None:
    with serving() as server:
        name = httpx.post(server.url + CHAT, json=body("hi"), timeout=20).json()["id"]
        assert httpx.get(f"{server.url}{RECORDS}/{name}").json()["standing"] == []
        assert cli.main(["explain", name, "--url", server.url]) == 0
        assert "It has ended" in capsys.readouterr().out
        assert cli.main(["explain", name, "--url", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "finished"
        assert cli.main(["explain", "nobody", "--url", server.url]) == 1
        assert "nobody" in capsys.readouterr().err


def test_requests_carry_their_priority_and_whose_key_it_was() -> None:
    keys = ("one", "two")
    with serving(options=ServerOptions(api_key=keys)) as server:
        for key, options in (("one", {}), ("one", {"priority": 5}), ("two", {"priority": None})):
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(server.url + CHAT, json=body("hi", **options), headers=headers).raise_for_status()
        seen = server.answers.seen
    assert [request.priority for request in seen] == [0, 5, 0]
    assert seen[0].owner == seen[1].owner != seen[2].owner
    assert all(request.owner and key not in request.owner for request in seen for key in keys)
    with serving() as server:
        httpx.post(
            f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 1, "priority": 9}
        )
        assert [(r.priority, r.owner) for r in server.answers.seen] == [(9, "")]


def test_documents_are_read_as_ingest_in_the_name_of_who_asked() -> None:
    headers = {"Authorization": "Bearer one"}
    with serving(options=ServerOptions(api_key=("one", "two")), shelf=MemoryShelf()) as server:
        sent = {"text": "Clause 1. The rent is 1,200."}
        httpx.post(f"{server.url}/v1/longread/documents", json=sent, headers=headers, timeout=20).raise_for_status()
        httpx.post(server.url + CHAT, json=body("hi"), headers=headers, timeout=20).raise_for_status()
        reading, chat = server.answers.seen
    assert (class_of(reading.priority), class_of(chat.priority)) == ("ingest", "interactive")
    assert reading.owner == chat.owner != ""


def test_what_would_tell_of_anothers_prompt_is_withheld_among_several_parties() -> None:
    mine, shared = standing_json(WAITING, shared=False), standing_json(WAITING, shared=True)
    assert mine["reason"] == "prefix" and "computes" in mine["detail"]
    assert shared["reason"] == "turn" and "computes" not in json.dumps(shared)
    assert mine["starts_in_ms"] == 1500 and mine["first_token_in_ms"] is None


def test_every_reason_has_advice_and_all_numbers_are_said() -> None:
    assert set(drawing.ADVICE) == set(get_args(WaitReason)) - {""}
    said = "\n".join(drawing.lines({"choice": 2} | standing_json(WAITING, shared=False), named=True))
    for words in ("choice 2", "250 ms", "class batch", "0 of 1,000", "preempted 1", "2 run and 5 wait, 3", "1.5 s"):
        assert words in said


def test_what_a_step_should_take_is_said_with_its_reason_and_what_is_not_known_is_said_to_be() -> None:
    reading = replace(
        WAITING, phase="prefill", reason="step", starts_in=None, first_token_in=2.0, step_target=0.031, step_reason="r"
    )
    said = "\n".join(drawing.lines({"choice": 0} | standing_json(reading, shared=True)))
    assert "a step should take 31 ms: r" in said and "not known" not in said
    early = replace(reading, first_token_in=None, cost_known=False, step_target=None)
    record = standing_json(early, shared=True)
    assert (record["starts_in_ms"], record["first_token_in_ms"], record["cost_known"]) == (None, None, False)
    said = "\n".join(drawing.lines({"choice": 0} | record))
    assert "when is not known yet" in said and "a step should take" not in said
    older = {
        name: value for name, value in record.items() if name not in ("cost_known", "step_target_ms", "step_reason")
    }
    assert drawing.lines({"choice": 0} | older)


def test_the_start_says_what_a_step_may_take() -> None:
    info = replace(FakeEngine().info, step_target=0.0312, step_reason="as measured")
    assert step_line(info) == "  steps: 31.2 ms (as measured)"
    assert "max_num_batched_tokens" in step_line(replace(info, step_target=None))
