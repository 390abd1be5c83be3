"""The workload ``custom``: the user's own prompts, from JSON lines, ShareGPT's JSON, or texts and a file of questions.

Knows files and their faults; each fault is named with its line. Everything is checked before the first ask.

JSON lines have ``prompt`` (text or token ids) or ``messages``, and may have ``max_tokens`` (or ``output_tokens``, as
vLLM's custom dataset), ``expected`` (a text, or an object like :class:`Expected`), ``at`` (seconds), ``session``,
``think_seconds``, ``key``, ``kind``, ``extra`` (further body fields) and ``answers`` (true: an assistant turn of null
is filled with the session's own answer). It is what ``longread bench workload --output`` writes.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final, get_args

from longread.measure.workloads.ask import Ask, Expected, ExpectedKind, Workload
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.options import (
    MAX_OUTPUT,
    MAX_PROMPTS,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    anything,
    choice,
    osl,
    whole,
)
from longread.measure.workloads.sequence import Asks, workload
from longread.spec.errors import ConfigError

MAX_BYTES = 1 << 30
MAX_LINE = 1 << 26  # characters: some sixteen million tokens
MAX_ID = (1 << 31) - 1
FIELDS: Final = (
    *("prompt", "messages", "max_tokens", "output_tokens", "expected", "at", "session", "think_seconds", "key"),
    *("kind", "extra", "isl", "answers"),
)
OWN_BODY: Final = ("messages", "prompt", "model", "stream", "max_tokens", "max_completion_tokens")
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    Option("path", anything, None, "file: JSON lines, ShareGPT JSON, or a text beside questions"),
    Option("questions", anything, None, "file with a question a line, asked about the text; QUESTION<TAB>ANSWER"),
    Option("format", choice("auto", "jsonl", "sharegpt", "text"), "auto", "of the file; auto: by its name and content"),
    Option("num_prompts", whole(1, MAX_PROMPTS), None, "take the first so many (default: all)"),
    osl("128"),
)


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    if not isinstance(given["path"], str | Path) or not str(given["path"]):
        raise ConfigError("workload custom reads a file: give path=FILE")
    path = Path(given["path"])
    data = _read(path)
    form = given["format"] if given["format"] != "auto" else _format(path, data)
    if (form == "text") != (given["questions"] is not None):
        raise ConfigError(
            f"{path}: a text needs questions=FILE to be asked" if form == "text" else "questions= is for a text file"
        )
    if form == "text":
        asks = _text(path, data, Path(str(given["questions"])), given)
    else:
        asks = _sharegpt(path, data, given) if form == "sharegpt" else _jsonl(path, data, given)
    if given["num_prompts"] is not None:
        asks = asks[: given["num_prompts"]]
    digest = hashlib.sha256(data.encode(errors="surrogatepass")).hexdigest()
    name = {**given, "path": path.name, "questions": Path(str(given["questions"])).name if form == "text" else None}
    measured = Asks(len(asks), lambda index: _sized(asks[index], count))
    return workload("custom", name, measured, count, format=form, file_sha256=digest)


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes; at most {MAX_BYTES:,}: split it")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,}); convert it with iconv") from None


def _format(path: Path, data: str) -> str:
    if path.suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    start = data.lstrip()[:1]
    if path.suffix == ".json":
        return "sharegpt" if start == "[" else "jsonl"
    return "jsonl" if start == "{" else "text"


def _sized(ask: Ask, count: Counter) -> Ask:
    """With its prompt's tokens, where a tokenizer was given."""
    if not count.exact or ask.isl is not None:
        return ask
    texts = [ask.prompt] if isinstance(ask.prompt, str) else []
    for message in ask.messages or ():
        content = message.get("content")
        texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    size = len(ask.prompt) if isinstance(ask.prompt, tuple) else sum(count.count(text) for text in texts)
    return Ask(**{**{name: getattr(ask, name) for name in Ask.__slots__}, "isl": size})


def _jsonl(path: Path, data: str, given: Settings) -> list[Ask]:
    found: list[Ask] = []
    keys: dict[str, int] = {}
    for number, line in _lines(path, data):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {str(error) or 'nested too deep'}") from None
        try:
            ask = _ask(row, len(found), given)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if ask.key in keys:
            raise ConfigError(f"{where}: the key {ask.key!r:.80} was given in line {keys[ask.key]} already")
        keys[ask.key] = number
        found.append(ask)
    if not found:
        raise ConfigError(f"{path}: no prompt in it")
    return found


def _lines(path: Path, data: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(data.split("\n"), 1):
        if len(line) > MAX_LINE:
            raise ConfigError(f"{path}, line {number}: {len(line):,} characters; at most {MAX_LINE:,}")
        if line.strip():
            if number > MAX_PROMPTS:
                raise ConfigError(f"{path}: more than {MAX_PROMPTS:,} prompts; split it")
            yield number, line


def _ask(row: object, index: int, given: Settings) -> Ask:
    """Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, not {_told(row)}")
    unknown = [name for name in row if name not in FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r:.60} (known: {', '.join(FIELDS)}); body fields go into extra")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("needs prompt or messages, and not both")
    if "max_tokens" in row and "output_tokens" in row:
        raise ValueError("max_tokens and output_tokens say the same; give one")
    most = row.get("max_tokens", row.get("output_tokens"))
    if most is not None and (type(most) is not int or not 1 <= most <= MAX_OUTPUT):
        raise ValueError(f"max_tokens must be a whole number from 1 to {MAX_OUTPUT:,}, not {_told(most)}")
    isl = row.get("isl")
    if isl is not None and (type(isl) is not int or isl < 1):
        raise ValueError(f"isl must be a whole number from 1, not {_told(isl)}")
    own = row.get("answers", False)
    if not isinstance(own, bool) or (own and ("messages" not in row or _text_of(row, "session") is None)):
        raise ValueError("answers must be true or false, and true needs messages and a session")
    return Ask(
        key=_text_of(row, "key") or f"custom-{index}",
        messages=_messages(row["messages"], own) if "messages" in row else None,
        prompt=_prompt(row["prompt"]) if "prompt" in row else None,
        max_tokens=given["osl"].draw(Random((given["seed"] << 24) + index), index) if most is None else most,
        at=_seconds(row, "at"),
        session=_text_of(row, "session"),
        think_seconds=_seconds(row, "think_seconds") or 0.0,
        kind=_text_of(row, "kind") or "custom",
        isl=isl,
        expected=_expected(row.get("expected")),
        extra=_extra(row.get("extra")),
        answers=own,
    )


def _messages(value: object, own: bool) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of at least one message, not {_told(value)}")
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{place}] must be an object, not {_told(message)}")
        if message.get("role") not in ROLES:
            raise ValueError(f"messages[{place}].role must be one of {', '.join(ROLES)}: {_told(message.get('role'))}")
        content = message.get("content")
        parts = isinstance(content, list) and all(
            isinstance(p, dict) and isinstance(p.get("type"), str) for p in content
        )
        bare = content is None and message["role"] == "assistant" and (own or message.get("tool_calls"))
        if not (isinstance(content, str) or parts or bare):
            raise ValueError(f"messages[{place}].content must be a text or a list of parts, not {_told(content)}")
    return tuple(value)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each <= MAX_ID for each in value):
        return tuple(value)
    raise ValueError(f"prompt must be a text or a list of token ids, not empty: {_told(value)}")


def _expected(value: object) -> Expected | None:
    if value is None:
        return None
    if isinstance(value, str) and value:
        return Expected("contains", value)
    kinds = get_args(ExpectedKind)
    if not isinstance(value, dict) or value.get("kind") not in kinds or not isinstance(value.get("text"), str):
        raise ValueError(f"expected must be a text, or an object with a kind ({', '.join(kinds)}) and a text")
    unknown = [name for name in value if name not in Expected.__slots__]
    lists = [value.get(name, []) for name in ("alternatives", "critical")]
    if unknown or not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists):
        raise ValueError("expected has kind, text, and lists of texts named alternatives and critical, nothing else")
    if value["kind"] == "critical" and not lists[1]:
        raise ValueError("an expected answer of kind critical needs its values in critical")
    return Expected(value["kind"], value["text"], tuple(lists[0]), tuple(lists[1]))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _extra(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"extra must be an object, not {_told(value)}")
    own = [name for name in value if name in OWN_BODY]
    if own:
        raise ValueError(f"extra must not set {own[0]}: that is the client's or a field of the line itself")
    return value


def _text_of(row: Mapping[str, object], name: str) -> str | None:
    value = row.get(name)
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= 200):
        raise ValueError(f"{name} must be a text of 1 to 200 characters, not {_told(value)}")
    return value


def _seconds(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9 or math.isnan(value):
        raise ValueError(f"{name} must be seconds from 0 to 1e9, not {_told(value)}")
    return float(value)


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _sharegpt(path: Path, data: str, given: Settings) -> list[Ask]:
    """The first turn of each conversation and the answer after it as a reference, as other tools replay this file."""
    try:
        rows = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {str(error) or 'nested too deep'}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: ShareGPT's file is a list of conversations, not {_told(rows)}")
    found: list[Ask] = []
    for place, row in enumerate(rows):
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"{path}: conversation {place} has no list 'conversations'")
        said = [(turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None) for turn in turns[:2]]
        if len(said) < 2 or said[0][0] not in ("human", "user") or not all(isinstance(v, str) and v for _, v in said):
            continue  # the known file has conversations that begin with an answer or are empty; every tool drops them
        found.append(
            Ask(
                key=f"sharegpt-{place}",
                messages=({"role": "user", "content": said[0][1]},),
                prompt=None,
                max_tokens=given["osl"].draw(Random((given["seed"] << 24) + place), place),
                kind="custom",
                expected=Expected("reference", str(said[1][1])),
            )
        )
    if not found:
        raise ConfigError(f"{path}: no conversation that begins with a human turn and an answer")
    return found


def _text(path: Path, data: str, questions: Path, given: Settings) -> list[Ask]:
    """Each question after the text; what stands behind a tab is the answer wanted."""
    if not data.strip():
        raise ConfigError(f"{path}: an empty text")
    found: list[Ask] = []
    for number, line in _lines(questions, _read(questions)):
        question, _, answer = line.strip().partition("\t")
        if not question:
            raise ConfigError(f"{questions}, line {number}: an answer without a question before it")
        found.append(
            Ask(
                key=f"custom-{len(found)}",
                messages=({"role": "user", "content": f"{data}\n{question}"},),
                prompt=None,
                max_tokens=given["osl"].draw(Random((given["seed"] << 24) + len(found)), len(found)),
                kind="document",
                expected=Expected("contains", answer.strip()) if answer.strip() else None,
            )
        )
    if not found:
        raise ConfigError(f"{questions}: no question in it")
    return found
