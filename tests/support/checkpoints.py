"""Damage for checkpoint files: edits a safetensors header or index in place."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

INDEX = "model.safetensors.index.json"


def read_header(file: Path) -> tuple[dict, bytes]:
    """(header, tensor bytes) of a safetensors file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_header(file: Path, change: Callable[[dict], object]) -> None:
    header, data = read_header(file)
    change(header)
    write_raw(file, json.dumps(header).encode(), data)


def edit_index(root: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((root / INDEX).read_text())
    change(index["weight_map"])
    (root / INDEX).write_text(json.dumps(index))


def rebuild(file: Path, entries: list[tuple[str, dict, bytes]]) -> None:
    """Write a consistent file of (name, entry, bytes): offsets are made anew."""
    header, offset = {}, 0
    for name, entry, data in entries:
        header[name] = entry | {"data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    write_raw(file, json.dumps(header).encode(), b"".join(data for _, _, data in entries))


def unpack(file: Path) -> list[tuple[str, dict, bytes]]:
    """The inverse of ``rebuild``."""
    header, data = read_header(file)
    header.pop("__metadata__", None)
    return [(name, entry, data[slice(*entry["data_offsets"])]) for name, entry in header.items()]
