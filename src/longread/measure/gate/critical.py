"""Values that must not change: numbers with units, dates, codes, names, parties, negations. Found in a text, compared.

Pure. What is not found here is not protected: the kinds are listed in KINDS, and an expected value is looked for as it
stands, whatever its kind.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("number", "date", "code", "name", "party", "negation")
_UNITS = (
    "percent|per cent|%|‰|mg/kg|mcg|µg|μg|ug|mg|kg|g|ml|mL|l|IU|mmol|units?|tablets?|drops?|"
    "EUR|USD|CNY|RMB|GBP|€|\\$|km|cm|mm|metres?|meters?|m|°C|bar|kPa|MPa|Nm|kW|kWh|V|A|Hz|rpm|"
    "hours?|days?|weeks?|months?|years?|minutes?|seconds?|persons?|times|"
    "元|万元|亿元|欧元|美元|天|日|个月|月|年|周|小时|分钟|秒|人|名|次|片|粒|滴|支|"
    "毫克|微克|克|千克|公斤|毫升|升|国际单位|单位|米|厘米|毫米|公里|千米|摄氏度|千帕|兆帕|伏|安|赫兹"
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
# ASCII: a Chinese character before a digit is no part of its number.
_DATE = re.compile(
    rf"\b\d{{1,2}} (?:{_MONTHS})(?: \d{{4}})?\b|\b\d{{4}}-\d{{2}}-\d{{2}}\b|(?:\d{{4}}年)?\d{{1,2}}月\d{{1,2}}日",
    re.ASCII,
)
_CODE = re.compile(r"(?<![\w-])(?:[A-Z]{1,5}-?\d{2,}[A-Z0-9-]*|\d{2,}-[A-Z]{1,5})(?![\w-])", re.ASCII)
_NUMBER = re.compile(rf"(?<![\w.,])[-+−]?\d+(?:[.,]\d+)*(?:\s?(?:{_UNITS})(?![A-Za-z]))?", re.ASCII)
_NAME = re.compile(r"\b(?:Dr|Mr|Mrs|Ms|Prof)\.? [A-Z]\w+(?: [A-Z]\w+)?|\bPort [A-Z]\w+")
_PARTY = re.compile(
    r"\b(?:Supplier|Customer|Buyer|Seller|Owner|Operator|Landlord|Tenant|Lender|Borrower|Licensor|Licensee|Contractor|"
    r"Employer|Insurer|Insured|Carrier|Consignee|Guarantor)\b|甲方|乙方|丙方|出租人|承租人|买方|卖方|发包人|承包人|保证人|"
    r"贷款人|借款人",
)
_NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|without|cannot|except|unless|prohibited|forbidden|n't)\b|n't\b|"
    r"不得|否|不应|不可|不能|不须|不必|无需|无须|禁止|严禁|未|没有|不|非|除外",
    re.IGNORECASE | re.ASCII,
)
POLAR = ("yes", "no", "可以", "不得", "是", "否")  # values that are nothing but their polarity
_SPELLED = {"per cent": "percent", "%": "percent", "meter": "metre", "μg": "mcg", "µg": "mcg", "ug": "mcg", "ml": "mL"}
_REFERENCE = re.compile(r"\s?[(（][^()（）]*[)）]")  # "(clause 4.2)": where it stands is no value
_SEPARATOR = re.compile(r"[;；]")


@dataclass(frozen=True, slots=True)
class Critical:
    """One value in one spelling; ``kind`` one of KINDS."""

    kind: str
    value: str


def find(text: str) -> tuple[Critical, ...]:
    """All critical values of a text, in the order of KINDS and then of the text. A negation counts as that there is
    one: which word says it may change.
    """
    left = unicodedata.normalize("NFC", text)
    found: list[Critical] = []
    for kind, pattern in (("date", _DATE), ("code", _CODE), ("number", _NUMBER)):
        found += [Critical(kind, _plain(kind, match[0])) for match in pattern.finditer(left)]
        left = pattern.sub(" ; ", left)
    found += [Critical("name", " ".join(match[0].replace(".", "").split())) for match in _NAME.finditer(left)]
    found += [Critical("party", match[0]) for match in _PARTY.finditer(left)]
    if _NEGATION.search(left):
        found.append(Critical("negation", "negated"))
    return tuple(sorted(found, key=lambda one: KINDS.index(one.kind)))


def _plain(kind: str, value: str) -> str:
    """One spelling: no thousands separators, one name a unit."""
    if kind != "number":
        return value
    match = re.fullmatch(r"([-+−]?\d+(?:[.,]\d+)*)\s?(.*)", value, re.DOTALL)
    if match is None:
        return value
    digits, unit = match[1].replace("−", "-").lstrip("+"), match[2]
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    unit = _SPELLED.get(unit, unit)
    if len(unit) > 2 and unit.endswith("s") and unit.isascii():
        unit = _SPELLED.get(unit[:-1], unit[:-1])
    return f"{digits} {unit}".strip()


def changes(base: str, candidate: str) -> list[str]:
    """What differs between the critical values of two answers to the same question, as words; empty: nothing.

    Values are compared as multisets: another order of the same values is no change.
    """
    before, after = Counter(find(base)), Counter(find(candidate))
    lost, new = before - after, after - before
    out = []
    for kind in KINDS:
        gone = [one.value for one in lost.elements() if one.kind == kind]
        come = [one.value for one in new.elements() if one.kind == kind]
        if gone or come:
            out.append(f"{kind}: {' and '.join(gone) or 'nothing'} became {' and '.join(come) or 'nothing'}")
    return out


def stands(value: str, text: str) -> bool:
    """Whether a value stands in a text as itself: 5 mg does not stand in 15 mg, 2.5 mg or 5 mg/kg, and yes does not
    stand in a text that denies.
    """
    wanted, said = (" ".join(unicodedata.normalize("NFC", part).split()).casefold() for part in (value, text))
    if not wanted or (wanted in POLAR and (_NEGATION.search(said) is None) != (_NEGATION.search(wanted) is None)):
        return False
    before = r"(?<![\d.,\-/])" if wanted[0].isdigit() else r"(?<![a-z])" if wanted[0].isascii() else ""
    after = r"(?![.,]?\d)" if wanted[-1].isdigit() else r"(?![a-z/])" if wanted[-1].isascii() else ""
    return re.search(before + re.escape(wanted) + after, said) is not None


def untrue(expected: Sequence[str], answer: str) -> list[str]:
    """What an answer says against the truth: values that are missing, and others of the same kind and unit in their
    place. Empty: nothing.
    """
    missing = [value for value in expected if not stands(value, answer)]
    allowed = Counter(one for value in expected for one in find(value))
    units = {(one.kind, _unit(one.value)) for one in allowed}
    strange = [
        one.value
        for one in find(_REFERENCE.sub("", answer))
        if (one.kind, _unit(one.value)) in units and one not in allowed and one.kind in ("number", "date", "code")
    ]
    out = [f"{value!r} is missing" for value in missing]
    return out + [f"{value!r} is said instead or besides" for value in dict.fromkeys(strange)]


def _unit(value: str) -> str:
    return re.sub(r"[-\d.,]+\s?", "", value, count=1)


def values_of(answer: str) -> tuple[str, ...]:
    """The values of a reference answer in the form "value (reference); value (reference)"."""
    parts = [_REFERENCE.sub("", part).strip() for part in _SEPARATOR.split(answer)]
    return tuple(part.rstrip("。.") for part in parts if part)
