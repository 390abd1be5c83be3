"""Answers against references, and two ways in which a model falls apart: it repeats itself, or it does not end.

Pure; knows no HTTP and no models. ROUGE-L is Lin 2004's on words, with every Chinese, Japanese or Korean character a
word of its own; case and spacing do not count, since they carry no value that is not compared elsewhere.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from rapidfuzz.distance import LCSseq

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯豈-﫿]|[^\W_]+(?:[.,:/-][^\W_]+)*|[^\w\s]")
_END = re.compile(r"[。．.!！?？;；:：,，、]+$")
MIN_REPEATS = 4  # of a block, one behind the other
MIN_REPEATED = 24  # words covered by them: a table's rules and a short list repeat, too
LONGEST_BLOCK = 64  # words


def normalised(text: str) -> str:
    """For an exact match: one form of each character, spaces and case, no full stop at the end."""
    joined = " ".join(unicodedata.normalize("NFKC", text).split()).casefold()
    return _END.sub("", joined).strip()


def exact(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer is one of the references, up to ``normalised``."""
    return normalised(answer) in {normalised(reference) for reference in references}


def words(text: str) -> list[str]:
    """Words, numbers with their separators, single CJK characters, single marks."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; 1 where both are empty, 0 where one is."""
    said, meant = words(answer), words(reference)
    if not said or not meant:
        return float(said == meant)
    common = int(LCSseq.similarity(said, meant))
    return 2 * common / (len(said) + len(meant))


def repeats(text: str) -> str | None:
    """The block that the text repeats at least MIN_REPEATS times in a row over MIN_REPEATED words, None: it does not.

    Every block length up to LONGEST_BLOCK is tried: a run of words equal to those one block before is what a loop is.
    """
    found = words(text)
    for size in range(1, min(LONGEST_BLOCK, len(found) // MIN_REPEATS) + 1):
        run = 0
        wanted = max(size * (MIN_REPEATS - 1), MIN_REPEATED - size)
        for i in range(size, len(found)):
            run = run + 1 if found[i] == found[i - size] else 0
            if run >= wanted:
                return " ".join(found[i - size + 1 : i + 1])
    return None


def novelty(text: str, size: int = 4) -> float:
    """Share of distinct runs of ``size`` words; 1 for a text shorter than that. Falls when a text goes in circles."""
    found = words(text)
    runs = Counter(tuple(found[i : i + size]) for i in range(len(found) - size + 1))
    return len(runs) / sum(runs.values()) if runs else 1.0


def truncated(text: str, finish_reason: str | None) -> bool:
    """Whether an answer did not end by itself: at the length limit, without a reason, or inside an open fence."""
    return finish_reason in ("length", None) or text.count("```") % 2 == 1
