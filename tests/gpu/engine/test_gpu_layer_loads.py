"""The engine on a GPU computes on pages that are still on their way from main memory, and says what it says of pages
that were there: to the bit, since they are the same bytes.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longread.engine.engine import LocalEngine
from longread.engine.load import load_resolved
from longread.kv import layer_loads
from longread.kv.arrivals import Arrival
from longread.kv.layer_loads import CudaLink
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.reduced import random_spec

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a whole engine takes too long interpreted")
BOOK = 64 * 256  # tokens; a page end
SAMPLED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
Said = tuple[list[tuple[int, float | None]], FinishEvent]


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, 100_000), k=length))


@pytest.fixture(scope="module", params=["DeepSeek-V4-Flash", "DeepSeek-V3"])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """Every load is worth it, and each begins 15 ms late: what did not wait for it would be far ahead."""
    plain = CudaLink.begin

    def late(self: CudaLink) -> Callable[[], Arrival]:
        self.run(lambda: torch.cuda._sleep(30_000_000))
        return plain(self)

    options = EngineOptions(
        request.param,
        device="cuda",
        random_weights=True,
        layers="4" if request.param == "DeepSeek-V4-Flash" else "1+1",
        max_model_len=2 * BOOK,
        max_num_seqs=2,
        num_gpu_blocks_override=140,
        host_cache_size=2**31,
    )
    spec = random_spec(options.model, options.layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_loads, "LEAST_BYTES", 0)
        patch.setattr(CudaLink, "begin", late)
        loaded = load_resolved(Path(options.model), spec, resolve(options, spec, probe_machine()))
        yield loaded
        loaded.close()
    torch.cuda.empty_cache()


def ask(engine: LocalEngine, prompt: tuple[int, ...], salt: str | None = None) -> Said:
    engine.submit(GenerationRequest("r", prompt, SAMPLED, cache_salt=salt))
    tokens: list[tuple[int, float | None]] = []
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.append((event.token_id, event.logprob))
            elif isinstance(event, FinishEvent):
                end = event
    return tokens, end


@pytest.mark.parametrize("more", [1, 30, 500, 700])
def test_a_suffix_says_the_same_of_pages_on_their_way(engine: LocalEngine, more: int) -> None:
    """A row, captured chunks, a chunk that is launched layer by layer. A salt keeps what was read the one way from what
    is read the other way.
    """
    book, other = ids(BOOK, more), ids(2 * BOOK - 2048, 1000 + more)
    asked = (*book, *ids(more, 2000 + more))
    ask(engine, book, "there")
    want, end = ask(engine, asked, "there")
    assert end.reuse is not None and end.reuse.device_tokens == BOOK
    ask(engine, book, "away")
    ask(engine, other)  # needs the room
    compiled: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given.get("repr"))
    try:
        found, end = ask(engine, asked, "away")
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert end.reuse is not None and end.reuse.reused_tokens == BOOK and end.reuse.host_tokens > BOOK // 2
    assert found == want
    assert not compiled, "a kernel was compiled while the engine served"
    engine._cache.check()


def test_others_decode_beside_loads(engine: LocalEngine) -> None:
    """Three books by turns beside a running answer: each that is read again says the same every time."""
    books = [ids(BOOK, seed) for seed in (31, 32, 33)]
    engine.submit(
        GenerationRequest("runs", ids(300, 34), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    )
    first: dict[int, list[int]] = {}
    for turn in range(9):
        book = turn % 3
        name = f"b{turn}"
        engine.submit(GenerationRequest(name, (*books[book], 7, 8, 9), SamplingParams(temperature=0.0, max_tokens=3)))
        said: list[int] = []
        ended = False
        while not ended:
            for event in engine.step():
                if isinstance(event, TokenEvent) and event.request_id == name:
                    said.append(event.token_id)
                ended = ended or (isinstance(event, FinishEvent) and event.request_id == name)
        if turn >= 3:  # before, it was computed
            assert said == first.setdefault(book, said)
    while engine.has_work():
        engine.step()
    engine._cache.check()
