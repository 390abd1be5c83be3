"""Sessions: the same core as requests; fork, save, load, and room made by preempting requests."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_model import MLA_GROUPS, RING_GROUPS, VOCAB, ToyModel, toy_engine

from longread.spec.engine import GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import (
    ContextLengthError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    SessionFileError,
)
from longread.weights.safetensors import Shard, write_shard

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
HOT = SamplingParams(
    temperature=3.0, seed=4, max_tokens=30, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3
)
both = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "ring"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + seed * 17 + i) % (VOCAB - 2) + 2 for i in range(length)]


@both
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_a_session_and_a_request_say_the_same(groups: tuple, sampling: SamplingParams) -> None:
    engine, text = toy_engine(groups), prompt(700)
    engine.submit(GenerationRequest("r", tuple(text), sampling))
    said: list[int] = []
    while engine.has_work():
        said += [e.token_id for e in engine.step() if isinstance(e, TokenEvent)]
    with toy_engine(groups, max_num_batched_tokens=33).session() as session:
        assert session.sync(text) == 700
        assert [session.step(sampling) for _ in range(30)] == said
        assert session.tokens == (*text, *said)


@both
def test_sync_keeps_extends_and_rewinds(groups: tuple) -> None:
    engine = toy_engine(groups)
    text, model = prompt(600), engine._core.runner._model
    with engine.session() as session:
        session.sync(text[:300])
        assert session.sync(text[:300]) == 0
        assert session.sync(text) == 300
        logits = session.logits
        session.step(GREEDY)
        before = model.tokens_run
        assert session.sync(text) < 600, "the cache knows a part"
        assert model.tokens_run > before
        assert torch.equal(session.logits, logits)
        session.sync([*text[:100], 5, 6])
        with toy_engine(groups).session() as fresh:
            fresh.sync([*text[:100], 5, 6])
            assert torch.equal(fresh.logits, session.logits)
    engine._core.cache.check()


@both
def test_forks_go_their_own_way(groups: tuple) -> None:
    engine = toy_engine(groups)
    session = engine.session()
    session.sync(prompt(300))
    fork = session.fork()
    left = [session.step(GREEDY) for _ in range(5)]
    assert torch.equal(fork.logits, fork.fork().logits)
    fork.sync([*prompt(300), 9])
    right = [fork.step(GREEDY) for _ in range(5)]
    for tokens, first in ((left, []), (right, [9])):
        with toy_engine(groups).session() as fresh:
            fresh.sync(prompt(300) + first)
            assert [fresh.step(GREEDY) for _ in range(5)] == tokens
    session.close()
    fork.close()
    engine._core.cache.check()


@both
@pytest.mark.parametrize(("prompt_length", "said_before"), [(600, 1), (600, 7), (3, 5), (250, 10), (256, 0)])
def test_a_saved_generation_goes_on_as_if_uninterrupted(
    groups: tuple, tmp_path: Path, prompt_length: int, said_before: int
) -> None:
    file = tmp_path / "s.session"
    with toy_engine(groups).session() as session:
        session.sync(prompt(prompt_length))
        for _ in range(said_before):
            session.step(HOT)
        session.save(file)
        logits, tokens = session.logits, session.tokens
        said = [session.step(HOT) for _ in range(12)]
    other = toy_engine(groups, num_pages=6)
    with other.session(file) as loaded:
        assert loaded.tokens == tokens
        assert torch.equal(loaded.logits, logits)
        assert loaded._core.runner._model.tokens_run == 0
        assert [loaded.step(HOT) for _ in range(12)] == said
    other._core.cache.check()
    other.submit(GenerationRequest("r", (*tokens, 7), GREEDY))
    while other.has_work():
        for event in other.step():
            last = event
    assert last.cached_tokens >= len(tokens) // 256 * 256, "what was loaded serves prompts, too"


def forge(path: Path, original: Path, change: Callable[[dict, dict], object]) -> None:
    """A session file with a right digest whose header or entries (``change``) are wrong."""
    shard = Shard(original)
    parts = {name: shard.tensor(entry).clone() for name, entry in shard.tensors.items()}
    about = json.loads(bytes(parts.pop("session").tolist()))
    change(about, parts)
    digest = hashlib.blake2b(digest_size=16)
    for tensor in parts.values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    text = json.dumps(about | {"digest": digest.hexdigest()}).encode()
    parts = {"session": torch.frombuffer(bytearray(text), dtype=torch.int8)} | parts
    entries = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in parts.items()]
    write_shard(path, entries, iter(parts.values()))


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("format 1", lambda about, parts: about.update(format=1)),
        ("prompt_length is None", lambda about, parts: about.pop("prompt_length")),
        ("prompt_length is 0", lambda about, parts: about.update(prompt_length=0)),
        ("prompt_length is 301", lambda about, parts: about.update(prompt_length=301)),
        ("tokens is missing", lambda about, parts: parts.pop("tokens")),
        ("tokens is missing or not", lambda about, parts: parts.update(tokens=parts["tokens"].float())),
        (r"logits is missing or not torch.float32 \[97\]", lambda about, parts: parts.update(logits=torch.zeros(3))),
        ("rows.latent", lambda about, parts: parts.pop("rows.latent")),
        ("unknown entries", lambda about, parts: parts.update(more=torch.zeros(1))),
    ],
)
def test_a_file_whose_digest_is_right_is_still_not_trusted(tmp_path: Path, says: str, change: Callable) -> None:
    engine = toy_engine()
    with engine.session() as session:
        session.sync(prompt(300))
        session.save(tmp_path / "s")
    forge(tmp_path / "same", tmp_path / "s", lambda about, parts: None)
    engine.session(tmp_path / "same").close()
    forge(tmp_path / "forged", tmp_path / "s", change)
    with pytest.raises(SessionFileError, match=says):
        engine.session(tmp_path / "forged")


def test_a_session_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with toy_engine().session() as session:
        session.sync(prompt(3))
        for place in (tmp_path / "none" / "s", tmp_path / "file" / "s", tmp_path):
            with pytest.raises(SessionFileError, match="cannot be saved"):
                session.save(place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_of_another_identity_names_both(tmp_path: Path) -> None:
    with toy_engine().session() as session:
        session.sync(prompt(10))
        session.save(tmp_path / "s")
    other = toy_engine(root=b"other")
    with other.session() as session:
        session.sync(prompt(4))
        with pytest.raises(SessionFileError, match=f"{b'toy'.hex()}.*{b'other'.hex()}"):
            session.load(tmp_path / "s")
        assert session.tokens == tuple(prompt(4)), "a file that cannot be used changes nothing"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    engine = toy_engine()
    with engine.session() as session:
        session.sync(prompt(300))
        session.save(tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    damaged = {
        "empty": b"",
        "truncated": whole[:-1],
        "half": whole[: len(whole) // 2],
        "longer": whole + b"\0",
        "flipped": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
        "other": b"not a session at all, but long enough to have a header",
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SessionFileError, match=name):
            engine.session(tmp_path / name)
    with pytest.raises(SessionFileError, match="missing"):
        engine.session(tmp_path / "missing")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["s", *damaged])
    engine._core.cache.check()
    assert engine.stats().pages_held == 0


def test_limits() -> None:
    engine = toy_engine(max_model_len=20)
    with engine.session() as session:
        for call in (lambda: session.logits, session.step, lambda: session.save(Path("x"))):
            with pytest.raises(InvalidRequestError, match="no tokens yet"):
                call()
        with pytest.raises(InvalidRequestError, match="empty"):
            session.sync([])
        with pytest.raises(InvalidRequestError, match=str(VOCAB)):
            session.sync([VOCAB])
        with pytest.raises(ContextLengthError, match="20"):
            session.sync(prompt(21))
        session.sync(prompt(20))
        with pytest.raises(ContextLengthError, match="21 in all"):
            session.step(GREEDY)
        with pytest.raises(InvalidRequestError, match="top_p"):
            session.step(SamplingParams(top_p=0.0))


def test_requests_make_room_for_sessions_and_go_on_afterwards() -> None:
    engine = toy_engine(num_pages=4, max_num_seqs=2)
    engine.submit(GenerationRequest("r", tuple(prompt(500)), GREEDY))
    said: list[int] = []
    for _ in range(8):
        said += [e.token_id for e in engine.step() if isinstance(e, TokenEvent)]
    with engine.session() as session:
        session.sync(prompt(700, seed=1))  # three of four pages
        engine._core.cache.check()
        assert engine.stats().num_preemptions == 1
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                said.append(event.token_id)
            else:
                assert event.reason == "length"
    with toy_engine().session() as fresh:
        fresh.sync(prompt(500))
        assert [fresh.step(GREEDY) for _ in range(30)] == said


def test_sessions_that_fill_the_engine() -> None:
    engine = toy_engine(num_pages=2, max_num_seqs=2)
    first, second = engine.session(), engine.session()
    first.sync(prompt(300))
    with pytest.raises(OverloadedError, match="close one"):
        second.sync(prompt(300, seed=1))
    assert second.tokens == ()
    engine.submit(GenerationRequest("r", tuple(prompt(5)), GREEDY))
    (event,) = engine.step()
    assert event.reason == "failed"
    assert "sessions" in event.error
    first.close()
    second.sync(prompt(300, seed=1))
    second.close()
    engine._core.cache.check()


def test_a_session_without_a_page_for_the_next_token_stays_as_it_is() -> None:
    engine = toy_engine(num_pages=2, max_num_seqs=2)
    first, second = engine.session(), engine.session()
    first.sync(prompt(256))
    second.sync(prompt(200, seed=1))
    logits = first.logits
    with pytest.raises(OverloadedError):
        first.step(GREEDY)
    with pytest.raises(OverloadedError):
        first.sync(prompt(300))
    assert first.tokens == tuple(prompt(256))
    assert torch.equal(first.logits, logits)
    second.close()
    with toy_engine().session() as fresh:
        fresh.sync(prompt(256))
        assert first.step(GREEDY) == fresh.step(GREEDY)
    first.close()
    engine._core.cache.check()


def test_a_failing_model_empties_the_session_only() -> None:
    engine = toy_engine(model=ToyModel(RING_GROUPS, fail_on=96))
    session = engine.session()
    session.sync(prompt(300)[:200])
    with pytest.raises(EngineFailedError, match="told to fail"):
        session.sync([*prompt(300)[:200], 96])
    assert session.tokens == ()
    session.sync([5, 6])
    session.close()
    engine._core.cache.check()
