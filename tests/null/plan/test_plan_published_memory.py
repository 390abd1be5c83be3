"""The memory formulas against what others report of memory, and whom a report concerns."""

from dataclasses import replace

import pytest
from rich.console import Console

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Workload
from longread.plan.document import survey_document
from longread.plan.gpu_memory import gpu_memory
from longread.plan.peer_capacity import peer_capacity
from longread.plan.published_memory import MemoryFact, against, memory_facts
from longread.plan.report import print_survey
from longread.plan.search import search
from longread.plan.space import LARGER_SHARES, SHARE, Fixed
from longread.plan.survey import survey
from longread.spec.releases import release


def fact(words: str) -> MemoryFact:
    (found,) = [f for f in memory_facts() if words in f.said]
    return found


@pytest.mark.parametrize("share", [SHARE, *LARGER_SHARES])
def test_v3_1_at_128k_is_out_of_memory_on_96_gb_as_published(share: float) -> None:
    """SGLang keeps keys and values of 128K tokens of context beside their latents while a chunk is read."""
    f = fact("ran out of memory at 128K")
    d = replace(f.deployment, memory_share=share)
    memory = gpu_memory(d)
    assert f.fits == 0 and memory.free < memory.session_bytes(f.context)
    heads, rows = 16, 131072
    assert memory.parts["workspace"].size == 2 * rows * (heads * (128 + 128 + 192) + 576)
    larger = replace(d, hardware=parse_hardware("8xH20-141"))
    assert gpu_memory(larger).free > gpu_memory(larger).session_bytes(f.context)  # where the blog's baseline ran


def test_v4_pro_with_its_drafter_holds_one_sequence_of_a_million_tokens() -> None:
    f = fact("only batch 1")
    for share, chunk in ((0.92, 4096), (0.95, 4096), (0.95, 8192), (0.98, 8192)):
        d = replace(f.deployment, memory_share=share, chunk=chunk)
        held = peer_capacity(d, f.context, drafter_layers=d.spec.mtp_layers)
        assert int(held.sessions) == f.fits == 1, (share, chunk)
        assert gpu_memory(d).free - gpu_memory(d, drafter=True).free > 5 * 2**30  # DSpark's weights


def test_v3_takes_as_much_of_a_card_as_reported() -> None:
    f = fact("of a card in use")
    assert f.shown is not None
    memory = gpu_memory(f.deployment)
    assert memory.free > 0
    assert f.shown[0] <= memory.usable / 1e9 <= f.shown[1]


def test_a_survey_shows_what_others_report_of_such_a_model_there(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(model: str, machine: str) -> list[str]:
        return [f.said for f in survey(release(model), parse_hardware(machine)).published]

    assert shown("R1", "8xH20-96") == [f.said for f in memory_facts() if f.deployment.hardware.label == "8xH20-96"]
    assert shown("V4-Pro", "8xH20-141") == [fact("only batch 1").said]
    assert shown("V3.2", "8xH20-96") == shown("V3", "8xH200") == []
    print_survey(Console(width=400), survey(release("V3"), parse_hardware("8xH20-96")))
    assert "ran out of memory at 128K" in capsys.readouterr().out
    document = survey_document(survey(release("V4-Pro"), parse_hardware("8xH20-141")))
    assert [(f["fits"], f["drafter"]) for f in document["published"]] == [(1, True)]


def test_a_report_concerns_models_of_the_same_size_on_the_same_machine() -> None:
    small, large = parse_hardware("8xH20-96"), parse_hardware("8xH20-141")
    for model in ("V3", "R1", "V3.1"):
        assert [f.fits for f in against(release(model), small, 131072, 1)] == [0]
        assert not against(release(model), large, 131072, 1)
        assert not against(release(model), small, 65536, 1)
    assert not against(release("V3.2"), small, 131072, 1)
    assert [f.fits for f in against(release("V4-Pro"), large, 1_000_000, 2)] == [1]
    assert not against(release("V4-Pro"), large, 1_000_000, 1)
    assert all("not said" in f.words and f.source in f.words for f in memory_facts())


def test_a_plan_says_what_others_report_and_that_no_drafter_is_loaded() -> None:
    one = Workload(131072, 512)
    r = search(release("V3.1"), parse_hardware("8xH20-96"), one, engines=("sglang",), fixed=Fixed(tp=8, dp=1, ep=False))
    assert any("ran out of memory at 128K" in note for note in r.notes)
    best = r.feasible[0]
    assert best.deployment.cache == "fp8" or (best.deployment.memory_share == 0.98 and best.deployment.chunk <= 4096)
    assert any("no drafter is loaded or counted: MTP" in note for note in r.notes)
    big, machine = release("V4-Pro-0813"), parse_hardware("8xH20-141")
    two = search(big, machine, Workload(1_048_000, 512, concurrency=2), engines=("sglang",))
    assert any("only batch 1 fits" in note for note in two.notes) == (two.feasible[0].sessions > 1)
    assert any("DSpark" in note and "GiB" in note for note in two.notes)
    assert not any("published for" in note for note in search(big, machine, Workload(8192, 512)).notes)
