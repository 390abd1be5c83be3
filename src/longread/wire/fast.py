"""The fast tokenizer library ``fastokens``, used only where it was found to give the ids of ``tokenizers``.

Knows both libraries' calls and a set of hard texts; not where texts come from or what is done with ids.
"""

import random
from array import array
from collections.abc import Callable, Iterator

from fastokens import Tokenizer as FastTokenizer

# What the library raises for a file it cannot read or a text it gives up on (limits of its pattern matcher).
_ERRORS = (ValueError, RuntimeError, OSError)

Encode = Callable[[str, bool], bytes]


class FastEncoder:
    """``encode`` releases the interpreter lock. Raises ValueError for a tokenizer.json that the library cannot read."""

    def __init__(self, document: str):
        try:
            self._tokenizer = FastTokenizer.from_json_str(document)
        except _ERRORS as error:
            raise ValueError(str(error)) from error

    def encode(self, text: str, special: bool) -> bytes | None:
        """Ids as int32 bytes, None where the library gives up on the text. ``special``: markup becomes added tokens."""
        try:
            if special:
                return array("i", self._tokenizer.encode(text).ids).tobytes()
            return array("i", self._tokenizer.encode_ordinary(text).ids).tobytes()
        except _ERRORS:
            return None


def first_difference(fast: FastEncoder, exact: Encode, markup: list[str]) -> str | None:
    """The first of the hard texts that the two encode differently; None if they agree on all, in both views."""
    for text in hard_texts(markup):
        for special in (False, True):
            if fast.encode(text, special) != exact(text, special):
                return text
    return None


_HARD = (
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # tab and spaces   \r\n\n\n",
    "深度求索的长文本：测试「引号」、全角，ひらがな カタカナ・゠゛ 한국어 ไทย हिन्दी العربية",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 n\u0303 \u202e rtl \0 nul \ufeff bom \ufffd\u2028\u2029\x85\x1c\u3000\u00a0x",
    "Zalgo: Z\u0311\u0306a\u0324\u0300l\u0302g\u033co \u0301\u0301 1\u03012 一\u0301二",
    "1234567890 3.14159 0xDEADBEEF 1_000_000 ½⅔Ⅷ²٣٤٥६ １２３４",
    "https://example.org/a?b=c&d=%20#e  $x = \"y\\n\"; /* z */ <a href='b'>&amp;</a>",
    " ", "\n", "\r", "\r\n\r\n x", " \n \n ", "\t\t\tif", "   if", "it's I'LL", "A" * 300, " " * 300, "\n" * 300,
    "0" * 100, "." * 300, "一" * 300, "é" * 300, "😀" * 100, "\u0301" * 100, "ab" * 200, "- " * 200, "\ud7ff\ue000",
)  # fmt: skip
_RANGES = (
    *((32, 127), (32, 127), (9, 14), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x700), (0x2000, 0x2070)),
    *((0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xAD00), (0xFF00, 0xFFF0), (0x1F300, 0x1F700)),
)
_RANDOM_TEXTS = 120


def hard_texts(markup: list[str]) -> Iterator[str]:
    """Texts at which tokenizers go apart: signs, numbers, scripts, marks, white space, long runs, markup in the middle
    of them. The same in each process.
    """
    yield from _HARD
    for token in markup[:64]:
        yield f"a {token}b\n{token} {token}{token[:-1]}"
    draw = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        chosen = draw.sample(_RANGES, 3)
        characters = [chr(draw.randrange(*draw.choice(chosen))) for _ in range(draw.randrange(80))]
        for _ in range(draw.randrange(3)):
            characters.insert(draw.randrange(len(characters) + 1), draw.choice([*markup, "\n", "  ", "12"]))
        yield "".join(characters)
