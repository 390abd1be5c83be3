"""Structured output through llguidance over the fixture tokenizer, on its own and inside a running engine."""

import json
import re
import threading
import time
from importlib import resources
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from longread.engine import grammar as grammar_room
from longread.engine.engine import LocalEngine
from longread.engine.grammar import COMPILED_KEPT, MAX_CHOICES, MAX_NESTING, GrammarCompiler
from longread.engine.load import load_engine
from longread.spec.config import EngineOptions
from longread.spec.engine import FinishEvent, GenerationRequest, GrammarSpec, SamplingParams, TokenEvent
from longread.spec.errors import InvalidRequestError
from longread.weights.fixture import write_fixture

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "model"
    write_fixture(path, "v2-lite")
    return path


@pytest.fixture(scope="module")
def text_of(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture
def engine(checkpoint: Path) -> LocalEngine:
    return load_engine(EngineOptions(str(checkpoint), max_model_len=1024, num_gpu_blocks_override=8, max_num_seqs=4))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    with resources.as_file(resources.files("longread.weights") / "fixture_tokenizer.json") as path:
        return GrammarCompiler(path, 1536, 1)


def run(engine: LocalEngine, *requests: GenerationRequest) -> tuple[dict[str, list[int]], dict[str, FinishEvent]]:
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    ends: dict[str, FinishEvent] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token_id)
            else:
                ends[event.request_id] = event
    return tokens, ends


def ask(name: str, grammar: GrammarSpec, **sampling: object) -> GenerationRequest:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 300} | sampling
    return GenerationRequest(name, (5, 6, 7), SamplingParams(grammar=grammar, **params))


def test_every_kind_gives_what_it_promises(engine: LocalEngine, text_of: Tokenizer) -> None:
    requests = [
        ask("schema", GrammarSpec("json_schema", PERSON), seed=1),
        ask("regex", GrammarSpec("regex", r"[ab]{3,8}-\d{2}")),
        ask("choice", GrammarSpec("choice", '["yes", "no, \\"not\\" so", "vielleicht"]'), ignore_eos=True),
        ask("greedy", GrammarSpec("choice", '["first", "second"]'), temperature=0.0, min_tokens=200),
        GenerationRequest("free", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)),
    ]
    tokens, ends = run(engine, *requests)
    said = {name: text_of.decode(ids) for name, ids in tokens.items()}
    assert {name: end.reason for name, end in ends.items()} == {
        "schema": "stop",
        "regex": "stop",
        "choice": "stop",
        "greedy": "stop",
        "free": "length",
    }
    person = json.loads(said["schema"])
    assert set(person) == {"name", "age"}
    assert re.fullmatch(r"[ab]{3,8}-\d{2}", said["regex"])
    assert said["choice"] in ("yes", 'no, "not" so', "vielleicht")
    assert said["greedy"] in ("first", "second")
    assert ends["choice"].stop_token == engine.info.eos_id


def test_json_object_is_valid_as_far_as_it_goes(engine: LocalEngine, text_of: Tokenizer) -> None:
    tokens, _ = run(engine, ask("r", GrammarSpec("json_object"), max_tokens=40))
    assert text_of.decode(tokens["r"]).lstrip().startswith("{")


def test_the_grammar_starts_behind_the_marker(engine: LocalEngine, text_of: Tokenizer) -> None:
    marker = text_of.token_to_id("</think>")
    assert marker is not None
    request = ask("r", GrammarSpec("choice", '["yes"]'), grammar_after=marker, logit_bias=((marker, 4.0),))
    tokens, ends = run(engine, request)
    at = tokens["r"].index(marker)
    assert text_of.decode(tokens["r"][at + 1 :]) == "yes"
    assert ends["r"].reason == "stop"


def test_preemption_keeps_the_place(engine: LocalEngine, text_of: Tokenizer) -> None:
    request = ask("r", GrammarSpec("json_schema", PERSON), seed=8)
    alone, _ = run(engine, request)
    engine.submit(request)
    said: list[int] = []
    while engine.has_work():
        said += [e.token_id for e in engine.step() if isinstance(e, TokenEvent)]
        if len(said) in (3, 9):
            engine._core.scheduler.preempt_latest()
    assert said == alone["r"]
    json.loads(text_of.decode(said))


def test_a_session_follows_a_grammar(engine: LocalEngine, text_of: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, grammar=GrammarSpec("choice", '["abcd efgh"]'))
    with engine.session() as session:
        session.sync([5, 6, 7])
        tokens = []
        while (token := session.step(params)) != engine.info.eos_id:
            tokens.append(token)
    assert text_of.decode(tokens) == "abcd efgh"


DEEP = '{"type":"object","properties":{"a":' * (MAX_NESTING // 2 + 1) + "true" + "}}" * (MAX_NESTING // 2 + 1)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"type": ', "not JSON"),
        ("json_schema", "[1]", "must be an object"),
        ("json_schema", '{"$ref": "#/nowhere"}', "cannot be used"),
        ("json_schema", DEEP, f"limit is {MAX_NESTING}"),
        ("json_schema", "[" * 100_000, f"limit is {MAX_NESTING}"),
        ("json_schema", '{"description": "' + "x" * 300_000 + '"}', "limit is 262144"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("regex", "", "empty"),
        ("regex", "a\ud800", "not valid Unicode"),
        ("json_schema", '{"const": "\ud800"}', "not valid Unicode"),
        ("choice", '["\udfff"]', "not valid Unicode"),
        ("choice", "[]", "non-empty"),
        ("choice", '["a", 1]', "strings"),
        ("choice", '[""]', "strings"),
        ("choice", json.dumps(["a"] * (MAX_CHOICES + 1)), f"limit is {MAX_CHOICES}"),
        ("choice", "yes", "not JSON"),
        ("regex", r"[^\s\S]", "no text can match it"),
        ("json_schema", '{"$ref": "#"}', "refers to itself without end"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: str, value: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as refused:
        compiler.start(GrammarSpec(kind, value), None)  # type: ignore[arg-type]
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(.*a.{200}|b.*c){50}"),
        ("regex", "(x+x+)+y"),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(9000)]})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "object"}})),
        ("json_schema", json.dumps({"type": "string", "minLength": 10**7})),
        ("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 500}}})),
        ("choice", json.dumps(["a" * i for i in range(1, 700)])),
    ],
)
def test_hostile_grammars_are_bounded(compiler: GrammarCompiler, kind: str, value: str) -> None:
    started = time.process_time()
    try:
        state = compiler.start(GrammarSpec(kind, value), None)  # type: ignore[arg-type]
    except InvalidRequestError:
        pass
    else:
        for _ in range(3):
            allowed = state.allowed(1536)
            if state.error or not allowed.any() or allowed.argmax() == 1:
                break
            state.consume(int(allowed.argmax()))
    assert time.process_time() - started < 30, "bounded, however slow the machine is"


def test_compiled_once_and_from_many_threads(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("json_schema", PERSON)
    states = []
    threads = [threading.Thread(target=lambda: states.append(compiler.start(spec, None))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 8
    before = [s.allowed(1536).tolist() for s in states]
    states[0].consume(before[0].index(True))
    assert states[1].allowed(1536).tolist() == before[1], "states are independent"
    assert len(compiler._compiled) <= COMPILED_KEPT


def test_kept_grammars_are_bounded_by_their_text(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_room, "COMPILED_CHARACTERS", 250)
    small, *large = [GrammarSpec("regex", "a"), *(GrammarSpec("regex", letter * 100) for letter in "bcd")]
    for spec in (small, *large):
        compiler.prepare(spec)
    assert list(compiler._compiled) == large[1:], "the least recently used go until the rest fits"
    compiler.prepare(small)
    assert list(compiler._compiled) == [*large[1:], small]


def test_a_compiled_grammar_is_renewed_and_the_oldest_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_room, "USES_KEPT", 3)
    monkeypatch.setattr(grammar_room, "USES_LIMIT", 6)
    monkeypatch.setattr(grammar_room, "COMPILED_KEPT", 2)
    compiler._compiled.clear()
    spec = GrammarSpec("regex", "renewed")

    def uses(count: int) -> object:
        for _ in range(count):
            compiler.start(spec, None)
        return compiler._compiled[spec]

    first = uses(3)
    assert uses(1) is first, "starting renews nothing that can still be used"
    compiler.prepare(spec)
    second = compiler._compiled[spec]
    assert second is not first
    assert uses(6) is second
    assert uses(1) is not second, "but what is worn out"
    compiler.start(GrammarSpec("regex", "n0"), None)
    compiler.prepare(spec)
    compiler.start(GrammarSpec("regex", "n1"), None)
    assert set(compiler._compiled) == {spec, GrammarSpec("regex", "n1")}, "the least recently used is forgotten"


def test_choices_of_a_validated_request_compile_nothing_on_the_engine_s_thread(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = engine._core.grammars
    assert grammars is not None
    compiled: list[str] = []
    original = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *a: compiled.append(a[1]) or original(*a))
    spec = GrammarSpec("choice", '["yes", "no"]')
    for round_ in range(4):
        engine.validate(ask("check", spec))
        before = len(compiled)
        for choice in range(100):
            engine.submit(ask(f"{round_}.{choice}", spec))
        assert len(compiled) == before
    assert len(compiled) == 2, "renewed where it was validated, for its age"
    for _ in range(1000):
        engine.validate(ask("check", spec))
    assert len(compiled) == 2, "validating is no use"


def test_a_grammar_that_breaks_fails_its_request_only(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from longread.engine.grammar import GrammarState

    broken = GrammarSpec("regex", "broken[a-z]*")
    monkeypatch.setattr(
        GrammarState, "error", property(lambda self: "too complex" if self._matcher is victim else None)
    )
    victim = None
    engine.submit(ask("bad", broken))
    victim = engine._requests["bad"].sampling.grammar._matcher
    _, ends = run(engine, ask("good", GrammarSpec("choice", '["yes"]')))
    assert ends["bad"].reason == "failed"
    assert "too complex" in (ends["bad"].error or "")
    assert ends["good"].reason == "stop"
