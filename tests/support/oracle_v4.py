"""The V4 oracle: transformers' DeepseekV4ForCausalLM in float32 over a native checkpoint, and a bare driver of ours.

Traps: the cache argument is ``cache``; rows are never left-padded (the compressors would pool the pads).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from longread.engine.runner import Model
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from longread.spec.state import CacheKind, pages_for, state_groups
from longread.weights.export import write_checkpoint
from longread.weights.fixture import random_weights, tiny_config


def load_oracle(path: Path, config: dict[str, object], weights: dict[str, Tensor]) -> torch.nn.Module:
    """Write the weights as a native checkpoint and load it with transformers, in float32."""
    import transformers  # slow to import, needed by the oracle tests only

    write_checkpoint(path, config, weights)
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = set(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        raise RuntimeError(f"the oracle did not take: missing {sorted(missing)}, {info['mismatched_keys']}")
    return model.eval()


def tiny(kind: str, seed: int = 0, **overrides: object) -> tuple[dict[str, object], ModelSpec, dict[str, Tensor]]:
    """Config, spec and float32 weights of a tiny V4 model."""
    config = tiny_config(kind, **overrides)
    spec = spec_from_config(config)
    return config, spec, random_weights(spec, seed)


@dataclass
class Driver:
    """Slots, pages and positions of several sequences: what the engine does, without a policy.

    Page rows begin as NaN and stay so until the model writes them; packed ones as bytes 255, which are NaN in FP8.
    ``shuffle`` gives every sequence scattered pages.
    """

    spec: ModelSpec
    model: Model
    slots: int = 4
    pages: int = 64
    dtype: torch.dtype = torch.float32
    shuffle: bool = False
    cache: CacheKind = "model"
    device: str = "cpu"
    state: dict[str, Tensor] = field(init=False)
    tables: dict[int, list[int]] = field(init=False)
    lengths: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.state = {}
        for g in state_groups(self.spec, self.cache):
            kind = {"model": self.dtype, "float32": torch.float32, "uint8": torch.uint8}[g.dtype]
            shape = (self.pages, g.rows_per_page) if g.kind == "rows" else (self.slots, g.ring_rows)
            whole = len(g.layers), *shape, g.width
            self.state[g.name] = torch.full(whole, _poison(kind), dtype=kind, device=self.device)
        ids = list(range(self.pages))
        if self.shuffle:
            ids = torch.randperm(self.pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.free = ids
        self.tables, self.lengths = {}, {}
        for slot in range(self.slots):
            self.reset(slot)

    def reset(self, slot: int) -> None:
        """Give the slot to a new sequence: rings filled as declared, pages poisoned and given back."""
        for g in state_groups(self.spec, self.cache):
            storage = self.state[g.name]
            if g.kind == "ring":
                storage[:, slot] = g.fill
            else:
                storage[:, self.tables.get(slot, [])] = _poison(storage.dtype)
        self.free = self.tables.get(slot, []) + self.free
        self.tables[slot], self.lengths[slot] = [], 0

    def step(self, work: Sequence[tuple[int, Sequence[int]]], all_rows: bool = True) -> list[Tensor]:
        """Run one step over (slot, new tokens) pairs; returns each pair's logits, [n, vocab] or [1, vocab]."""
        segments, ids, positions, rows, offset = [], [], [], [], 0
        for slot, tokens in work:
            start, n = self.lengths[slot], len(tokens)
            while len(self.tables[slot]) < pages_for(start + n):
                self.tables[slot].append(self.free.pop(0))
            segments.append(Segment(slot, start, n, offset, tuple(self.tables[slot])))
            ids.extend(tokens)
            positions.extend(range(start, start + n))
            rows.extend(range(offset, offset + n) if all_rows else [offset + n - 1])
            self.lengths[slot] = start + n
            offset += n
        inputs = StepInputs(torch.tensor(ids), torch.tensor(positions), tuple(segments), torch.tensor(rows))
        logits = self.model.forward(inputs, self.state)
        return list(logits.split([len(tokens) if all_rows else 1 for _, tokens in work]))


def _poison(dtype: torch.dtype) -> float:
    return 255 if dtype == torch.uint8 else float("nan")


def prompt(count: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
