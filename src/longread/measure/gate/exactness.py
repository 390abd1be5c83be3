"""Level 0: the same request has the same answer, whatever the server did before and does beside it.

Fresh documents (their seed is new in each run, so no cache knows them) are asked cold, warm, behind another question,
as a stream, beside other requests, under another cache salt, after the cache was put under pressure, and as a
conversation that goes on. Texts must be equal and what is told of their tokens within the limits; where two texts part,
both tokens may be as good as equal (a tie), which is no failure. Whether the server really reused anything is read from
``cached_tokens``.
Knows the client; which limits are a server's is rounding's, how the sampler is examined sampling's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from longread.measure.gate.abilities import Abilities
from longread.measure.gate.capture import all_of, chat_fields
from longread.measure.gate.client import Answer, Client
from longread.measure.gate.distribution import divergence_point
from longread.measure.gate.documents import ANSWER_TOKENS, FORMS, Style, instructed_chat
from longread.measure.gate.profiles import Profile
from longread.measure.gate.rounding import Apart, Rule, apart, rule_of
from longread.measure.gate.verdict import Finding, LevelResult, Verdict
from longread.measure.reading import Question, write

PRESSURE_ROUNDS = 24  # other documents at most that are read to push one out of the cache
PRESSURE_SHARE = 1.1  # of the cache's capacity, where the server tells it
BLIND_PRESSURE = 4  # documents of the same length where it does not
KINDS = ("single", "multi-key", "multi-value")
Evidence = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Compared:
    """Two answers that must be one. ``apart``: how far their tokens' probabilities are, None: none were told.
    ``parted``: the first position with another token. ``verdict``: "equal", "tie" or "different". ``cached``: tokens
    that the server says it reused, on both sides. ``empty``: neither side said anything, so that nothing was compared.
    """

    name: str
    document: str
    verdict: str
    apart: Apart | None
    parted: int | None
    texts: tuple[str, str]
    cached: tuple[int | None, int | None]
    empty: bool = False

    def document_of(self) -> dict[str, object]:
        """As JSON: a gap that is not finite is missing."""
        figures = asdict(self)
        apart = figures.pop("apart") or {}
        if not math.isfinite(apart.get("gap", 0.0)):
            apart["gap"] = None
        return {"level": 0, **figures, **apart}


@dataclass(slots=True)
class Trial:
    """One fresh document and what was said about it."""

    key: str
    text: str
    questions: tuple[Question, Question]
    language: str
    found: list[Compared] = field(default_factory=list)


def compare(name: str, key: str, one: Answer, other: Answer, rule: Rule) -> Compared:
    """``rule``: what the server may differ by."""
    same = divergence_point(one.positions, other.positions)
    told = bool(one.positions and other.positions)
    found = apart(one.positions[:same], other.positions[:same]) if told else None
    parted = same - 1 if told and same and one.positions[same - 1].token != other.positions[same - 1].token else None
    equal = (one.text, one.finish_reason, one.reasoning) == (other.text, other.finish_reason, other.reasoning)
    holds = found is None or rule.holds(found)
    verdict = "equal" if equal and holds else "different"
    if not equal and found is not None and holds and parted is not None:
        verdict = "tie" if rule.tie(one.positions[parted], other.positions[parted]) else verdict
    empty = not (one.text or one.reasoning or other.text or other.reasoning or told)
    return Compared(name, key, verdict, found, parted, (one.text, other.text), (one.cached, other.cached), empty)


class Exactness:
    """Runs the trials against one server. ``fresh``: the run's own seed; ``rates``: tokens a line by form."""

    def __init__(
        self,
        client: Client,
        abilities: Abilities,
        profile: Profile,
        style: Style,
        fresh: int,
        rates: Mapping[tuple[str, str], float],
        pressure_tokens: int,
        evidence: Evidence,
        tell: Callable[[str], None] = lambda words: None,
    ):
        self.tell = tell
        self.client, self.abilities, self.style = client, abilities, style
        self.rule, self.fresh, self.rates = rule_of(abilities, profile), fresh, rates
        self.pressure_tokens, self.evidence = pressure_tokens, evidence
        self.found: list[Compared] = []
        self.notes: list[str] = [self.rule.words]
        self._serial = 0

    def _trial(self, length: int) -> Trial:
        self._serial += 1
        language, domain = FORMS[self._serial % len(FORMS)]
        lines = max(12, int((length - 2 * ANSWER_TOKENS) / self.rates[language, domain]))
        document = write((self.fresh << 16) + self._serial, lines, language, domain)
        first, second = document.questions(48, seed=0, kinds=KINDS)[:2]
        return Trial(f"fresh-{self._serial}-{length}", document.text, (first, second), language)

    async def _ask(self, trial: Trial, which: int, **more: object) -> Answer:
        messages = instructed_chat(trial.text, trial.questions[which].text, trial.language, self.style)
        return await self.client.chat(messages, **chat_fields(self.abilities, ANSWER_TOKENS), **more)

    async def _go_on(self, trial: Trial, said: str, **more: object) -> Answer:
        """The second question as a second turn, behind the first answer."""
        first = instructed_chat(trial.text, trial.questions[0].text, trial.language, self.style)
        turns = ({"role": "assistant", "content": said}, {"role": "user", "content": trial.questions[1].text})
        return await self.client.chat((*first, *turns), **chat_fields(self.abilities, ANSWER_TOKENS), **more)

    def _compared(self, trial: Trial, name: str, one: Answer, other: Answer) -> None:
        found = compare(name, trial.key, one, other, self.rule)
        self.found.append(found)
        self.evidence(found.document_of())

    async def run(self, length: int, pressure: bool) -> None:
        """One document through all situations. ``pressure``: also push it out of the cache, as far as that can be."""
        trial, salt = self._trial(length), {"cache_salt": f"gate-{self.fresh}-{self._serial}"}
        cold = await self._ask(trial, 0)
        self._compared(trial, "cold = warm", cold, await self._ask(trial, 0))
        behind = await self._ask(trial, 1)
        self._compared(trial, "another question in between", cold, await self._ask(trial, 0))
        self._compared(trial, "whole = stream", cold, await self._ask(trial, 0, stream=True))
        other = self._trial(length)
        beside = await all_of([self._ask(trial, 0), self._ask(trial, 1), self._ask(other, 0), self._ask(trial, 0)])
        self._compared(trial, "alone = beside others", cold, beside[0])
        self._compared(trial, "alone = beside itself", cold, beside[3])
        self._compared(trial, "warm = beside others", behind, beside[1])
        further = await self._go_on(trial, cold.text)
        if self.abilities.salt:
            self._compared(trial, "warm behind a question = cold", behind, await self._ask(trial, 1, **salt))
            self._compared(trial, "cold = cold elsewhere", cold, await self._ask(trial, 0, **salt))
            alone = {"cache_salt": f"{salt['cache_salt']}-2"}
            self._compared(trial, "gone on = read at once", further, await self._go_on(trial, cold.text, **alone))
        if pressure:
            await self._press(trial, length)
            again = await self._ask(trial, 0)
            self._compared(trial, "after pressure on the cache", cold, again)
            if again.cached:
                self.notes.append(
                    f"{trial.key} was still cached after the pressure ({again.cached:,} tokens): its return from "
                    "nothing, or from a slower tier, was not seen; raise --pressure-tokens"
                )

    async def _press(self, trial: Trial, length: int) -> None:
        capacity = self.abilities.capacity
        wanted = BLIND_PRESSURE * length if capacity is None else int(PRESSURE_SHARE * capacity)
        wanted = min(wanted, self.pressure_tokens)
        rounds = min(PRESSURE_ROUNDS, max(1, -(-wanted // length)))
        what, read = f"{rounds:,} other documents of {length:,} tokens fill the cache (--pressure-tokens)", 0
        self.tell(what)

        async def fill(trial: Trial) -> None:
            nonlocal read
            await self._ask(trial, 0)
            read += 1
            if read * 10 // rounds > (read - 1) * 10 // rounds:  # ten times, where a log is all that is seen
                self.tell(f"{what}: {read:,} read")

        await all_of(fill(self._trial(length)) for _ in range(rounds))

    def judged(self, least: int) -> list[Finding]:
        """Findings so far; ``least``: documents that a PASS needs."""
        if not self.found:
            return [Finding(0, "same answer in every situation", "INCONCLUSIVE", note="nothing was asked")]
        bad = [one for one in self.found if one.verdict == "different"]
        ties = sum(one.verdict == "tie" for one in self.found)
        documents = len({one.document for one in self.found if not one.empty})
        note = "; ".join(f"{one.name}: {_what(one)}" for one in bad[:3])
        enough = documents >= least
        if not bad and not enough:
            note = f"{documents} of {least} documents were answered with anything that can be compared"
        findings = [
            Finding(
                0,
                "same answer in every situation",
                "FAIL" if bad else "PASS" if enough else "INCONCLUSIVE",
                float(len(bad)),
                limit=0.0,
                samples=len(self.found),
                needed=None if bad or enough or not documents else len(self.found) * least // documents,
                note=note,
            ),
            *self._distances(),
            Finding(0, "ties", None, float(ties), samples=len(self.found)),
        ]
        return [*findings, *self._reuse()]

    def _distances(self) -> list[Finding]:
        """What was told of the tokens, against the limits."""
        found = [one.apart for one in self.found if one.apart is not None]
        if not found:
            reason = self.abilities.without.get("logprobs", "none were told")
            note = f"not run: no log-probabilities ({reason})"
            return [Finding(0, self.rule.gap_name, "INCONCLUSIVE", note=note)]
        positions = sum(one.positions for one in found)
        mean = sum(one.total for one in found) / positions if positions else 0.0
        return [
            _within(self.rule.gap_name, max(one.gap for one in found), self.rule.gap, len(found)),
            _within("moved", max(one.moved for one in found), self.rule.moved, positions),
            _within("moved_mean", mean, self.rule.mean, positions),
        ]

    def _reuse(self) -> list[Finding]:
        told = [one.cached[1] for one in self.found if one.cached[1] is not None]
        if not self.abilities.cached_told:
            self._note("the server does not tell cached_tokens: whether anything was reused is not known")
            return []
        if not any(told):
            self._note("the server reused nothing, so that cold and warm are the same thing here")
        if not self.abilities.salt:
            self._note("the server takes no cache_salt: no question was read cold a second time")
        return [Finding(0, "most tokens reused", None, float(max(told, default=0)), samples=len(told))]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def result(self, least: int, sampling: Sequence[Finding]) -> LevelResult:
        """The level, with what the sampler's examination found."""
        return LevelResult(0, (*self.judged(least), *sampling), notes=tuple(self.notes))


def _within(name: str, value: float, limit: float | None, samples: int) -> Finding:
    """Judged by its limit, told where there is none."""
    verdict: Verdict | None = None if limit is None else "PASS" if value <= limit else "FAIL"
    return Finding(0, name, verdict, value, limit=limit, samples=samples)


def _what(one: Compared) -> str:
    if one.texts[0] != one.texts[1]:
        return f"{one.texts[0][:80]!r} became {one.texts[1][:80]!r} ({one.document})"
    if one.apart is None:
        return f"the same text ended or was reasoned otherwise ({one.document})"
    if one.apart.gap == math.inf:
        return f"at one position no told token is the same ({one.document})"
    return f"a log-probability moved by {one.apart.gap:.2g}, {one.apart.moved:.2g} of the probability ({one.document})"
