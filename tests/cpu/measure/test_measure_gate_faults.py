"""The gate against bundled readers with faults planted into their engines: two small ones here, all of them by
``benchmarks/planted_faults.py``.
"""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from planted_faults import HARMLESS, NONE, fault_of, faulty_server

from longread.measure.gate.profiles import built_in
from longread.measure.gate.record import Sayings
from longread.measure.gate.run import Outcome, Settings, Watch, make_base, run_gate
from longread.spec.config import Dtype

LENGTH, DOCUMENTS, PAGES = 512, 3, 24


def settings(address: str, levels: tuple[int, ...]) -> Settings:
    return Settings(address, lengths=(LENGTH,), documents=DOCUMENTS, levels=levels, seconds=240, concurrency=2, fresh=1)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base() -> Sayings:
    with faulty_server(NONE, 2048, PAGES) as address:
        found = asyncio.run(make_base(settings(address, (1, 2, 4)), None, Watch()))
    assert found.complete
    return found


def gate(name: str, base: Sayings | None, levels: tuple[int, ...], dtype: Dtype = "float32") -> Outcome:
    with faulty_server(fault_of(name), 2048, PAGES, dtype) as address:
        return asyncio.run(run_gate(settings(address, levels), built_in("lossless"), base, Watch()))


def failed(outcome: Outcome) -> set[str]:
    return {f.name for level in outcome.levels for f in level.findings if f.verdict == "FAIL"}


def test_a_swapped_expert_fails_by_its_likelihood(base: Sayings) -> None:
    outcome = gate("swapped expert", base, (1,))
    assert outcome.verdict == "FAIL" and "kl_mean at 512" in failed(outcome)


def test_another_chunk_size_passes(base: Sayings) -> None:
    outcome = gate(HARMLESS[0].name, base, (1, 4))
    judged = {f.name: f.verdict for level in outcome.levels for f in level.findings}
    assert not failed(outcome) and judged["kl_mean at 512"] == "PASS", outcome.levels


def test_an_ignored_temperature_fails_and_the_rest_of_exactness_holds() -> None:
    outcome = gate("temperature ignored", None, (0,))
    assert failed(outcome) == {"temperature 0.5"}, outcome.levels
    assert outcome.levels[0].notes[0].startswith("the limit of float32, as the server tells")


def test_bfloat16_rounds_by_more_than_float32_may_and_passes_by_its_own_limits() -> None:
    outcome = gate("none", None, (0,), "bfloat16")
    judged = {f.name: f for f in outcome.levels[0].findings}
    assert outcome.verdict == "PASS", judged
    assert outcome.levels[0].notes[0].startswith("the limits of bfloat16 and FP8 (bfloat16, as the server tells)")
    gap = judged["tail_gap"].value
    assert gap is not None and gap > built_in("lossless")["logprob_gap"]


def test_a_window_of_one_position_before_fails_by_the_limits_of_bfloat16() -> None:
    """The least fault of the cache: it changes no text."""
    outcome = gate("off-by-one snapshot", None, (0,), "bfloat16")
    assert {"same answer in every situation", "tail_gap"} <= failed(outcome), outcome.levels
