"""Writes checkpoints in DeepSeek's own on-disk formats: plain, FP8 tiles, FP4 experts; one file or shards with index.

Knows names and types from the inventory and the layout of safetensors files; streams tensor by tensor, so that one
encoded tensor is held beside the given weights. Knows no model arithmetic.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from longread.kernels.quant import ref as quant
from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError, MissingTensorError, TensorShapeError, UnexpectedTensorError
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.loaded import is_drafter, loaded_shape
from longread.spec.model import ModelSpec, QuantSpec
from longread.weights.safetensors import INDEX_NAME, TORCH_DTYPES, write_shard


def write_checkpoint(
    path: str | Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shards: int = 1
) -> None:
    """Write ``config.json`` and the weights that it implies into ``path`` (created if missing).

    ``tensors``: float weights under native names, without scales (int64 ``tid2eid``). They are cast or quantised as
    ``config``'s ``quantization_config`` says. MTP tensors may be left out as a whole. ``shards`` > 1 writes Hugging
    Face's sharded layout with an index. Raises MissingTensorError, UnexpectedTensorError, TensorShapeError.
    """
    spec = spec_from_config(config)
    entries = list(inventory(spec))
    if not any(is_drafter(name, spec) for name in tensors):
        entries = [e for e in entries if not is_drafter(e.name, spec)]
    _check(entries, tensors)
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    parts = _split(_units(entries), shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        flat = [entry for unit in part for entry in unit]
        write_shard(target / name, [(e.name, e.dtype, e.shape) for e in flat], _encoded(part, tensors, spec))
        weight_map |= {e.name: name for e in flat}
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
        target.joinpath(INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    text = json.dumps(dict(config), indent=2, ensure_ascii=False)
    target.joinpath("config.json").write_text(text + "\n", encoding="utf-8")


def write_tokenizer(path: str | Path, document: bytes, max_length: int) -> None:
    """Write ``tokenizer.json`` (``document``, as it is) and the ``tokenizer_config.json`` that DeepSeek's files have.

    ``max_length``: the model's longest context in tokens. ``path`` must exist.
    """
    target = Path(path)
    target.joinpath("tokenizer.json").write_bytes(document)
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<｜begin▁of▁sentence｜>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<｜end▁of▁sentence｜>",
        "model_max_length": max_length,
        "pad_token": "<｜▁pad▁｜>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=2)
    target.joinpath("tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _check(entries: list[TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """Refuse before the first byte is written."""
    weights = {e.name: e for e in entries if e.scale_of is None}
    for name, entry in weights.items():
        if name not in tensors:
            raise MissingTensorError(f"cannot write {name}: no such tensor was given")
        if tuple(tensors[name].shape) != loaded_shape(entry):
            raise TensorShapeError(f"{name}: expected shape {loaded_shape(entry)}, given {tuple(tensors[name].shape)}")
    unknown = sorted(set(tensors) - set(weights))
    if unknown:
        raise UnexpectedTensorError(f"{len(unknown)} tensors do not belong to this config, the first is {unknown[0]}")


def _units(entries: list[TensorSpec]) -> list[list[TensorSpec]]:
    """Each weight with its scale behind it: they are made together, so they are written together."""
    scales = {e.scale_of: e for e in entries if e.scale_of is not None}
    weights = [e for e in entries if e.scale_of is None]
    return [[e, scales[e.name]] if e.name in scales else [e] for e in weights]


def _split(units: list[list[TensorSpec]], shards: int) -> list[list[list[TensorSpec]]]:
    """At most ``shards`` runs of about equal bytes, in order."""
    if shards < 1:
        raise ConfigError(f"shards must be at least 1, not {shards}")
    total = sum(e.nbytes for unit in units for e in unit)
    parts: list[list[list[TensorSpec]]] = [[] for _ in range(min(shards, len(units)))]
    done = 0
    for unit in units:
        parts[min(done * len(parts) // max(total, 1), len(parts) - 1)].append(unit)
        done += sum(e.nbytes for e in unit)
    return [part for part in parts if part]


def _encoded(part: list[list[TensorSpec]], tensors: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[Tensor]:
    """The tensors of one file in order, one encoded unit at a time."""
    for unit in part:
        weight = tensors[unit[0].name]
        if len(unit) == 1:
            yield weight.to(TORCH_DTYPES[unit[0].dtype])
        elif unit[0].dtype == "int8":
            yield from quant.quantise_fp4(weight)
        elif spec.quant is not None:
            yield from quant.quantise_fp8(weight, spec.quant.block, _scale_format(spec.quant, unit[1].dtype))


def _scale_format(layout: QuantSpec, stored: str) -> quant.ScaleFormat:
    """V3.1 says ue8m0 and stores float32: powers of two in float32."""
    if stored == "float8_e8m0":
        return "ue8m0"
    return "float32_pow2" if layout.power_of_two else "float32"
