"""Every kind of damaged or foreign checkpoint is refused with its own error, before any weight is decoded."""

import errno
import json
import mmap
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import INDEX, edit_header, edit_index, rebuild, unpack, write_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longread.kernels.quant import ref
from longread.spec import errors
from longread.spec.config_json import spec_from_config
from longread.weights.fixture import write_fixture
from longread.weights.reader import Checkpoint

NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "v3"
    write_fixture(path, "v3", quantised=True, shards=3, vocab_size=256, num_hidden_layers=2, n_routed_experts=8)
    return path


@pytest.fixture
def root(pristine, tmp_path, monkeypatch) -> Path:
    def decoded(*args):
        raise AssertionError("a weight was decoded before the refusal")

    monkeypatch.setattr(ref, "dequantise_fp8", decoded)
    shutil.copytree(pristine, tmp_path / "v3")
    return tmp_path / "v3"


def refuse(root: Path, error: type[errors.CheckpointError], *fragments: str) -> None:
    with pytest.raises(errors.CheckpointError) as caught:
        checkpoint = Checkpoint.open(root)
        checkpoint.load(spec_from_config(checkpoint.config), torch.float32)
    assert type(caught.value) is error, caught.value
    for fragment in fragments:
        assert fragment in str(caught.value)


def shard_of(root: Path, name: str) -> Path:
    return root / json.loads((root / INDEX).read_text())["weight_map"][name]


def edit_tensor(root: Path, name: str, change) -> None:
    """Replace one tensor's (entry, bytes); the file stays consistent with itself."""
    file = shard_of(root, name)
    rebuild(file, [(n, *(change(e, b) if n == name else (e, b))) for n, e, b in unpack(file)])


def test_the_pristine_checkpoint_loads(pristine):
    checkpoint = Checkpoint.open(pristine)
    assert NORM in checkpoint.load(spec_from_config(checkpoint.config), torch.float32)


def test_path_is_no_directory(root):
    refuse(root / "config.json", errors.CheckpointPathError, "no directory")
    refuse(root / "elsewhere", errors.CheckpointPathError, "no directory")


def test_no_config(root):
    (root / "config.json").unlink()
    refuse(root, errors.CheckpointPathError, "no config.json")


def test_config_is_not_json(root):
    (root / "config.json").write_text("{nonsense")
    refuse(root, errors.CheckpointError, "config.json", "JSON")


def test_no_safetensors(root):
    for file in [*root.glob("*.safetensors"), root / INDEX]:
        file.unlink()
    refuse(root, errors.CheckpointPathError, "no safetensors")


def test_a_shard_that_cannot_be_mapped(root, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    refuse(root, errors.CheckpointPathError, FIRST, "Cannot allocate memory")


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shard(root, with_index):
    (root / SECOND).unlink()
    if not with_index:
        (root / INDEX).unlink()  # the numbering alone gives it away
    refuse(root, errors.MissingShardError, SECOND, "1 of 3")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_shard(root, keep):
    raw = (root / SECOND).read_bytes()
    (root / SECOND).write_bytes(raw[:keep])
    refuse(root, errors.TruncatedShardError, SECOND, str(len(raw[:keep])))


def test_file_longer_than_its_header_says(root):
    with (root / SECOND).open("ab") as file:
        file.write(b"\0")
    refuse(root, errors.TruncatedShardError, SECOND, "longer")


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe garbage",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
    ],
)
def test_garbage_header(root, header):
    write_raw(root / SECOND, header, b"\0\0\0\0")
    refuse(root, errors.ShardHeaderError, SECOND)


def test_header_length_bomb(root):
    (root / SECOND).write_bytes(b"\xff" * 8 + b"{}")
    refuse(root, errors.ShardHeaderError, SECOND, str(2**64 - 1), "100000000")


@pytest.mark.parametrize(("start", "word"), [(0, "overlaps"), (1000, "gap")])
def test_offsets_that_overlap_or_leave_gaps(root, start, word):
    header = {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]},
    }
    write_raw(root / SECOND, json.dumps(header).encode(), b"\0" * 20)
    refuse(root, errors.ShardHeaderError, SECOND, word)


def test_type_that_no_checkpoint_uses(root):
    name = unpack(root / SECOND)[0][0]
    edit_header(root / SECOND, lambda h: h[name].update(dtype="F64"))
    refuse(root, errors.TensorDtypeError, SECOND, name, "F64")


def test_index_names_the_wrong_shard(root):
    here = shard_of(root, NORM).name
    other = FIRST if here != FIRST else SECOND
    edit_index(root, lambda m: m.update({NORM: other}))
    refuse(root, errors.IndexMismatchError, NORM, here, other)


def test_index_lacks_a_tensor(root):
    edit_index(root, lambda m: m.pop(NORM))
    refuse(root, errors.IndexMismatchError, NORM, "does not list")


def test_index_lists_an_absent_tensor(root):
    edit_index(root, lambda m: m.update({"model.ghost.weight": FIRST}))
    refuse(root, errors.IndexMismatchError, "model.ghost.weight", "no shard has it")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_index_is_no_index(root, text):
    (root / INDEX).write_text(text)
    refuse(root, errors.IndexMismatchError, INDEX)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nothing")])
def test_index_is_no_file(root, make):
    (root / INDEX).unlink()
    make(root / INDEX)
    refuse(root, errors.IndexMismatchError, INDEX, "no regular file")


def test_index_names_an_impossible_file(root):
    edit_index(root, lambda m: m.update({NORM: "x" * 5000 + ".safetensors"}))
    refuse(root, errors.IndexMismatchError, NORM, "5012", "255")


def test_index_of_absurd_size(root):
    os.truncate(root / INDEX, 100_000_001)  # sparse: takes no disk
    refuse(root, errors.IndexMismatchError, INDEX, "100000001", "100000000")


@pytest.mark.parametrize("file", ["../v3/{}", "/etc/{}", "sub/{}", "..\\{}", "..", "", "model.bin"])
def test_index_must_not_leave_its_directory(root, file):
    edit_index(root, lambda m: m.update({NORM: file.format(FIRST)}))
    refuse(root, errors.IndexMismatchError, NORM, "no plain file name")


def test_tensor_in_two_shards(root):
    source = shard_of(root, NORM)
    target = next(root / f for f in (FIRST, SECOND, THIRD) if root / f != source)
    rebuild(target, unpack(target) + [t for t in unpack(source) if t[0] == NORM])
    refuse(root, errors.DuplicateTensorError, NORM, source.name, target.name)


def test_missing_tensor(root):
    file = shard_of(root, NORM)
    rebuild(file, [t for t in unpack(file) if t[0] != NORM])
    edit_index(root, lambda m: m.pop(NORM))
    refuse(root, errors.MissingTensorError, NORM, "(128,)", "1 tensors")


def test_unexpected_tensor(root):
    entry = {"dtype": "BF16", "shape": [2]}
    rebuild(root / FIRST, [*unpack(root / FIRST), ("model.extra.weight", entry, b"\0" * 4)])
    edit_index(root, lambda m: m.update({"model.extra.weight": FIRST}))
    refuse(root, errors.UnexpectedTensorError, FIRST, "model.extra.weight", "(2,)")


def test_misshapen_tensor(root):
    edit_tensor(root, NORM, lambda e, b: (e | {"shape": [64]}, b[:128]))
    refuse(root, errors.TensorShapeError, NORM, "(128,)", "(64,)")


def test_scale_of_a_wrong_shape(root):
    name = EXPERT + "_scale_inv"
    edit_tensor(root, name, lambda e, b: (e | {"shape": [2, 1]}, b * 2))
    refuse(root, errors.TensorShapeError, name, "(1, 1)", "(2, 1)")


@pytest.mark.parametrize("name", [EXPERT, EXPERT + "_scale_inv"])
def test_wrong_type(root, name):
    edit_tensor(root, name, lambda e, b: (e | {"dtype": "BF16"}, bytes(2 * 128 * 64 if name == EXPERT else 2)))
    refuse(root, errors.TensorDtypeError, name, "bfloat16", "float8")


def test_plain_weights_under_a_quantised_config(root):
    config = json.loads((root / "config.json").read_text())
    del config["quantization_config"]
    (root / "config.json").write_text(json.dumps(config))
    refuse(root, errors.UnexpectedTensorError, "weight_scale_inv")


@pytest.mark.parametrize("name", [NORM, EXPERT + "_scale_inv"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity(root, monkeypatch, name, value):
    monkeypatch.undo()  # this is found while decoding
    dtype = torch.bfloat16 if name == NORM else torch.float32

    def poison(entry, data):
        values = torch.frombuffer(bytearray(data), dtype=dtype)
        values[-1] = value
        return entry, values.view(torch.uint8).numpy().tobytes()

    edit_tensor(root, name, poison)
    refuse(root, errors.NonFiniteTensorError, name)


def test_weights_that_float16_cannot_hold(root, monkeypatch):
    monkeypatch.undo()
    huge = torch.full((128,), 1e30, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    edit_tensor(root, NORM, lambda e, b: (e, huge))
    checkpoint = Checkpoint.open(root)
    spec = spec_from_config(checkpoint.config)
    checkpoint.load(spec, torch.bfloat16)
    with pytest.raises(errors.NonFiniteTensorError, match="float16"):
        checkpoint.load(spec, torch.float16)
    with pytest.raises(errors.ConfigError, match="float64"):
        checkpoint.load(spec, torch.float64)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_random_damage_is_an_error_of_ours_or_harmless(pristine, tmp_path, seed):
    """Bytes changed, removed or inserted in a header never raise anything but CheckpointError."""
    dice = random.Random(seed)
    raw = bytearray((pristine / THIRD).read_bytes()[:4000])  # header prefix only: most mutations are then truncations
    if dice.random() < 0.5:
        raw = bytearray((pristine / THIRD).read_bytes())
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(min(len(raw), 3000))
        action = dice.randrange(3)
        if action == 0:
            raw[at] = dice.choice([dice.randrange(256), ord('"'), ord("{"), ord("9"), 0])
        elif action == 1:
            del raw[at : at + dice.randint(1, 8)]
        else:
            raw[at:at] = bytes([dice.randrange(256)] * dice.randint(1, 8))
    target = tmp_path / "fuzzed"
    target.mkdir(exist_ok=True)
    shutil.copy(pristine / "config.json", target)
    (target / "model.safetensors").write_bytes(raw)
    try:
        Checkpoint.open(target)
    except errors.CheckpointError as error:
        assert str(target) in str(error)
