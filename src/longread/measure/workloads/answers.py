"""Whether an answer says what is expected: values, names, yes or no, or that it is not there; English and Chinese.

Knows spelling (full width, thousands, units, case), not meaning. A stricter or a softer judgement is built on it.
"""

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from longread.measure.workloads.ask import Expected

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}(?=\W|$)")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:[,'\u2019]\d{3})+(?!\d)")
_SPACED = re.compile(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w]|\.\d)|\d+(?:\.\d+)?")
_PERCENT_ZH = re.compile(r"百分之(\d+(?:\.\d+)?)")
_PERCENT = re.compile(r"(\d)\s*(?:%|per ?cent\b)")
_TITLE = re.compile(r"\b(ms|mr|mrs|dr)\.(?=\s)")
_UNITS = (
    (re.compile(r"(?<=\d)\s*(?:milligrams?|mg)\b"), " mg"),
    (re.compile(r"(?<=\d)\s*(?:micrograms?|mcg|µg|μg)\b"), " micrograms"),
    (re.compile(r"(?<=\d)\s*(?:millilit(?:re|er)s?|ml)\b"), " ml"),
    (re.compile(r"(?<=\d)\s*(?:lit(?:re|er)s?)\b"), " litres"),
    (re.compile(r"(?<=\d)\s*(?:met(?:re|er)s?)\b"), " metres"),
    (re.compile(r"(?<=\d)\s*(?:days?)\b"), " days"),
    (re.compile(r"(?<=\d)\s*(?:hours?|hrs?)\b"), " hours"),
    (re.compile(r"(?<=\d)\s*°\s*c\b"), " °c"),
    (re.compile(r"€\s*(?=\d)|\beuros?\b"), "eur "),
    (re.compile(r"(?:us)?\$\s*(?=\d)"), "usd "),
)
_SPACES = re.compile(r"\s+")
_CJK = re.compile(r"[\u3400-\u9fff]")


@dataclass(frozen=True, slots=True)
class Scored:
    """``right`` with the reason in words; ``missing``: expected values that the answer does not have."""

    right: bool
    reason: str
    missing: tuple[str, ...] = ()


def score(expected: Expected, text: str) -> Scored:
    """Judge an answer. A thought between ``<think>`` marks does not count. "reference" is right where it is equal or
    contained: overlap measures are for others.
    """
    answer = normalise(_THOUGHT.sub("", text))
    if not answer:
        return Scored(False, "an empty answer", expected.critical or (expected.text,))
    wanted = (expected.text, *expected.alternatives)
    if expected.kind == "absent":
        said = any(holds(answer, normalise(each).rstrip(".。")) for each in wanted)
        return Scored(said, "says that it is not there" if said else "does not say that it is not there")
    if expected.kind == "critical":
        missing = tuple(value for value in expected.critical if not holds(answer, normalise(value)))
        return Scored(not missing, "all values" if not missing else "values are missing or changed", missing)
    polarity = _polarity_of(normalise(expected.text))
    if polarity is not None:
        found = _polarity(answer)
        told = "neither yes nor no" if found is None else "the right one of yes and no"
        return Scored(found is polarity, told if found in (None, polarity) else "the opposite")
    if expected.kind == "exact":
        right = any(_bare(answer) == _bare(normalise(each)) for each in wanted)
        return Scored(right, "equal" if right else "another text", () if right else (expected.text,))
    right = any(holds(answer, normalise(each)) for each in wanted)
    return Scored(right, "contained" if right else "not contained", () if right else (expected.text,))


def normalise(text: str) -> str:
    """One spelling: full width to half, lower case, no thousands separators or emphasis, one space, percent as %."""
    text = unicodedata.normalize("NFKC", _SPACED.sub("", text)).lower()
    text = text.replace("、", ",").replace("。", ".").replace("−", "-").replace("–", "-")
    text = _MARKUP.sub("", text)
    text = _GROUPED.sub(lambda found: re.sub(r"\D", "", found.group()), text)
    text = _PERCENT_ZH.sub(r"\1%", text)
    text = _PERCENT.sub(r"\1%", text)
    text = _TITLE.sub(r"\1", text)
    for pattern, unit in _UNITS:
        text = pattern.sub(unit, text)
    return _SPACES.sub(" ", _NUMBER.sub(_plain, text)).strip()


def holds(answer: str, value: str) -> bool:
    """Whether a normalised answer has a normalised value as a whole: 15 is not in 150, 1.15 or KX-15."""
    if not value:
        return False
    left = r"(?<![\w])(?<!\d[.,\-/])" if _wordy(value[0]) else ""
    right = r"(?![\w])(?!\.\d)(?!-\w)" if _wordy(value[-1]) else ""
    if value[0].isdigit():
        left = r"(?<![0-9a-z_])(?<!\d[.,])(?<![a-z0-9]-)"
    if value[-1].isdigit():
        right = r"(?![0-9a-z_])(?!\.\d)(?!-[a-z0-9])"
    return re.search(left + re.escape(value) + right, answer) is not None


def _wordy(character: str) -> bool:
    """Chinese has no word boundaries, so a value may stand anywhere in a sentence."""
    return character.isalnum() and not _CJK.match(character)


def _plain(found: re.Match[str]) -> str:
    """12.50 and 12.5 are one number; 007 stays an identifier."""
    text = found.group()
    if "." not in text:
        return text
    try:
        number = Decimal(text).normalize()
    except InvalidOperation:
        return text
    return f"{number:f}"


def _bare(text: str) -> str:
    return text.strip(" .,;:!?\"'()[]")


def _polarity_of(text: str) -> bool | None:
    return {"yes": True, "是": True, "no": False, "否": False}.get(text)


def _polarity(answer: str) -> bool | None:
    """What an answer to a question for yes or no says: its first word, or else the first negation it has."""
    first = re.match(r"\W*(yes|no|是否|不是|是|否)", answer)
    if first and first.group(1) in ("yes", "no", "是", "否", "不是"):
        end = answer[first.end() : first.end() + 1]
        if not (first.group(1) in ("yes", "no") and end.isalnum()):
            return first.group(1) in ("yes", "是")
    if re.search(r"\b(?:no|not|cannot|never)\b|n't\b|不|没有|未|否|禁止", answer):
        return False
    if re.search(r"\b(?:yes|may|must|is|are|was|has|permitted|allowed)\b|是|可以|必须|允许|已|会", answer):
        return True
    return None
