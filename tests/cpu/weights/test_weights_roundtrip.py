"""What is exported comes back: exact if stored plainly, as quantised if not, and as transformers reads it."""

import json

import pytest
import torch
import transformers

from longread.kernels.quant import ref
from longread.spec import errors
from longread.spec.config_json import spec_from_config
from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter, loaded_bytes
from longread.weights.export import write_checkpoint
from longread.weights.fixture import KINDS, random_weights, tiny_config
from longread.weights.reader import Checkpoint

SMALL = {"vocab_size": 256, "n_routed_experts": 8}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# name -> (kind, overrides): every published form of quantisation
FORMS = {
    "v3 fp32 128": ("v3", {"quantization_config": FP8}),
    "v3.1 fp32 powers of two": ("v3", {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}),
    # 64 + 32 latent rows: transformers reads whole blocks only
    "v3 fp32 32": ("v3", {"quantization_config": FP8 | {"weight_block_size": [32, 32]}, "qk_rope_head_dim": 32}),
    "v4 ue8m0 fp4": ("v4-flash", {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}, "expert_dtype": "fp4"}),
    "v4 base fp32 fp8": ("v4-pro", {"quantization_config": FP8, "expert_dtype": "fp8"}),
    "v4 ue8m0 32 fp4": (
        "v4-pro",
        {"quantization_config": FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, "expert_dtype": "fp4"},
    ),
}


def load(path, dtype=torch.float32):
    checkpoint = Checkpoint.open(path)
    return checkpoint.load(spec_from_config(checkpoint.config), dtype)


def oracle(path):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("shards", [1, 4])
def test_plain_weights_come_back_exactly(tmp_path, kind, stored, shards):
    config = tiny_config(kind, torch_dtype=stored, **SMALL)
    spec = spec_from_config(config)
    weights = random_weights(spec, seed=3)
    write_checkpoint(tmp_path, config, weights, shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    loaded = load(tmp_path)
    backbone = {n: t for n, t in weights.items() if not is_drafter(n, spec)}
    assert loaded.keys() == backbone.keys()
    for name, tensor in backbone.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_come_back_quantised(tmp_path, form):
    kind, overrides = FORMS[form]
    config = tiny_config(kind, **SMALL | overrides)
    spec = spec_from_config(config)
    weights = random_weights(spec)
    write_checkpoint(tmp_path, config, weights, shards=2)
    checkpoint = Checkpoint.open(tmp_path)
    loaded = checkpoint.load(spec, torch.float32)
    quantised = 0
    for entry in inventory(spec):
        assert checkpoint.tensors[entry.name].shape == entry.shape
        assert checkpoint.tensors[entry.name].dtype == entry.dtype
        if entry.name not in loaded:
            continue
        weight = weights[entry.name]
        if entry.dtype == "float8_e4m3":
            stored_as = "ue8m0" if spec.quant.scale_format == "ue8m0" else "float32"
            if spec.quant.power_of_two and stored_as == "float32":
                stored_as = "float32_pow2"
            codes, scale = ref.quantise_fp8(weight, spec.quant.block, stored_as)
            weight = ref.dequantise_fp8(codes, scale, spec.quant.block, torch.float32)
            quantised += 1
        elif entry.dtype == "int8":
            weight = ref.dequantise_fp4(*ref.quantise_fp4(weight), torch.float32)
            quantised += 1
        assert torch.equal(loaded[entry.name], weight), entry.name
        error = (weight - weights[entry.name]).float().norm() / weights[entry.name].float().norm()
        assert error < (0.15 if entry.dtype == "int8" else 0.05), entry.name
    assert quantised > 50


@pytest.mark.parametrize("form", FORMS)
def test_transformers_reads_the_same_numbers(tmp_path, form):
    """Its reading of the quantised directory equals its reading of a plain one that holds our decoded weights."""
    kind, overrides = FORMS[form]
    config = tiny_config(kind, **SMALL | overrides)
    write_checkpoint(tmp_path / "quantised", config, random_weights(spec_from_config(config)), shards=2)
    write_checkpoint(
        tmp_path / "plain",
        tiny_config(kind, torch_dtype="float32", **SMALL | _shapes(overrides)),
        load(tmp_path / "quantised"),
    )
    theirs, ours = oracle(tmp_path / "quantised"), oracle(tmp_path / "plain")
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor), name


def _shapes(overrides):
    return {k: v for k, v in overrides.items() if k not in ("quantization_config", "expert_dtype")}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_finds_every_plain_tensor(tmp_path, kind):
    config = tiny_config(kind, **SMALL)
    write_checkpoint(tmp_path, config, random_weights(spec_from_config(config)))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"]
    assert all(".layers.4." in name for name in info["unexpected_keys"])  # V3's MTP block
    ids = torch.randint(3, 256, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(ids).logits
    assert 0.5 < logits.std() < 2 and logits.std(dim=1).mean() > 0.5  # lively, and different at each position


def test_drafter_may_be_left_out_and_is_skipped_with_one_line(tmp_path, caplog):
    config = tiny_config("v3", **SMALL)
    spec = spec_from_config(config)
    weights = random_weights(spec)
    backbone = {n: t for n, t in weights.items() if not is_drafter(n, spec)}
    write_checkpoint(tmp_path / "whole", config, weights)
    write_checkpoint(tmp_path / "bare", config, backbone)
    with caplog.at_level("INFO", "longread.weights"):
        whole = load(tmp_path / "whole")
    drafter = [t for n, t in weights.items() if is_drafter(n, spec)]
    size = sum(t.numel() * 2 for t in drafter) + 2 * 8  # bfloat16, but the router bias float32
    assert [r.getMessage() for r in caplog.records] == [
        f"skipped {len(drafter)} tensors ({size} bytes) that are not run: MTP blocks, precomputed rotary buffers"
    ]
    caplog.clear()
    with caplog.at_level("INFO", "longread.weights"):
        bare = load(tmp_path / "bare")
    assert not caplog.records
    assert whole.keys() == bare.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantised", [False, True])
def test_loaded_bytes_are_what_the_planner_counts(tmp_path, kind, quantised):
    config = tiny_config(kind, quantised=quantised, **SMALL)
    spec = spec_from_config(config)
    write_checkpoint(tmp_path, config, random_weights(spec))
    for name in ("float32", "bfloat16"):
        loaded = load(tmp_path, getattr(torch, name))
        assert sum(t.nbytes for t in loaded.values()) == loaded_bytes(spec, name)
        for weight, tensor in loaded.items():
            steers = weight.endswith((".bias", "_bias", "attn_sink", ".ape")) or "hc_" in weight
            kept = torch.int64 if weight.endswith("tid2eid") else torch.float32 if steers else getattr(torch, name)
            assert tensor.dtype == kept, weight


def test_a_matching_type_is_a_view_into_the_file_and_cannot_change_it(tmp_path):
    config = tiny_config("v2-lite", **SMALL)
    write_checkpoint(tmp_path, config, random_weights(spec_from_config(config)))
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    loaded = checkpoint.load(spec_from_config(config), torch.bfloat16)
    for name, tensor in loaded.items():
        assert tensor.data_ptr() == checkpoint.stored(name).data_ptr(), name
    del checkpoint  # the tensors keep the mapping alive
    loaded["model.norm.weight"].zero_()
    assert not loaded["model.norm.weight"].any()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_progress_counts_file_bytes(tmp_path):
    config = tiny_config("v3", quantised=True, **SMALL)
    spec = spec_from_config(config)
    write_checkpoint(tmp_path, config, random_weights(spec), shards=2)
    seen = []
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.load(spec, torch.float32, lambda done, total: seen.append((done, total)))
    wanted = sum(t.nbytes for n, t in checkpoint.tensors.items() if not is_drafter(n, spec))
    assert seen == sorted(seen) and seen[-1] == (wanted, wanted)


def test_fingerprint_follows_the_weights_only(tmp_path):
    config = tiny_config("v4-flash", quantised=True, **SMALL)
    weights = random_weights(spec_from_config(config))
    write_checkpoint(tmp_path / "a", config, weights)
    write_checkpoint(tmp_path / "b", config, weights, shards=3)
    seen = {Checkpoint.open(tmp_path / n).fingerprint for n in "ab"}
    assert len(seen) == 1 and len(seen.copy().pop()) == 32
    for name in ("layers.4.ffn.gate.bias", "norm.weight", "embed.weight", "layers.3.ffn.experts.7.w2.weight"):
        write_checkpoint(tmp_path / "c", config, weights | {name: weights[name] * 1.5 + 0.1})
        fingerprint = Checkpoint.open(tmp_path / "c").fingerprint
        assert fingerprint not in seen, name
        seen.add(fingerprint)


@pytest.mark.parametrize("share", [0.013, 0.37, 0.5, 0.991])
def test_one_changed_bit_anywhere_is_another_fingerprint(tmp_path, share):
    config = tiny_config("v4-flash", quantised=True, **SMALL)
    write_checkpoint(tmp_path, config, random_weights(spec_from_config(config)))
    before = Checkpoint.open(tmp_path).fingerprint
    largest = max(Checkpoint.open(tmp_path).tensors.values(), key=lambda t: t.nbytes)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(largest.start + int(largest.nbytes * share))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert Checkpoint.open(tmp_path).fingerprint != before


def test_stored_rotary_buffers_are_skipped(tmp_path):
    from checkpoints import rebuild, unpack

    config = tiny_config("v2-lite", **SMALL)
    write_checkpoint(tmp_path, config, random_weights(spec_from_config(config)))
    file = tmp_path / "model.safetensors"
    buffer = ("model.layers.0.self_attn.rotary_emb.inv_freq", {"dtype": "F32", "shape": [8]}, bytes(32))
    rebuild(file, [*unpack(file), buffer])
    assert buffer[0] not in load(tmp_path)


def test_misaligned_tensors_are_read(tmp_path):
    """A header whose length is no multiple of eight puts every tensor at an odd address."""
    from checkpoints import read_header, write_raw

    config = tiny_config("v3", torch_dtype="float32", **SMALL)
    spec = spec_from_config(config)
    weights = random_weights(spec)
    write_checkpoint(tmp_path, config, weights)
    header, data = read_header(tmp_path / "model.safetensors")
    text = json.dumps(header).encode()
    write_raw(tmp_path / "model.safetensors", text + b" " * (3 - len(text) % 8 + 8), data)
    for name, tensor in load(tmp_path).items():
        assert torch.equal(tensor, weights[name]), name


def test_export_refuses_what_does_not_fit_the_config(tmp_path):
    config = tiny_config("v3", **SMALL)
    weights = random_weights(spec_from_config(config))
    norm = "model.norm.weight"
    with pytest.raises(errors.MissingTensorError, match=norm):
        write_checkpoint(tmp_path, config, {n: t for n, t in weights.items() if n != norm})
    with pytest.raises(errors.UnexpectedTensorError, match="extra"):
        write_checkpoint(tmp_path, config, weights | {"extra": torch.ones(1)})
    with pytest.raises(errors.TensorShapeError, match=r"\(128,\).*\(3,\)"):
        write_checkpoint(tmp_path, config, weights | {norm: torch.ones(3)})
    with pytest.raises(errors.ConfigError, match="shards"):
        write_checkpoint(tmp_path, config, weights, shards=0)
    assert not list(tmp_path.iterdir())
