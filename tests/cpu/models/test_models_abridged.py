"""Models with a layer of each kind launch all that they launch whole: what is rehearsed before an engine is ready."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longread.kernels import dispatch
from longread.kernels.places import Chunk, Rows
from longread.models.native_step import Save
from longread.models.native_v3 import NativeV3
from longread.models.native_v4 import NativeV4
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, state_groups
from longread.weights.fixture import random_weights, tiny_config
from longread.weights.random import random_native

PAGES, SLOTS = 3, 4
TOP_K = 100  # rows of a page are all taken, of three pages some are chosen
FLASH = {
    "num_hidden_layers": 11,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 0, 0],
    "sliding_window": 128,
    "index_topk": TOP_K,
}
PRO = {
    "num_hidden_layers": 9,
    "compress_ratios": [128, 128, 4, 128, 4, 128, 4, 128, 4, 0],
    "sliding_window": 128,
    "index_topk": TOP_K,
}
BLOCKS = {"head_dim": 128, "index_head_dim": 128, "hidden_size": 256, "moe_intermediate_size": 128, "o_lora_rank": 128}
BLOCKS |= {"q_lora_rank": 128, "qk_rope_head_dim": 32}
V3 = {"num_hidden_layers": 6, "first_k_dense_replace": 3}
Launch = tuple[Any, ...]


def described(value: object) -> Any:
    """What a launch hangs on: shapes and types of tensors, and all numbers, through whatever holds them."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), tuple(value.stride())
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, *(described(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple | list):
        return tuple(described(part) for part in value)
    return value


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of models that are made from now on."""
    found: list[Launch] = []
    plain = dispatch._found

    def spied(reference: Callable[..., Any], device: str) -> Callable[..., Any]:
        chosen = plain(reference, device)

        def noted(*args: Any, **options: Any) -> Any:
            name = f"{reference.__module__}.{reference.__name__}"
            found.append((name, described(args), *sorted((k, described(v)) for k, v in options.items())))
            return chosen(*args, **options)

        return noted

    monkeypatch.setattr(dispatch, "_found", spied)
    return found


def steps(model: NativeV3 | NativeV4, state: dict[str, Tensor]) -> Iterator[None]:
    """Decode rows and chunks in a short and in a long context; with logits, without, and keeping a ring on the way."""
    table = torch.arange(PAGES, dtype=torch.int32)
    for bound in (PAGE_TOKENS, PAGES * PAGE_TOKENS):
        pages = bound // PAGE_TOKENS
        positions, slots = torch.full((2,), bound - 1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
        tables = table[None, :pages].expand(2, -1).contiguous()
        model.rows(torch.zeros(2, dtype=torch.int64), Rows(positions, slots, tables, bound), state)
        yield
        for size in (16, PAGE_TOKENS):
            start = bound - size
            positions = torch.arange(start, bound, dtype=torch.int32)
            meta = torch.tensor((start, size, 0, 0), dtype=torch.int32)
            where = Chunk(meta, positions, table[:pages], bound, (start, size))
            saves: list[Save] = [(start + 128, 1, start)] if size > 128 else []
            for last in (True, False):
                model.chunk(torch.zeros(size, dtype=torch.int64), where, state, last, saves)
                yield


def run(model: Any, state: Any, launched: list[Launch]) -> list[set[Launch]]:
    """The launches of each step."""
    launched.clear()
    found = []
    for _ in steps(model, state):
        found.append(set(launched))
        launched.clear()
    return found


def made(kind: str, quantised: bool, given: dict[str, object]) -> tuple[NativeV3 | NativeV4, dict[str, Tensor]]:
    config = tiny_config(kind, quantised=quantised, **given)
    spec: ModelSpec = spec_from_config(config)
    weights = random_native(spec, "cpu") if quantised else random_weights(spec).__getitem__
    dtype = torch.bfloat16 if quantised else torch.float32
    native = NativeV3 if spec.mla is not None else NativeV4
    model = native(spec, weights, dtype, "cpu")
    state = {}
    for g in state_groups(spec, "fp8" if quantised else "model"):
        rows = (PAGES, g.rows_per_page) if g.kind == "rows" else (SLOTS, g.ring_rows)
        own = {"model": dtype, "float32": torch.float32, "uint8": torch.uint8}[g.dtype]
        state[g.name] = torch.zeros(len(g.layers), *rows, g.width, dtype=own)
    return model, state


MODELS = [
    pytest.param("v4-flash", False, FLASH, 5, id="flash"),
    pytest.param("v4-flash", True, FLASH | BLOCKS, 5, id="flash quantised"),
    pytest.param("v4-pro", False, PRO, 4, id="pro"),
    pytest.param("v3", False, V3, 3, id="v3"),
    pytest.param("v3", True, V3 | {"kv_lora_rank": 128}, 3, id="v3 quantised"),
]


@pytest.mark.parametrize(("kind", "quantised", "given", "few"), MODELS)
def test_a_layer_of_each_kind_launches_all_that_the_whole_does(
    kind: str, quantised: bool, given: dict[str, object], few: int, launched: list[Launch]
) -> None:
    model, state = made(kind, quantised, given)
    short, own = model.abridged(state)
    assert isinstance(short, NativeV3 | NativeV4)
    assert len(short.layers) == few < len(model.layers)
    assert short.layers[-1] is model.layers[-1]
    whole = run(model, state, launched)
    assert len(whole) == 10 and all(len(step) > 10 for step in whole)
    assert run(short, own, launched) == whole


@pytest.mark.parametrize("missing", [0, 4, 128, "hashed", "learned"])
def test_a_kind_that_is_missing_is_seen(missing: int | str, launched: list[Launch]) -> None:
    """What the test above stands on."""
    model, state = made("v4-flash", False, FLASH)
    short, _ = model.abridged(state)
    assert isinstance(short, NativeV4)
    kinds = [(layer.attention.ratio, "learned" if layer.table is None else "hashed") for layer in short.layers[:-1]]
    left = [layer for layer, kind in zip(short.layers, kinds, strict=False) if missing not in kind]
    assert len(left) < len(kinds)
    short.layers = [*left, short.layers[-1]]
    assert run(short, state, launched) != run(model, state, launched)


def test_layers_keep_their_own_place_in_the_state(launched: list[Launch]) -> None:
    """An abridged chunk writes the state of its layers and of no other: what it is planned for is what it touches."""
    model, state = made("v4-flash", False, FLASH)
    short, own = model.abridged(state)
    assert isinstance(short, NativeV4)
    run(short, own, launched)
    touched = {int(layer) for layer in state["window"].flatten(1).any(1).nonzero()}
    assert touched == {layer.attention.layer for layer in short.layers} == {0, 2, 3, 4, 10}
