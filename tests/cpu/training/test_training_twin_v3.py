"""The V3 twin against the model that serves: logits, quantised export, gradients, routing balance."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from oracle_v3 import Driver, prompt
from torch import Tensor
from training import twin_v3
from training.configs import READER_V3
from training.twin_v3 import TwinV3

from longread.models import deepseek_v3
from longread.models.deepseek_v3 import DeepseekV3
from longread.spec.errors import MissingTensorError, TensorShapeError, UnexpectedTensorError, UnsupportedModelError
from longread.spec.inventory import inventory
from longread.spec.loaded import is_drafter, loaded_shape
from longread.weights.export import write_checkpoint
from longread.weights.fixture import random_weights, tiny_config
from longread.weights.reader import Checkpoint

TOLERANCE = 1e-4
LENGTH = 300  # two pages
ROOT = Path(__file__).parents[3]
TINY = tiny_config("v3", quantised=True)
CONFIGS: dict[str, dict[str, object]] = {
    "tiny": TINY,
    "wide-values": TINY | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    "powers-of-two": TINY | {"quantization_config": TINY["quantization_config"] | {"scale_fmt": "ue8m0"}},  # type: ignore[operator]
    "reader": dict(READER_V3),
}


@dataclass
class Case:
    config: dict[str, object]
    twin: TwinV3

    @classmethod
    def of(cls, config: dict[str, object]) -> "Case":
        """The fixture's weights: no norm is 1, no router bias 0."""
        twin = TwinV3(config)
        twin.load_native(random_weights(twin.spec, 0))
        return cls(config, twin.eval())

    def ids(self, count: int, rows: int = 1) -> Tensor:
        return torch.tensor([prompt(count, self.twin.spec.vocab, seed) for seed in range(rows)])

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.twin.logits(self.twin.hidden(ids))

    def served(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        """The serving model's logits [1, T, vocab] of one whole prompt [1, T] over a fresh state."""
        driver = Driver(self.twin.spec, DeepseekV3(self.twin.spec, weights, torch.float32))
        return torch.stack(driver.step([(0, ids[0].tolist())]))


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.fixture(params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Case.of(CONFIGS[request.param])
    torch.set_num_threads(threads)


def test_the_twin_is_the_model(case: Case) -> None:
    ids = case.ids(LENGTH)
    expected = case.served(case.twin.native(), ids)
    assert expected.std() > 0.3, "an idle model agrees with anything"
    close(case.logits(ids), expected)


def test_fused_attention_is_eager_attention(case: Case) -> None:
    ids = case.ids(130, rows=2)
    case.twin.eager = True
    expected = case.logits(ids)
    case.twin.eager = False
    close(case.logits(ids), expected)


def test_fake_quantisation_is_the_exported_checkpoint(case: Case, tmp_path: Path) -> None:
    """Weights that no stored type holds exactly, so that every rounding counts."""
    with torch.no_grad():
        for p in case.twin.parameters():
            p.mul_(1 + torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 1e-2)
    ids = case.ids(LENGTH)
    plain = case.logits(ids)
    case.twin.fake_quant = True
    rounded = case.logits(ids)
    assert (rounded - plain).abs().max() > 100 * TOLERANCE
    write_checkpoint(tmp_path, case.config, case.twin.native())
    close(rounded, case.served(Checkpoint.open(tmp_path).load(case.twin.spec, torch.float32), ids))


@pytest.mark.parametrize("fake_quant", [False, True])
def test_every_parameter_gets_a_gradient(case: Case, fake_quant: bool) -> None:
    twin = TwinV3(case.config).train()  # its own initialisation, as in training
    twin.fake_quant = fake_quant
    ids = case.ids(64, rows=8)
    loss = torch.nn.functional.cross_entropy(twin.logits(twin.hidden(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for name, p in twin.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        per_matrix = p.grad.flatten(0, -3) if p.ndim == 3 else p.grad[None]
        assert all(g.abs().max() > 0 for g in per_matrix), name


def test_gradients_are_those_of_finite_differences() -> None:
    """Through gates, rotation and attention; float64, so that the differences mean something."""
    case = Case.of(TINY)
    twin = case.twin
    ids = case.ids(24)
    router = twin.layers[2].routed.router
    for p in (router, twin.layers[0].attention.q_a, twin.layers[1].dense.down, twin.embed):
        twin.zero_grad()
        twin.hidden(ids).square().sum().backward()
        direction = p.grad / p.grad.norm()
        expected, step = float(p.grad.norm()), 2e-3
        with torch.no_grad():
            p.add_(direction, alpha=step)
            above = float(twin.hidden(ids).square().sum())
            p.add_(direction, alpha=-2 * step)
            below = float(twin.hidden(ids).square().sum())
            p.add_(direction, alpha=step)
        assert (above - below) / (2 * step) == pytest.approx(expected, rel=0.05)


def test_native_weights_make_the_round_trip(case: Case) -> None:
    native = case.twin.native()
    shapes = {
        t.name: loaded_shape(t)
        for t in inventory(case.twin.spec)
        if t.scale_of is None and not is_drafter(t.name, case.twin.spec)
    }
    assert {name: tuple(t.shape) for name, t in native.items()} == shapes
    assert {t.dtype for t in native.values()} == {torch.float32}
    other = TwinV3(case.config)
    other.load_native(native)
    again = other.native()
    assert all(torch.equal(again[name], t) for name, t in native.items())
    native["model.norm.weight"].zero_()
    assert case.twin.norm.detach().abs().min() > 0, "native() must hand out copies"


def test_wrong_weights_are_refused() -> None:
    twin = TwinV3(TINY)
    native = twin.native()
    norm = native.pop("model.norm.weight")
    with pytest.raises(MissingTensorError, match=r"model\.norm"):
        twin.load_native(native)
    with pytest.raises(TensorShapeError, match=r"model\.norm"):
        twin.load_native(native | {"model.norm.weight": norm[1:]})
    with pytest.raises(UnexpectedTensorError, match="gate_up"):
        twin.load_native(native | {"model.norm.weight": norm, "model.layers.0.gate_up": norm})


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        TwinV3(tiny_config("v2-lite"))


def test_groups_hold_every_parameter_once(case: Case) -> None:
    groups = case.twin.groups()
    assert set(groups) == {"muon", "adam", "embed"}
    held = [id(p) for members in groups.values() for p in members]
    assert sorted(held) == sorted(id(p) for p in case.twin.parameters())
    assert all(p.ndim in (2, 3) for p in groups["muon"])


def test_load_counts_the_chosen_experts_of_training_tokens() -> None:
    case = Case.of(TINY)
    twin, ids = case.twin, case.ids(50, rows=2)
    ids[ids == twin_v3.PAD] = 5
    ids[1, 40:] = twin_v3.PAD
    routed = twin.layers[1].routed
    twin.hidden(ids)
    assert routed.load.sum() == 0, "evaluation is not load"
    twin.train().hidden(ids)
    assert routed.load.sum() == 90 * twin.spec.moe.top_k
    twin.hidden(ids)
    assert routed.load.sum() == 180 * twin.spec.moe.top_k


def test_the_bias_follows_the_load() -> None:
    twin = TwinV3(TINY)
    routed = twin.layers[1].routed
    routed.load.copy_(torch.arange(16.0))  # mean 7.5
    twin.update_router_bias(0.25)
    assert routed.bias.tolist() == [0.25] * 8 + [-0.25] * 8
    assert routed.load.sum() == 0
    twin.update_router_bias(0.25)
    assert routed.bias.tolist() == [0.25] * 8 + [-0.25] * 8, "without tokens nothing moves"


def test_balancing_evens_the_load() -> None:
    case = Case.of(TINY)
    twin, ids = case.twin.train(), case.ids(200)

    def spread() -> float:
        with torch.no_grad():
            twin.hidden(ids)
        loads = torch.stack([m.load for m in twin.modules() if isinstance(m, twin_v3.Routed)])
        return float(loads.amax() / loads.mean())

    before = spread()
    for _ in range(60):
        twin.update_router_bias(0.02)
        after = spread()
    assert after < 0.7 * before


def test_the_first_guess_is_nearly_even() -> None:
    twin = TwinV3(READER_V3)
    ids = torch.tensor([prompt(100, twin.spec.vocab)])
    with torch.no_grad():
        logits = twin.logits(twin.hidden(ids))
    assert 0.3 < logits.std() < 0.8  # a loss of about ln(vocab) + 0.1


def test_the_seed_decides_the_first_weights() -> None:
    state = torch.get_rng_state()
    first, again, other = TwinV3(TINY, 3).native(), TwinV3(TINY, 3).native(), TwinV3(TINY, 4).native()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(again[name], t) for name, t in first.items())
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert not torch.equal(other[name], first[name])


def test_autocast_keeps_choices_and_stream_in_float32() -> None:
    case = Case.of(TINY)
    ids = case.ids(64)
    expected = case.logits(ids)
    for case.twin.eager in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = case.twin.hidden(ids)
            logits = case.twin.logits(hidden)
        assert hidden.dtype == logits.dtype == torch.float32
        # A rounding can flip an expert, so the bulk is judged, not the worst logit.
        assert (logits - expected).pow(2).mean().sqrt() < 0.15 * expected.std()


def test_the_latent_epsilon_is_the_models() -> None:
    assert twin_v3.LATENT_EPS == deepseek_v3.LATENT_EPS


def test_the_twin_imports_torch_and_numpy_at_most() -> None:
    """The training machine has little else."""
    code = (
        "import sys; sys.modules.update({m: None for m in ('psutil', 'orjson', 'rich', 'numba', 'pydantic')});"
        "import training.twin_v3; print(sorted(m for m in sys.modules if m.startswith('longread.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in eval(done.stdout)}
    assert rooms <= {"spec", "kernels", "weights"}
