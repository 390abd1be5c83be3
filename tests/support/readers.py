"""The bundled readers for tests: loaded into the real engine, and questions of every kind that training never saw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.ask import prefix_of
from training.exam import FIRST_SEED

from longread.cli.checkpoint import locate
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.measure.reading import KINDS, Document, Question, write
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.model import ModelSpec
from longread.wire.encoding import ChatEncoding, encoding_for
from longread.wire.encoding.conversation import Conversation, Turn
from longread.wire.tokenizer import Tokenizer

MAX_TOKENS = 96  # the longest answer takes less


@dataclass(frozen=True, slots=True)
class Said:
    """One greedy answer: its tokens, its text, and how it ended."""

    ids: tuple[int, ...]
    text: str
    end: FinishEvent


@dataclass(frozen=True, slots=True)
class Reader:
    """A checkpoint in an engine of its own, with the tokenizer and chat encoding that the server would take."""

    spec: ModelSpec
    engine: LocalEngine
    tokenizer: Tokenizer
    encoding: ChatEncoding

    @classmethod
    def open(cls, name: str, folder: Path | None = None, **options: object) -> "Reader":
        """``name``: a bundled model; ``folder``: other weights for it, with a tokenizer; ``options``: the engine's."""
        path = locate(name)
        spec = spec_from_config(read_config(path), label=name)
        tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
        encoding, _ = encoding_for("auto", spec.family, name, name, has_think=True)
        options = {"max_model_len": 2048, "max_num_seqs": 8, "dtype": "float32"} | options
        engine = load_engine(EngineOptions(model=str(folder or path), **options))
        return cls(spec, engine, tokenizer, encoding)

    def prompt(self, *texts: str) -> tuple[int, ...]:
        """Ids of a conversation, thinking off: the user's turn, or user's and assistant's in turn."""
        turns = tuple(Turn("assistant" if i % 2 else "user", (text,)) for i, text in enumerate(texts))
        conversation = Conversation(turns, thinking=False, effort=None)
        return tuple(self.tokenizer.encode_prompt(self.encoding.render(conversation).pieces))

    def answers(self, prompts: Sequence[tuple[int, ...]], max_tokens: int = MAX_TOKENS) -> list[Said]:
        """All prompts submitted at once."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        ids: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        ends: dict[str, FinishEvent] = {}
        for key, prompt in zip(ids, prompts, strict=True):
            self.engine.submit(GenerationRequest(key, prompt, sampling))
        while len(ends) < len(prompts):
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    ids[event.request_id].append(event.token_id)
                elif isinstance(event, FinishEvent):
                    ends[event.request_id] = event
        return [Said(tuple(ids[key]), self.tokenizer.decode(ids[key]), ends[key]) for key in ids]

    def wrong(self, document: Document, questions: Sequence[Question]) -> list[str]:
        """Ask each alone about the document, which is read once; the questions that were not answered exactly."""
        prompts = [self.prompt(f"{document.text}\n{question.text}") for question in questions]
        self.answers([prefix_of(prompts)], max_tokens=1)
        said = self.answers(prompts)
        return [
            f"{question.kind}: {question.text!r} expected {question.answer!r}, said {one.text!r}"
            for question, one in zip(questions, said, strict=True)
            if one.text != question.answer or one.end.reason != "stop"
        ]


def examination(number: int, lines: int, language: str, domain: str) -> Document:
    """A document of an examination's seeds, which training never takes."""
    return write(FIRST_SEED + number, lines, language, domain)


def each_kind(document: Document, count: int, kinds: Sequence[str] = KINDS) -> list[Question]:
    """``count`` questions, the kinds in turn as far as the document has them."""

    def turns() -> Iterator[Question]:
        offered = document.questions(6 * count, kinds=kinds)
        waiting = {kind: [question for question in offered if question.kind == kind] for kind in kinds}
        while any(waiting.values()):
            for questions in waiting.values():
                yield from questions[:1]
                del questions[:1]

    return [question for question, _ in zip(turns(), range(count), strict=False)]
