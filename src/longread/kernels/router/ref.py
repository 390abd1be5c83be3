"""Expert routing in plain torch: softmax greedy, group-limited greedy, noaux_tc, sqrt-softplus and the hash table.

Knows scores and groups; knows no expert weights. All arithmetic is float32 whatever the model's dtype: a routing choice
is a discontinuity. Sources: DeepSeek-V2 and -V3 inference code, DeepSeek-V4 inference/model.py.
"""

import torch
from torch import Tensor
from torch.nn import functional

from longread.spec.model import MoESpec


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] any float dtype, weight [E, D] -> float32 [T, E]. Keep ``weight`` in float32 to avoid a cast a step."""
    return functional.linear(x.float(), weight.float())


def affinity(logits: Tensor, moe: MoESpec) -> Tensor:
    """Unbiased scores of every expert: float32 [T, E]."""
    if moe.scoring == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if moe.scoring == "sigmoid" else functional.softplus(logits).sqrt()


def route(logits: Tensor, moe: MoESpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Top-k experts by ``moe.method``: (ids int64 [T, k], weights float32 [T, k]), in no particular order.

    logits: float32 [T, E]. bias: float32 [E], noaux_tc only: it moves the choice, never the weights.
    """
    scores = affinity(logits, moe)
    if moe.method == "noaux_tc":
        choice = scores if bias is None else scores + bias
        if moe.groups > 1:
            choice = _keep_groups(choice, moe, best_of_group=2, dropped=float("-inf"))
        ids = choice.topk(moe.top_k, dim=-1, sorted=False).indices
        return ids, _weights(scores.gather(1, ids), moe)
    if moe.method == "group_limited_greedy" and moe.groups > 1:
        scores = _keep_groups(scores, moe, best_of_group=1, dropped=0.0)
    weights, ids = scores.topk(moe.top_k, dim=-1, sorted=False)
    return ids, _weights(weights, moe)


def route_hash(logits: Tensor, moe: MoESpec, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Experts given by a table (V4's hash layers): ids int64 [T, k]; the weights still come from the scores."""
    return ids, _weights(affinity(logits, moe).gather(1, ids), moe)


def _weights(chosen: Tensor, moe: MoESpec) -> Tensor:
    if moe.normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen if moe.scale == 1.0 else chosen * moe.scale


def _keep_groups(scores: Tensor, moe: MoESpec, best_of_group: int, dropped: float) -> Tensor:
    """Scores outside the ``kept_groups`` best groups become ``dropped``; a group counts the sum of its best few."""
    tokens, experts = scores.shape
    grouped = scores.view(tokens, moe.groups, experts // moe.groups)
    if best_of_group == 1:
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(best_of_group, dim=-1).values.sum(-1)
    kept = group_scores.topk(moe.kept_groups, dim=-1, sorted=False).indices
    drop = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(drop[..., None], dropped).view(tokens, experts)
