"""A Mooncake trace as asks: arrivals at the trace's times, equal blocks as equal text.

Knows the trace reader and words that are one token each. Must not know servers. The trace holds no text, so blocks
become seeded words: a block of 512 tokens is 512 words that byte-level vocabularies hold whole.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import overload

from longread.measure.workload import BLOCK_TOKENS, Arrival, read_trace
from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.options import MAX_OUTPUT, MAX_TOKENS
from longread.spec.errors import ConfigError

# One token each with the space before it, in the vocabularies of DeepSeek, Llama 3 and Qwen.
_TOLD = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long
"""
WORDS = _TOLD.split()
KEPT_BLOCKS = 4096


class Replay(Sequence[Ask]):
    """Asks by index, each built when it is taken."""

    def __init__(self, arrivals: Sequence[Arrival], seed: int):
        self._arrivals, self._seed = arrivals, seed
        self._words = lru_cache(KEPT_BLOCKS)(self._draw)

    def __len__(self) -> int:
        return len(self._arrivals)

    @overload
    def __getitem__(self, index: int) -> Ask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Ask]: ...
    def __getitem__(self, index: int | slice) -> Ask | Sequence[Ask]:
        if isinstance(index, slice):
            return Replay(self._arrivals[index], self._seed)
        each = self._arrivals[index]
        text = "".join(self._words(number, tokens) for number, tokens in each.runs())
        return Ask(f"trace/{index}", None, text, each.osl, at=each.at, kind=each.kind, isl=each.isl)

    def _draw(self, number: int, tokens: int) -> str:
        draw = random.Random(f"{self._seed}/{number}")
        return "".join(f" {draw.choice(WORDS)}" for _ in range(tokens))


def replay(path: Path, seed: int = 0, speedup: float = 1.0, limit: int | None = None) -> Workload:
    """``speedup`` 2: in half the time; ``limit``: of the file's first requests. Raises ConfigError with the line."""
    arrivals = read_trace(path, speedup=speedup, limit=limit)
    for number, each in enumerate(arrivals):
        for name, value, most in (("input", each.isl, MAX_TOKENS), ("output", each.osl, MAX_OUTPUT)):
            if value > most:
                raise ConfigError(f"{path}: request {number + 1} has {value:,} {name} tokens; at most {most:,}")
    described = {
        "name": "trace",
        "file": path.name,
        "requests": len(arrivals),
        "speedup": speedup,
        "seed": seed,
        "seconds": arrivals[-1].at,
        "input_tokens": sum(each.isl for each in arrivals),
        "output_tokens": sum(each.osl for each in arrivals),
        "distinct_blocks": len({number for each in arrivals for number in each.blocks}),
        "block_tokens": BLOCK_TOKENS,
        "lengths": "words that are one token each; the chat's markup and the tokenizer decide the rest",
    }
    return Workload("trace", seed, Replay(arrivals, seed), described)
