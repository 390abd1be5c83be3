"""The file of a saved session: one self-describing safetensors file.

Knows its own format, tensors and a lease's pages; must not know requests, models or text. Entries: ``session`` (int8: a
JSON text with format version, cache identity, prompt length, and a digest of everything else), ``tokens`` (int64 [n]),
``logits`` (float32 [vocab]), and for each state group its pages (``rows.NAME``: [layers, pages, rows, width]) or its
slot (``ring.NAME``: [layers, rows, width]). Files are written whole and renamed, so a half-written one never has the
name.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longread.kv.lease import Lease
from longread.spec.errors import CheckpointError, SessionFileError
from longread.spec.state import StateGroup, pages_for
from longread.weights.safetensors import Shard, write_shard

FORMAT = 2  # 1 had no prompt_length, so that a generation could not be continued from it
Groups = tuple[StateGroup, ...]
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A file that was read and proved: views into the mapped file, by entry name. ``prompt_length``: how many of the
    tokens were given; seed, penalties and grammar count from there.
    """

    tokens: list[int]
    prompt_length: int
    logits: Tensor
    state: dict[str, Tensor]


def save(
    path: Path, identity: bytes, lease: Lease, prompt_length: int, logits: Tensor, groups: Groups, state: State
) -> None:
    """Write a session. Groups are gathered one at a time, twice: once for the digest, once for the file.

    Raises SessionFileError where the file cannot be written.
    """

    def parts() -> Iterator[tuple[str, Tensor]]:
        yield "tokens", torch.frombuffer(lease.tokens, dtype=torch.int32).to(torch.int64)
        yield "logits", logits.cpu().contiguous()
        pages = lease.pages[: pages_for(len(lease.tokens))]
        for group in groups:
            tensor = state[group.name]
            if group.kind == "rows":
                yield f"rows.{group.name}", tensor[:, pages].cpu()
            else:
                yield f"ring.{group.name}", tensor[:, lease.slot].contiguous().cpu()

    digest = hashlib.blake2b(digest_size=16)
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for name, tensor in parts():
        digest.update(_bytes(tensor))
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
    about = {
        "format": FORMAT,
        "identity": identity.hex(),
        "prompt_length": prompt_length,
        "digest": digest.hexdigest(),
    }
    text = json.dumps(about).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.int8)
    tensors = (tensor for tensor in [head, *(tensor for _, tensor in parts())])
    _write(path, [("session", "int8", (len(text),)), *entries], tensors)


def _write(path: Path, entries: list[tuple[str, str, tuple[int, ...]]], tensors: Iterator[Tensor]) -> None:
    temporary = path.with_name(path.name + ".part")
    try:
        try:
            write_shard(temporary, entries, tensors)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SessionFileError(f"the session cannot be saved as {path}: {error}") from error


def read(path: Path, identity: bytes, vocab: int, groups: Groups, state: State) -> SavedSession:
    """Read and prove a session file. Raises SessionFileError: missing, damaged, of another format or identity."""
    try:
        shard = Shard(path)
    except (OSError, CheckpointError) as error:
        raise SessionFileError(f"{path} cannot be read as a session: {error}") from error
    parts = {name: shard.tensor(entry) for name, entry in shard.tensors.items()}
    about = _about(path, parts)
    if about.get("format") != FORMAT:
        raise SessionFileError(f"{path} has session format {about.get('format')!r}; this version reads {FORMAT}")
    if about.get("identity") != identity.hex():
        raise SessionFileError(
            f"{path} belongs to cache identity {about.get('identity')}, this engine's is {identity.hex()}: "
            "load it with the model, weights and cache type that it was saved with"
        )
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in parts.items():
        if name != "session":
            digest.update(_bytes(tensor))
    if about.get("digest") != digest.hexdigest():
        raise SessionFileError(
            f"{path} is damaged: its content has digest {digest.hexdigest()}, not {about.get('digest')}"
        )
    _check_shapes(path, parts, vocab, groups, state)
    tokens, prompt_length = parts["tokens"].tolist(), about.get("prompt_length")
    if not isinstance(prompt_length, int) or isinstance(prompt_length, bool) or not 0 < prompt_length <= len(tokens):
        raise SessionFileError(f"{path}: prompt_length is {prompt_length!r}, not 1..{len(tokens)}")
    return SavedSession(tokens, prompt_length, parts["logits"].clone(), parts)


def restore(saved: SavedSession, lease: Lease, groups: Groups, state: State) -> None:
    """Copy the saved state into a fresh lease, whose pages cover the tokens."""
    pages = lease.pages[: pages_for(len(saved.tokens))]
    for group in groups:
        if group.kind == "rows":
            rows = state[group.name]
            rows[:, pages] = saved.state[f"rows.{group.name}"].to(rows.device)
        else:
            state[group.name][:, lease.slot] = saved.state[f"ring.{group.name}"]


def _about(path: Path, parts: dict[str, Tensor]) -> dict[str, object]:
    try:
        about = json.loads(bytes(_bytes(parts["session"])))
    except (KeyError, ValueError, RecursionError) as error:
        raise SessionFileError(f"{path} is no session file: it has no readable 'session' entry") from error
    if not isinstance(about, dict):
        raise SessionFileError(f"{path} is no session file: its 'session' entry is not an object")
    return about


def _check_shapes(path: Path, parts: dict[str, Tensor], vocab: int, groups: Groups, state: State) -> None:
    """The identity fixes the groups, so a difference here is a writer's bug, not another model; still never trusted."""
    tokens = parts["tokens"].numel() if "tokens" in parts else 0
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int64, (tokens,)),
        "logits": (torch.float32, (vocab,)),
    }
    for group in groups:
        own = state[group.name]
        shape = (
            (own.shape[0], pages_for(tokens), *own.shape[2:])
            if group.kind == "rows"
            else (own.shape[0], *own.shape[2:])
        )
        expected[f"{group.kind}.{group.name}"] = (own.dtype, shape)
    for name, (dtype, shape) in expected.items():
        found = parts.get(name)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            raise SessionFileError(f"{path}: {name} is missing or not {dtype} {list(shape)}")
    unknown = sorted(set(parts) - set(expected) - {"session"})
    if unknown:
        raise SessionFileError(f"{path}: unknown entries {unknown}")


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
