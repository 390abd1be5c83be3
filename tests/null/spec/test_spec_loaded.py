"""What of a checkpoint is loaded: counted against the published totals, without torch."""

import pytest

from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter, loaded_bytes, loaded_dtype, loaded_shape
from longread.spec.releases import release

FLOAT32 = ("e_score_correction_bias", "gate.bias", "attn_sink", ".ape")


def test_a_plain_checkpoint_is_loaded_byte_for_byte():
    spec = release("DeepSeek-V2-Lite")
    assert loaded_bytes(spec, "bfloat16") == sum(t.nbytes for t in inventory(spec))
    assert loaded_bytes(spec, "float32") == 2 * loaded_bytes(spec, "bfloat16")


@pytest.mark.parametrize(("name", "parameters"), [("DeepSeek-V3", 671.03e9), ("DeepSeek-V4-Flash", 284.33e9)])
def test_quantised_models_grow_to_two_bytes_a_parameter(name, parameters):
    assert loaded_bytes(release(name), "bfloat16") == pytest.approx(2 * parameters, rel=5e-4)


def test_packed_pairs_steering_tensors_and_tables():
    spec = release("DeepSeek-V4-Flash")
    seen = set()
    for entry in inventory(spec):
        if entry.scale_of is not None or is_drafter(entry.name, spec):
            continue
        kept = entry.name.endswith(FLOAT32) or "hc_" in entry.name
        expected = "int64" if entry.name.endswith("tid2eid") else "float32" if kept else "bfloat16"
        assert loaded_dtype(entry, "bfloat16") == expected, entry.name
        seen.add(expected)
        if entry.name == "layers.0.ffn.experts.0.w1.weight":
            assert entry.shape == (2048, 2048) and loaded_shape(entry) == (2048, 4096)
    assert seen == {"int64", "float32", "bfloat16"}


def test_a_drafter_is_known_by_its_name():
    v3, v4 = release("DeepSeek-V3"), release("DeepSeek-V4-Flash")
    assert is_drafter("model.layers.61.eh_proj.weight", v3)
    assert not is_drafter("model.layers.60.mlp.gate.weight", v3)
    assert not is_drafter("lm_head.weight", v3)
    assert is_drafter("mtp.2.markov_head.markov_w1.weight", v4)  # DSpark's, whatever the config counts
    assert not is_drafter("layers.42.attn_norm.weight", v4)
