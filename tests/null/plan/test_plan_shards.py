"""How strategies cut weights, and which of them cannot be."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from deployments import GIB, H20, H200, cut, deployment
from hypothesis import given
from hypothesis import strategies as st

from longread.plan import shards
from longread.plan.cards import parse_hardware
from longread.plan.deployment import EngineName, Strategy
from longread.plan.frontend import load_seconds
from longread.plan.gpu_memory import capacity, gpu_memory, max_context, require_room, triangle
from longread.plan.ops import decode_ops
from longread.plan.peer_capacity import peer_capacity
from longread.plan.shards import check_strategy, stage_layers, stage_weights, weight_bytes
from longread.spec.errors import ConfigError
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.model import ModelSpec
from longread.spec.releases import release

MODELS = [
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
    "DeepSeek-V3.2",
    "DeepSeek-V4-Flash",
    "DeepSeek-V4-Pro",
    "DeepSeek-V4.1-Flash",
]
WIDE = {"nodes": 4}


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_all_cards_together_hold_every_weight(model: str, tp: int, pp: int, cp: int) -> None:
    one = sum(weight_bytes(deployment(model, gpus=1)).values())
    stages = stage_weights(deployment(model, strategy=Strategy(tp, pp, cp)))
    total = sum(sum(groups.values()) for groups in stages) * tp * cp
    assert one <= total + 1000 * tp * cp * pp
    if tp == cp == 1:
        assert total == one
    assert max(sum(g.values()) for g in stages) == sum(
        weight_bytes(deployment(model, strategy=Strategy(tp, pp, cp))).values()
    )


def test_what_tp_cuts_and_what_it_copies() -> None:
    for model, copied in (
        ("DeepSeek-V3.2", {"indexer", "router+norm+hyper"}),
        ("DeepSeek-V4-Flash", {"indexer", "router+norm+hyper"}),
    ):
        whole, eighth = (weight_bytes(deployment(model, gpus=n)) for n in (1, 8))
        for group, size in whole.items():
            if group in copied:
                assert eighth[group] == size, group
            elif group == "attention":  # q_a and kv_a, and V4's compressors, on every card
                assert size / 8 < eighth[group] < size
            else:
                assert eighth[group] == pytest.approx(size / 8, rel=1e-6), group


def test_mla_attention_by_hand() -> None:
    """V3: q_b 24576 x 1536, kv_b 32768 x 512, o 7168 x 16384 are cut by heads; q_a 1536 x 7168, kv_a 576 x 7168 not."""
    spec = release("DeepSeek-V3")

    def stored(rows: int, columns: int) -> int:
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    cut_bytes = stored(24576, 1536) + stored(32768, 512) + stored(7168, 16384)
    whole = stored(1536, 7168) + stored(576, 7168)
    expected = spec.layers * (cut_bytes // 8 + whole)
    assert weight_bytes(deployment(spec))["attention"] == pytest.approx(expected, rel=1e-6)


def test_data_parallel_attention_is_copied_and_experts_are_not() -> None:
    one = weight_bytes(deployment("DeepSeek-V4-Flash", gpus=1))
    dp = weight_bytes(deployment("DeepSeek-V4-Flash", strategy=Strategy(8, dp=8, ep=True)))
    assert dp["attention"] == one["attention"] and dp["shared"] == one["shared"]
    assert dp["experts"] == one["experts"] // 8
    assert dp["embed+head"] == one["embed+head"]
    cp = weight_bytes(deployment("DeepSeek-V4-Flash", strategy=Strategy(1, cp=8)))
    assert cp["attention"] == one["attention"] and cp["experts"] == one["experts"] // 8


def test_formats_of_experts() -> None:
    sizes = {
        form: weight_bytes(deployment("DeepSeek-V3.2", gpus=1, experts=form))
        for form in ("native", "fp8", "int4", "bf16")
    }
    numbers = 58 * 256 * 3 * 7168 * 2048
    assert sizes["native"] == sizes["fp8"]
    assert sizes["bf16"]["experts"] == 2 * numbers
    assert sizes["int4"]["experts"] == numbers // 2 + numbers // 64
    assert len({sum(s.values()) - s["experts"] for s in sizes.values()}) == 1
    flash = weight_bytes(deployment("DeepSeek-V4-Flash", gpus=1, experts="fp8"))["experts"]
    assert flash == 43 * 256 * 3 * 4096 * 2048 * (1 + 1 / 128**2)


def test_weights_as_vllm_reported_them() -> None:
    """One H200, vLLM 0.26, few layers of full shape: 29.4, 109.4, 36.5 GiB; RoPE tables and the like count."""
    flash = "DeepSeek-V4-Flash"
    for spec, gib in (
        (cut(flash, 8, (0, 0) + (4, 128) * 3), 29.4),
        (cut(flash, 32, (0, 0) + (4, 128) * 15), 109.4),
        (cut("DeepSeek-V3", 4, dense=1), 36.5),
    ):
        d = deployment(spec, gpus=1, on=H200)
        memory = gpu_memory(d)
        assert memory.weight_total / GIB == pytest.approx(gib, abs=0.85)
        assert (memory.weight_total + memory.parts["tables"].size) / GIB == pytest.approx(gib, abs=0.35)


@pytest.mark.parametrize(
    ("layers", "chunk", "gib"),
    [
        ("flash-8", 8192, 29.4 + 2.6),
        ("flash-32", 8192, 109.4 + 2.6),
        ("flash-32", 16384, 109.7 + 5.1),
        ("v3.2", 8192, 40.7 + 4.8),
        ("v3", 8192, 36.5 + 7.4),
    ],
)
def test_weights_and_activations_as_vllm_profiled_them(layers: str, chunk: int, gib: float) -> None:
    spec = {
        "flash-8": cut("DeepSeek-V4-Flash", 8, (0, 0) + (4, 128) * 3),
        "flash-32": cut("DeepSeek-V4-Flash", 32, (0, 0) + (4, 128) * 15),
        "v3.2": cut("DeepSeek-V3.2", 4, dense=1),
        "v3": cut("DeepSeek-V3", 4, dense=1),
    }[layers]
    length = 163_840 if layers == "v3" else 540_672
    m = gpu_memory(deployment(spec, gpus=1, on=H200, chunk=chunk, max_num_seqs=8, max_model_len=length))
    assert (m.weight_total + m.beside - m.graphs - m.parts["context"].size) / GIB == pytest.approx(gib, rel=0.04)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("DeepSeek-V3", {"strategy": Strategy(0)}, "tp=0; it must be at least 1"),
        ("DeepSeek-V3", {"strategy": Strategy(3)}, "128 attention heads cannot be split over 3"),
        ("DeepSeek-V3", {"strategy": Strategy(16)}, "needs 16 GPUs, 8xH20-96 has 8"),
        ("DeepSeek-V3", {"strategy": Strategy(8, dp=3)}, "dp must divide tp"),
        ("DeepSeek-V3", {"strategy": Strategy(8, replicas=2)}, "needs 16 GPUs"),
        (
            "DeepSeek-V3",
            {"strategy": Strategy(32), **WIDE},
            "dense FFN of width 18432 over 32 .* 576 columns, not a multiple of the FP8 block of 128",
        ),
        ("DeepSeek-V4-Pro", {"strategy": Strategy(16), **WIDE}, "leaves 192 columns.*sglang#23602"),
        ("DeepSeek-V4-Pro", {"strategy": Strategy(16, dp=2), "experts": "fp8", **WIDE}, "routed experts .* 192"),
        ("DeepSeek-V4-Flash", {"strategy": Strategy(16), **WIDE}, "8 groups .o_groups."),
        ("DeepSeek-V3", {"strategy": Strategy(8, pp=4), "engine": "longread", **WIDE}, "runs on one machine"),
        ("DeepSeek-V4-Flash", {"strategy": Strategy(4, cp=2)}, "no context parallelism"),
        ("DeepSeek-V3", {"max_model_len": 200_000}, "outside 1..163840"),
        ("DeepSeek-V3", {"memory_share": 1.2}, "memory_share=1.2"),
        ("DeepSeek-V3", {"max_num_seqs": 0}, "max_num_seqs=0"),
        ("DeepSeek-V3", {"chunk": 8, "max_num_seqs": 16}, "one token a sequence"),
        ("DeepSeek-V3", {"cache": "nvfp4"}, "no record"),
        ("DeepSeek-V3", {"gpus": 0, "strategy": Strategy()}, "at least one of each"),
        ("DeepSeek-V2", {"strategy": Strategy(8, pp=4, ep=True), **WIDE, "gpus": 8}, None),
        ("DeepSeek-V4-Pro", {"strategy": Strategy(16, dp=2), **WIDE}, None),  # as sglang#23933 ran it
        ("DeepSeek-V4-Pro", {"strategy": Strategy(8, pp=4), **WIDE}, None),
        ("DeepSeek-V3", {"strategy": Strategy(16), **WIDE}, None),
        ("DeepSeek-V4-Flash", {"strategy": Strategy(2)}, None),
    ],
)
def test_strategies_that_cannot_be(model: str, options: dict[str, object], words: str | None) -> None:
    d = deployment(model, **options)
    if words is None:
        check_strategy(d)
        return
    with pytest.raises(ConfigError, match=words):
        check_strategy(d)


def test_experts_over_cards_that_do_not_divide_them() -> None:
    with pytest.raises(ConfigError, match="160 experts cannot be spread over 64"):
        check_strategy(deployment("DeepSeek-V2", strategy=Strategy(64, dp=8, ep=True), nodes=8))


def test_stages_as_vllm_cuts_them() -> None:
    assert stage_layers(61, 4) == [(0, 15), (15, 30), (30, 46), (46, 61)]
    assert stage_layers(43, 2) == [(0, 22), (22, 43)]
    for layers in (27, 43, 61):
        for pp in range(1, 9):
            ends = stage_layers(layers, pp)
            assert ends[0][0] == 0 and ends[-1][1] == layers
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
            assert max(e - s for s, e in ends) - min(e - s for s, e in ends) <= 1


def test_cache_is_copied_by_tp_and_cut_by_the_others() -> None:
    def per_token(strategy: Strategy, model: str = "DeepSeek-V3.2") -> float:
        return sum(gpu_memory(deployment(model, strategy=strategy, engine="sglang")).kv_per_token.values())

    assert per_token(Strategy(8)) == per_token(Strategy(1)) == 48_068
    assert per_token(Strategy(4, pp=2)) in (48_068 / 61 * 30, 48_068 / 61 * 31)
    split = deployment("DeepSeek-V4-Flash", strategy=Strategy(4, cp=2), engine="longread")
    said = gpu_memory(split).sharing
    assert said["csa"] == "copied to 4 cards, tokens split over 2 cards (cp)"
    assert said["window"] == "copied to 4 cards, copied to all 2 cp cards"


def test_sglang_context_parallelism_copies_the_cache() -> None:
    """It splits a prompt's tokens while they are read, and gathers their cache to every card."""
    shape = {"strategy": Strategy(1, cp=8), "on": H200, "max_model_len": 131072 + 512, "max_num_seqs": 16}
    own = deployment("DeepSeek-V3.2", engine="longread", **shape)
    theirs = deployment("DeepSeek-V3.2", engine="sglang", **shape)
    assert sum(gpu_memory(own).kv_per_token.values()) == 48_068 / 8
    assert sum(gpu_memory(theirs).kv_per_token.values()) == 48_068
    assert set(gpu_memory(theirs).sharing.values()) == {"copied to 8 cards"}
    said = peer_capacity(theirs)
    assert said.token_bytes == 48_068
    assert said.sessions == pytest.approx(capacity(theirs).sessions, rel=0.01)
    assert said.sessions < 16 < said.ours  # longread's cache would split the same bytes
    real = parse_hardware("8xH20-141")
    slow, quick = (load_seconds(replace(d, hardware=real), 131072, "host")["load host"] for d in (theirs, own))
    assert slow == 8 * quick


def test_rings_and_snapshots_of_a_sequence() -> None:
    d = deployment("DeepSeek-V4-Flash", engine="longread", snapshots=3)
    memory = gpu_memory(d)
    assert memory.snapshot_bytes == sum(memory.kv_fixed.values()) == 5_057_536
    assert memory.session_bytes(1, 3) - memory.session_bytes(1) == 3 * memory.snapshot_bytes
    assert memory.session_bytes(257) == 512 * 3850.25 + memory.snapshot_bytes
    with_more = capacity(replace(d, snapshots=30), 4096)
    assert with_more.sessions < capacity(d, 4096).sessions


def test_triangle_and_longest_context_agree_with_capacity() -> None:
    d = deployment("DeepSeek-V3.2", on=H20, experts="int4", max_model_len=163_840, engine="longread")
    cells = {(c.context, c.concurrency): c for c in triangle(d)}
    assert max(context for context, _ in cells) == 131_072  # the model's own limit lies below the next
    for (context, concurrency), cell in cells.items():
        held = capacity(replace(d, max_model_len=context), context).whole
        assert cell.fits == (concurrency <= held), (context, concurrency)
        assert cell.fits == (cell.size <= gpu_memory(d).usable)
    full = replace(d, hardware=deployment("DeepSeek-V3.2", on=H20).hardware, experts="native")
    longest = max_context(full)
    assert longest < 163_840 and longest % 256 == 0
    if longest:
        assert capacity(replace(full, max_model_len=longest)).whole >= 1
    with pytest.raises(ConfigError, match=r"GiB a card too much .*most of it experts"):
        require_room(full, 163_840)
    require_room(d, 163_840)


def test_index_scores_by_engine() -> None:
    """8192 x 524,288 / 4 x 4 B = 4.3 GB for V4, 17.2 GB for V3.2, unless they are cut or streamed."""
    for model, whole in (("DeepSeek-V4-Flash", 4.3e9), ("DeepSeek-V3.2", 17.2e9 * 163_840 / 524_288)):
        sizes = {e: gpu_memory(deployment(model, engine=e)).logits["indexer"] for e in ("sglang", "vllm", "longread")}
        assert sizes["sglang"] == pytest.approx(whole, rel=0.01)
        assert (sizes["vllm"], sizes["longread"]) == (512 * 2**20, 64 * 2**20)
    assert "indexer" not in gpu_memory(deployment("DeepSeek-V3")).logits


def test_a_hundred_deployments_walk_the_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []

    def counted(spec: ModelSpec) -> Iterator[TensorSpec]:
        walked.append(spec.label)
        return inventory(spec)

    monkeypatch.setattr(shards, "inventory", counted)
    spec = cut("DeepSeek-V4-Pro", 6, ratios=(128, 128, 4, 128, 4, 128))
    for tp in (1, 2, 4, 8):
        for chunk in range(1024, 26 * 1024, 1024):
            d = replace(deployment("DeepSeek-V4-Pro", strategy=Strategy(tp), chunk=chunk), spec=spec)
            capacity(d), max_context(d)
    assert len(walked) == 1


@pytest.mark.parametrize("model", ["DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4-Flash"])
def test_a_decode_step_reads_the_cache_that_its_card_has(model: str) -> None:
    """SGLang's context parallelism copies the cache to every card, which then reads all of it; Longread's splits it."""

    def read(engine: EngineName, cp: int) -> float:
        d = deployment(model, strategy=Strategy(1, 1, cp), engine=engine)
        ops = {op.name: op for op in decode_ops(d, 8, 131072)}
        return ops["attention"].bytes + (ops["indexer scores"].bytes if "indexer scores" in ops else 0.0)

    assert read("sglang", 8) == pytest.approx(read("sglang", 1))
    assert read("longread", 8) == pytest.approx(read("longread", 1) / 8)
