"""NativeV4 on a CPU, by the reference of each kernel, against the CPU's own model: plain weights are the same sums."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from oracle_v4 import Driver, prompt, tiny
from torch import Tensor

from longread.cli.checkpoint import locate
from longread.engine.runner import Model
from longread.kernels.dispatch import force_reference, kernel
from longread.kernels.norm import ref as norm
from longread.kernels.places import Chunk, Rows
from longread.measure.reading import write
from longread.models import native_step
from longread.models.deepseek_v4 import DeepseekV4
from longread.models.inputs import StepInputs
from longread.models.native_step import Save
from longread.models.native_v4 import NativeV4
from longread.spec.batch import Segment
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.errors import UnsupportedModelError
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, CacheKind, state_groups
from longread.weights.fixture import tiny_config
from longread.weights.random import random_native
from longread.weights.reader import Checkpoint
from longread.wire.tokenizer import Tokenizer

LENGTH = 700  # five HCA windows, 175 CSA windows (top-k is 16), three pages
TOLERANCE = 2e-5  # float32, sums in another order


@dataclass
class Case:
    spec: ModelSpec
    plain: DeepseekV4
    native: NativeV4
    ids: list[int]
    logits: Tensor

    def driver(self, model: Model | None = None) -> Driver:
        return Driver(self.spec, model or self.native, shuffle=True)


@pytest.fixture(scope="module", params=["v4-flash", "v4-pro"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, spec, weights = tiny(request.param, sliding_window=128)
    plain = DeepseekV4(spec, weights, torch.float32)
    native = NativeV4(spec, weights.__getitem__, torch.float32, "cpu")
    made = Case(spec, plain, native, prompt(LENGTH, spec.vocab), Tensor())
    made.logits = made.driver(plain).step([(0, made.ids)])[0]
    yield made
    torch.set_num_threads(threads)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [LENGTH, 33, 256])
def test_chunks_of_any_size(case: Case, chunk: int) -> None:
    driver = case.driver()
    parts = [driver.step([(2, case.ids[i : i + chunk])])[0] for i in range(0, LENGTH, chunk)]
    close(torch.cat(parts), case.logits)


@pytest.mark.parametrize("seed", range(2))
def test_random_cuts_beside_other_sequences(case: Case, seed: int) -> None:
    """Decode rows and chunks of sequences on scattered pages, in one step; each sees only itself."""
    rng, driver = random.Random(seed), case.driver()
    offsets, lengths = [0, 0, 0, 0], [LENGTH, 333, 130, 2]
    got: list[list[Tensor]] = [[], [], [], []]
    while any(o < n for o, n in zip(offsets, lengths, strict=True)):
        work = []
        for slot in rng.sample(range(4), 4):
            size = min(lengths[slot] - offsets[slot], rng.choice([0, 1, 1, 2, 5, 31, 64, 127, 129, 200]))
            if size:
                work.append((slot, case.ids[offsets[slot] : offsets[slot] + size]))
                offsets[slot] += size
        if work:
            for (slot, _), part in zip(work, driver.step(work), strict=True):
                got[slot].append(part)
    for slot, n in enumerate(lengths):
        close(torch.cat(got[slot]), case.logits[:n])


def test_batched_decode(case: Case) -> None:
    """Below and beyond top-k, before and after the window is full; across a CSA, an HCA and a page end."""
    driver = case.driver()
    starts = [601, 2, 120, 250]
    driver.step([(slot, case.ids[:n]) for slot, n in enumerate(starts)])
    for i in range(10):
        parts = driver.step([(slot, [case.ids[n + i]]) for slot, n in enumerate(starts)])
        for n, part in zip(starts, parts, strict=True):
            close(part, case.logits[n + i : n + i + 1])


def test_last_logits_are_those_of_all_rows(case: Case) -> None:
    """The last layer's queries and experts of one row alone; rows in any order, and twice; none."""
    driver = case.driver()
    close(driver.step([(0, case.ids[:300])], all_rows=False)[0], case.logits[299:300])
    segment = Segment(1, 0, 40, 0, tuple(range(8, 16)))
    inputs = torch.tensor(case.ids[:40]), torch.arange(40), (segment,)
    rows = torch.tensor([39, 3, 17, 3])
    close(case.native.forward(StepInputs(*inputs, rows), driver.state), case.logits[rows])
    assert case.native.forward(StepInputs(*inputs, rows[:0]), driver.state).shape == (0, case.spec.vocab)


def test_queries_in_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_step, "QUERY_BLOCK", 128)
    driver = case.driver()
    close(torch.cat([driver.step([(0, case.ids[i : i + 350])])[0] for i in range(0, LENGTH, 350)]), case.logits)


def test_padding_changes_nothing(case: Case) -> None:
    """Padded chunks and rows with long tables give the logits, and touch no state but their own."""
    driver, native, pages = case.driver(), case.native, [5, 9, 2]
    before = {name: tensor.clone() for name, tensor in driver.state.items()}
    table = torch.tensor([*pages, 0, 0], dtype=torch.int32)
    for start, length, padded in ((0, 300, 384), (300, 1, 16), (301, 290, 300)):
        positions = torch.full((padded,), -1, dtype=torch.int32)
        positions[:length] = torch.arange(start, start + length)
        meta = torch.tensor([start, length, 3, 0], dtype=torch.int32)
        ids = torch.zeros(padded, dtype=torch.int64)
        ids[:length] = torch.tensor(case.ids[start : start + length])
        logits = native.chunk(ids, Chunk(meta, positions, table, 5 * PAGE_TOKENS), driver.state, last=True)
        assert logits is not None
        close(logits, case.logits[start + length - 1 : start + length])
    for position in range(591, 600):
        positions = torch.tensor([-1, position, -1, -1], dtype=torch.int32)
        where = Rows(positions, torch.tensor([0, 3, 0, 0], dtype=torch.int32), table.expand(4, -1), 5 * PAGE_TOKENS)
        logits = native.rows(torch.tensor([0, case.ids[position], 0, 0]), where, driver.state)
        assert logits.isfinite().all()
        close(logits[1:2], case.logits[position : position + 1])
    for name, tensor in driver.state.items():
        own = pages if name in ("csa", "index", "hca") else [3]
        others = [i for i in range(tensor.shape[1]) if i not in own]
        assert torch.equal(tensor[:, others].nan_to_num(7), before[name][:, others].nan_to_num(7)), name


def test_layers_leave_room_for_other_rows(case: Case) -> None:
    """Between two layers of a chunk another sequence decodes; a chunk without logits leaves the state that one has."""
    driver = case.driver()
    driver.step([(1, case.ids[:70])])
    segment = Segment(0, 0, 333, 0, tuple(range(40, 42)))
    where = native_step.chunk_of(segment, 0, 333, torch.device("cpu"))
    steps = case.native.chunk_layers(torch.tensor(case.ids[:333]), where, driver.state, last=False)
    for i, _ in enumerate(steps):
        close(driver.step([(1, [case.ids[70 + i]])])[0], case.logits[70 + i : 71 + i])
    assert i == case.spec.layers - 2
    table = torch.tensor([[40, 41]], dtype=torch.int32)
    row = Rows(torch.tensor([333], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), table, 512)
    close(case.native.rows(torch.tensor(case.ids[333:334]), row, driver.state), case.logits[333:334])


def test_kept_rings_are_those_of_a_chunk_that_ends_there(case: Case) -> None:
    """Kept on a chunk's way at 256; the chunk is cut at 301."""
    cut, kept = case.driver(), case.driver()
    cut.step([(0, case.ids[:256])])
    pages = tuple(cut.tables[0]) + tuple(cut.free[:2])
    segment = Segment(0, 0, 600, 0, pages, ((256, 1), (301, 2), (256, 3)))
    assert [(p.start, p.stop) for p in native_step.pieces(segment)] == [(0, 301), (301, 600)]
    inputs = StepInputs(torch.tensor(case.ids[:600]), torch.arange(600), (segment,), torch.tensor([599, 280]))
    close(case.native.forward(inputs, kept.state), case.logits[[599, 280]])
    for group in state_groups(case.spec):
        if group.kind == "ring":
            for ring in (1, 3):
                torch.testing.assert_close(kept.state[group.name][:, ring], cut.state[group.name][:, 0])
            assert not torch.equal(kept.state[group.name][:, 2], kept.state[group.name][:, 1])


@pytest.mark.parametrize("start", [0, 1, 100, 128])
def test_rings_kept_inside_a_chunk_are_those_of_cutting_it(case: Case, start: int) -> None:
    """Every group's, near the chunk's start, at page ends and between. Products of another length round otherwise, so
    they are near (kernels' ``keep`` is held to bits elsewhere); what the chunk itself leaves is the same to the bit.
    """
    places = [-(-(start + 128) // 128) * 128, 512, 640]
    begin = [start] * (start > 0)
    end, whole = read(case, [*begin, LENGTH], [])
    _, cut = read(case, [*begin, *places, LENGTH], places)
    logits, kept = read(case, [*begin, LENGTH], [(p, ring, start) for ring, p in enumerate(places, 1)])
    assert torch.equal(logits, end)
    for group in state_groups(case.spec):
        got, alone = kept[group.name], whole[group.name]
        if group.kind == "rows":
            assert torch.equal(got.nan_to_num(7), alone.nan_to_num(7)), group.name
            continue
        assert torch.equal(got[:, [0, 4]], alone[:, [0, 4]]), group.name
        assert not (got[:, 1:4] == UNTOUCHED).any()
        torch.testing.assert_close(got[:, 1:4], cut[group.name][:, 1:4], atol=TOLERANCE, rtol=1e-6)


UNTOUCHED = 7.5


def read(case: Case, stops: list[int], saves: list[int] | list[Save]) -> tuple[Tensor, dict[str, Tensor]]:
    """The prompt in chunks up to each of ``stops``: the last one's logits, and the state. Ring rows 1 and on keep what
    the slot holds at each position of ``saves``, or what the last chunk keeps on its way.
    """
    state, at, logits = Driver(case.spec, case.native, slots=5).state, 0, None
    for group in state_groups(case.spec):
        if group.kind == "ring":
            state[group.name][:, 1:] = UNTOUCHED
    inside = [save for save in saves if isinstance(save, tuple)]
    for stop in stops:
        where = native_step.chunk_of(Segment(0, at, stop - at, 0, (11, 9, 10)), at, stop, torch.device("cpu"))
        own = inside if stop == stops[-1] else []
        logits = case.native.chunk(torch.tensor(case.ids[at:stop]), where, state, last=True, saves=own)
        for ring, position in enumerate(saves, 1):
            if position == stop:
                case.native.keep(0, ring, state)
        at = stop
    assert logits is not None
    return logits, state


@pytest.mark.parametrize("position", [300, 128, 256])
def test_a_ring_that_a_chunk_does_not_have_is_refused(case: Case, position: int) -> None:
    """Off the windows' ends, or with tokens in it from before the chunk: whoever asks has to cut the chunk."""
    where = native_step.chunk_of(Segment(0, 129, 371, 0, (0, 1)), 129, 500, torch.device("cpu"))
    steps = case.native.chunk_layers(torch.tensor(case.ids[:371]), where, {}, False, [(position, 1, 129)])
    with pytest.raises(ValueError, match=f"ring state at {position} cannot be kept inside a chunk from 129"):
        next(steps)


def reader(cache: CacheKind, dtype: torch.dtype, native: bool, ids: list[int]) -> Tensor:
    """Logits of reader-v4 for a prompt in two chunks, and its last 16 tokens one by one."""
    path = locate("reader-v4")
    spec, checkpoint = spec_from_config(read_config(path)), Checkpoint.open(path)
    model: Model = (
        NativeV4(spec, checkpoint.native(spec), dtype, "cpu")
        if native
        else DeepseekV4(spec, checkpoint.load(spec, dtype), dtype)
    )
    driver = Driver(spec, model, pages=8, dtype=dtype, shuffle=True, cache=cache)
    cuts = [0, 333, len(ids) - 16, *range(len(ids) - 15, len(ids) + 1)]
    return torch.cat([driver.step([(0, ids[a:b])])[0] for a, b in pairwise(cuts)])


@pytest.mark.parametrize("cache", ["model", "fp8"])
def test_quantised_reader_is_near_the_dequantised_one(cache: CacheKind) -> None:
    """FP8 weights and activations, FP4 experts, plain or packed cache, on a text of a kind that the reader knows.

    Measured: KL 0.0002 nats (packed 0.0004), 99 % of the best tokens. FP8 activations are good to 6 %, their sums to
    far less; a wrong scale, nibble or row is off by nats.
    """
    ids = text(640)
    expected = reader("model", torch.float32, False, ids).log_softmax(-1)
    got = reader(cache, torch.bfloat16, True, ids).log_softmax(-1)
    assert got.isfinite().all()
    apart = torch.nn.functional.kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    assert apart.mean() < 0.002
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.97
    assert torch.equal(got[-16:].argmax(-1), expected[-16:].argmax(-1))


def text(count: int) -> list[int]:
    tokenizer = Tokenizer.open(locate("reader-v4"), bos_id=0, eos_id=1)
    return list(tokenizer.encode(write(7, 60, "en", "contract").text))[:count]


# Sizes at which no FP8 scale block reaches over a matrix's end.
WHOLE_BLOCKS = {
    "head_dim": 128,
    "moe_intermediate_size": 128,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "sliding_window": 128,
}


@pytest.mark.parametrize("kind", ["v4-flash", "v4-pro"])
def test_random_stored_weights_keep_activations_near_one(kind: str) -> None:
    """Random codes in the stored formats through all layers and a packed cache: finite, and of a usual spread."""
    spec = spec_from_config(tiny_config(kind, quantised=True, **WHOLE_BLOCKS))
    model = NativeV4(spec, random_native(spec, "cpu", seed=1), torch.bfloat16, "cpu")
    assert {layer.experts.kind for layer in model.layers} == {"fp4_words"}
    driver = Driver(spec, model, dtype=torch.bfloat16, shuffle=True, cache="fp8")
    logits = torch.cat([driver.step([(0, part)])[0] for part in (prompt(300, spec.vocab), [5], [6])])
    assert 0.3 < logits.std() < 3


def test_references_can_be_forced() -> None:
    """For every device, also one that an operation has no kernel for."""
    assert kernel(norm.rms_norm, "cpu") is not norm.rms_norm
    force_reference()
    try:
        assert kernel(norm.rms_norm, "cpu") is norm.rms_norm
        assert kernel(norm.rms_norm, "cuda") is norm.rms_norm
    finally:
        force_reference(False)
    assert kernel(norm.rms_norm, "cpu") is not norm.rms_norm


def test_matrices_that_share_a_scale_block_are_refused() -> None:
    spec = spec_from_config(tiny_config("v4-flash", quantised=True, **WHOLE_BLOCKS | {"q_lora_rank": 64}))
    with pytest.raises(UnsupportedModelError, match="wq_a has 64 rows"):
        NativeV4(spec, random_native(spec, "cpu"), torch.bfloat16, "cpu")
