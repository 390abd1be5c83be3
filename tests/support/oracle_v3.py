"""The V2/V3 oracle: transformers in float32 over an exported native checkpoint, and a bare driver of our model.

The driver does what the engine does without a policy: slots, pages and positions of several sequences. Pages begin as
NaN and stay so until the model writes them, and a sequence's page ids are shuffled.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longread.models.deepseek_v3 import DeepseekV3
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from longread.spec.state import pages_for, state_groups
from longread.weights.export import write_checkpoint
from longread.weights.fixture import random_weights, tiny_config

Tiny = tuple[dict[str, object], ModelSpec, dict[str, Tensor]]

# The four router and projection variants of the family; V2 is not a fixture kind of its own.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "v2-lite": ("v2-lite", {}),
    "v2": (
        "v2-lite",
        {
            "q_lora_rank": 64,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
    ),
    "v3": ("v3", {}),
    "v3-wide": (
        "v3",
        {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
}


def tiny(variant: str, **overrides: object) -> Tiny:
    """Config, spec and float32 weights of a tiny model."""
    kind, changes = VARIANTS[variant]
    config = tiny_config(kind, **(changes | overrides))
    spec = spec_from_config(config)
    return config, spec, random_weights(spec, 0)


def load_oracle(path: Path, config: dict[str, object], weights: dict[str, Tensor]) -> torch.nn.Module:
    """Write the weights as a native checkpoint and load it with transformers, float32, eager attention."""
    import transformers  # slow to import, needed by the oracle tests only

    write_checkpoint(path, config, weights)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"the oracle did not take: {info['missing_keys']}, {info['mismatched_keys']}")
    return model.eval()


class Driver:
    """Runs steps over a paged state of ``pages`` pages with shuffled ids (``contiguous`` False)."""

    def __init__(self, spec: ModelSpec, model: DeepseekV3, pages: int = 16, contiguous: bool = False):
        (group,) = state_groups(spec)
        shape = (len(group.layers), pages, group.rows_per_page, group.width)
        self.state = {group.name: torch.full(shape, float("nan"), dtype=model.dtype)}
        self.model = model
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.free: list[int] = list(range(pages)) if contiguous else order
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, work: Sequence[tuple[int, Sequence[int]]], last_only: bool = False) -> list[Tensor]:
        """Feed (slot, new tokens) pairs in one step; each pair's logits [n, vocab], or [1, vocab]."""
        segments, ids, positions, rows = [], [], [], []
        for slot, tokens in work:
            start, table = self.lengths.get(slot, 0), self.tables.setdefault(slot, [])
            while len(table) < pages_for(start + len(tokens)):
                table.append(self.free.pop(0))
            segments.append(Segment(slot, start, len(tokens), len(ids), tuple(table)))
            rows += [len(ids) + len(tokens) - 1] if last_only else range(len(ids), len(ids) + len(tokens))
            positions += range(start, start + len(tokens))
            ids += tokens
            self.lengths[slot] = start + len(tokens)
        wanted = torch.tensor(rows, dtype=torch.int64)
        inputs = StepInputs(torch.tensor(ids), torch.tensor(positions), tuple(segments), wanted)
        logits = self.model.forward(inputs, self.state)
        return list(logits.split([1 if last_only else len(tokens) for _, tokens in work]))


def prompt(count: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
