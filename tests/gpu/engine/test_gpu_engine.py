"""The engine on a GPU: the bundled reader answers as on a CPU, from each cache format, warm and cold, and compiles
nothing once it is ready.

The kernels round to bfloat16 and FP8 where the CPU's model computes in float32, so what must be equal is what was found
(the texts of the answers), not the bits of the logits.
"""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from readers import Reader

from longread.engine import load_device
from longread.engine.device_runner import DeviceRunner
from longread.engine.load import load_resolved
from longread.measure.reading import write
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.engine import GenerationRequest, SamplingParams
from longread.spec.reduced import random_spec

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a whole engine takes too long interpreted")
QUESTIONS = 6
LINES = 80  # about 1,500 tokens


@pytest.fixture(scope="module")
def asked() -> tuple[list[tuple[int, ...]], list[str]]:
    """Prompts of about 1,500 tokens, and what the CPU answers."""
    reader = Reader.open("reader-v4")
    document = write(901, LINES, "en", "contract")
    prompts = [reader.prompt(f"{document.text}\n{question.text}") for question in document.questions(QUESTIONS)]
    answers = [said.text for said in reader.answers(prompts)]
    reader.engine.close()
    return prompts, answers


@pytest.mark.parametrize("cache", ["fp8", "bfloat16"])
def test_answers_are_those_of_a_cpu(asked: tuple[list[tuple[int, ...]], list[str]], cache: str) -> None:
    prompts, want = asked
    reader = Reader.open("reader-v4", device="cuda", dtype="bfloat16", kv_cache_dtype=cache)
    compiled: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given.get("repr"))
    try:
        cold = [said.text for said in reader.answers(prompts)]
        warm = [said.text for said in reader.answers(prompts)]
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        reader.engine.close()
    assert warm == cold
    assert cold == want
    assert not compiled, "a kernel was compiled while the engine served"


def test_graphs_answer_as_launches_do(
    asked: tuple[list[tuple[int, ...]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels in the same buckets: a graph that reads a stale input would say something else."""

    def launches(*args: Any, **options: Any) -> DeviceRunner:
        return DeviceRunner(*args, **(options | {"graphs": False}))

    prompts = asked[0][:2]
    reader = Reader.open("reader-v4", device="cuda", dtype="bfloat16")
    want = [said.text for said in reader.answers(prompts)]
    reader.engine.close()
    monkeypatch.setattr(load_device, "DeviceRunner", launches)
    reader = Reader.open("reader-v4", device="cuda", dtype="bfloat16")
    found = [said.text for said in reader.answers(prompts)]
    reader.engine.close()
    assert found == want


def test_memory_is_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers of V4-Flash's widths, a prompt as long as the context: torch's peak within 3 % of the plan's."""
    length = 32768
    options = EngineOptions(
        "DeepSeek-V4-Flash",
        device="cuda",
        random_weights=True,
        layers="4",
        max_model_len=length,
        max_num_seqs=8,
        num_gpu_blocks_override=512,
    )
    spec = random_spec(options.model, options.layers)
    config = resolve(options, spec, probe_machine())
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # what another test left
    engine = load_resolved(Path(options.model), spec, config)
    ids = tuple(random.Random(1).choices(range(100, spec.vocab), k=length - 16))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.submit(GenerationRequest("a", ids, sampling))
    while engine.has_work():
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    engine.close()
    with capsys.disabled():
        print(f"\ntorch's peak {peak / 1e9:.2f} GB, planned {config.memory.device_peak / 1e9:.2f} GB")
    assert abs(config.memory.device_peak / peak - 1) < 0.03, (config.memory, peak)
