"""Every way to a cached document gives the same cache bytes and bit-equal logits: device, host, disk, another process,
one killed while it wrote, an exported file, a fork. Cold against warm: the same bits but for the tokens that are
computed in another step, whose rounding depends on its shape; and the same greedy tokens.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.cli.checkpoint import locate
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.shelf import DiskShelf
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import pages_for
from longread.weights.fixture import write_fixture

TOLERANCE = 2e-5
KINDS = ("v3", "v4-flash", "v4-pro", "reader-v3", "reader-v4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LENGTHS = (512, 700)  # a page end, and inside a page
SUFFIXES = (0, 1, 40)  # each begins like the next one
COMPUTED = (1, 1, 39)  # behind the prompt before

Saved = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param.startswith("reader"):
        return locate(request.param)
    path = tmp_path_factory.mktemp("warm") / "model"
    write_fixture(path, request.param)
    return path


Load = Callable[..., LocalEngine]


@pytest.fixture
def load() -> Iterator[Load]:
    """Makes engines, and closes those that the test has not closed."""
    with ExitStack() as opened:

        def make(*given: object, **options: object) -> LocalEngine:
            engine = start(*given, **options)  # type: ignore[arg-type]
            opened.callback(engine.close)
            return engine

        yield make


def start(model: Path, store: Path | None = None, **options: object) -> LocalEngine:
    given: dict[str, object] = {
        "num_gpu_blocks_override": 16,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "store": str(store) if store is not None else None,
    }
    return load_engine(EngineOptions(model=str(model), dtype="float32", **(given | options)))


def skip_reader(model: Path, *names: str) -> None:
    if model.name in names:
        pytest.skip("the tiny models, and of the readers one at most, show it")


def text(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 400, (length,), generator=generator).tolist()


def look(engine: LocalEngine, tokens: list[int]) -> tuple[int, Saved]:
    """How many tokens a session had to compute, its last logits, and its cache's content: all rows of whole windows
    and the ring.
    """
    with engine.session() as session:
        computed = session.sync(tokens)
        lease = session._timeline.lease
        assert lease is not None
        parts = {}
        for group in engine._core.groups:
            state = engine._core.state[group.name]
            if group.kind == "ring":
                parts[group.name] = state[:, lease.slot].clone()
            else:
                rows = state[:, lease.pages[: pages_for(len(tokens))]].flatten(1, 2)
                parts[group.name] = rows[:, : len(tokens) // group.tokens_per_row].clone()
        return computed, (session.logits, parts)


def assert_same(a: Saved, b: Saved) -> None:
    assert torch.equal(a[0], b[0])
    for name, part in a[1].items():
        assert torch.equal(part, b[1][name]), name


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: a trained model's logits are tens, those of the tiny ones at most some units."""
    return bool((a - b).abs().max() <= TOLERANCE * max(1.0, b.abs().max().item() / 4))


def answer(engine: LocalEngine, tokens: list[int]) -> tuple[list[int], FinishEvent]:
    engine.submit(GenerationRequest("r", tuple(tokens), GREEDY))
    out: list[int] = []
    while True:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                out.append(event.token_id)
            else:
                return out, event


@pytest.mark.parametrize("length", LENGTHS)
def test_all_warm_paths_are_the_same_bits(model: Path, load: Load, length: int, tmp_path: Path) -> None:
    if length == LENGTHS[0] and model.name.startswith("reader"):
        pytest.skip("the tiny models have shown this length")
    document, store = text(length), tmp_path / "store"
    prompts = [document + text(suffix, 7) for suffix in SUFFIXES]
    uncached = load(model, enable_prefix_caching=False)
    cold = [look(uncached, prompt)[1] for prompt in prompts]
    first = load(model, store)
    look(first, document)
    fresh = [look(first, prompt) for prompt in prompts]  # a suffix each behind the cached document
    assert tuple(computed for computed, _ in fresh) == COMPUTED
    for (_, got), known in zip(fresh, cold, strict=True):
        assert close(got[0], known[0])
    device = [look(first, prompt) for prompt in prompts]  # where each can land is there now: the same work everywhere
    assert [computed for computed, _ in device] == [1] * len(prompts)
    assert first.flush(30)
    first.close()
    restarted = load(model, store)
    # The longest first: one that is looked at leaves its end as a landing point, computed from the one before it, and
    # the next one would land there and not on what was stored.
    for prompt, (_, known) in reversed(list(zip(prompts, device, strict=True))):
        computed, got = look(restarted, prompt)
        assert computed == 1
        assert_same(got, known)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_repetition_is_the_first_reading_but_for_its_last_token(model: Path, load: Load, length: int) -> None:
    """Cold, the last token is computed in one step with those before it; repeated, it is alone. So its numbers may be
    rounded otherwise, within ``TOLERANCE``; everything before it is kept and not computed again.
    """
    skip_reader(model, "reader-v3", "reader-v4")
    engine, prompt = load(model), text(length)
    computed, (logits, parts) = look(engine, prompt)
    assert computed == length
    (again, repeated), (third, repeated_again) = look(engine, prompt), look(engine, prompt)
    assert (again, third) == (1, 1)
    assert_same(repeated_again, repeated)
    assert close(repeated[0], logits) and repeated[0].argmax() == logits.argmax()
    for group in engine._core.groups:
        part, other = parts[group.name], repeated[1][group.name]
        torch.testing.assert_close(other, part, atol=TOLERANCE, rtol=TOLERANCE, msg=group.name)
        if group.kind == "rows":
            kept = (length - 1) // group.tokens_per_row
            assert kept and torch.equal(other[:, :kept], part[:, :kept]), group.name


@pytest.mark.parametrize("length", LENGTHS)
def test_host_disk_and_fork_are_the_same_bits(model: Path, load: Load, length: int, tmp_path: Path) -> None:
    """A pool that holds one document: a second one pushes the first down, and it comes back, alone and under a token
    more.
    """
    skip_reader(model, "reader-v3", *(["reader-v4"] if length == LENGTHS[0] else []))
    document, other = text(length), text(1000, 2)
    prompts = [document, document + text(1, 7)]
    one = load(model, tmp_path / "one")
    for prompt in prompts:
        look(one, prompt)
    device = [look(one, prompt)[1] for prompt in prompts]
    one.close()
    options = {"num_gpu_blocks_override": 4, "max_model_len": 1000, "max_num_seqs": 1}
    host = load(model, None, host_cache_size=2**27, **options)
    for prompt in prompts:
        look(host, prompt)
    disk = load(model, tmp_path / "one", **options)
    for prompt, known in zip(prompts, device, strict=True):
        for engine in (host, disk):
            look(engine, other)
            assert engine._cache.match(prompt).cached_tokens == 0
            computed, got = look(engine, prompt)
            assert computed == 1
            assert_same(got, known)
    assert host._tiers.host.used_bytes
    host.close()
    disk.close()
    forked = load(model, tmp_path / "one")
    with forked.session() as parent:
        parent.sync(document)
        with parent.fork() as child:
            assert torch.equal(child.logits, device[0][0])
            assert child.step(GREEDY) == parent.step(GREEDY)
            assert torch.equal(child.logits, parent.logits)
    forked.close()


def test_requests_say_the_same_cold_and_from_every_tier(model: Path, load: Load, tmp_path: Path) -> None:
    skip_reader(model, "reader-v3")
    prompt = text(700) + text(40, 7)
    cold, _ = answer(load(model), prompt)
    first = load(model, tmp_path / "store")
    answer(first, text(700))
    device, end = answer(first, prompt)
    assert device == cold and end.reuse is not None and end.reuse.device_tokens >= 256
    first.close()
    second = load(model, tmp_path / "store")
    disk, end = answer(second, prompt)
    assert disk == cold and end.reuse is not None and end.reuse.disk_tokens == end.cached_tokens >= 512
    assert sum(end.times.parts().values()) == pytest.approx(end.times.first_token - end.times.arrived)
    second.close()


KILLED = """
import os, signal, sys
from longread.engine.load import load_engine
from longread.spec.config import EngineOptions
options = EngineOptions(model=sys.argv[1], dtype="float32", num_gpu_blocks_override=16, max_model_len=1024,
                        max_num_seqs=4, max_num_batched_tokens=256, store=sys.argv[2])
engine = load_engine(options)
with engine.session() as session:
    session.sync(eval(sys.argv[3]))
    engine.flush(30)
    session.sync(eval(sys.argv[3]) + eval(sys.argv[4]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_store_serves_the_same_bits(load: Load, tmp_path: Path) -> None:
    """With every kind of state that there is: rows, windows, both compressions and the indexer's."""
    model, document = tmp_path / "model", text(700)
    write_fixture(model, "v4-pro")
    one = load(model)
    look(one, document)
    _, device = look(one, document)
    arguments = [str(model), str(tmp_path / "store"), repr(document), repr(text(200, 3))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    two = load(model, tmp_path / "store")
    computed, got = look(two, document)
    assert computed == 1
    assert close(got[0], device[0])  # another number of threads may round differently
    assert_same(look(two, document)[1], got)
    two.close()


def test_an_exported_document_is_the_same_bits_on_another_store(model: Path, load: Load, tmp_path: Path) -> None:
    """Asked a question: an exported file has the document's end to land on, not the points inside it."""
    skip_reader(model, "reader-v3", "reader-v4")
    document, question = text(700), text(40, 7)
    one = load(model, tmp_path / "one")
    look(one, document)
    assert one.flush(30) and one.store is not None
    entered = DiskShelf(one.store).add("text", name="a", tokens=document, pinned=False)
    one.store.export(entered.id, tmp_path / "file")
    computed, device = look(one, document + question)
    assert computed == len(question)
    one.close()
    two = load(model, tmp_path / "two")
    assert two.store is not None
    two.store.import_(tmp_path / "file")
    computed, got = look(two, document + question)
    assert computed == len(question)
    assert_same(got, device)
    two.close()


def test_another_model_dtype_or_weights_never_hit(load: Load, tmp_path: Path) -> None:
    document, store = text(700), tmp_path / "store"
    write_fixture(tmp_path / "a", "v4-flash")
    write_fixture(tmp_path / "weights", "v4-flash", seed=1)
    write_fixture(tmp_path / "rope", "v4-flash", rope_theta=20000)
    first = load(tmp_path / "a", store)
    look(first, document)
    first.close()
    for name in ("weights", "rope"):
        other = load(tmp_path / name, store)
        _, end = answer(other, document)
        assert end.cached_tokens == 0 and end.reuse is not None
        assert end.reuse.reason == "other model or format" and end.reuse.note
        other.close()
    options = EngineOptions(str(tmp_path / "a"), dtype="bfloat16", num_gpu_blocks_override=16, max_num_seqs=4)
    half = load_engine(dataclasses.replace(options, max_model_len=1024, store=str(store)))
    _, end = answer(half, document)
    assert end.cached_tokens == 0 and end.reuse is not None and end.reuse.reason == "other model or format"
    half.close()


def test_a_folder_that_is_no_store_is_told_and_service_goes_on(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_fixture(tmp_path / "a", "v3")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    engine = load(tmp_path / "a", tmp_path / "store")
    assert engine.store is None and "without the store" in caplog.text
    assert len(answer(engine, text(300))[0]) == 8
    engine.close()
