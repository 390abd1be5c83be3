"""Structured output: compiles a GrammarSpec over the checkpoint's tokenizer and masks what the grammar forbids.

Knows llguidance and one tokenizer.json; must not know requests, sampling or the model. Compiling is safe from any
thread. Hostile grammars are bounded three ways: size and nesting before the library sees them, the library's own fuel
limits while it builds and steps, and one trial mask at compile time, since lexers are built lazily.
"""

import json
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from longread.spec.engine import GrammarSpec
from longread.spec.errors import EngineFailedError, InvalidRequestError
from longread.spec.limits import MAX_GRAMMAR_CHARACTERS

MAX_NESTING = 64
MAX_CHOICES = 4096
COMPILED_KEPT = 32  # grammars kept compiled; a conversation sends the same schema each turn
COMPILED_CHARACTERS = 512 * 1024  # of the kept ones' sources together: compiled, a character takes 25 to 150 bytes
USES_KEPT = 256  # copies share a lexer that grows with use and fails at a limit, so a compiled grammar is renewed ...
USES_LIMIT = 1024  # ... where a request is validated; on the engine's thread only if very many choices came of a few


class GrammarState:
    """One request's place in its grammar. Lives with the request, so preemption does not touch it.

    ``after``: the grammar starts behind the first such token; until then everything is allowed.
    """

    def __init__(self, matcher: LLMatcher, after: int | None, eos_id: int):
        self._matcher = matcher
        self._after = after
        self._eos_id = eos_id

    @property
    def active(self) -> bool:
        """Whether the next token is constrained."""
        return self._after is None

    @property
    def finished(self) -> bool:
        """Whether nothing but the end token may follow."""
        return self.active and bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on (a resource limit); None: it can."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def allowed(self, vocab: int) -> NDArray[np.bool_]:
        """Which of the ``vocab`` ids may come next: bool [vocab]. Only while ``active``; check ``error`` afterwards."""
        if self._matcher.is_stopped():
            only_end = np.zeros(vocab, dtype=np.bool_)
            only_end[self._eos_id] = True
            return only_end
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=vocab, bitorder="little").view(np.bool_)

    def consume(self, token: int) -> None:
        """Follow one output token (not the end token); check ``error`` afterwards."""
        if self.active:
            self._matcher.consume_token(token)
        elif token == self._after:
            self._after = None


class _Compiled:
    """A compiled grammar and how many states were started from it."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.uses = 0


class GrammarCompiler:
    """Compiles and caches grammars over one tokenizer. ``vocab`` is the model's, which may be padded.

    The lock guards the cache only: a grammar that takes a second to compile must not hold up the engine's thread.
    """

    def __init__(self, tokenizer_json: Path, vocab: int, eos_id: int):
        self._path = tokenizer_json
        self._vocab = vocab
        self._eos_id = eos_id
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, _Compiled] = OrderedDict()
        self._limits = LLParserLimits(verbose_errors=False)

    def prepare(self, spec: GrammarSpec) -> None:
        """See that ``start`` will find the grammar compiled; no use of it. Raises as ``start``."""
        self._find(spec, USES_KEPT)

    def start(self, spec: GrammarSpec, after: int | None) -> GrammarState:
        """A fresh state of this grammar; compiles only what ``prepare`` has not.

        Raises InvalidRequestError with the library's reason.
        """
        kept = self._find(spec, USES_LIMIT)
        with self._lock:
            kept.uses += 1
            return GrammarState(kept.matcher.deep_copy(), after, self._eos_id)

    def _find(self, spec: GrammarSpec, uses: int) -> _Compiled:
        """The compiled grammar, if it has been used less than ``uses`` times, else a new one."""
        with self._lock:
            kept = self._compiled.get(spec)
            if kept is not None and kept.uses < uses:
                self._compiled.move_to_end(spec)
                return kept
        return self._keep(spec)

    def _keep(self, spec: GrammarSpec) -> _Compiled:
        """Compile, outside the lock; the least recently used of too many, or of too much text, are forgotten."""
        kept = _Compiled(self._compile(_grammar_text(spec), spec.kind))
        with self._lock:
            self._compiled[spec] = kept
            self._compiled.move_to_end(spec)
            held = sum(len(known.value) for known in self._compiled)
            while len(self._compiled) > COMPILED_KEPT or held > COMPILED_CHARACTERS:
                held -= len(self._compiled.popitem(last=False)[0].value)
        return kept

    def _compile(self, grammar: str, kind: str) -> LLMatcher:
        matcher = LLMatcher(self._open_tokenizer(), grammar, log_level=0, limits=self._limits)
        for _ in range(2):  # what overflows in the first mask shows in the second; copies keep the original unused
            trial = matcher.deep_copy()
            if not trial.is_error():
                trial.compute_bitmask()
            if trial.is_error():
                raise _refuse(f"the {kind} grammar cannot be used: {_reason(trial)}")
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        """About a second for 129K tokens, so only where a grammar is used at all. Raises EngineFailedError."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(str(self._path), n_vocab=self._vocab, eos_token=self._eos_id)
                except ValueError as error:
                    raise EngineFailedError(f"the checkpoint's tokenizer cannot serve grammars: {error}") from error
            return self._tokenizer


def _grammar_text(spec: GrammarSpec) -> str:
    """The library's grammar of a spec, after the checks that do not need the library."""
    try:
        spec.value.encode()
    except UnicodeEncodeError as error:
        raise _refuse(f"the {spec.kind} grammar is not valid Unicode: {error.reason} at {error.start}") from None
    if len(spec.value) > MAX_GRAMMAR_CHARACTERS:
        raise _refuse(
            f"the {spec.kind} grammar has {len(spec.value)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}"
        )
    if spec.kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
    if spec.kind == "regex":
        if not spec.value:
            raise _refuse("the regex is empty")
        return str(LLMatcher.grammar_from_regex(spec.value))
    value = _parse_json(spec)
    if spec.kind == "json_schema":
        if not isinstance(value, dict):
            raise _refuse(f"the JSON schema must be an object, not {type(value).__name__}")
        return str(LLMatcher.grammar_from_json_schema(spec.value))
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise _refuse("choice must be a non-empty list of non-empty strings")
    if len(value) > MAX_CHOICES:
        raise _refuse(f"choice has {len(value)} entries; the limit is {MAX_CHOICES}")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in value)))


def _parse_json(spec: GrammarSpec) -> object:
    depth = _nesting(spec.value)
    if depth > MAX_NESTING:
        raise _refuse(f"the {spec.kind} grammar is nested {depth} deep; the limit is {MAX_NESTING}")
    try:
        return json.loads(spec.value)
    except ValueError as error:
        raise _refuse(f"the {spec.kind} grammar is not JSON: {error}") from error


def _nesting(text: str) -> int:
    """Deepest nesting of brackets outside strings, found without recursion."""
    depth = deepest = 0
    inside = escaped = False
    for character in text:
        if inside:
            inside = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            inside = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _reason(matcher: LLMatcher) -> str:
    """The library's message, without the mark that its parser state was left out, or what an internal name means."""
    reason = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    if reason == "NoExtensionBias":
        return "no text can match it: a part matches nothing, or refers to itself without end"
    return reason


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="response_format", code="invalid_grammar")
