"""The workload ``documents``: long documents with questions, each document fresh or asked about again.

Knows which document is asked what and when; the documents themselves are made elsewhere.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

from longread.measure.reading import DOMAINS as READ_DOMAINS
from longread.measure.workloads.ask import Ask, Message, Workload
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.lengths import ranged
from longread.measure.workloads.options import (
    LANGUAGE,
    MAX_TOKENS,
    RANGE_RATIO,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    choice,
    isl,
    number,
    osl,
    prompts,
    several,
    whole,
)
from longread.measure.workloads.questions import Asked
from longread.measure.workloads.sequence import Asks, Kept, workload
from longread.measure.workloads.texts import ALL_KINDS, DOMAINS, Asking, Text, compose
from longread.spec.errors import ConfigError

MIN_TOKENS = 256
INSTRUCTIONS: Final = {
    "en": "Answer from the document only, and briefly: the value with its unit, the name, or yes or no. "
    "If the document does not give it, answer: Not in the document.",
    "zh": "只根据文件简短回答：带单位的数值、名称，或者是、否。如果文件中没有，请回答：文件中没有。",
}
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(16),
    isl("8192", MIN_TOKENS),
    osl("128"),
    RANGE_RATIO,
    LANGUAGE,
    Option("domains", several(*DOMAINS), "report,manual,codebase,contract,statute", f"in turn: {', '.join(DOMAINS)}"),
    Option("kinds", several(*ALL_KINDS), None, f"kinds of questions (default: all): {', '.join(ALL_KINDS)}"),
    Option("questions", whole(1, 256), 1, "asked about each document: the first one cold, the others warm"),
    Option("prefix_share", number(0, 1, below=True), None, "instead of questions: share of asks about a read document"),
    Option("order", choice("grouped", "mixed"), "grouped", "grouped: document by document; mixed: drawn"),
    Option(
        "audience",
        choice("general", "reader"),
        "general",
        "reader: as the bundled readers were taught, without an instruction, their domains only",
    ),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Which question of which document the n-th ask is."""

    document: int
    question: int


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    given = checked(given)
    library = Library(given, count)
    places = plan(given["num_prompts"], _documents(given), given["order"], Random(given["seed"]))
    return workload("documents", given, Asks(len(places), lambda index: library.ask(places[index])), count)


def checked(given: Settings) -> Settings:
    """Raises ConfigError where options contradict each other."""
    if given["prefix_share"] is not None and given["questions"] != 1:
        raise ConfigError("questions and prefix_share both say how often a document is asked about; give one of them")
    if given["audience"] == "reader":
        wrong = [domain for domain in given["domains"] if domain not in READ_DOMAINS]
        if wrong:
            raise ConfigError(
                f"domains={','.join(given['domains'])}: the bundled readers were not taught {wrong[0]}; with "
                f"audience=reader take some of {','.join(READ_DOMAINS)}"
            )
    base = given["isl"]
    return {**given, "isl": ranged("isl", base, given["range_ratio"], MIN_TOKENS, MAX_TOKENS)}


def _documents(given: Settings) -> int:
    if given["prefix_share"] is not None:
        return max(round(given["num_prompts"] * (1 - given["prefix_share"])), 1)
    return max(-(-given["num_prompts"] // given["questions"]), 1)


def plan(count: int, documents: int, order: str, rng: Random) -> list[Place]:
    """``count`` asks over ``documents`` documents, as evenly as they go. Mixed: in drawn order, each document's
    questions in theirs.
    """
    owners = [index * documents // count for index in range(count)]
    if order == "mixed":
        rng.shuffle(owners)
    asked = [0] * documents
    names: dict[int, int] = {}  # documents are numbered in the order in which they are first asked about
    places = []
    for owner in owners:
        number = names.setdefault(owner, len(names))
        places.append(Place(number, asked[owner]))
        asked[owner] += 1
    return places


@dataclass(frozen=True, slots=True)
class _Opened:
    text: Text
    asked: list[Asked]


class Library:
    """The documents of a workload by number, those used last kept. ``name`` begins the keys of asks, ``kind`` is what
    they are counted as, ``salt`` tells the documents of one seed's workloads apart.
    """

    def __init__(self, given: Settings, count: Counter, *, name: str = "doc", kind: str = "document", salt: int = 0):
        self._given, self._counter, self._name, self._kind, self._salt = given, count, name, kind, salt
        self._most = -(-given["num_prompts"] // _documents(given))
        self._opened: Kept[_Opened] = Kept(self._open, lambda opened: len(opened.text.text))

    def ask(self, place: Place) -> Ask:
        opened = self._opened.take(place.document)
        text, asked = opened.text, opened.asked
        question = asked[place.question % len(asked)]
        instruction = self._instruction(text.language)
        messages: list[Message] = [{"role": "system", "content": instruction}] if instruction else []
        messages.append({"role": "user", "content": f"{text.text}\n{question.text}"})
        size = text.tokens + self._counter.count(instruction) + self._counter.count("\n" + question.text)
        return Ask(
            key=f"{self._name}-{place.document}/q-{place.question}",
            messages=tuple(messages),
            prompt=None,
            max_tokens=self._given["osl"].draw(self._rng(place.document, 3 + place.question), place.question),
            kind=self._kind if place.question == 0 else f"{self._kind}-again",
            isl=size if self._counter.exact else None,
            expected=question.expected,
        )

    def _instruction(self, language: str) -> str:
        return INSTRUCTIONS[language] if self._given["audience"] == "general" else ""

    def _rng(self, document: int, use: int) -> Random:
        return Random(self._seed(document, use))

    def _seed(self, document: int, use: int) -> int:
        return (((self._given["seed"] << 8) + self._salt << 40) + document << 16) + use

    def _open(self, document: int) -> _Opened:
        given = self._given
        languages = ("en", "zh") if given["language"] == "mixed" else (given["language"],)
        domains = given["domains"]
        language = languages[document % len(languages)]
        domain = domains[document // len(languages) % len(domains)]
        tokens = given["isl"].draw(self._rng(document, 1), document)
        tokens -= self._counter.count(self._instruction(language))
        asking = Asking(self._most, self._seed(document, 2), given["kinds"])
        text = compose(domain, language, self._seed(document, 0), tokens, self._counter, asking)
        asked = text.questions(asking)
        if not asked:
            raise ConfigError(f"isl={tokens:,}: too short for a {domain} that can be asked about; take more tokens")
        return _Opened(text, asked)
