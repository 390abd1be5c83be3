"""Pages and state groups: what one sequence keeps, and the identity of a page.

A page is 256 tokens. A model's cache is a set of named groups: *rows* groups grow with the sequence (``tokens_per_row``
tokens a row, paged), *ring* groups have a fixed size per sequence (a slot), cannot be rebuilt locally and are saved
whole as snapshots. Keys and values are not assumed anywhere.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longread.spec.model import ModelSpec

PAGE_TOKENS = 256
CACHE_FORMAT = 1  # raise when the meaning of any stored row changes: old pages become misses


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One named part of a sequence's cache.

    rows: storage is [len(layers), pages, PAGE_TOKENS // tokens_per_row, width].
    ring: storage is [len(layers), slots + snapshots, ring_rows, width]; a fresh slot is filled with ``fill``, and
    snapshot r is at index slots + r.
    ``layers`` are the model layers that own the group, in order; storage index i belongs to layers[i].
    ``dtype`` "model" follows the engine's compute type; "uint8": a row is packed, and ``width`` counts bytes.
    """

    name: str
    kind: Literal["rows", "ring"]
    layers: tuple[int, ...]
    width: int
    tokens_per_row: int = 1
    ring_rows: int = 0
    fill: float = 0.0
    dtype: Literal["model", "float32", "uint8"] = "model"

    @property
    def rows_per_page(self) -> int:
        return PAGE_TOKENS // self.tokens_per_row

    def bytes_per_page(self, model_itemsize: int) -> int:
        """Bytes of one page over all layers of the group; 0 for a ring."""
        return (
            len(self.layers) * self.rows_per_page * self.width * self._itemsize(model_itemsize)
            if self.kind == "rows"
            else 0
        )

    def bytes_per_slot(self, model_itemsize: int) -> int:
        """Bytes of one slot (or one snapshot) over all layers of the group; 0 for rows."""
        return (
            len(self.layers) * self.ring_rows * self.width * self._itemsize(model_itemsize)
            if self.kind == "ring"
            else 0
        )

    def _itemsize(self, model_itemsize: int) -> int:
        return {"model": model_itemsize, "float32": 4, "uint8": 1}[self.dtype]


CacheKind = Literal["model", "fp8"]


def state_groups(spec: ModelSpec, cache: CacheKind = "model") -> tuple[StateGroup, ...]:
    """The groups of a model, in storage order (facts: one latent row a token for MLA; V4 as in section 7 of its notes).

    V4's CSA compressor keeps the last 8 tokens (previous and current window of 4) of pooled inputs and scores, at
    position mod 8; the HCA compressor keeps an online softmax of its open window (max, sum, weighted sum).
    ``cache`` "fp8": latent and index rows are packed bytes (``packed_latent``, ``packed_index``) instead of numbers of
    the compute type.
    """
    every = tuple(range(spec.layers))
    packed = cache == "fp8"
    kept: Literal["model", "uint8"] = "uint8" if packed else "model"
    if spec.mla is not None:
        width = packed_mla(spec) if packed else spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim
        groups = [StateGroup("latent", "rows", every, width, dtype=kept)]
        if spec.indexer is not None:
            width = packed_index(spec.indexer.head_dim) if packed else spec.indexer.head_dim
            groups.append(StateGroup("index", "rows", every, width, dtype=kept))
        return tuple(groups)
    c, ix = spec.compressed, spec.indexer
    if c is None or ix is None or spec.family != "deepseek_v4":
        raise NotImplementedError(f"{spec.label}: no state groups for family {spec.family}")
    csa = tuple(i for i in every if c.ratios[i] == 4)
    hca = tuple(i for i in every if c.ratios[i] == 128)
    d, di, inf = c.head_dim, ix.head_dim, float("inf")
    row, key = (packed_latent(d, c.rope_head_dim), packed_index(di)) if packed else (d, di)
    groups = [
        StateGroup("csa", "rows", csa, row, tokens_per_row=4, dtype=kept),
        StateGroup("index", "rows", csa, key, tokens_per_row=4, dtype=kept),
        StateGroup("hca", "rows", hca, row, tokens_per_row=128, dtype=kept),
        StateGroup("window", "ring", every, row, ring_rows=c.window, dtype=kept),
        StateGroup("csa_kv", "ring", csa, 2 * d, ring_rows=8, dtype="float32"),
        StateGroup("csa_score", "ring", csa, 2 * d, ring_rows=8, fill=-inf, dtype="float32"),
        StateGroup("index_kv", "ring", csa, 2 * di, ring_rows=8, dtype="float32"),
        StateGroup("index_score", "ring", csa, 2 * di, ring_rows=8, fill=-inf, dtype="float32"),
        StateGroup("hca_max", "ring", hca, d, ring_rows=1, fill=-inf, dtype="float32"),
        StateGroup("hca_sum", "ring", hca, d, ring_rows=1, dtype="float32"),
        StateGroup("hca_acc", "ring", hca, d, ring_rows=1, dtype="float32"),
    ]
    return tuple(g for g in groups if g.layers)


def packed_latent(dim: int, rope: int) -> int:
    """Bytes of a packed V4 row: FP8 channels, bfloat16 rotated channels, one scale byte per 64, to a multiple of 8."""
    plain = dim - rope
    return -(-(plain + 2 * rope + -(-plain // 64)) // 8) * 8


def packed_mla(spec: ModelSpec) -> int:
    """Bytes of a packed MLA row: FP8 latents, one float32 scale per 128 of them, bfloat16 rotated channels."""
    if spec.mla is None:
        raise ValueError(f"{spec.label} has no latent attention")
    latent = spec.mla.kv_lora_rank
    return latent + 4 * -(-latent // 128) + 2 * spec.mla.qk_rope_head_dim


def packed_index(dim: int) -> int:
    """Bytes of a packed index row: FP8 channels and one float32 scale."""
    return dim + 4


def cache_root(spec: ModelSpec, model_label: str, dtype: str, cache: CacheKind = "model") -> bytes:
    """Root of every page hash of one model in one cache format: a change of either is a different identity.

    ``model_label`` identifies the weights (name and revision or fingerprint); the spec enters whole. ``cache``: as for
    ``state_groups``.
    """
    stored = dtype if cache == "model" else f"{dtype}\0{cache}"
    text = f"longread-cache-{CACHE_FORMAT}\0{model_label}\0{stored}\0{spec!r}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def salted_root(root: bytes, salt: str | None) -> bytes:
    """Root of the page hashes of requests with a ``cache_salt``: they meet those of the same salt only. None: ``root``
    itself.
    """
    if salt is None:
        return root
    text = b"longread-salt\0" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(root + text, digest_size=16).digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a run of tokens after ``parent``: blake2b-128 over the parent and the ids as little-endian int32."""
    ids = array("i", tokens)
    if ids.itemsize != 4:
        raise RuntimeError("array('i') is not 32 bits wide on this platform")
    return hashlib.blake2b(parent + ids.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class HashedTokens:
    """A prompt's ids with the identity of each full page, made by a caller so that the engine's thread hashes nothing.

    ``root``: what the chain begins with (``salted_root`` of ``EngineInfo.cache_root``). ``data``: all ids as int32
    bytes, in the order of ``array("i")``. ``hashes``: ``page_hash`` of each full page, chained. ``least`` and ``most``:
    the smallest and the largest id. An engine that finds it unfit (``fits``) hashes for itself.
    """

    root: bytes
    data: bytes
    hashes: tuple[bytes, ...]
    least: int
    most: int

    def fits(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Whether this was made under ``root`` for ``tokens`` or a beginning of them.

        Lengths are compared whole; of ids and hashes the first and the last full page, so the cost is constant.
        """
        count, pages = len(self.data) // 4, len(self.hashes)
        whole = len(self.data) == 4 * count and pages == count // PAGE_TOKENS and 0 < count <= len(tokens)
        if not whole or self.root != root:
            return False
        ids = memoryview(self.data).cast("i")  # compared as numbers: a token need not fit 32 bits
        for page in {0, pages - 1} if pages else ():
            run = ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tolist()
            parent = self.hashes[page - 1] if page else root
            if run != list(tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]):
                return False
            if page_hash(parent, run) != self.hashes[page]:
                return False
        return ids[pages * PAGE_TOKENS :].tolist() == list(tokens[pages * PAGE_TOKENS : count])


def hash_pages(root: bytes, data: bytes, known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """``page_hash`` of each full page of ids given as int32 bytes; ``known``: the first ones, which are kept."""
    size, digest, hashes = 4 * PAGE_TOKENS, hashlib.blake2b, list(known)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * size, len(data) - size + 1, size):
        parent = digest(parent + data[start : start + size], digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


def pages_for(tokens: int) -> int:
    """Pages that ``tokens`` tokens occupy."""
    return -(-tokens // PAGE_TOKENS)
