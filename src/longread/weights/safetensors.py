"""The safetensors file format: header, mapping, writing (github.com/huggingface/safetensors, README "Format").

A file is 8 bytes little-endian header length N, N bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the
tensors' bytes without gaps. Knows bytes, names, types and shapes of one file; knows no model and no other files.

The file is mapped privately and tensors are views into the mapping: pages come from the system's file cache on first
touch, exist once, and a stray write cannot reach the file.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

import torch
from torch import Tensor

from longread.spec.errors import CheckpointPathError, ShardHeaderError, TensorDtypeError, TruncatedShardError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit; the header of a 92,000-tensor model has 12 MB
# file name of a type -> (the project's name, torch type)
_TYPES = {
    "BF16": ("bfloat16", torch.bfloat16),
    "F16": ("float16", torch.float16),
    "F32": ("float32", torch.float32),
    "F8_E4M3": ("float8_e4m3", torch.float8_e4m3fn),
    "F8_E8M0": ("float8_e8m0", torch.float8_e8m0fnu),
    "I8": ("int8", torch.int8),
    "I64": ("int64", torch.int64),
}
_FILE_NAMES = {name: code for code, (name, _) in _TYPES.items()}
TORCH_DTYPES = dict(_TYPES.values())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``start`` and ``stop`` are absolute bytes in ``file``. ``dtype`` is the project's name."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Shard:
    """One mapped file.

    Raises CheckpointPathError (unreadable), ShardHeaderError, TruncatedShardError or TensorDtypeError before any
    tensor is touched.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header, data = _read_header(path, file, size)
                self.tensors = _entries(path, header, data, size)
                # ACCESS_COPY is a private mapping: torch sees writable memory, the file never changes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointPathError(f"{path}: cannot be read or mapped: {error.strerror}") from error

    def tensor(self, entry: StoredTensor) -> Tensor:
        """A view into the mapping; it keeps the mapping alive. (A copy if the file misaligns the tensor.)"""
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def release(self, entry: StoredTensor) -> None:
        """Give back the resident pages of a tensor that was decoded into another; a later read maps them again.

        Only whole pages inside the tensor, so that a neighbour's view is untouched. Nobody may have written to it.
        """
        first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


def write_shard(path: Path, entries: Iterable[tuple[str, str, tuple[int, ...]]], tensors: Iterable[Tensor]) -> None:
    """Write one file of ``entries`` (name, project's type name, shape); ``tensors`` come in the same order, lazily."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
        header[name] = {
            "dtype": _FILE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[bytes, int]:
    """(header text, offset of the data)."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise TruncatedShardError(f"{path}: has {size} bytes, a safetensors file has at least 8; download it again")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise ShardHeaderError(
            f"{path}: announces a header of {length} bytes, the limit is {MAX_HEADER_BYTES}: "
            "this is no safetensors file, or it is damaged; download it again"
        )
    if 8 + length > size:
        raise TruncatedShardError(
            f"{path}: the header alone needs {8 + length} bytes, the file has {size}; download it again"
        )
    return file.read(length), 8 + length


def _entries(path: Path, header: bytes, data: int, size: int) -> dict[str, StoredTensor]:
    """Parse and prove the header: tensors without overlap or gap that end where the file ends."""
    try:
        parsed = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad_header(path, f"the header is not JSON of the expected form ({error})") from error
    if not isinstance(parsed, dict):
        raise _bad_header(path, "the header is not a JSON object")
    entries = {n: _entry(path, n, value, data) for n, value in parsed.items() if n != "__metadata__"}
    end = data
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise _bad_header(path, f"{entry.name} begins at byte {entry.start}, expected {end}: it {what}")
        end = entry.stop
    if end != size:
        state = "is truncated" if end > size else "is longer than its header says"
        raise TruncatedShardError(f"{path}: {state}: expected {end} bytes, found {size}; download it again")
    return entries


def _entry(path: Path, name: str, value: object, data: int) -> StoredTensor:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise _bad_header(path, f"the entry of {name} has no dtype")
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _bad_header(path, f"the entry of {name} has shape {shape!r} and data_offsets {offsets!r}")
    if value["dtype"] not in _TYPES:
        raise TensorDtypeError(
            f"{path}: {name} has dtype {value['dtype']}; DeepSeek checkpoints hold {', '.join(_TYPES)}"
        )
    dtype, torch_dtype = _TYPES[value["dtype"]]
    expected = math.prod(shape) * torch_dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise _bad_header(
            path,
            f"{name} {value['dtype']} {shape} needs {expected} bytes, its data_offsets {offsets} hold another number",
        )
    return StoredTensor(name, path.name, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _bad_header(path: Path, reason: str) -> ShardHeaderError:
    return ShardHeaderError(f"{path}: {reason}; the file is damaged or no safetensors file: download it again")
