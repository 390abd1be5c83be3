"""V3 behind the engine on a GPU: the bundled reader answers as on a CPU, memory is as planned, nothing is compiled and
no long chunk waits for the device.
"""

import gc
import random
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")  # CPU-only machines collect this file, too

from readers import Reader  # noqa: E402

from longread.engine.load import load_resolved  # noqa: E402
from longread.kernels.experts import triton as experts  # noqa: E402
from longread.kernels.mla import device_ref, rows_gluon  # noqa: E402
from longread.kernels.mla import triton as mla  # noqa: E402
from longread.measure.reading import write  # noqa: E402
from longread.plan import device_mla  # noqa: E402
from longread.plan.machine import probe_machine  # noqa: E402
from longread.plan.resolve import resolve  # noqa: E402
from longread.spec.config import EngineOptions  # noqa: E402
from longread.spec.engine import GenerationRequest, SamplingParams  # noqa: E402
from longread.spec.reduced import random_spec  # noqa: E402

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a whole engine takes too long interpreted")
QUESTIONS = 6
LINES = 80  # about 1,500 tokens


@on_a_gpu
@pytest.mark.parametrize("cache", ["fp8", "bfloat16"])
def test_answers_are_those_of_a_cpu(cache: str) -> None:
    reader = Reader.open("reader-v3")
    document = write(901, LINES, "en", "contract")
    questions = document.questions(QUESTIONS)
    prompts = [reader.prompt(f"{document.text}\n{question.text}") for question in questions]
    want = [said.text for said in reader.answers(prompts)]
    reader.engine.close()
    sure = [i for i, question in enumerate(questions) if want[i] == question.answer]  # what is guessed may change
    assert len(sure) >= QUESTIONS - 1
    prompts, want = [prompts[i] for i in sure], [want[i] for i in sure]
    reader = Reader.open("reader-v3", device="cuda", dtype="bfloat16", kv_cache_dtype=cache)
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


@on_a_gpu
def test_memory_is_as_planned() -> None:
    """Two layers of V3's widths, a prompt of four chunks that begin within pages, since an answer is decoded beside
    them: torch's peak within 3 % of the plan's.
    """
    length = 32768
    options = EngineOptions(
        "DeepSeek-V3",
        device="cuda",
        random_weights=True,
        layers="1+1",
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
    for name, prompt, tokens in (("a", ids[:20], 200), ("b", ids, 8)):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.submit(GenerationRequest(name, prompt, sampling))
        engine.step()
    while engine.has_work():
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    engine.close()
    assert abs(config.memory.device_peak / peak - 1) < 0.03, (config.memory, peak)


def test_the_plan_cuts_keys_as_the_kernel_does() -> None:
    assert (device_mla.KEYS, device_mla.TILE_HEADS, device_mla.TILE_KEYS) == (
        device_ref.KEYS,
        rows_gluon.HEADS,
        rows_gluon.KEYS,
    )
    for programs in (1, 2, 16, 128, 1024):
        for blocks in (1, 7, 32, 512, 2560):
            assert device_mla._splits(programs, blocks) == mla._splits(programs, blocks)


@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_the_plan_sorts_pairs_as_the_kernel_does(kind: str) -> None:
    assert device_mla.FEW_PAIRS == experts.FEW
    for mean in (4, 4.01, 11, 24, 24.01, 100, 1000):
        config = experts.choose(kind, int(mean * 2560), 2560)
        assert device_mla.expert_block(int(mean * 2560) / 2560, kind == "fp8") == config.block, mean
