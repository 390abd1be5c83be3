"""The memory plan: exact parts equal the state groups, bounds grow with what they depend on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.plan.memory import memory_plan, page_bytes, slot_bytes, workspace_bytes
from longread.spec.loaded import loaded_bytes
from longread.spec.releases import release
from longread.spec.state import state_groups

NAMES = ["DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"]
COUNTS = st.integers(0, 1000)


@given(st.sampled_from(NAMES), st.sampled_from(["float32", "bfloat16"]), COUNTS, COUNTS, COUNTS)
def test_cache_parts_are_the_bytes_of_the_state_groups(
    name: str, dtype: str, pages: int, slots: int, snaps: int
) -> None:
    spec, size = release(name), {"float32": 4, "bfloat16": 2}[dtype]
    plan = memory_plan(
        spec,
        dtype=dtype,
        weight_bytes=5,
        num_pages=pages,
        num_slots=slots,
        num_snapshots=snaps,
        max_num_batched_tokens=256,
    )
    per_page = sum(g.bytes_per_page(size) for g in state_groups(spec))
    per_slot = sum(g.bytes_per_slot(size) for g in state_groups(spec))
    assert (plan.kv_pages, plan.kv_slots, plan.kv_snapshots) == (pages * per_page, slots * per_slot, snaps * per_slot)
    assert plan.allocated == 5 + plan.kv_cache
    assert plan.total == plan.allocated + plan.workspace + plan.logits + plan.runtime
    assert plan.logits == 3 * slots * spec.vocab * 4


def test_pages_of_public_models() -> None:
    assert page_bytes(release("DeepSeek-V3"), "bfloat16") == 70_272 * 256
    assert page_bytes(release("DeepSeek-V4-Flash"), "bfloat16") == 6_880 * 256
    assert slot_bytes(release("DeepSeek-V3"), "float32") == 0
    assert slot_bytes(release("DeepSeek-V4-Flash"), "bfloat16") == pytest.approx(7.48e6, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_workspace_covers_its_largest_tensors_and_grows(name: str) -> None:
    spec = release(name)
    tokens = 2048
    whole = workspace_bytes(spec, tokens, 16)
    streams = spec.hyper.mult if spec.hyper else 1
    assert whole > 4 * tokens * spec.hidden * streams * 10
    assert whole > 4 * tokens * spec.moe.top_k * spec.hidden
    assert workspace_bytes(spec, 2 * tokens, 16) > whole > workspace_bytes(spec, 1, 1)
    assert workspace_bytes(replace(spec, hidden=2 * spec.hidden), tokens, 16) > whole


def test_loaded_weights_follow_the_type() -> None:
    spec = release("DeepSeek-V2-Lite")
    assert loaded_bytes(spec, "float32") == 2 * loaded_bytes(spec, "bfloat16")
