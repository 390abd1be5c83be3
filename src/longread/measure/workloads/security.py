"""The workload ``security``: code to audit and logs to triage, with planted findings whose answers are known.

Knows where findings are put and what is asked about them; a document has some of them only, so a question may be about
one that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from longread.measure.workloads import codebase, findings
from longread.measure.workloads.ask import Ask, Expected, Workload
from longread.measure.workloads.chat import language_of
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
    isl,
    osl,
    prompts,
    several,
    whole,
)
from longread.measure.workloads.sequence import Asks, Kept, workload
from longread.measure.workloads.texts import ABSENT, GENRES, fill, pad, padding_of

MIN_TOKENS = 2048  # findings and decoys take about half of it
TASKS: Final = ("audit", "triage")
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(16),
    isl("16384", MIN_TOKENS),
    osl("256"),
    RANGE_RATIO,
    LANGUAGE,
    Option("tasks", several(*TASKS), "audit,triage", "audit: code with weak functions; triage: logs with incidents"),
    Option("questions", whole(1, 5), 1, "asked about each document: the first one cold, the others warm"),
)
INSTRUCTIONS: Final = {
    "en": "You review code and logs for security. Answer from the material only, and briefly: the name or the address "
    "that is asked for. If there is no such finding, answer: Not in the document.",
    "zh": "你负责代码和日志的安全审查。只根据材料简短回答所问的名称或地址。如果没有这样的发现，请回答：文件中没有。",
}
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Case:
    """A document and its questions. ``size``: its tokens."""

    text: str
    size: int
    language: str
    asked: tuple[tuple[str, Expected], ...]


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    prompt = ranged("isl", given["isl"], given["range_ratio"], MIN_TOKENS, MAX_TOKENS)
    every = given["questions"]
    kept = Kept(lambda number: _case(given, number, prompt.draw(_rng(given, number, 0), number), count), _characters)

    def make(index: int) -> Ask:
        number, turn = divmod(index, every)
        case = kept.take(number)
        question, expected = case.asked[turn]
        instruction = INSTRUCTIONS[case.language]
        size = case.size + count.count(instruction) + count.count("\n" + question)
        return Ask(
            key=f"case-{number}/q-{turn}",
            messages=(
                {"role": "system", "content": instruction},
                {"role": "user", "content": f"{case.text}\n{question}"},
            ),
            prompt=None,
            max_tokens=given["osl"].draw(_rng(given, index, 1), index),
            kind="security" if turn == 0 else "security-again",
            isl=size if count.exact else None,
            expected=expected,
        )

    return workload("security", given, Asks(given["num_prompts"], make), count)


def _rng(given: Settings, number: int, use: int) -> Random:
    return Random((((given["seed"] << 8) + 8 + use) << 40) + number)


def _characters(case: Case) -> int:
    return len(case.text)


def _case(given: Settings, number: int, tokens: int, count: Counter) -> Case:
    rng = _rng(given, number, 2)
    language, task = language_of(given["language"], number), given["tasks"][number % len(given["tasks"])]
    tokens -= count.count(INSTRUCTIONS[language])
    if task == "audit":
        return _audit(language, tokens, given["questions"], rng, count)
    return _triage(language, tokens, given["questions"], rng, count)


def _expected(answer: str | None, language: str) -> Expected:
    if answer is None:
        return Expected("absent", ABSENT[language][0], ABSENT[language][1:])
    return Expected("contains", answer, critical=(answer,))


def _audit(language: str, tokens: int, questions: int, rng: Random, count: Counter) -> Case:
    """About half of the weaknesses are in the code, each in one function; all of them have a safe twin there."""
    weak = list(findings.WEAKNESSES)
    rng.shuffle(weak)
    asked = weak[:questions]
    there = [each for each in weak if rng.randrange(100) < 60]
    names = list(dict.fromkeys(_name(rng) for _ in range(64)))[: len(there) + len(weak)]
    nouns = [rng.choice(codebase.NOUNS) for _ in names]
    planted = findings.functions(there, names[: len(there)], True, nouns[: len(there)])
    planted += findings.functions(weak, names[len(there) :], False, nouns[len(there) :])
    rng.shuffle(planted)
    answers = dict(zip((each.name for each in there), names, strict=False))
    pairs = tuple((each.asked[language], _expected(answers.get(each.name), language)) for each in asked)
    genre = GENRES["codebase", language]
    taken = sum(count.count("".join(lines)) for lines in planted) + count.count("\n" + pairs[0][0])
    said, used = fill(codebase.stream(genre, rng.randrange(1 << 48)), tokens - taken, count)
    padding = list(pad(*padding_of(genre, said), tokens - taken - used, count))
    places = [index for index, line in enumerate(said) if line.text.startswith("def ")] or [len(said)]
    before: dict[int, list[str]] = {}
    for lines in planted:
        before.setdefault(rng.choice(places), []).extend(lines)
    parts = [text for index, line in enumerate(said) for text in (*before.get(index, ()), line.text)]
    parts += before.get(len(said), [])
    size = taken - count.count("\n" + pairs[0][0]) + used + sum(map(count.count, padding))
    return Case("".join([*parts, *padding]), size, language, pairs)


def _name(rng: Random) -> str:
    """Of words that the code base's own functions do not begin with, so that no name is taken."""
    verb = rng.choice(("handle", "serve", "answer", "process"))
    return f"{verb}_{rng.choice(codebase.ADJECTIVES)}_{rng.choice(codebase.NOUNS)}_{rng.choice(codebase.PARTS)}"


def _triage(language: str, tokens: int, questions: int, rng: Random, count: Counter) -> Case:
    """About half of the incidents are in the log, and a decoy of each."""
    names = list(findings.INCIDENTS)
    rng.shuffle(names)
    users = list(findings.USERS)
    rng.shuffle(users)
    address = list(range(1, 255))
    rng.shuffle(address)
    events: list[list[str]] = []
    answers: dict[str, str] = {}
    for place, name in enumerate(names):
        if rng.randrange(100) < 60:
            lines, answers[name] = findings.incident(name, f"203.0.113.{address[place]}", users[place], rng)
            events.append(lines)
        events.append(findings.decoy(name, f"192.0.2.{address[place]}", users[-1 - place], rng))
    pairs = tuple(
        (findings.INCIDENTS[name][language], _expected(answers.get(name), language)) for name in names[:questions]
    )
    room = tokens - count.count("\n" + pairs[0][0])
    lines, size = _log(events, room, rng, count)
    return Case("".join(lines), size, language, pairs)


def _log(events: Sequence[Sequence[str]], room: int, rng: Random, count: Counter) -> tuple[list[str], int]:
    """Daily lines with the events among them, spread a little; lines get their times last, all of one width."""
    used = sum(count.count(_timed(line, 0, 1)) for lines in events for line in lines)
    daily: list[str] = []
    while True:
        chunk = [findings.daily(rng) for _ in range(64)]
        size = count.count("".join([_timed(line, index, 64) for index, line in enumerate(chunk)]))
        if used + size > room:
            break
        daily += chunk
        used += size
    for line in chunk:
        size = count.count(_timed(line, 0, 1))
        if used + size <= room:
            daily.append(line)
            used += size
    slots: list[list[str]] = [[line] for line in daily]
    for lines in events:
        start = rng.randrange(len(slots))
        for offset, line in enumerate(lines):
            slots[min(start + offset // 2, len(slots) - 1)].append(line)
    flat = [line for slot in slots for line in slot]
    whole_log = [_timed(line, index, len(flat)) for index, line in enumerate(flat)]
    padding = list(pad([], ["mark\n", "mark: log continues\n"], room - used, count))
    return [*whole_log, *padding], count.count("".join(whole_log)) + sum(map(count.count, padding))


def _timed(line: str, index: int, of: int) -> str:
    second = index * _SECONDS_A_DAY // of
    return f"2025-03-07T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z {line}\n"
