"""Level 0's other half: is the temperature honoured, and does a seed repeat?

From log-probabilities at one position follow those of the drawn tokens at any temperature T: p^(1/T), normalised. The
likelihood of the tokens that a server drew gives an interval for the temperature that it really used; the one asked for
must lie in it. Knows the client; the arithmetic is pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from longread.measure.gate.abilities import Abilities
from longread.measure.gate.capture import all_of
from longread.measure.gate.client import Answer, Client
from longread.measure.gate.distribution import Position, known
from longread.measure.gate.verdict import Finding, Verdict
from longread.measure.reading import write

ASKED = (1.0, 0.5)  # temperatures
GRID = tuple(0.04 * 1.03**i for i in range(190))  # 0.04 .. 10.7
LIKELIHOOD = 5.41  # half of chi-square's 99.9 % quantile at one degree of freedom: one false alarm in 1000
SHARP = 1.6  # the interval must tell a temperature from this many times it
BATCH, MOST_DRAWS = 16, 256
GREEDY = 8  # draws at temperature 0
PLACES = 24  # beginnings of a text among which an open next token is looked for
BEST_SHARE = (0.08, 0.8)  # of the most probable token at a place that tells something
SEEDS, SEED_TOKENS = 4, 24
LINES = 30


@dataclass(frozen=True, slots=True)
class Heat:
    """The temperature that draws look like: most likely value, and the interval."""

    value: float
    low: float
    high: float


def heat(position: Position, drawn: Sequence[str]) -> Heat | None:
    """From a position's distribution and the tokens drawn there; those outside the told ones are left out (that they
    were told does not depend on the draw). None where nothing is left.
    """
    logprobs = [math.log(p) for p in known(position).values() if p > 0]
    told = known(position)
    kept = [math.log(told[token]) for token in drawn if token in told]
    if not kept or len(logprobs) < 2:
        return None
    total = math.fsum(kept)

    def likelihood(temperature: float) -> float:
        top = max(logprobs) / temperature
        norm = top + math.log(math.fsum(math.exp(value / temperature - top) for value in logprobs))
        return total / temperature - len(kept) * norm

    found = [(likelihood(temperature), temperature) for temperature in GRID]
    best, value = max(found)
    inside = [temperature for one, temperature in found if one >= best - LIKELIHOOD]
    return Heat(value, min(inside), max(inside))


def spread(position: Position) -> float:
    """Variance of the log-probability of a drawn token: what one draw tells about the temperature."""
    told = [p for p in known(position).values() if p > 0]
    total = math.fsum(told)
    mean = math.fsum(p * math.log(p) for p in told) / total
    return math.fsum(p * (math.log(p) - mean) ** 2 for p in told) / total


def judge_heat(asked: float, found: Heat | None, draws: int) -> Finding:
    """FAIL where the temperature asked for is outside; PASS where the interval is also sharp enough to say so."""
    name = f"temperature {asked:g}"
    if found is None:
        return Finding(
            0, name, "INCONCLUSIVE", limit=asked, samples=draws, note="no drawn token was among the told ones"
        )
    inside = found.low <= asked <= found.high
    sharp = found.low >= asked / SHARP and found.high <= asked * SHARP
    wide = max(math.log(found.high / asked), math.log(asked / found.low)) / math.log(SHARP) if inside else 0.0
    needed = None if not inside or sharp else max(draws + 1, math.ceil(draws * wide**2))
    verdict: Verdict = "FAIL" if not inside else "PASS" if sharp else "INCONCLUSIVE"
    note = "the drawn tokens do not follow the log-probabilities at that temperature" if not inside else ""
    return Finding(0, name, verdict, found.value, found.low, found.high, asked, draws, needed, note)


class Sampler:
    """Examines one server's sampling."""

    def __init__(
        self, client: Client, abilities: Abilities, fresh: int, evidence: Callable[[Mapping[str, object]], None]
    ):
        self.client, self.abilities, self.fresh, self.evidence = client, abilities, fresh, evidence

    async def run(self) -> list[Finding]:
        """All findings."""
        if not self.abilities.text_prompts:
            reason = self.abilities.without.get("text prompts", "no log-probabilities")
            return [Finding(0, "temperature", "INCONCLUSIVE", note=f"not run: /v1/completions: {reason}")]
        place = await self._open_place()
        if place is None:
            note = "not run: no place was found where the next token is open"
            return [Finding(0, "temperature", "INCONCLUSIVE", note=note)]
        prompt, position = place
        findings = [await self._greedy(prompt, position)]
        for asked in ASKED:
            findings.append(await self._heat(prompt, position, asked))
        findings.append(await self._seeds(prompt))
        return findings

    async def _one(self, prompt: str, temperature: float, seed: int | None, tokens: int = 1) -> Answer:
        fields: dict[str, object] = {"max_tokens": tokens, "temperature": temperature, "top_p": 1}
        if seed is not None and self.abilities.seed:
            fields["seed"] = seed
        return await self.client.complete(prompt, logprobs=self.abilities.completion_top, **fields)

    async def _open_place(self) -> tuple[str, Position] | None:
        """The beginning of a text whose next token tells most about the temperature, of those that are open at all."""
        text = write(self.fresh, LINES, "en", "contract").text
        words = [i for i in range(1, len(text)) if text[i].isspace()][20:]
        cuts = sorted(Random(self.fresh).sample(words, min(PLACES, len(words))))
        answers = await all_of(self._one(text[:cut], 0, None) for cut in cuts)
        found = []
        for cut, answer in zip(cuts, answers, strict=True):
            if answer.positions and len(answer.positions[0].top) > 1:
                position = answer.positions[0]
                if BEST_SHARE[0] <= math.exp(position.top[0][1]) <= BEST_SHARE[1]:
                    found.append((spread(position), cut, position))
        if not found:
            return None
        _, cut, position = max(found, key=lambda one: one[0])
        return text[:cut], position

    async def _greedy(self, prompt: str, position: Position) -> Finding:
        answers = await all_of(self._one(prompt, 0, seed) for seed in range(GREEDY))
        drawn = [answer.positions[0].token for answer in answers if answer.positions]
        others = [token for token in drawn if token != position.best]
        tied = all((position.of(token) or -99.0) >= position.top[0][1] - 0.05 for token in others)
        verdict: Verdict = "PASS" if not others or tied else "FAIL"
        note = f"{others[0]!r} was drawn where {position.best!r} is the most probable" if others else ""
        if verdict == "PASS" and len(drawn) < GREEDY:
            verdict, note = "INCONCLUSIVE", f"{len(drawn)} of {GREEDY} draws were told"
        self._keep(0.0, drawn)
        return Finding(0, "temperature 0", verdict, float(len(others)), limit=0.0, samples=len(drawn), note=note)

    async def _heat(self, prompt: str, position: Position, asked: float) -> Finding:
        """Draw in batches until the interval decides."""
        drawn: list[str] = []
        finding = judge_heat(asked, None, 0)
        while len(drawn) < MOST_DRAWS:
            first = 1000 + len(drawn)
            answers = await all_of(self._one(prompt, asked, self.fresh % 2**31 + first + i) for i in range(BATCH))
            drawn += [answer.positions[0].token for answer in answers if answer.positions]
            finding = judge_heat(asked, heat(position, drawn), len(drawn))
            if finding.verdict != "INCONCLUSIVE" or len(drawn) < BATCH:
                break
        self._keep(asked, drawn)
        return finding

    async def _seeds(self, prompt: str) -> Finding:
        """The same seed twice, one request at a time so that both meet the same batch."""
        name = "a seed repeats"
        if not self.abilities.seed:
            note = f"not run: {self.abilities.without.get('seed', 'no seed')}"
            return Finding(0, name, "INCONCLUSIVE", note=note)
        texts = []
        for _ in range(2):
            texts.append([(await self._one(prompt, 1.0, seed, SEED_TOKENS)).text for seed in range(SEEDS)])
        same = sum(a == b for a, b in zip(*texts, strict=True))
        self.evidence({"level": 0, "name": name, "texts": texts})
        if same == SEEDS:
            distinct = len(set(texts[0])) > 1
            note = "" if distinct else "but every seed gives the same text"
            return Finding(
                0, name, "PASS" if distinct else "FAIL", float(SEEDS - same), limit=0.0, samples=SEEDS, note=note
            )
        verdict: Verdict = "INCONCLUSIVE" if same else "FAIL"
        note = f"{same} of {SEEDS} seeds repeated" + ("; kernels that sum by batch shape do that" if same else "")
        return Finding(0, name, verdict, float(SEEDS - same), limit=0.0, samples=SEEDS, note=note)

    def _keep(self, temperature: float, drawn: Sequence[str]) -> None:
        self.evidence({"level": 0, "name": f"temperature {temperature:g}", "drawn": list(drawn)})
