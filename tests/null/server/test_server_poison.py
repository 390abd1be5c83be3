"""A prompt that kills the engine is found and refused for a while; whoever only was beside it is served."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import pytest
from serving import wait_until
from worker_serving import WorkerServing, worker_serving

from longread.server.poison import REFUSED_SECONDS, SUSPECT_SECONDS, Poison
from longread.spec.engine import GenerationRequest
from longread.spec.errors import OverloadedError, PoisonedPromptError

NUMBERS = count()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(*prompt: int) -> GenerationRequest:
    return GenerationRequest(f"r{next(NUMBERS)}", prompt)


def begin(poison: Poison, *requests: GenerationRequest) -> list[GenerationRequest]:
    for request in requests:
        poison.check([request])
        poison.began(request)
    return list(requests)


def test_one_death_accuses_nobody_and_the_second_one_who_was_in_both() -> None:
    clock = Clock()
    poison = Poison(clock)
    poison.died(begin(poison, asked(1), asked(2), asked(3)))
    poison.died(begin(poison, asked(1), asked(4)))
    with pytest.raises(PoisonedPromptError, match="in 600 s") as caught:
        poison.check([asked(4), asked(1)])
    assert (caught.value.code, caught.value.retry_after) == ("prompt_crashes_engine", REFUSED_SECONDS)
    begin(poison, asked(2), asked(3), asked(4), asked(1, 1))
    clock.now = REFUSED_SECONDS - 1.5
    with pytest.raises(PoisonedPromptError, match="in 2 s"):
        poison.check([asked(1)])
    clock.now = REFUSED_SECONDS
    begin(poison, asked(1))


def test_of_several_each_is_tried_alone_until_one_is_known() -> None:
    poison = Poison(Clock())
    first = begin(poison, asked(1), asked(2), asked(3))
    poison.died(first)
    poison.died(begin(poison, asked(1), asked(2), asked(3)))
    (innocent,) = begin(poison, asked(2))
    begin(poison, asked(9))  # who was not there need not wait
    for each in (1, 3):
        with pytest.raises(OverloadedError) as caught:
            poison.check([asked(each)])
        assert caught.value.code == "prompt_in_quarantine" and caught.value.retry_after
    begin(poison, asked(2))  # the same prompt again is no other suspect
    poison.ended(innocent, well=True)
    with pytest.raises(OverloadedError):
        poison.check([asked(1), asked(3)])
    poison._inside.clear()
    poison.died([*begin(poison, asked(1)), *begin(poison, asked(2))])  # 2 is cleared: it does not wait
    with pytest.raises(PoisonedPromptError):
        poison.check([asked(1)])
    begin(poison, asked(3), asked(2))


def test_suspicion_passes() -> None:
    clock = Clock()
    poison = Poison(clock)
    poison.died(begin(poison, asked(1)))
    clock.now = SUSPECT_SECONDS + 1
    poison.died(begin(poison, asked(1)))
    begin(poison, asked(1))
    clock.now *= 2
    poison.ended(asked(1), well=False)
    assert not poison._deaths and not poison._known


def post(serving: WorkerServing, *prompt: int) -> httpx.Response:
    body = {"model": "fake", "prompt": list(prompt), "max_tokens": 3, "ignore_eos": True}
    return httpx.post(f"{serving.url}/v1/completions", json=body, timeout=30)


def test_a_poisonous_request_kills_twice_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with worker_serving(poison=666, step_seconds=0.005) as serving, ThreadPoolExecutor(4) as pool:
        for deaths in (1, 2):
            died = post(serving, 666, 7, 8)
            assert (died.status_code, died.json()["error"]["code"]) == (503, "engine_restarting")
            assert wait_until(lambda n=deaths: len(serving.made) == n + 1 and serving.ready(), 20.0)
            others = [pool.submit(post, serving, 5, 6, number) for number in range(1, 5)]
            assert [each.result().status_code for each in others] == [200] * 4
        refused = post(serving, 666, 7, 8)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (422, "prompt_crashes_engine")
        assert 1 <= int(refused.headers["Retry-After"]) <= REFUSED_SECONDS
        assert f"{refused.headers['Retry-After']} s" in error["message"]
        assert post(serving, 5, 6, 1).status_code == 200
        text = httpx.get(f"{serving.url}/metrics").text
        assert 'admission_rejections_total{model_name="fake",reason="prompt_crashes_engine"} 1.0' in text
        assert len(serving.made) == 3
    assert any("(3 tokens) was in flight in 2 deaths" in record.getMessage() for record in caplog.records)
