r"""Where a text may be cut so that encoding the parts gives exactly the ids of the whole.

Knows DeepSeek's pre-tokeniser (V3 to V4) and one rule about it; knows no ids and no caches. A tokenizer with any other
pre-tokeniser is not cut: ``divisible`` says so.

That pre-tokeniser splits three times, each time the pieces that the split before left: numbers N = ``\p{N}{1,3}``;
runs of Han and kana H; and the pattern P, an ordered choice of
    a  an ASCII sign, then ASCII letters             d  ``\s*[\r\n]+``
    b  perhaps one other character, then letters     e  ``\s+(?!\S)``
    c  perhaps a space, then signs, then line ends   f  ``\s+``
Byte pairs are merged inside pre-tokens only. So for ids of T = ids of T[:k] + ids of T[k:] it is enough that the
pre-tokens are.

The rule: with p = T[k-1] and c = T[k], they are wherever
    1  p is a line end and c is in V,            3  exactly one of p and c is in H,
    2  p is in V and c is a space,               4  one is an ASCII digit and the other in ``\t\r\n ,.:;``,
where V is H and the printable ASCII characters but the space: no white space in any version of Unicode.

Proof. (i) No match of N, H or P holds p and c side by side. N and H: neither holds any of the four pairs. P: behind a
line end it goes on with white space only (c, d, e, f), which c of pair 1 is not; it takes a space first or behind
white space only, which p of pair 2 is not; and for pairs 3 and 4 the pieces that P is given end at k. So every match
that begins before k ends at k at the latest. (ii) The matches before k are the same in T as in T[:k]. Only e looks at
a character behind its match, so they could differ only for an e that ends at k in white space: p of pair 1 is that,
but there d, which is tried before e and looks ahead nowhere, matches from the same place up to k in both; p of pair 2
is not; in pairs 3 and 4 the piece ends at k in both. (iii) Nothing looks behind, so the matches from k on are those of
T[k:]. (iv) What nothing matches is a piece of its own, and none of them lies across k: d takes the line end of pair 1
if nothing else did, f the space of pair 2, and in pairs 3 and 4 a match of H or N ends or begins at k. A gap that an
earlier split leaves across k is given to the later ones, for which (i) to (iii) hold all the same.
With added tokens: none of them holds a pair of the rule (``divisible``), so none lies across k, and the text between
two of them is pre-tokenised by itself, like T above.
"""

import re
from collections.abc import Mapping
from typing import Any

_H = "一-龥\u3040-ゟ゠-ヿ"
_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_P = (
    rf"{_SIGN}[A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + "]*"
    r"|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"
)
# As tokenizer.json of DeepSeek-V3, V3.1, R1, V3.2 and V4 has it; any difference, and nothing is cut.
_SPLITS = [
    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    for regex in (r"\p{N}{1,3}", f"[{_H}]+", _P)
]
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_PRE_TOKENIZER = {"type": "Sequence", "pretokenizers": [*_SPLITS, _BYTES]}
_NO_NORMALIZER: tuple[object, ...] = (None, {"type": "Sequence", "normalizers": []})

_CUT = re.compile(
    rf"(?<=[\r\n])(?=[!-~{_H}])|(?<=[!-~{_H}])(?= )|(?<=[{_H}])(?=[^{_H}])|(?<=[^{_H}])(?=[{_H}])"
    r"|(?<=[0-9])(?=[\t\r\n ,.:;])|(?<=[\t\r\n ,.:;])(?=[0-9])"
)
PART_CHARACTERS = 4096  # a part has at least so many
_WINDOW = 256  # characters looked at behind them: the search holds the interpreter lock, and most texts cut at once


def divisible(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the rule holds for a tokenizer.json: this very pre-tokeniser, no normaliser, no dropout, no truncation,
    and added tokens that match as they are and have no cut inside.
    """
    added = tokenizer["added_tokens"]
    return (
        tokenizer.get("pre_tokenizer") == _PRE_TOKENIZER
        and tokenizer.get("normalizer") in _NO_NORMALIZER
        and not tokenizer["model"].get("dropout")
        and tokenizer.get("truncation") is None
        and tokenizer.get("padding") is None
        and not any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in added)
        and not any(_CUT.search(token["content"]) for token in added)
    )


def cuts(text: str) -> list[int]:
    """All places where the rule allows a cut, for tests; ``parts`` uses a few of them."""
    return [match.start() for match in _CUT.finditer(text)]


def parts(text: str) -> list[str]:
    """The text in parts of ``PART_CHARACTERS`` or more, the last one of any length; [] for no text.

    A cut depends on what is before it and on the one character behind it: texts that begin alike have the same parts
    up to the one with the first difference.
    """
    found = []
    start, at = 0, PART_CHARACTERS
    while at < len(text):
        match = _CUT.search(text, at, at + _WINDOW)
        if match is None:
            at += PART_CHARACTERS
            continue
        found.append(text[start : match.start()])
        start, at = match.start(), match.start() + PART_CHARACTERS
    if start < len(text):
        found.append(text[start:])
    return found
