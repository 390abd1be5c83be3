"""The workload ``agent``: sessions over a code base whose prefix grows turn by turn, with tools, calls and results.

Knows the shape of a session in OpenAI's format; files are the code base's. Turns are written beforehand, so prompts do
not depend on answers and two servers are asked the same; with ``answers`` the server's own answers go in, and results
come as user turns then, since a model may have called nothing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from longread.measure.workloads import codebase
from longread.measure.workloads.ask import Ask, Expected, Message, Workload
from longread.measure.workloads.chat import language_of
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.lengths import Lengths
from longread.measure.workloads.options import (
    LANGUAGE,
    MAX_TOKENS,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    number,
    osl,
    tokens,
    whole,
    yes,
)
from longread.measure.workloads.questions import Book, questions
from longread.measure.workloads.sequence import Asks, Kept, workload
from longread.measure.workloads.stream import Said
from longread.measure.workloads.texts import ABSENT, GENRES, compose
from longread.spec.errors import ConfigError

MAX_TURNS = 512
ASKED: Final = ("single", "role", "rule", "where")
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    Option("sessions", whole(1, 100_000), 8, "how many sessions"),
    Option("turns", whole(1, MAX_TURNS), 6, "requests of each session"),
    Option("turn_tokens", tokens(64, MAX_TOKENS), "1024", "tokens of a tool result at least: whole files are read"),
    Option("system_tokens", whole(0, MAX_TOKENS), 2048, "tokens of the system prompt, the same for all sessions"),
    Option("calls", whole(1, 32), 2, "tool calls between a question and its answer"),
    Option("think_seconds", number(0, 3600), 0.0, "pause after an answer, as a tool or a person takes"),
    osl("256"),
    LANGUAGE,
    Option("answers", yes, False, "put the server's own answers into the session, instead of written ones"),
)
_WORDS: Final = {
    "en": {
        "system": "You work on a code base through tools. Read what you need, then answer briefly: the value, the "
        "name, the path, or yes or no.\nHandbook of the plant that the code runs:\n",
        "thought": "I will read the files that this may concern.",
        "further": "That is not enough yet; I will read on.",
        "result": "Result of read_files({p}):\n{t}",
        "more": "The files say more. Read on if you need to; else answer: {q}",
    },
    "zh": {
        "system": "你通过工具处理一个代码库。先读取所需文件，再简短回答：数值、名称、路径，或者是、否。\n"
        "代码所运行的工厂手册：\n",
        "thought": "我先读取可能相关的文件。",
        "further": "信息还不够，我继续读取。",
        "result": "read_files({p}) 的结果：\n{t}",
        "more": "如有需要请继续读取，否则请回答：{q}",
    },
}
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": properties, "required": sorted(properties)},
        },
    }
    for name, about, properties in (
        (
            "read_files",
            "Return the text of files of the repository, one after the other.",
            {"paths": {"type": "array", "items": {"type": "string"}, "description": "paths from the root"}},
        ),
        (
            "search",
            "Return the lines of the repository that match a regular expression, with path and line number.",
            {"pattern": {"type": "string"}, "under": {"type": "string", "description": "a folder"}},
        ),
        (
            "run_tests",
            "Run the tests of a package and return what failed.",
            {"package": {"type": "string"}, "verbose": {"type": "boolean"}},
        ),
    )
]


@dataclass(slots=True)
class _Session:
    """``ends``: how many of ``messages`` the n-th ask has; ``sizes``: their tokens; ``expected``: of its answer."""

    messages: list[Message]
    ends: list[int]
    sizes: list[int]
    expected: list[Expected | None]

    @property
    def characters(self) -> int:
        return sum(len(str(message.get("content") or "")) for message in self.messages)


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    sessions, turns, longest = given["sessions"], given["turns"], given["turn_tokens"].high
    if given["system_tokens"] and given["system_tokens"] < 256:
        raise ConfigError(f"system_tokens={given['system_tokens']}; it must be 0 or at least 256")
    most = given["system_tokens"] + turns * longest
    if most > MAX_TOKENS:
        raise ConfigError(
            f"{turns} turns of up to {longest:,} tokens behind {given['system_tokens']:,} are {most:,}; at most "
            f"{MAX_TOKENS:,}: take fewer turns or smaller turn_tokens"
        )
    systems = Kept(lambda language: _system(given, language, count), len)
    kept = Kept(
        lambda number: _write(given, number, systems.take(language_of(given["language"], number)), count),
        lambda session: session.characters,
    )

    def make(index: int) -> Ask:
        turn, number = divmod(index, sessions)  # turn by turn: also without sessions each prefix has come before
        session = kept.take(number)
        return Ask(
            key=f"session-{number}/turn-{turn}",
            messages=tuple(session.messages[: session.ends[turn]]),
            prompt=None,
            max_tokens=given["osl"].draw(Random((((given["seed"] << 8) + 6) << 40) + index), index),
            session=f"session-{number}",
            think_seconds=given["think_seconds"] if turn else 0.0,
            kind="agent",
            isl=session.sizes[turn] if count.exact and not given["answers"] else None,
            expected=session.expected[turn],
            extra={} if given["answers"] else {"tools": TOOLS},
            answers=given["answers"],
        )

    return workload("agent", given, Asks(sessions * turns, make), count)


def _system(given: Settings, language: str, count: Counter) -> str:
    text = _WORDS[language]["system"]
    if not given["system_tokens"]:
        return text.partition("\n")[0]
    seed = (((given["seed"] << 8) + 7) << 40) + (language == "zh")
    return text + compose("manual", language, seed, given["system_tokens"] - count.count(text), count).text


def _write(given: Settings, number: int, system: str, count: Counter) -> _Session:
    """One session to its last turn. Each question is about the files that the last call before its answer read."""
    language = language_of(given["language"], number)
    rng = Random((((given["seed"] << 8) + 5) << 40) + number)
    files = _files(codebase.stream(GENRES["codebase", language], rng.randrange(1 << 48)))
    words, own = _WORDS[language], given["answers"]
    session = _Session([{"role": "system", "content": system}], [], [], [])
    size, told = count.count(system), 0
    step, question, parts = 0, None, list[list[Said]]()
    for turn in range(given["turns"]):
        if step == 0:
            parts = [_packed(files, given["turn_tokens"], rng, turn + at, count) for at in range(given["calls"])]
            book = Book(GENRES["codebase", language], parts[-1], ABSENT[language])
            question = questions(book, 1, rng.randrange(1 << 32), ASKED)[0]
            session.messages.append({"role": "user", "content": question.text})
        size += sum(_size(message, count) for message in session.messages[max(told, 1) :])
        told = len(session.messages)
        session.ends.append(told)
        session.sizes.append(size)
        assert question is not None  # asked at step 0
        answered = step == given["calls"]
        session.expected.append(question.expected if answered else None)
        if answered:
            session.messages.append({"role": "assistant", "content": None if own else question.expected.text})
        else:
            thought = words["further" if step else "thought"]
            session.messages += _call(words, thought, parts[step], f"call_{number}_{turn}", question.text, own)
        step = 0 if answered else step + 1
    return session


def _call(
    words: dict[str, str], thought: str, part: Sequence[Said], name: str, question: str, own: bool
) -> list[Message]:
    """The assistant's call and what the tool returned."""
    paths = [line.text.split()[2] for line in part if line.text.startswith("# ==== ")]
    text = "".join([line.text for line in part])
    arguments = json.dumps({"paths": paths})
    if own:
        result = words["result"].format(p=arguments, t=text) + words["more"].format(q=question)
        return [{"role": "assistant", "content": None}, {"role": "user", "content": result}]
    call = {"id": name, "type": "function", "function": {"name": "read_files", "arguments": arguments}}
    return [
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": text},
    ]


def _size(message: Message, count: Counter) -> int:
    """Tokens of what a message says, without the template's markup."""
    calls = message.get("tool_calls") or ()
    texts = [message.get("content") or "", *(call["function"]["arguments"] for call in calls)]
    return sum(count.count(text) for text in texts if text)


def _files(said: Iterator[Said]) -> Iterator[list[Said]]:
    """The stream's whole files."""
    file: list[Said] = []
    next(said)  # the repository's title
    for line in said:
        if line.text.startswith("# ==== ") and file:
            yield file
            file = []
        file.append(line)


def _packed(files: Iterator[list[Said]], wanted: Lengths, rng: Random, turn: int, count: Counter) -> list[Said]:
    """Whole files of at least so many tokens together."""
    left, part = wanted.draw(rng, turn), list[Said]()
    while left > 0:
        file = next(files)
        part += file
        left -= count.count("".join([line.text for line in file]))
    return part
