"""The workloads ``chat`` and ``shared-prefix``: short turns of varied lengths, alone or behind a long system prompt.

Knows which text is asked what; texts come from the genres, so the answers are known.
"""

from random import Random
from typing import Final

from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.documents import INSTRUCTIONS
from longread.measure.workloads.lengths import Lengths, ranged
from longread.measure.workloads.options import (
    LANGUAGE,
    MAX_TOKENS,
    RANGE_RATIO,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    isl,
    osl,
    prompts,
    several,
    tokens,
    whole,
)
from longread.measure.workloads.sequence import Asks, Kept, workload
from longread.measure.workloads.texts import OWN_DOMAINS, Asking, Text, compose

CHAT_MIN, CHAT_MAX = 192, 32_768
TRIES = 8  # a very short passage may state nothing: another one is taken
PREFIX_MIN = 256
QUESTION_KINDS: Final = ("single", "role", "rule", "where", "last", "absent")
_DOMAINS = Option("domains", several(*OWN_DOMAINS), "report,manual,formulary,codebase", "what is talked about, in turn")

CHAT_OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(100),
    isl("lognormal:320:0.7", CHAT_MIN, CHAT_MAX),
    osl("lognormal:160:0.8"),
    RANGE_RATIO,
    LANGUAGE,
    _DOMAINS,
)
SHARED_OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(100),
    Option("prefix_len", tokens(PREFIX_MIN, MAX_TOKENS), "4096", "tokens of the system prompt"),
    Option("prefixes", whole(1, 1024), 1, "how many different system prompts, asked in turn"),
    osl("64"),
    LANGUAGE,
    _DOMAINS,
)


def build_chat(given: Settings) -> Workload:
    """Each ask: an instruction, a passage and a question about it, all in a few hundred tokens."""
    count = counter(given["tokenizer"])
    prompt = ranged("isl", given["isl"], given["range_ratio"], CHAT_MIN, CHAT_MAX)
    make = Turns(given, count, prompt, given["osl"], "chat", 1)
    return workload("chat", given, Asks(given["num_prompts"], make.ask), count)


class Turns:
    """Short asks by number. ``kind``: what they are counted as, and the beginning of their keys; ``salt`` tells the
    texts of one seed's workloads apart.
    """

    def __init__(self, given: Settings, count: Counter, prompt: Lengths, answer: Lengths, kind: str, salt: int):
        self._given, self._counter, self._prompt, self._answer = given, count, prompt, answer
        self._kind, self._salt = kind, salt

    def ask(self, index: int) -> Ask:
        given, count = self._given, self._counter
        rng = Random((((given["seed"] << 8) + self._salt) << 40) + index)
        language = language_of(given["language"], index)
        instruction = INSTRUCTIONS[language]
        wanted = self._prompt.draw(rng, index)
        most = self._answer.draw(rng, index)
        domain = given["domains"][index % len(given["domains"])]
        head = count.count(instruction)
        for _ in range(TRIES):
            asking = Asking(1, rng.randrange(1 << 32), QUESTION_KINDS)
            text = compose(domain, language, rng.randrange(1 << 48), wanted - head, count, asking)
            question = text.questions(asking)
            if question:
                break
        tail = f"\n{question[0].text}" if question else ""
        return Ask(
            key=f"{self._kind}-{index}",
            messages=(
                {"role": "system", "content": instruction},
                {"role": "user", "content": f"{text.text}{tail}"},
            ),
            prompt=None,
            max_tokens=most,
            kind=self._kind,
            isl=head + text.tokens + count.count(tail) if count.exact else None,
            expected=question[0].expected if question else None,
        )


def build_shared(given: Settings) -> Workload:
    """Each ask: one of a few long system prompts, and a short question about it."""
    count = counter(given["tokenizer"])
    prefixes, seed = given["prefixes"], given["seed"]
    most = -(-given["num_prompts"] // prefixes)

    def open_(number: int) -> Text:
        rng = Random((((seed << 8) + 2) << 40) + number)
        wanted = given["prefix_len"].draw(rng, number)
        language = language_of(given["language"], number)
        domain = given["domains"][number % len(given["domains"])]
        head = count.count(INSTRUCTIONS[language] + "\n")
        return compose(domain, language, rng.randrange(1 << 48), wanted - head, count)

    kept: Kept[Text] = Kept(open_, lambda text: len(text.text))
    asked = Kept(lambda number: kept.take(number).questions(Asking(most, seed, QUESTION_KINDS)), len, 1 << 20)

    def make(index: int) -> Ask:
        number, turn = index % prefixes, index // prefixes
        text, questions = kept.take(number), asked.take(number)
        system = f"{INSTRUCTIONS[text.language]}\n{text.text}"
        question = questions[turn % len(questions)]
        size = count.count(INSTRUCTIONS[text.language] + "\n") + text.tokens + count.count(question.text)
        return Ask(
            key=f"prefix-{number}/q-{turn}",
            messages=({"role": "system", "content": system}, {"role": "user", "content": question.text}),
            prompt=None,
            max_tokens=given["osl"].draw(Random((((seed << 8) + 3) << 40) + index), index),
            kind="shared-prefix",
            isl=size if count.exact else None,
            expected=question.expected,
        )

    return workload("shared-prefix", given, Asks(given["num_prompts"], make), count)


def language_of(language: str, turn: int) -> str:
    return ("en", "zh")[turn % 2] if language == "mixed" else language
