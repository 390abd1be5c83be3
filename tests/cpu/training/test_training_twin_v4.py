"""The V4 training twin against the project's model, and its attention against the plain form."""

import pytest
import torch
from oracle_v4 import Driver
from training import attention
from training.configs import READER_V4
from training.twin_v4 import TwinV4

from longread.models.deepseek_v4 import DeepseekV4
from longread.spec.config_json import spec_from_config
from longread.weights.fixture import random_weights, tiny_config

QUANTISED = ("quantization_config", "expert_dtype")
CONFIGS = {
    "flash": tiny_config("v4-flash"),
    "pro": tiny_config("v4-pro"),
    "reader": {k: v for k, v in READER_V4.items() if k not in QUANTISED},
}


def twin(config: dict[str, object], **options: object) -> TwinV4:
    made = TwinV4(config)
    made.eager = True
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_models(name: str) -> None:
    config = CONFIGS[name]
    spec = spec_from_config(config)
    weights = random_weights(spec, 1)
    ours = twin(config, selection="topk")
    ours.load_native(weights)
    ids = torch.randint(3, spec.vocab, (2, 620), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = ours.logits(ours.hidden(ids))
    model = DeepseekV4(spec, weights, torch.float32)
    for row in range(2):
        expected = Driver(spec, model).step([(0, ids[row].tolist())])[0]
        assert (logits[row] - expected).abs().max() < 1e-4
    # The selection is at work: without it the logits are others.
    ours.selection = "dense"
    with torch.no_grad():
        assert (ours.logits(ours.hidden(ids)) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_native_names_survive_the_round_trip(name: str) -> None:
    weights = random_weights(spec_from_config(CONFIGS[name]), 3)
    ours = twin(CONFIGS[name])
    ours.load_native(weights)
    back = ours.native()
    assert {k for k in weights if not k.startswith("mtp.")} == set(back)
    assert all(torch.equal(value, weights[key].to(value.dtype)) for key, value in back.items())


def test_every_parameter_gets_a_finite_gradient() -> None:
    config = CONFIGS["flash"]
    ours = twin(config)
    ids = torch.randint(3, 1000, (2, 256), generator=torch.Generator().manual_seed(0))
    ours.set_index_queries(torch.tensor([[40, 200, 255], [7, 130, 250]]))
    hidden = ours.hidden(ids)
    index_loss = ours.index_loss()
    assert index_loss is not None
    (ours.logits(hidden).logsumexp(-1).mean() + index_loss).backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_the_index_loss_moves_only_the_indexer() -> None:
    ours = twin(CONFIGS["flash"])
    ids = torch.randint(3, 1000, (1, 256), generator=torch.Generator().manual_seed(0))
    ours.set_index_queries(torch.tensor([[40, 200, 255]]))
    ours.hidden(ids)
    index_loss = ours.index_loss()
    assert index_loss is not None and index_loss > 0
    index_loss.backward()
    moved = {name for name, p in ours.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == {name for name, _ in ours.named_parameters() if "__indexer__" in name}


def test_random_selection_differs_and_counts() -> None:
    ours = twin(CONFIGS["flash"], selection="random", keep_selection=True)
    ids = torch.randint(3, 1000, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours.hidden(ids)
    top_k = ours.ix.top_k
    for chosen in ours.selections:
        visible = (torch.arange(256) + 1) // 4
        assert torch.equal(chosen.sum(-1), visible.clamp(max=top_k).expand(2, -1))


@pytest.mark.parametrize(("length", "ratio"), [(256, 4), (512, 128), (384, 0), (1024, 4)])
@pytest.mark.parametrize("sparse", [False, True])
def test_block_tables_hold_every_visible_pair(length: int, ratio: int, sparse: bool) -> None:
    """The tables decide what a GPU computes; here they are unfolded and compared with the definition."""
    count = length // ratio if ratio else 0
    if sparse and ratio != 4:
        pytest.skip("only the indexed layers select")
    chosen = torch.rand(1, length, count, generator=torch.Generator().manual_seed(0)) < 0.3
    padding = -count % attention.BLOCK
    mask = attention._block_mask(length, count + padding, 128, ratio, torch.device("cpu"))
    if sparse:
        padded = torch.nn.functional.pad(chosen, (0, padding))
        mask = attention._with_chosen(mask, padded, length, 128, ratio)
    q, k = torch.arange(length)[:, None], torch.arange(length + count + padding)
    pairs = mask.mask_mod(torch.tensor(0), torch.tensor(0), q, k)
    window = (k <= q) & (q - k < 128)
    entry = (k >= length) & ((k - length) < (q + 1) // max(ratio, 1))
    if sparse:
        entry[:, length : length + count] &= chosen[0]
    assert torch.equal(pairs, torch.where(k < length, window, entry))
    blocks = pairs.view(length // 128, 128, -1, 128)
    kept = mask.to_dense()[0, 0].bool()
    assert torch.equal(kept | blocks.any(3).any(1), kept)
    if not sparse:
        assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
        for row in range(length // 128):
            for block in mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].tolist():
                assert blocks[row, :, block].all()
