"""The bundled checkpoints' files: small, in the types of DeepSeek's own files, with the tokenizer that was trained."""

from pathlib import Path

import pytest
from checkpoints import read_header

from longread.cli.checkpoint import BUNDLED
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.inventory import inventory
from longread.wire.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "models" / "src" / "longread_models"
LIMIT = 30 * 10**6  # bytes of all of them together
STORED = {
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3": "F8_E4M3",
    "float8_e8m0": "F8_E8M0",
    "int8": "I8",
    "int64": "I64",
}
QUANTISED = {  # part of the model: type in DeepSeek's releases of that architecture
    "reader-v3": {"dense": "float8_e4m3", "experts": "float8_e4m3", "shared": "float8_e4m3"},
    "reader-v4": {"experts": "int8", "shared": "float8_e4m3"},  # int8: two FP4 numbers a byte
}


def test_all_of_them_are_small() -> None:
    sizes = {path: path.stat().st_size for path in MODELS.rglob("*") if "__pycache__" not in path.parts}
    assert sum(path.suffix == ".safetensors" for path in sizes) == len(BUNDLED)
    assert sum(sizes.values()) <= LIMIT


@pytest.mark.parametrize("name", BUNDLED)
def test_every_tensor_is_stored_as_in_a_release(name: str) -> None:
    spec = spec_from_config(read_config(MODELS / name))
    header, _ = read_header(MODELS / name / "model.safetensors")
    header.pop("__metadata__")
    wanted = {tensor.name: (STORED[tensor.dtype], list(tensor.shape)) for tensor in inventory(spec)}
    assert {key: (entry["dtype"], entry["shape"]) for key, entry in header.items()} == wanted
    for part, dtype in QUANTISED[name].items():
        types = {t.dtype for t in inventory(spec) if t.part == part}
        assert types == {dtype}, part
    attention = [
        t for t in inventory(spec) if t.part == "attention" and t.name.endswith(("q_b_proj.weight", "wq_b.weight"))
    ]
    assert len(attention) == spec.layers and {t.dtype for t in attention} == {"float8_e4m3"}


@pytest.mark.parametrize("name", BUNDLED)
def test_the_tokenizer_is_the_trained_one(name: str) -> None:
    trained = ROOT / "training" / "tokenizer.json"
    assert (MODELS / name / "tokenizer.json").read_bytes() == trained.read_bytes()
    spec = spec_from_config(read_config(MODELS / name))
    Tokenizer.open(MODELS / name, bos_id=spec.bos_id, eos_id=spec.eos_id).check_vocabulary(spec.vocab)
