"""Engine options from untyped values."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.spec.config import EngineOptions, Slo, from_mapping, parse_bytes, parse_slo, parse_tokens
from longread.spec.errors import ConfigError

ALL = {
    "model": "m",
    "served_model_name": "name",
    "dtype": "bfloat16",
    "max_model_len": "128K",
    "max_num_seqs": 4,
    "max_num_batched_tokens": "2k",
    "kv_cache_memory_bytes": "20GiB",
    "num_gpu_blocks_override": 7,
    "enable_prefix_caching": False,
    "snapshot_interval": 512,
    "seed": 3,
    "store": "folder",
    "store_size": "20GiB",
    "host_cache_size": "0",
    "slo": "ttft=2s,tpot=50ms",
    "step_target": "250ms",
    "device": "cuda",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": "0.9",
    "random_weights": True,
    "layers": "1+3",
}


def test_every_option_can_be_given() -> None:
    options = from_mapping(ALL)
    assert set(ALL) == {f.name for f in fields(EngineOptions)}
    assert (options.max_model_len, options.max_num_batched_tokens) == (131072, 2000)
    assert options.kv_cache_memory_bytes == 20 * 2**30
    assert options.enable_prefix_caching is False and options.dtype == "bfloat16"
    assert options.slo == Slo(ttft=2.0, tpot=0.05)
    assert options.step_target == 0.25
    assert (options.device, options.kv_cache_dtype, options.layers) == ("cuda", "fp8", "1+3")
    assert options.gpu_memory_utilization == 0.9 and options.random_weights


def test_defaults_leave_choices_open() -> None:
    assert from_mapping({"model": "m"}) == EngineOptions(model="m")
    assert from_mapping({"model": "m", "max_model_len": "auto", "max_num_seqs": None}) == EngineOptions(model="m")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_modle_len", "max_model_len"),
        ("max-num-seqs", "max_num_seqs"),
        ("kv_cache_memory", "kv_cache_memory_bytes"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*did you mean {nearest}"):
        from_mapping({"model": "m", name: 1})


def test_an_option_like_no_other_lists_all_and_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="known: model"):
        from_mapping({"model": "m", "zzz": 1})
    with pytest.raises(ConfigError, match="model is required"):
        from_mapping({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("dtype", "float64"),
        ("dtype", True),
        ("max_model_len", 0),
        ("max_model_len", -5),
        ("max_model_len", True),
        ("max_model_len", 1.5),
        ("max_model_len", "1.3"),
        ("max_model_len", "4 GiB"),
        ("max_num_seqs", 2**61),
        ("max_num_seqs", "9" * 70),
        ("kv_cache_memory_bytes", "20 gigs"),
        ("kv_cache_memory_bytes", "-1GiB"),
        ("kv_cache_memory_bytes", "nan"),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", "yes"),
        ("snapshot_interval", 1),
        ("seed", None),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        from_mapping({"model": "m", name: value})


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("20GiB", 20 * 2**30), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("2TB", 2 * 10**12), ("7B", 7)],
)
def test_byte_sizes(text: str, count: int) -> None:
    assert parse_bytes("x", text) == count


@pytest.mark.parametrize(
    ("text", "count"), [("128K", 131072), ("128k", 128000), ("1M", 2**20), ("1.5K", 1536), ("9", 9)]
)
def test_token_counts(text: str, count: int) -> None:
    assert parse_tokens("x", text) == count


@given(
    st.dictionaries(
        st.sampled_from(sorted(ALL)), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    )
)
def test_anything_is_options_or_a_config_error(values: dict[str, object]) -> None:
    try:
        options = from_mapping(values)
    except ConfigError:
        return
    assert isinstance(options.model, str) and options.model


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("tpot=50ms", Slo(None, 0.05)),
        (" TTFT = 1.5 s , tpot=.5ms ", Slo(1.5, 0.0005)),
        ("ttft=2min", Slo(120.0, None)),
        ("tpot=800us", Slo(None, 0.0008)),
    ],
)
def test_targets_are_read_and_shown_again(text: str, slo: Slo) -> None:
    read = parse_slo("slo", text)
    assert read.ttft == pytest.approx(slo.ttft) and read.tpot == pytest.approx(slo.tpot)
    again = parse_slo("slo", str(read))
    assert again.ttft == pytest.approx(slo.ttft) and again.tpot == pytest.approx(slo.tpot)


@pytest.mark.parametrize(
    "text", ["", "tpot", "tpot=50", "tpot=0ms", "itl=5ms", "tpot=1s,tpot=2s", "tpot=-1s", "x" * 999]
)
def test_what_is_no_target_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="slo: "):
        from_mapping({"model": "m", "slo": text})


@pytest.mark.parametrize(
    ("given_", "seconds"), [("none", None), ("auto", "auto"), (None, None), (".5s", 0.5), (2, 2.0), ("1 min", 60.0)]
)
def test_a_steps_target_is_a_duration_or_none(given_: object, seconds: object) -> None:
    assert from_mapping({"model": "m", "step_target": given_}).step_target == seconds


@pytest.mark.parametrize("given_", ["", "fast", "0ms", 0, -1, True, float("nan"), float("inf"), "100"])
def test_what_is_no_duration_is_refused(given_: object) -> None:
    with pytest.raises(ConfigError, match="step_target: "):
        from_mapping({"model": "m", "step_target": given_})
