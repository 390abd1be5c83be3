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


def peak(spec: ModelSpec, weights: dict[str, Tensor], tokens: int, context: int) -> int:
    model = (DeepseekV3 if spec.mla is not None else DeepseekV4)(spec, weights, torch.float32)
    pages = pages_for(context + tokens)
    state = {}
    for g in state_groups(spec):
        if g.kind == "rows":
            state[g.name] = torch.full((len(g.layers), pages, g.rows_per_page, g.width), 0.01)
        else:
            state[g.name] = torch.full((len(g.layers), 1, g.ring_rows, g.width), 0.5)
    inputs = StepInputs(
        token_ids=torch.arange(tokens) % spec.vocab,
        positions=torch.arange(context, context + tokens),
        segments=(Segment(slot=0, start=context, length=tokens, offset=0, pages=tuple(range(pages))),),
        logit_rows=torch.tensor([tokens - 1]),
    )
    with torch.inference_mode(), PeakBytes([*weights.values(), *state.values()]) as counter:
        model.forward(inputs, state)
    return counter.peak


@pytest.mark.parametrize("kind", list(SIZES))
def test_one_step_stays_below_the_bound_and_does_not_grow_with_the_context(kind: str) -> None:
    spec = spec_from_config(tiny_config(kind, **SIZES[kind]))
    weights = random_weights(spec, 0)
    fresh, deep = peak(spec, weights, 256, 0), peak(spec, weights, 256, 4096)
    assert 4 * 256 * spec.hidden < fresh  # the counter sees at least one activation
    assert max(fresh, deep) <= workspace_bytes(spec, 256, 16)
    assert deep <= 1.5 * fresh + 16 * 2**20  # one score tile of slack; 4096 keys for every token would be far above
