"""Reads a claim in English or Chinese: takes out what it knows, says what it assumed, refuses what is left over."""

import re
import unicodedata
from dataclasses import replace
from typing import Literal

from longread.plan.claims import phrases as p
from longread.plan.claims.claim import Claim, TokenRate
from longread.plan.claims.names import find_hardware, find_models
from longread.plan.claims.words import seconds
from longread.plan.deployment import Strategy
from longread.spec.config import TOKEN_UNITS
from longread.spec.errors import ConfigError

LONGEST = 2000  # characters of a claim
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9}
_CHINESE = {"千": 1e3, "万": 1e4, "百万": 1e6, "亿": 1e8}
_SECONDS = (("ms", 1e-3), ("milli", 1e-3), ("毫秒", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("μs", 1e-6), ("micro", 1e-6),
            ("微秒", 1e-6), ("min", 60.0), ("分钟", 60.0), ("s", 1.0), ("秒", 1.0))  # fmt: skip
_DIGITS = 15
_SCALE = re.compile(r"(?<=\d)(\s?[KM])(?![a-su-zA-SU-Z])")  # behind a number, and before "tokens" at most
_MARK = "\x00"


class _Text:
    """What is still to be read; what was taken is replaced by marks, so that it neither joins nor is read twice."""

    def __init__(self, text: str) -> None:
        self.rest = text
        self.understood: list[str] = []
        self.assumed: list[str] = []

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.search(self.rest)
        if match is not None:
            self.blank(match.start(), match.end())
        return match

    def blank(self, start: int, end: int) -> None:
        self.rest = self.rest[:start] + _MARK * (end - start) + self.rest[end:]


def parse_claim(text: str) -> Claim:
    """A claim such as "512K first token in 168 ms, 100 concurrent, 8xH20, DeepSeek-V4.1".

    A missing model means each of V3, V3.2 and V4-Flash, and "H20" both of its memory sizes; ``assumed`` says so. Raises
    ``ConfigError``: empty, too long, two values for one thing, a word that is not understood (naming it and the forms
    that are), an unknown model (naming those near).
    """
    claim = read_words(text)
    if not claim.hardware:
        raise ConfigError(f"the claim names no hardware; add such as 8xH20 or 2x8xH200 (understood: {p.FORMS})")
    return with_models(claim)


def read_words(text: str) -> Claim:
    """The same, without a demand for hardware and model: options may say the rest."""
    if not text.strip():
        raise ConfigError('the claim is empty; write such as "512K first token in 168 ms, 8xH20, V4-Flash"')
    if len(text) > LONGEST:
        raise ConfigError(f"a claim of {len(text):,} characters; at most {LONGEST:,} are read")
    t = _Text(_normal(text))
    longer = p.LONGER.search(t.rest)
    if longer is not None:
        raise ConfigError(
            f"{longer[0]!r}: a claim is of a time that is kept, and this is one that is exceeded; write the time alone"
        )
    claim = Claim((), (), text=text.strip())
    claim = replace(claim, hardware=find_hardware(t), specs=find_models(t))
    claim = _strategy(t, claim)
    claim = _rate(t, claim)
    claim = _times(t, claim)
    claim = _load(t, claim)
    claim = _lengths(t, claim)
    claim = _flags(t, claim)
    claim = _bare_time(t, claim)
    _refuse_rest(t)
    return replace(claim, understood=tuple(t.understood), assumed=tuple(t.assumed))


def with_models(claim: Claim) -> Claim:
    """Every model that the claim may be about, where it names none."""
    if claim.specs:
        return claim
    from longread.spec.releases import release

    names = ("V3", "V3.2", "V4-Flash")
    assumed = f"no model named: judged for {', '.join(names)}"
    return replace(claim, specs=tuple(release(n) for n in names), assumed=(*claim.assumed, assumed))


def _normal(text: str) -> str:
    """Lower case but for the K and M of lengths, full-width forms and multiplication signs plain, thousands separators
    gone.
    """
    plain = unicodedata.normalize("NFKC", text).replace("×", "x").replace("✕", "x").replace("–", "-")
    plain = "".join(part if at % 2 else part.lower() for at, part in enumerate(_SCALE.split(plain)))
    plain = re.sub(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\dkmKM万])", lambda match: match[0].replace(",", ""), plain)
    return " ".join(plain.split())


def _number(text: str) -> float:
    """Raises ``ConfigError`` for more digits than any claim has."""
    if len(text) > _DIGITS:
        raise ConfigError(f"a number of {len(text)} digits in the claim; at most {_DIGITS} are read")
    return float(text)


def to_seconds(number: str, unit: str) -> float:
    return _number(number) * next(factor for start, factor in _SECONDS if unit.startswith(start))


def to_tokens(number: str, scale: str | None) -> int:
    """As the options read lengths: 512K is 524,288 and 512k is 512,000; 万 is 10,000."""
    return round(_number(number) * (_CHINESE.get(scale or "") or TOKEN_UNITS.get(scale or "", 10**9)))


def parse_time(name: str, text: str) -> float:
    """Seconds of an option's value such as 168ms, 2s, 1.5 min. Raises ``ConfigError``."""
    match = re.fullmatch(p.DURATION, _normal(text[:40]))
    if match is None or to_seconds(match[1], match[2]) <= 0:
        raise ConfigError(f"{name}: {text[:40]!r} is no time above 0; write such as 168ms or 2s")
    return to_seconds(match[1], match[2])


def parse_percentile(word: str) -> str:
    """*mean*, or such as *p99.9*. Raises ``ConfigError`` for anything else."""
    word = _normal(word[:40])
    word = {"平均": "mean", "average": "mean", "中位": "p50", "中位数": "p50", "median": "p50"}.get(word, word)
    if word != "mean" and (re.fullmatch(r"p\d{1,2}(\.\d{1,4})?", word) is None or float(word[1:]) == 0):
        raise ConfigError(f"percentile: {word!r} is none; write p1 to p99.99, median or mean")
    return word


def parse_rate(name: str, text: str) -> TokenRate:
    """Tokens/s of an option's value such as 20k, 30/user, 700/gpu, 16k/input. Raises ``ConfigError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m)?(?:/(user|gpu|total|input))?", text[:40].strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{name}: {text[:40]!r} is no rate above 0; write such as 20k, 30/user, 700/gpu or 16k/input")
    value = _amount(match[1], match[2])
    if match[3] == "input":
        return TokenRate(value, "input", "total")
    scope: Literal["total", "user", "gpu"] | None = {"user": "user", "gpu": "gpu", "total": "total"}.get(match[3])  # type: ignore[assignment]
    return TokenRate(value, "output", scope)


def _amount(number: str, scale: str | None) -> float:
    """Of rates and requests, which nobody counts in powers of two."""
    return _number(number) * (1.0 if not scale else _CHINESE.get(scale) or _DECIMAL[scale.lower()])


def _strategy(t: _Text, claim: Claim) -> Claim:
    match = t.take(p.STRATEGY)
    if match is None:
        return claim
    sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    sizes |= {name: max(int(size), 1) for name, size in re.findall(r"(tp|pp|cp|dp)\s*=?\s*(\d{1,4})", match[1])}
    tp, dp = sizes["tp"], sizes["dp"]
    cards = max((machine.total_gpus for machine in claim.hardware), default=0)
    # vLLM counts dp beside tp, SGLang inside it: beside, if there are as many cards.
    beside = tp > 1 and tp * dp * sizes["pp"] * sizes["cp"] <= cards
    strategy = Strategy(tp * dp if beside else max(tp, dp), sizes["pp"], sizes["cp"], dp, "ep" in match[1])
    t.understood.append(f"split {strategy.label}")
    return replace(claim, strategy=strategy)


def _rate(t: _Text, claim: Claim) -> Claim:
    clause_of = t.rest
    match = t.take(p.RATE_BEFORE) or t.take(p.RATE)
    if match is None:
        return claim
    second = p.RATE.search(t.rest) or p.RATE_BEFORE.search(t.rest)
    if second is not None:
        raise ConfigError(
            f"the claim has two rates, {match[0].strip()!r} and {second[0].strip()!r}; judge them one by one"
        )
    clause, start = _clause(clause_of, match.start(), match.end())
    scope: Literal["total", "user", "gpu"] | None = None
    of: Literal["output", "input"] | None = None
    for name, pattern in p.SCOPE:
        found = pattern.search(clause)
        if found is not None and scope is None:
            scope = name  # type: ignore[assignment]
            t.blank(start + found.start(), start + found.end())
    for name, pattern in p.OF:
        if pattern.search(clause) is not None and of is None:
            of = name  # type: ignore[assignment]
    value = _amount(match[1], match[2])
    if of is None:
        t.assumed.append("the tokens/s are output tokens")
    if scope is None:
        t.assumed.append("one stream" if claim.concurrency == 1 else "the tokens/s are those of all streams together")
    t.understood.append(
        f"{value:,.6g} {of or 'output'} tokens/s"
        + {"user": " a stream", "gpu": " a card", "total": " in all", None: ""}[scope]
    )
    return replace(claim, rate=TokenRate(value, of or "output", scope))


def _clause(text: str, start: int, end: int) -> tuple[str, int]:
    """The part between commas around a match, and where it starts."""
    left = max((text.rfind(mark, 0, start) for mark in ",;。、"), default=-1) + 1
    right = min((at for mark in ",;。、" if (at := text.find(mark, end)) >= 0), default=len(text))
    return text[left:right], left


def _times(t: _Text, claim: Claim) -> Claim:
    ttft = _one(t, p.FIRST_TIME, "first-token times")
    tpot = _one(t, p.EACH_TIME, "times per token")
    if ttft is not None:
        t.understood.append(f"first token in {seconds(ttft)}")
    if tpot is not None:
        t.understood.append(f"{seconds(tpot)} per output token")
    return replace(claim, ttft=ttft, tpot=tpot)


def _one(t: _Text, patterns: tuple[re.Pattern[str], ...], what: str) -> float | None:
    values = []
    for pattern in patterns:
        while (match := t.take(pattern)) is not None:
            values.append(to_seconds(match[1], match[2]))
    if len(set(values)) > 1:
        raise ConfigError(
            f"the claim has two {what}: {seconds(values[0])} and {seconds(values[1])}; judge them one by one"
        )
    return values[0] if values else None


def _load(t: _Text, claim: Claim) -> Claim:
    for pattern in p.SHARE:
        match = t.take(pattern)
        if match is not None:
            share = _number(match[1]) / (100 if "%" in match[0] else 1)
            t.understood.append(f"{share:.4g} of the prompt read before")
            claim = replace(claim, cached=share)
            break
    for pattern in p.SUFFIX:
        match = t.take(pattern)
        if match is not None:
            claim = replace(claim, suffix=to_tokens(match[1], match[2]))
            t.understood.append(f"{claim.suffix:,} new tokens")
            break
    for pattern in p.STREAMS:
        match = t.take(pattern)
        if match is not None:
            value = _amount(match[1], match[2])
            if value != int(value) or value < 1:
                raise ConfigError(f"{match[0].strip()!r}: the number of requests at once must be a whole number from 1")
            t.understood.append(f"{int(value):,} requests at once")
            return replace(claim, concurrency=int(value))
    return claim


def _lengths(t: _Text, claim: Claim) -> Claim:
    isl = osl = None
    both = t.take(p.IN_OUT)
    if both is not None:
        isl, osl = to_tokens(both[1], both[2]), to_tokens(both[3], both[4])
    for pattern in p.OUT_LENGTH if osl is None else ():
        match = t.take(pattern)
        if match is not None:
            osl = to_tokens(match[1], match[2])
            break
    scaled = ""
    for pattern in p.IN_LENGTH if isl is None else ():
        match = t.take(pattern)
        if match is not None:
            isl = to_tokens(match[1], match[2])
            scaled = match[1] + match[2] if match[2] and match[2] in TOKEN_UNITS else ""
            break
    if scaled and isl is not None:
        t.assumed.append(f"{scaled} is {isl:,} tokens: of lengths k and m are decimal, K and M binary, as in vLLM")
    if isl is not None:
        t.understood.append(f"{isl:,} tokens of prompt")
    if osl is not None:
        t.understood.append(f"{osl:,} tokens of answer")
    return replace(claim, isl=isl, osl=osl)


def _flags(t: _Text, claim: Claim) -> Claim:
    changes: dict[str, object] = {}
    for name, value, pattern in p.FLAGS:
        if name not in changes and t.take(pattern) is not None:
            changes[name] = value
            t.understood.append({"shared": "one shared document" if value else "distinct documents",
                                 "together": "all arrive at once" if value else "arrivals spread",
                                 "ids": "token ids come in"}[name])  # fmt: skip
    for name, pattern in p.TIER:
        if "tier" not in changes and t.take(pattern) is not None:
            changes["tier"] = name
            t.understood.append(f"cached part in {name} memory" if name != "disk" else "cached part on disk")
    for name, pattern in p.STATE:
        if "state" not in changes and t.take(pattern) is not None:
            changes["state"] = name
            t.understood.append(name)
    engine = t.take(p.ENGINE)
    if engine is not None:
        changes["engine"] = engine[1]
        t.understood.append(f"engine {engine[1]}")
    percentile = t.take(p.PERCENTILE)
    if percentile is not None:
        changes["percentile"] = parse_percentile(percentile[1])
        t.understood.append(f"percentile {changes['percentile']}")
    return replace(claim, **changes)  # type: ignore[arg-type]


def _bare_time(t: _Text, claim: Claim) -> Claim:
    """A time without a name is the first token's where a prompt's length is given."""
    match = p.ANY_TIME.search(t.rest)
    if match is None:
        return claim
    if claim.ttft is not None or claim.isl is None:
        raise ConfigError(
            f"{match[0].strip()!r}: a time of what? write TTFT {match[0].strip()} or TPOT {match[0].strip()}"
        )
    t.blank(match.start(), match.end())
    second = p.ANY_TIME.search(t.rest)
    if second is not None:
        raise ConfigError(f"the claim has two times, {match[0]!r} and {second[0]!r}; write which is what (TTFT, TPOT)")
    value = to_seconds(match[1], match[2])
    t.understood.append(f"first token in {seconds(value)}")
    t.assumed.append("the time is to the first token")
    return replace(claim, ttft=value)


def _refuse_rest(t: _Text) -> None:
    """Raises ``ConfigError`` for the first word that is neither understood nor without meaning."""
    for word in re.findall(r"[a-z][a-z0-9.'+-]*|[\d.]+%?|[^\W\d_a-z]+|[%]", t.rest):
        plain = word.strip("-.'")
        if plain in p.FILLER or not plain:
            continue
        for filler in sorted(p.FILLER_ZH, key=len, reverse=True):
            plain = plain.replace(filler, "")
        if plain:
            raise ConfigError(f"{plain[:40]!r} in the claim is not understood; understood are {p.FORMS}")
