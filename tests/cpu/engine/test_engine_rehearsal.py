"""What runs before the device's runner is ready, on a CPU: which buckets, which layers, and in what order."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from longread.engine import device_runner
from longread.engine.compile_ahead import Missing
from longread.engine.device_runner import DeviceRunner, Limits
from longread.models.native_v4 import NativeV4, NativeV4Layer
from longread.spec.config_json import spec_from_config
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, pages_for, state_groups
from longread.weights.fixture import random_weights, tiny_config

LONGEST = 2304  # two bounds of graphs
RATIOS = [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 0]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_from_config(
        tiny_config("v4-flash", num_hidden_layers=10, compress_ratios=RATIOS, sliding_window=128, vocab_size=1500)
    )


@pytest.fixture
def runner(spec: ModelSpec) -> DeviceRunner:
    model = NativeV4(spec, random_weights(spec).__getitem__, torch.float32, "cpu")
    state = {}
    for g in state_groups(spec):
        rows = (pages_for(LONGEST), PAGE_TOKENS // g.tokens_per_row) if g.kind == "rows" else (4, g.ring_rows)
        state[g.name] = torch.zeros(len(g.layers), *rows, g.width)
    limits = Limits(2, 640, LONGEST, spec.vocab)
    return DeviceRunner(model, state, limits, slots=4, device=torch.device("cpu"), graphs=False)


class Marked:
    """A cache's mark."""

    def __init__(self) -> None:
        self.left = False

    def there(self) -> bool:
        return self.left

    def leave(self) -> None:
        self.left = True


def test_every_graph_is_tried_with_a_layer_of_each_kind(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    plain = NativeV4Layer.feed_forward

    def spied(self: NativeV4Layer, *args: Any) -> Any:
        ran.append(self.attention.layer)
        return plain(self, *args)

    monkeypatch.setattr(NativeV4Layer, "feed_forward", spied)
    tried: list[tuple[str, int, int]] = []
    for name, run in runner._graph_work(lambda *bucket: tried.append(bucket)):
        assert name == "graph"
        run()
    chunks = {("chunk", size, bound) for size in (16, 32, 64, 128, 256, 512) for bound in (2048, LONGEST)}
    assert len(tried) == 16 and set(tried) == chunks | {
        ("rows", size, bound) for size in (1, 2) for bound in (2048, LONGEST)
    }
    for bucket in (("rows", 2, LONGEST), ("chunk", 32, 2048)):
        runner._abridged(*bucket)
        assert ran == [0, 2, 3, 4, 9]
        ran.clear()
    runner._launch("rows", 2, LONGEST)
    assert ran == list(range(10))


def test_kernels_are_compiled_before_anything_runs_and_once(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that will be run is looked through, then compiled, then run; not again where the cache says so."""
    order: list[str] = []
    told: list[tuple[str, int, int]] = []
    mark = Marked()
    work = [("chunk", lambda: order.append("chunk"))]

    def graphs(run: Callable[[str, int, int], object]) -> Iterable[tuple[str, Callable[[], object]]]:
        return [("graph", lambda: run("rows", 1, 2048))]

    def found(given: Iterable[Callable[[], object]]) -> list[Missing]:
        for run in given:
            run()
        order.append("found")
        return [Missing(None, "a")]  # type: ignore[arg-type]

    def compiled(kernels: list[Missing], device: torch.device, tell: Callable[[int, int], None]) -> int:
        order.append(f"compiled {len(kernels)}")
        tell(1, 1)
        return 1

    monkeypatch.setattr(device_runner, "TOLD_SECONDS", -1e9)
    monkeypatch.setattr(runner, "_graphs", True)
    monkeypatch.setattr(runner, "_mark", lambda: mark)
    monkeypatch.setattr(runner, "_eager_work", lambda: work)
    monkeypatch.setattr(runner, "_graph_work", graphs)
    monkeypatch.setattr(runner, "_abridged", lambda *bucket: order.append("abridged"))
    monkeypatch.setattr(runner, "_graph", lambda *bucket: order.append("graph"))
    monkeypatch.setattr(device_runner, "missing_kernels", found)
    monkeypatch.setattr(device_runner, "compile_all", compiled)
    runner.prepare(lambda *line: told.append(line))
    assert order == ["chunk", "abridged", "found", "compiled 1", "chunk", "graph"]
    assert told[0] == ("looked at", 1, 2) and mark.left
    order.clear()
    runner.prepare()
    assert order == ["chunk", "graph"]
