"""vLLM's capacity log lines as its users and our own runs on one H200 saw them; SGLang's bytes a token."""

import pytest
from deployments import GIB, H200, cut, deployment

from longread.plan.deployment import Strategy
from longread.plan.peer_capacity import groups_of, peer_capacity
from longread.spec.errors import ConfigError
from longread.spec.releases import release

FLASH_8 = cut("DeepSeek-V4-Flash", 8, (0, 0) + (4, 128) * 3)
FLASH_32 = cut("DeepSeek-V4-Flash", 32, (0, 0) + (4, 128) * 15)


def _vllm(model: object, pool: float, length: int, chunk: int, drafter: int = 0, cache: str = "fp8_ds_mla") -> object:
    d = deployment(
        model,  # type: ignore[arg-type]
        gpus=1,
        on=H200,
        strategy=Strategy(),
        max_model_len=length,
        chunk=chunk,
        max_num_seqs=8,
        cache=cache,
    )
    return peer_capacity(d, pool=int(pool * GIB), drafter_layers=drafter)


@pytest.mark.parametrize(
    ("model", "pool", "length", "chunk", "drafter", "tokens", "sessions"),
    [
        # vllm#51041, vLLM 0.26, 2 x H20 TP2, one drafter layer. The two runs differ in what they reserve (8,192 and
        # 16,384 tokens in flight fit to 0.05 %) and in the max_model_len that the reserve is spread over, not in the
        # checkpoint: "56 bytes a token" are a quotient.
        ("DeepSeek-V4-Flash", 7.01, 912_128, 4096, 1, 1_009_661, 1.11),
        ("DeepSeek-V4-Flash", 7.71, 121_344, 8192, 1, 150_992, 1.24),
        # Measured on one H200 (vLLM 0.26), pools printed to two or three digits.
        (FLASH_32, 16.95, 540_672, 8192, 0, 1_607_687, 2.97),
        (FLASH_32, 14.2, 540_672, 16384, 0, 776_844, 1.44),
        (FLASH_8, 87.9, 540_672, 8192, 0, 43.3e6, 80.0),
    ],
)
def test_vllm_log_lines(
    model: object, pool: float, length: int, chunk: int, drafter: int, tokens: float, sessions: float
) -> None:
    said = _vllm(model, pool, length, chunk, drafter)
    assert said.reported_tokens == pytest.approx(tokens, rel=0.003)
    assert said.reported_sessions == pytest.approx(sessions, abs=0.011 if sessions < 10 else 0.1)


@pytest.mark.parametrize(
    ("model", "pool", "chunk", "tokens"),
    [(FLASH_32, 16.95, 8192, 749_435), (FLASH_32, 14.2, 16384, 335_892), (FLASH_8, 87.9, 8192, 19.2e6)],
)
def test_vllm_metric_counts_otherwise(model: object, pool: float, chunk: int, tokens: float) -> None:
    assert _vllm(model, pool, 540_672, chunk).metric_tokens == pytest.approx(tokens, rel=0.003)


@pytest.mark.parametrize(
    ("model", "pool", "cache", "tokens", "token_bytes"),
    [("DeepSeek-V3.2", 73.0, "fp8_ds_mla", 24.9e6, 3152), ("DeepSeek-V3", 74.6, "bfloat16", 17.4e6, 4608)],
)
def test_vllm_without_windows(model: str, pool: float, cache: str, tokens: float, token_bytes: int) -> None:
    said = _vllm(cut(model, 4, dense=1), pool, 163_840, 8192, cache=cache)
    assert (said.token_bytes, said.fixed_bytes) == (token_bytes, 0)
    assert said.reported_tokens == pytest.approx(tokens, rel=0.003)
    assert said.sessions == pytest.approx(said.ours, rel=0.001)


def test_fixed_and_per_token_of_a_user_with_three_lengths() -> None:
    """A user's fit over 24 to 25 GiB: 3,300 B + 3.2e9 / max_model_len, 398K tokens at 50K and 2.45M at 500K.

    His cache rows are smaller (nvfp4), so the slope is ours with FP8 rows, 4,208 B; the fixed part is the same.
    """
    said = _vllm("DeepSeek-V4-Flash-0731", 24.5, 500_000, 4096, drafter=3)
    assert said.fixed_bytes == pytest.approx(3.2e9, rel=0.01)
    assert said.token_bytes == pytest.approx(4208, abs=1)
    assert said.reported_tokens == pytest.approx(2.45e6, rel=0.02)
    assert _vllm("DeepSeek-V4-Flash-0731", 24.5, 50_000, 4096, drafter=3).reported_tokens == pytest.approx(
        398e3, rel=0.04
    )


def test_groups_as_a_vllm_log_names_them() -> None:
    """vllm#54703: 62 rows-and-index caches of 1,002,240 B a block, 22 windows of 823,680 and 21 of 786,240."""
    c = release("DeepSeek-V4-Flash").compressed
    assert c is not None
    groups = groups_of(release("DeepSeek-V4-Flash"), c)
    assert groups.first == 1_002_240
    assert [n * groups.entry for n in groups.windows] == [823_680, 786_240]
    assert (groups.csa, groups.hca) == (21, 20)


def test_log_line_is_not_a_rate() -> None:
    """The same pool 'holds' five times as many tokens when max_model_len is eight times longer."""
    short, long = (_vllm("DeepSeek-V4-Flash", 7.0, n, 8192).reported_tokens for n in (65_536, 524_288))
    assert 4 < long / short < 8
    assert (
        _vllm("DeepSeek-V4-Flash", 7.0, 65_536, 8192).sessions < _vllm("DeepSeek-V4-Flash", 7.0, 65_536, 8192).ours / 10
    )


def test_sglang_bytes_a_token() -> None:
    """7,705.45 B: the figure of SGLang's own pool sizing for V4-Flash with a window share of 0.1."""
    d = deployment("DeepSeek-V4-Flash", on=H200, engine="sglang", max_model_len=2**20)
    said = peer_capacity(d, pool=20 * GIB)
    assert said.token_bytes == pytest.approx(7705.45, abs=0.01)
    assert said.reported_tokens == pytest.approx(20 * GIB / 7705.45, rel=0.02)
    assert said.ours > 1.9 * said.sessions
    plain = peer_capacity(deployment("DeepSeek-V3.2", on=H200, engine="sglang", max_model_len=131072), pool=10 * GIB)
    assert (plain.token_bytes, plain.fixed_bytes) == (48_068, 0)


def test_data_parallel_caches_add_up_and_no_room_is_no_tokens() -> None:
    d = deployment("DeepSeek-V4-Flash", on=H200, strategy=Strategy(8, dp=8, ep=True))
    said = peer_capacity(d, 131072, pool=10 * GIB)
    assert said.sessions == pytest.approx(8 * 10 * GIB / (said.fixed_bytes + 131072 * said.token_bytes), rel=0.02)
    assert said.context == 131072 and str(said.fixed_bytes // 2**30) in said.why
    assert peer_capacity(deployment("DeepSeek-V4-Pro", gpus=1)).reported_tokens == 0
    with pytest.raises(ConfigError, match="longread's own"):
        peer_capacity(deployment("DeepSeek-V4-Flash", engine="longread"))
