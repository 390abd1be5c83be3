"""The workload ``trace``: a Mooncake trace's arrivals and lengths, equal hash_ids as equal text.

Knows the trace reader and how a block becomes text. The trace holds no text, so a block of 512 tokens becomes 512
drawn ids, or 512 drawn words that are one token each in the usual vocabularies.
"""

from array import array
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final

from longread.measure.arrivals import BLOCK_TOKENS, MAX_ID, read_trace
from longread.measure.reading.grammar import words
from longread.measure.workloads.ask import Ask, Message, Workload
from longread.measure.workloads.counting import counter
from longread.measure.workloads.options import (
    MAX_OUTPUT,
    MAX_PROMPTS,
    MAX_TOKENS,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    anything,
    choice,
    number,
    whole,
    yes,
)
from longread.measure.workloads.random_ids import MAX_VOCABULARY, drawn
from longread.measure.workloads.sequence import Asks, workload
from longread.spec.errors import ConfigError

KEPT_BLOCKS = 4096
WORDS: Final = words("""
    water light house place people hand part life world school state family student group country problem week company
    system program question work government number night point home mother area money story fact month lot right study
    book eye job word business issue side kind head service friend father power hour game line end member law car city
    community name president team minute idea kid body information back parent face others level office door health
    person art war history party result change morning reason research girl guy moment air teacher force education
""")
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    Option("path", anything, None, "the trace: JSON lines with timestamp, input_length, output_length, hash_ids"),
    Option("num_prompts", whole(1, MAX_PROMPTS), None, "take the first so many (default: all)"),
    Option("speedup", number(1e-6, 1e6), 1.0, "2: arrivals in half the time"),
    Option("form", choice("text", "ids", "chat"), "text", "ids: exact lengths, need tokenizer or vocab_size"),
    Option("vocab_size", whole(2, MAX_VOCABULARY), None, "draw ids below it (default: the tokenizer's plain ids)"),
    Option("ignore_eos", yes, True, "ask for exactly the trace's output tokens"),
)


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    if not isinstance(given["path"], str | Path) or not str(given["path"]):
        raise ConfigError("workload trace reads a file: give path=FILE")
    vocabulary = range(given["vocab_size"]) if given["vocab_size"] else count.vocabulary
    if given["form"] == "ids" and vocabulary is None:
        raise ConfigError("form=ids draws token ids: give the server's tokenizer or vocab_size=N, or take form=text")
    path, seed = Path(given["path"]), given["seed"]
    arrivals = read_trace(path, speedup=given["speedup"], limit=given["num_prompts"])
    for place, each in enumerate(arrivals):
        for name, value, most in (("input", each.isl, MAX_TOKENS), ("output", each.osl, MAX_OUTPUT)):
            if value > most:
                raise ConfigError(f"{path}: request {place + 1} has {value:,} {name} tokens; at most {most:,}")

    @lru_cache(KEPT_BLOCKS)
    def ids_of(block: int) -> "array[int]":
        assert vocabulary is not None  # checked before
        return array("I", drawn(Random(seed * (MAX_ID + 1) + block), BLOCK_TOKENS, vocabulary))

    @lru_cache(KEPT_BLOCKS)
    def text_of(block: int) -> tuple[str, ...]:
        rng = Random(seed * (MAX_ID + 1) + block)
        return tuple(f" {rng.choice(WORDS)}" for _ in range(BLOCK_TOKENS))

    def make(index: int) -> Ask:
        each = arrivals[index]
        extra: dict[str, object] = {"ignore_eos": True} if given["ignore_eos"] else {}
        messages: tuple[Message, ...] | None = None
        prompt: str | tuple[int, ...] | None = None
        if given["form"] == "ids":
            prompt = tuple(i for block, size in each.runs() for i in ids_of(block)[:size])
        else:
            text = "".join([word for block, size in each.runs() for word in text_of(block)[:size]])
            messages = ({"role": "user", "content": text},) if given["form"] == "chat" else None
            prompt = None if messages else text
        return Ask(f"trace-{index}", messages, prompt, each.osl, at=each.at, kind=each.kind, isl=each.isl, extra=extra)

    blocks = {block for each in arrivals for block in each.blocks}
    facts = {"seconds": arrivals[-1].at, "input_tokens": sum(each.isl for each in arrivals)}
    told = {**given, "path": path.name}
    more = {"output_tokens": sum(each.osl for each in arrivals), "distinct_blocks": len(blocks)}
    return workload("trace", told, Asks(len(arrivals), make), count, **facts, **more)
