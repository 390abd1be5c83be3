"""``python -m training.ask PATH --lengths 1024,16384 --output results.json``: an exported checkpoint, really asked.

Single questions through the project's own engine on this machine, greedy, with the chat encoding that the server would
take. The document is read once; its questions follow from the prefix cache, eight at a time. Counts the same cells as
``training.evaluate`` and measures the cold time to the first token and decoding. Knows no twins.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer as RawTokenizer

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.measure.reading import Question, ask
from longread.measure.result import this_machine
from longread.spec.config import EngineOptions
from longread.spec.config_json import read_config, spec_from_config
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.model import ModelSpec
from longread.wire.encoding import ChatEncoding, encoding_for
from longread.wire.encoding.conversation import Conversation, Turn
from longread.wire.encoding.pieces import END_THINK, THINK
from longread.wire.tokenizer import Tokenizer
from training.cells import Asked, Cell, document_figures, summary, tables, write_result
from training.exam import Paper, papers

MAX_TOKENS = 160  # the longest thought with its answer takes less
DECODE_TOKENS = 128
ROOM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Reader:
    """A loaded checkpoint with its tokenizer and chat encoding."""

    engine: LocalEngine
    tokenizer: Tokenizer
    encoding: ChatEncoding

    @classmethod
    def open(cls, path: Path, longest: int, batch: int) -> "Reader":
        """Load a checkpoint for prompts of up to ``longest`` tokens, in float32 as the server does on a CPU."""
        spec: ModelSpec = spec_from_config(read_config(path), label=path.resolve().name)
        tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
        choice = encoding_for("auto", spec.family, spec.label, path.resolve().name, has_think=tokenizer.has(THINK))
        room = longest + ROOM_TOKENS
        engine = load_engine(EngineOptions(model=str(path), dtype="float32", max_model_len=room, max_num_seqs=batch))
        return cls(engine, tokenizer, choice.encoding)

    def prompt(self, text: str, thinking: bool) -> tuple[int, ...]:
        """Ids of one user turn."""
        effort = self.encoding.abilities.default_effort if thinking else None
        conversation = Conversation((Turn("user", (text,)),), thinking=thinking, effort=effort)
        return tuple(self.tokenizer.encode_prompt(self.encoding.render(conversation).pieces))

    def answers(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list["Answer"]:
        """Generate for all prompts; the engine batches as many as it may."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, FinishEvent] = {}
        for number, prompt in enumerate(prompts):
            tokens[str(number)] = []
            self.engine.submit(GenerationRequest(str(number), prompt, sampling))
        while len(ends) < len(prompts):
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    tokens[event.request_id].append(event.token_id)
                elif isinstance(event, FinishEvent):
                    if event.reason == "failed":
                        raise RuntimeError(f"a request failed: {event.error}")
                    ends[event.request_id] = event
        return [Answer(self.said(tokens[key]), ends[key]) for key in tokens]

    def said(self, ids: Sequence[int]) -> str:
        """The answer's text: what follows the thought, where there is one."""
        return self.tokenizer.decode(ids).rpartition(END_THINK)[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """One output and how it ended."""

    text: str
    end: FinishEvent

    def right(self, question: Question) -> bool:
        """Whether it is exactly the expected answer, ended by the model itself."""
        return self.end.reason == "stop" and self.text == question.answer


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def prefix_of(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all prompts begin with: the document."""
    first, last = min(prompts), max(prompts)  # in lexical order all others share what these two do
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def examine(reader: Reader, paper: Paper, thinking: bool) -> tuple[list[tuple[Asked, bool]], float, list[str]]:
    """Ask a paper's questions: outcomes, seconds to read the document (0 where it was cached), and the wrong ones."""
    head = paper.document.text + "\n"
    prompts = [reader.prompt(head + ask(question), thinking) for question in paper.questions]
    (read,) = reader.answers([prefix_of(prompts)], SamplingParams(temperature=0.0, max_tokens=1))
    times = read.end.times
    cold = times.first_token - times.arrived if not read.end.cached_tokens else 0.0
    given = reader.answers(prompts, GREEDY)
    outcomes, wrong = [], []
    for question, answer in zip(paper.questions, given, strict=True):
        right = answer.right(question)
        outcomes.append((paper.asked(question, thinking), right))
        if not right:
            wrong.append(f"{question.kind}: {question.text!r} expected {question.answer!r}, got {answer.text[:120]!r}")
    return outcomes, cold, wrong


def decode_rate(reader: Reader, prompt: tuple[int, ...], batch: int) -> float:
    """Tokens per second of ``batch`` requests together, counted from the first token to the end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS, ignore_eos=True)
    ends = [answer.end for answer in reader.answers([prompt] * batch, sampling)]
    started = max(end.times.first_token for end in ends)
    return batch * (DECODE_TOKENS - 1) / (max(end.times.finished for end in ends) - started)


def run(reader: Reader, tokenizer: RawTokenizer, settings: argparse.Namespace) -> dict[str, object]:
    """The whole examination; prints a line a document."""
    answers: list[tuple[Asked, bool]] = []
    documents: list[tuple[int, int, int]] = []
    speeds: list[Cell] = []
    for length in settings.lengths:
        cold: list[float] = []
        rates: list[float] = []
        for number, paper in enumerate(_papers(tokenizer, length, settings)):
            documents.append((length, paper.tokens, paper.document.facts))
            started = time.perf_counter()
            for thinking in settings.modes:
                outcomes, seconds, wrong = examine(reader, paper, thinking)
                answers += outcomes
                cold += [seconds] if seconds else []
                right = sum(ok for _, ok in outcomes)
                mode = "thinking" if thinking else "direct"
                spent = time.perf_counter() - started
                print(
                    f"{length:>6} document {number + 1}, {mode}: {right} of {len(outcomes)}, {spent:.1f} s", flush=True
                )
                for line in wrong[: settings.show_wrong]:
                    print(f"       wrong, {line}", flush=True)
            if number == 0:
                prompt = reader.prompt(paper.document.text + "\n" + ask(paper.questions[0]), False)
                rates = [decode_rate(reader, prompt, 1)]
        where: Cell = {"length": length, "ttft_cold_seconds": round(median(cold), 3) if cold else None}
        speeds.append(where | {"decode_tokens_per_second": round(rates[0], 1) if rates else None})
        print(summary([pair for pair in answers if pair[0].length == length]), speeds[-1], flush=True)
    return {"tables": tables(answers), "documents": document_figures(documents), "speed": speeds}


def _papers(tokenizer: RawTokenizer, length: int, settings: argparse.Namespace) -> Iterator[Paper]:
    """Each question is asked alone, so the document may fill the length but for one turn."""
    each = min(settings.each, settings.questions)
    documents = -(-settings.questions // each)
    return papers(tokenizer, length, documents, each, settings.seed0, turns=1)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = _parser().parse_args(arguments)
    settings.modes = {"off": (False,), "on": (True,), "both": (False, True)}[settings.thinking]
    reader = Reader.open(settings.checkpoint, max(settings.lengths), settings.batch)
    tokenizer = RawTokenizer.from_file(str(settings.checkpoint / "tokenizer.json"))
    result: dict[str, object] = {
        "model": settings.checkpoint.name,
        "method": "greedy decoding, longread engine, float32",
        "turns": 1,
        "selection": None,
        "quantised": True,
        "device": this_machine(("torch", "longread")).cpu,
        "seed0": settings.seed0,
    }
    write_result(settings.output, result | run(reader, tokenizer, settings))
    print(f"written to {settings.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.ask", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(1024, 4096, 8192))
    parser.add_argument("--questions", type=int, default=200, help="questions a length")
    parser.add_argument("--each", type=int, default=32, help="questions a document")
    parser.add_argument("--batch", type=int, default=8, help="questions worked on at once")
    parser.add_argument("--thinking", choices=("off", "on", "both"), default="off")
    parser.add_argument("--seed0", type=int, default=0, help="another examination")
    parser.add_argument("--show-wrong", type=int, default=2, help="wrong answers printed a document")
    parser.add_argument("--output", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
