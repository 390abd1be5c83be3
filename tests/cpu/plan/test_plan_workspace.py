"""The planner's workspace bound against what the models really allocate in one step."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from longread.models.deepseek_v3 import DeepseekV3
from longread.models.deepseek_v4 import DeepseekV4
from longread.models.inputs import StepInputs
from longread.plan.memory import workspace_bytes
from longread.spec.batch import Segment
from longread.spec.config_json import spec_from_config
from longread.spec.inventory import inventory
from longread.spec.loaded import loaded_dtype
from longread.spec.model import ModelSpec
from longread.spec.state import pages_for, state_groups
from longread.weights.fixture import random_weights, tiny_config

SIZES: dict[str, dict[str, object]] = {
    "v3": {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16},
    "v4-flash": {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "hidden_size": 512,
        "num_attention_heads": 16,
        "index_topk": 256,
    },
}


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators create, for as long as a tensor refers to them."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._live: dict[int, list[int]] = {}
        self._now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        entry = self._live.setdefault(storage._cdata, [storage.nbytes(), 0])
        if entry[1] == 0:
            self._now += entry[0]
            self.peak = max(self.peak, self._now)
        entry[1] += 1
        weakref.finalize(tensor, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        entry = self._live[key]
        entry[1] -= 1
        if entry[1] == 0:
            self._now -= self._live.pop(key)[0]


def peak(
    spec: ModelSpec, weights: dict[str, Tensor], tokens: int, context: int, dtype: torch.dtype, beside: int = 0
) -> int:
    """Of a step in which one sequence reads ``tokens`` behind ``context`` and ``beside`` others as long read one."""
    model = (DeepseekV3 if spec.mla is not None else DeepseekV4)(spec, weights, dtype)
    pages = pages_for(context + tokens)
    state = {}
    for g in state_groups(spec):
        own = torch.float32 if g.dtype == "float32" else dtype
        if g.kind == "rows":
            shape = (len(g.layers), pages * (beside + 1), g.rows_per_page, g.width)
            state[g.name] = torch.full(shape, 0.01, dtype=own)
        else:
            state[g.name] = torch.full((len(g.layers), beside + 1, g.ring_rows, g.width), 0.5, dtype=own)
    segments = [Segment(slot=0, start=context, length=tokens, offset=0, pages=tuple(range(pages)))]
    for i in range(1, beside + 1):
        theirs = tuple(range(i * pages, (i + 1) * pages))
        segments.append(Segment(slot=i, start=context, length=1, offset=tokens + i - 1, pages=theirs))
    inputs = StepInputs(
        token_ids=torch.arange(tokens + beside) % spec.vocab,
        positions=torch.cat([torch.arange(s.start, s.end) for s in segments]),
        segments=tuple(segments),
        logit_rows=torch.tensor([s.offset + s.length - 1 for s in segments]),
    )
    with torch.inference_mode(), PeakBytes([*weights.values(), *state.values()]) as counter:
        model.forward(inputs, state)
    return counter.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", list(SIZES))
def test_one_step_stays_below_the_bound_and_does_not_grow_with_the_context(kind: str, dtype: torch.dtype) -> None:
    spec = spec_from_config(tiny_config(kind, **SIZES[kind]))
    entries = {entry.name: entry for entry in inventory(spec)}
    weights = {
        name: value.to(getattr(torch, loaded_dtype(entries[name], str(dtype).removeprefix("torch."))))
        for name, value in random_weights(spec, 0).items()
    }
    fresh, deep = peak(spec, weights, 256, 0, dtype), peak(spec, weights, 256, 4096, dtype)
    mixed = peak(spec, weights, 249, 4096, dtype, beside=7)
    assert dtype.itemsize * 256 * spec.hidden < fresh  # the counter sees at least one activation
    name = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    bounds = [workspace_bytes(spec, 256, 16, context, name, threads) for context in (256, 4352)]
    assert fresh <= bounds[0] and max(deep, mixed) <= bounds[1] <= workspace_bytes(spec, 256, 16, None, name)
    if kind == "v4-flash":  # a bound for MLA has to hold for short chunks too, whose scores are larger
        assert bounds[0] < 1.4 * fresh and bounds[1] < 2 * max(deep, mixed)
    assert deep <= 1.5 * fresh + 16 * 2**20  # one score tile of slack; 4096 keys for every token would be far above
