"""Short chats beside a long prompt on two cores of a CPU, simulated with what a reader's steps take there.

``benchmarks/fairness.py`` measures the same for real, on a quiet machine.
"""

import random
from dataclasses import replace

import pytest
from virtual_loads import fresh, small

from longread.engine.virtual import Cost, Limits
from longread.measure.arrivals import Arrival
from longread.measure.simulate import simulate
from longread.spec.cost import StepCost
from longread.spec.step_target import quick_step

# reader-v4 on one core of an EPYC, in processor time: 16 tokens 15.6 ms, 64 28 ms, 128 50 ms, 512 242 ms; behind 16,384
# others 28, 82, 179 and 787 ms; a decoding row 4.7 ms. Large chunks are no faster a token: the caches end.
READER = StepCost(launch=0.0047, decode=0.0007, context=1e-7, chunk=0.0035, token=3.9e-4, pair=6.5e-8)
# As if starting a chunk took three times as long: less is gained by short steps, and more is lost.
SLUGGISH = replace(READER, chunk=0.0105)
CHATS, BOOK = 20, 32768
LONE = 1.3  # times what it would take in steps of any length; measured for real, too
HTTP = 0.02  # seconds that a first token takes beside the engine, idle or not


def _limits(cost: Cost) -> Limits:
    limits = small(pages=400, max_num_seqs=32, max_num_batched_tokens=2048, snapshots=100, context=65536, rings=True)
    measured = [(n, cost.seconds((0, 0), [(n, 0)])) for n in (32, 64, 128, 256, 512)]  # as an engine does at the start
    return replace(limits, step_target=quick_step([measured]))


def _chats(seed: int) -> list[Arrival]:
    draw = random.Random(seed)
    return [fresh(0.5 + i + draw.random() / 2, draw.randrange(100, 150), 8, "chat") for i in range(CHATS)]


def _p95(ttfts: list[float]) -> float:
    return sorted(ttfts)[int(len(ttfts) * 0.95)] + HTTP


@pytest.mark.parametrize("cost", [READER, SLUGGISH], ids=["reader", "sluggish"])
def test_chats_hardly_wait_for_a_book_and_short_steps_cost_it_little(cost: StepCost) -> None:
    limits = _limits(cost)
    book = fresh(0.0, BOOK, 1, "book")
    idle = _p95([run.ttft for run in simulate(_chats(1), limits, cost).runs])
    for seed in range(2, 7):
        done = simulate([book, *_chats(seed)], limits, cost)
        beside = [run.ttft for run in done.runs if run.kind == "chat"]
        assert max(run.finished for run in done.runs if run.kind == "chat") < done.runs[0].first_token
        assert _p95(beside) <= 2.5 * idle
    by_itself = simulate([book], limits, cost).runs[0].ttft
    assert by_itself <= LONE * simulate([book], replace(limits, step_target=None), cost).runs[0].ttft


def test_steps_of_any_length_would_make_them_wait() -> None:
    limits = replace(_limits(READER), step_target=None)
    done = simulate([fresh(0.0, BOOK, 1, "book"), *_chats(2)], limits, READER)
    assert _p95([run.ttft for run in done.runs if run.kind == "chat"]) > 1.0
