"""Reads DeepSeek checkpoints as they are published: sharded safetensors, plain, FP8 or FP4, native names.

Knows directories, index files and the inventory of a model, and decodes to one float type. Opening proves the files
against themselves, ``validate`` against the model; both cost headers only, so every refusal comes before any weight
is decoded. Knows no model arithmetic.

Memory: a tensor that is stored in the wanted type is a view into the mapped file (the system's file cache, no copy);
any other is decoded alone, in strips. The peak is the loaded weights plus one strip.

Accepted beyond the inventory: MTP and DSpark tensors and V2/V3's ``rotary_emb.inv_freq`` buffers (both are skipped, the
former because drafting is not run, the latter because the config implies them); any plain float type where a plain
float is expected; a scale as float32 or E8M0, since either says its own value.

NaN and infinity are refused in every scale and in every loaded tensor up to ``CHECKED_BYTES`` (norms, biases, router,
hyper-connections, small projections). Larger matrices are not searched: that would read the whole file once more.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from longread.kernels.quant import ref as quant
from longread.spec.config_json import read_config
from longread.spec.errors import (
    CheckpointPathError,
    ConfigError,
    DuplicateTensorError,
    IndexMismatchError,
    MissingShardError,
    MissingTensorError,
    NonFiniteTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.loaded import is_drafter, loaded_dtype
from longread.spec.model import ModelSpec
from longread.weights.safetensors import INDEX_NAME, MAX_HEADER_BYTES, TORCH_DTYPES, Shard, StoredTensor

Progress = Callable[[int, int], None]  # (bytes read, bytes to read)
CHECKED_BYTES = 4 << 20
FINGERPRINT_BLOCK = 8 << 20
LONG_READ = 4 << 30  # reading so much takes seconds, which is told
MAX_FILE_NAME = 255  # bytes, of every usual file system
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = ("bfloat16", "float16", "float32")
_SCALES = ("float32", "float8_e8m0")
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_log = logging.getLogger(__name__)


class Checkpoint:
    """One checkpoint directory, open and proven consistent. ``tensors``: every stored tensor by name."""

    def __init__(self, path: Path, config: dict[str, object], shards: Mapping[str, Shard]):
        self.path = path
        self.config = config
        self._shards = shards
        self.tensors: dict[str, StoredTensor] = {}
        for shard in shards.values():
            for name, entry in shard.tensors.items():
                if name in self.tensors:
                    raise DuplicateTensorError(
                        f"{path}: {name} lies in {self.tensors[name].file} and in {entry.file}; remove the stray file"
                    )
                self.tensors[name] = entry

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Open a directory with ``config.json`` and safetensors files.

        Raises CheckpointPathError, MissingShardError, TruncatedShardError, ShardHeaderError, TensorDtypeError,
        IndexMismatchError, DuplicateTensorError, and what ``read_config`` raises.
        """
        root = Path(path)
        if not root.is_dir():
            raise CheckpointPathError(f"{root}: is no directory; give the directory that holds config.json")
        if not (root / "config.json").is_file():
            raise CheckpointPathError(f"{root}: has no config.json; give a checkpoint directory in Hugging Face layout")
        config = read_config(root / "config.json")
        weight_map = _read_index(root / INDEX_NAME)
        files = _files(root, weight_map)
        checkpoint = cls(root, config, {name: Shard(root / name) for name in files})
        if weight_map is not None:
            _compare_index(root, weight_map, checkpoint.tensors)
        return checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def stored(self, name: str) -> Tensor:
        """A stored tensor as it is: a view into the mapped file."""
        entry = self.tensors[name]
        return self._shards[entry.file].tensor(entry)

    def validate(self, spec: ModelSpec) -> None:
        """Compare names, shapes and types with the model.

        Raises MissingTensorError, UnexpectedTensorError, TensorShapeError, TensorDtypeError for the first difference.
        """
        expected = {t.name: t for t in inventory(spec) if not is_drafter(t.name, spec)}
        self._check_names(expected, spec)
        for name, entry in expected.items():
            found = self.tensors[name]
            where = f"{self.path / found.file}: {name}"
            if found.dtype not in _allowed(entry):
                raise TensorDtypeError(
                    f"{where}: expected {' or '.join(_allowed(entry))}, found {found.dtype}; "
                    "check quantization_config in config.json, or convert the checkpoint"
                )
            if found.shape != entry.shape:
                raise TensorShapeError(
                    f"{where}: expected shape {entry.shape}, found {found.shape}; "
                    "config.json and weights are of different models, or the scale block differs"
                )

    def load(self, spec: ModelSpec, dtype: torch.dtype, progress: Progress | None = None) -> dict[str, Tensor]:
        """The backbone's weights by native name, dequantised to ``dtype``; no scales, no MTP.

        int64 tables keep their type; router biases, sinks, ``ape`` and ``hc_*`` are float32. Tensors may be views into
        the mapped files. ``progress`` is called after each tensor. Raises as ``validate``, NonFiniteTensorError, and
        ConfigError for another ``dtype``.
        """
        if dtype not in FLOATS:
            raise ConfigError(f"weights cannot be loaded as {dtype}; choose bfloat16, float16 or float32")
        self.validate(spec)
        self._log_skipped(spec)
        wanted = [t for t in inventory(spec) if not is_drafter(t.name, spec)]
        total, done = sum(self.tensors[t.name].nbytes for t in wanted), 0
        scales = {t.scale_of: t.name for t in wanted if t.scale_of is not None}
        weights: dict[str, Tensor] = {}
        for entry in wanted:
            if entry.scale_of is None:
                weights[entry.name] = self._decode(entry, scales.get(entry.name), spec, dtype)
            done += self.tensors[entry.name].nbytes
            if progress is not None:
                progress(done, total)
        return weights

    def native(self, spec: ModelSpec) -> Callable[[str], Tensor]:
        """The backbone's tensors by native name (weights and scales) in their stored types, as views into the files.

        Raises as ``validate``; each call NonFiniteTensorError as ``load`` does, and MissingTensorError for a name that
        the backbone does not have.
        """
        self.validate(spec)
        self._log_skipped(spec)
        wanted = {t.name: t for t in inventory(spec) if not is_drafter(t.name, spec)}

        def tensor(name: str) -> Tensor:
            if name not in wanted:
                raise MissingTensorError(f"{self.path}: the model that config.json describes has no tensor {name}")
            stored = self.stored(name)
            if wanted[name].scale_of is not None:
                self._refuse_non_finite(name, quant.decode_scale(stored))
            elif stored.dtype != torch.int8 and stored.nbytes <= CHECKED_BYTES:  # every FP4 code is a number
                self._refuse_non_finite(name, stored.float() if stored.dtype == torch.float8_e4m3fn else stored)
            return stored

        return tensor

    def _decode(self, entry: TensorSpec, scale_name: str | None, spec: ModelSpec, dtype: torch.dtype) -> Tensor:
        name, stored = entry.name, self.stored(entry.name)
        if scale_name is None:
            target = loaded_dtype(entry, str(dtype).removeprefix("torch."))
            result = stored.to(TORCH_DTYPES[target])  # a view when the type is already right
        else:
            scale = self.stored(scale_name)
            self._refuse_non_finite(scale_name, quant.decode_scale(scale))
            if stored.dtype == torch.int8:
                result = quant.dequantise_fp4(stored, scale, dtype)
            elif spec.quant is None:
                raise TensorDtypeError(f"{name}: is quantised, but config.json has no quantization_config")
            else:
                result = quant.dequantise_fp8(stored, scale, spec.quant.block, dtype)
        if result.nbytes <= CHECKED_BYTES:
            self._refuse_non_finite(name, result)
        if result.data_ptr() != stored.data_ptr():
            self._release(name)
        return result

    def _release(self, name: str) -> None:
        """Resident file pages of a decoded tensor would be counted as this process's memory for no use."""
        entry = self.tensors[name]
        self._shards[entry.file].release(entry)

    def _refuse_non_finite(self, name: str, values: Tensor) -> None:
        # The extremes carry every NaN and infinity, and finding them needs no temporary.
        if values.dtype != torch.int64 and values.numel() and not torch.stack(values.aminmax()).isfinite().all():
            raise NonFiniteTensorError(
                f"{self.path / self.tensors[name].file}: {name} has NaN or infinity as {values.dtype}; "
                "the file is damaged (download it again), or its values do not fit this type (load as bfloat16)"
            )

    def _check_names(self, expected: Mapping[str, TensorSpec], spec: ModelSpec) -> None:
        missing = [n for n in expected if n not in self.tensors]
        if missing:
            raise MissingTensorError(
                f"{self.path}: {len(missing)} tensors that config.json implies are in no shard, the first is "
                f"{missing[0]} {expected[missing[0]].shape}; complete the download, or correct config.json"
            )
        unknown = [t for n, t in self.tensors.items() if n not in expected and not _skipped(n, spec)]
        if unknown:
            raise UnexpectedTensorError(
                f"{self.path / unknown[0].file}: {unknown[0].name} {unknown[0].shape} does not belong to this model "
                f"({len(unknown)} such tensors); config.json is of another model, or the model has an unknown part"
            )

    def _log_skipped(self, spec: ModelSpec) -> None:
        skipped = [t for n, t in self.tensors.items() if _skipped(n, spec)]
        if skipped:
            size = sum(t.nbytes for t in skipped)
            _log.info(
                "skipped %d tensors (%d bytes) that are not run: MTP blocks, precomputed rotary buffers",
                len(skipped),
                size,
            )

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights: 32 hex digits (xxh3-128) over name, type, shape and every byte of every tensor.

        What was computed with other weights must never be reused, so nothing is sampled: a checkpoint is read once
        more, or for the first time, since loading reads it too. Independent of sharding, path and ``config.json``. It
        tells models apart; it is no proof against forgery.
        """
        total = sum(entry.nbytes for entry in self.tensors.values())
        if total >= LONG_READ:
            _log.info("reading %.0f GB of weights once for their identity, which the cache goes by", total / 1e9)
        digest = xxhash.xxh3_128(b"longread weights 2\0")
        files = {name: os.open(shard.path, os.O_RDONLY) for name, shard in self._shards.items()}
        try:
            for name in sorted(self.tensors):
                entry = self.tensors[name]
                digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
                for start in range(entry.start, entry.start + entry.nbytes, FINGERPRINT_BLOCK):
                    size = min(FINGERPRINT_BLOCK, entry.start + entry.nbytes - start)
                    digest.update(os.pread(files[entry.file], size, start))
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        return digest.hexdigest()


def _allowed(entry: TensorSpec) -> tuple[str, ...]:
    if entry.scale_of is not None:
        return _SCALES
    return _PLAIN if entry.dtype in _PLAIN else (entry.dtype,)


def _skipped(name: str, spec: ModelSpec) -> bool:
    return is_drafter(name, spec) or name.endswith(".rotary_emb.inv_freq")


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None without an index. A file name must be a plain name in the same directory."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():  # a folder, a pipe, or a link to nothing: without its index a checkpoint might look complete
        raise IndexMismatchError(f"{path}: is no regular file; download it again")
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise IndexMismatchError(f"{path}: has {path.stat().st_size} bytes, the limit is {MAX_HEADER_BYTES}")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise IndexMismatchError(f"{path}: is not JSON ({error}); download it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexMismatchError(f"{path}: has no weight_map; download it again")
    for tensor, file in weight_map.items():
        # The index is data from outside: it must not lead out of its directory.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise IndexMismatchError(f"{path}: {tensor} is said to lie in {file!r}, which is no plain file name")
        if len(file.encode(errors="replace")) > MAX_FILE_NAME:
            raise IndexMismatchError(
                f"{path}: {tensor} is said to lie in a file whose name has {len(file)} characters; "
                f"the limit is {MAX_FILE_NAME} bytes"
            )
    return weight_map


def _files(root: Path, weight_map: Mapping[str, str] | None) -> list[str]:
    """The shards to open: the index's, otherwise every safetensors file, complete by its own numbering."""
    present = sorted(p.name for p in root.glob("*.safetensors"))
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        stray = sorted(set(present) - set(names))
        if stray:
            _log.warning("%s: ignored %d safetensors files that the index does not name: %s", root, len(stray), stray)
    elif not present:
        raise CheckpointPathError(f"{root}: has no safetensors files; download the weights, or convert them")
    else:
        names = sorted({*present, *_siblings(present)})
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise MissingShardError(
            f"{root}: {len(missing)} of {len(names)} files are missing, the first is {missing[0]}; "
            "complete the download"
        )
    return names


def _siblings(names: list[str]) -> Iterator[str]:
    """Every file name that "-00002-of-00005" implies."""
    for name in names:
        match = _NUMBERED.search(name)
        if match and len(match[2]) <= 5:
            stem = name[: match.start()]
            yield from (f"{stem}-{i:0{len(match[1])}d}-of-{match[2]}.safetensors" for i in range(1, int(match[2]) + 1))


def _compare_index(root: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    where = root / INDEX_NAME
    for name, file in weight_map.items():
        found = tensors.get(name)
        if found is None:
            raise IndexMismatchError(
                f"{where}: {name} is said to lie in {file}, but no shard has it; download both again"
            )
        if found.file != file:
            raise IndexMismatchError(f"{where}: {name} is said to lie in {file}, but it lies in {found.file}")
    for name, found in tensors.items():
        if name not in weight_map:
            raise IndexMismatchError(f"{where}: does not list {name}, which lies in {found.file}; download it again")
