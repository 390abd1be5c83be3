"""The workload ``random``: prompts of random token ids with an optional common prefix, as vLLM's random dataset has
them: nothing that a prefix cache, a tokenizer or a language could shorten.

Knows ids. Ids are drawn evenly from those that are no markup.
"""

from array import array
from random import Random
from typing import Final

from longread.measure.workloads.ask import Ask, Message, Workload
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.lengths import ranged
from longread.measure.workloads.options import (
    MAX_OUTPUT,
    MAX_TOKENS,
    RANGE_RATIO,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    choice,
    isl,
    osl,
    prompts,
    whole,
    yes,
)
from longread.measure.workloads.sequence import Asks, workload
from longread.spec.errors import ConfigError

MAX_VOCABULARY = 1 << 24
OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(100),
    isl("1024", 1),
    osl("128"),
    RANGE_RATIO,
    Option("prefix_len", whole(0, MAX_TOKENS), 0, "tokens that all prompts begin with, in addition to isl"),
    Option("vocab_size", whole(2, MAX_VOCABULARY), None, "draw ids below it (default: the tokenizer's plain ids)"),
    Option("form", choice("ids", "text", "chat"), "ids", "ids: completions; text and chat: decoded by the tokenizer"),
    Option("ignore_eos", yes, True, "ask for exactly osl tokens (vLLM, SGLang and Longread know ignore_eos)"),
)


def build(given: Settings) -> Workload:
    count = counter(given["tokenizer"])
    vocabulary = range(given["vocab_size"]) if given["vocab_size"] else count.vocabulary
    if vocabulary is None:
        raise ConfigError(
            "workload random draws token ids and must know which there are: give --tokenizer (the server's "
            "tokenizer.json, its folder, or a bundled model's name), or --dataset-option vocab_size=N; or take another "
            "workload, as --dataset-name documents"
        )
    if given["form"] != "ids" and count.text is None:
        raise ConfigError(f"form={given['form']} decodes ids: give the server's tokenizer, or take form=ids")
    if given["vocab_size"] and count.vocabulary is not None and given["vocab_size"] > count.vocabulary.stop:
        raise ConfigError(
            f"vocab_size={given['vocab_size']:,}; the tokenizer's plain ids end at {count.vocabulary.stop:,}"
        )
    prompt = ranged("isl", given["isl"], given["range_ratio"], 1, MAX_TOKENS)
    answer = ranged("osl", given["osl"], given["range_ratio"], 1, MAX_OUTPUT)
    if given["prefix_len"] + prompt.high > MAX_TOKENS:
        raise ConfigError(f"prefix_len={given['prefix_len']:,} with isl up to {prompt.high:,}; at most {MAX_TOKENS:,}")
    seed = given["seed"]
    prefix = drawn(Random(seed << 24), given["prefix_len"], vocabulary)

    def make(index: int) -> Ask:
        rng = Random((seed << 24) + 1 + index)
        size, most = prompt.draw(rng, index), answer.draw(rng, index)
        ids = prefix + drawn(rng, size, vocabulary)
        extra: dict[str, object] = {"ignore_eos": True} if given["ignore_eos"] else {}
        key = f"random-{index}"
        if given["form"] == "ids":
            return Ask(key, None, tuple(ids), most, kind="random", isl=len(ids), extra=extra)
        text, length = as_text(ids, count)
        messages: tuple[Message, ...] = ({"role": "user", "content": text},)
        if given["form"] == "chat":
            return Ask(key, messages, None, most, kind="random", isl=length, extra=extra)
        return Ask(key, None, text, most, kind="random", isl=length, extra=extra)

    return workload("random", given, Asks(given["num_prompts"], make), count)


def drawn(rng: Random, size: int, vocabulary: range) -> list[int]:
    """``size`` ids. 64 bits a draw: no id is likelier than another by more than one part in 10**12."""
    raw = array("Q", rng.randbytes(8 * size))
    first, many = vocabulary.start, len(vocabulary)
    return [first + each % many for each in raw]


def as_text(ids: list[int], count: Counter) -> tuple[str, int]:
    """Text of about so many tokens: bytes that are no text are lost in decoding, so the ids are decoded and encoded
    until the length stays, as vLLM does. The length is the encoded one.
    """
    assert count.text is not None and count.ids is not None  # checked before any prompt is made
    wanted, kept = len(ids), ids
    for _ in range(8):
        text = count.text(kept).replace("\ufffd", " ")
        again = count.ids(text)
        if len(again) == wanted:
            return text, wanted
        kept = again[:wanted] if len(again) > wanted else again + ids[: wanted - len(again)]
    return text, len(again)
