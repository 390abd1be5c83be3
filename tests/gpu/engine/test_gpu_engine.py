"""The engine on a GPU: the bundled reader answers as on a CPU, from each cache format, warm and cold, and compiles
nothing once it is ready.

The kernels round to bfloat16 and FP8 where the CPU's model computes in float32, so what must be equal is what was found
(the texts of the answers), not the bits of the logits.
"""

import pytest
import torch
from readers import Reader

from longread.measure.reading import write

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a whole engine takes too long interpreted")
QUESTIONS = 6


@pytest.fixture(scope="module")
def asked() -> tuple[list[tuple[int, ...]], list[str]]:
    """Prompts of about 1,500 tokens, and what the CPU answers."""
    reader = Reader.open("reader-v4")
    document = write(901, 1500 // 6, "en", "contract")
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
