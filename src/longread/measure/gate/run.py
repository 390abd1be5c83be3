"""A gate from start to end: probe, plan, ask, judge, stop when decided; what was measured is kept whatever happens.

Knows all the parts; prints nothing and writes no file: ``Watch`` is told.
"""

import asyncio
import datetime
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import httpx

from longread.measure.gate import documents
from longread.measure.gate.abilities import Abilities, probe
from longread.measure.gate.capture import all_of, say_again, say_all
from longread.measure.gate.client import Allowance, Client
from longread.measure.gate.documents import MIN_LENGTH, Own, Plan, Style, forms, make_plan
from longread.measure.gate.errors import GateError, SpentError
from longread.measure.gate.exactness import Exactness
from longread.measure.gate.judging import judge
from longread.measure.gate.profiles import Profile
from longread.measure.gate.record import Said, Sayings
from longread.measure.gate.sampling import Sampler
from longread.measure.gate.statistics import ERROR, error_of_look
from longread.measure.gate.verdict import Finding, LevelResult, Verdict, together
from longread.measure.result import command_line, this_commit
from longread.spec.errors import ConfigError

SCHEMA = 1
LOOKS = 4  # at most, at the answers so far
EXACT_DOCUMENTS = 2  # of each length, that level 0 puts through everything
SAMPLE_LINES = 48
BUNDLED_STYLE = "reader-v"  # names of the bundled readers, which know one way of being asked
LONGEST = 2**21
MOST_TURNS = 1024
PRESSURE_TOKENS = 262_144


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user set. ``lengths`` in tokens; ``documents`` a length; ``fresh``: the seed of level 0's documents,
    None: a new one, so that no cache knows them. Raises ConfigError for what cannot work.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    documents: int = 8
    levels: tuple[int, ...] = (0, 1, 2, 3, 4)
    style: Style | None = None
    seed: int = 0
    seconds: float = 1800.0
    max_requests: int = 20_000
    timeout: float = 300.0
    concurrency: int = 4
    pressure_tokens: int = PRESSURE_TOKENS
    own: Own | None = None
    fresh: int | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {self.base_url!r} must begin with http:// or https://")
        try:
            httpx.URL(self.base_url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--base-url {self.base_url!r}: {error}") from error
        for length in self.lengths:
            if not MIN_LENGTH <= length <= LONGEST:
                raise ConfigError(f"--lengths: {length:,} is not in {MIN_LENGTH:,}..{LONGEST:,} tokens")
        if not self.lengths or len(set(self.lengths)) != len(self.lengths):
            raise ConfigError("--lengths: name each length once, and at least one")
        if not self.levels or not set(self.levels) <= {0, 1, 2, 3, 4} or len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"--levels: {list(self.levels)}; name some of 0, 1, 2, 3, 4, each once")
        for name, value, low, high in (
            ("--documents", self.documents, 1, MOST_TURNS),
            ("--budget", self.seconds, 1, 7 * 86400),
            ("--max-requests", self.max_requests, 1, 10_000_000),
            ("--timeout", self.timeout, 1, 86400),
            ("--concurrency", self.concurrency, 1, 256),
            ("--pressure-tokens", self.pressure_tokens, 0, 2**31),
            ("--seed", self.seed, 0, 2**31),
        ):
            if not math.isfinite(value) or not low <= value <= high:
                raise ConfigError(f"{name} {value:g} is not in {low:,}..{high:,}")


@dataclass
class Watch:
    """Told what happens. ``evidence``: one JSON object each; ``progress``: what is done, of how much, in words."""

    evidence: Callable[[Mapping[str, object]], None] = lambda _: None
    progress: Callable[[int, int, str], None] = lambda done, total, words: None


@dataclass(slots=True)
class Outcome:
    """A gate's result. ``stopped``: why it ended before its plan did, None: it did not."""

    profile: Profile
    levels: list[LevelResult] = field(default_factory=list)
    provenance: dict[str, object] = field(default_factory=dict)
    stopped: str | None = None
    interrupted: bool = False
    decided_after: int | None = None

    @property
    def verdict(self) -> Verdict:
        return together(level.verdict for level in self.levels)

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {
            "kind": "longread-gate",
            "schema": SCHEMA,
            "verdict": self.verdict,
            "profile": self.profile.document(),
            "stopped": self.stopped,
            "interrupted": self.interrupted,
            "levels": [
                {
                    "level": one.level,
                    "verdict": one.verdict,
                    "needed": one.needed,
                    "not_run": one.not_run,
                    "notes": list(one.notes),
                    "findings": [finding.document() for finding in one.findings],
                }
                for one in self.levels
            ],
            "provenance": self.provenance,
        }


def client_of(settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> Client:
    """With the settings' bounds, which count from now."""
    return Client(
        settings.base_url,
        Allowance(settings.max_requests, settings.seconds),
        api_key=settings.api_key,
        timeout=settings.timeout,
        concurrency=settings.concurrency,
        transport=transport,
    )


def provenance(settings: Settings, abilities: Abilities, client: Client, plan: Plan | None) -> dict[str, object]:
    """Server, model, what it can do, what was spent, and what made this."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": this_commit(),
        "command": command_line(),
        "base_url": settings.base_url,
        "model": abilities.model,
        "abilities": abilities.document(),
        "settings": {k: v for k, v in asdict(settings).items() if k not in ("api_key", "base_url", "own")},
        "plan": None
        if plan is None
        else {"style": plan.style, "seed": plan.seed, "papers": len(plan.papers), "own": plan.own_sha256},
        "requests": client.allowance.requests,
        "prompt_tokens": client.allowance.prompt_tokens,
        "output_tokens": client.allowance.output_tokens,
        "seconds": round(client.allowance.seconds - client.allowance.left, 1),
    }


async def line_rates(client: Client, style: Style) -> dict[tuple[str, str], float]:
    """Tokens a line of each form, as the server itself counts them."""

    async def one(language: str, domain: str) -> float:
        text = documents.sample(language, domain, SAMPLE_LINES)
        answer = await client.chat(({"role": "user", "content": text},), max_tokens=1, temperature=0)
        if not answer.prompt_tokens:
            raise GateError("the server does not tell usage.prompt_tokens; documents cannot be made to length")
        return answer.prompt_tokens / SAMPLE_LINES

    wanted = forms(style)
    found = await all_of(one(language, domain) for language, domain in wanted)
    return dict(zip(wanted, found, strict=True))


def style_of(settings: Settings, abilities: Abilities) -> Style:
    """As set, or by the model's name: the bundled readers were trained on plain questions, others need to be told."""
    if settings.style is not None:
        return settings.style
    return "plain" if abilities.model.startswith(BUNDLED_STYLE) else "instructed"


def check_lengths(lengths: Sequence[int], abilities: Abilities) -> None:
    """Raises ConfigError for a length that the server refuses anyway."""
    most = abilities.max_model_len
    too_long = [length for length in lengths if most is not None and length > most]
    if too_long:
        raise ConfigError(
            f"--lengths: {too_long[0]:,} tokens, but the server's max_model_len is {most:,}; leave it out"
        )


async def make_base(
    settings: Settings, like: Sayings | None, watch: Watch, transport: httpx.AsyncBaseTransport | None = None
) -> Sayings:
    """Ask one server everything, for others to be compared with. What came until the end of the time, or of the user's
    patience, is there and marked as not complete. ``like``: ask what was asked for that file.
    """
    async with client_of(settings, transport) as client:
        abilities = await probe(client, settings.model)
        if like is not None:
            check_own(settings, like.plan)
        plan = await _plan(settings, client, abilities) if like is None else like.plan
        check_lengths(plan.lengths, abilities)
        style = plan.style
        levels = frozenset(settings.levels) - {0}
        if 1 in levels and not abilities.top:
            raise GateError(
                f"the server tells no log-probabilities ({abilities.without['logprobs']}): use --levels 2,3,4"
            )
        found = Sayings({}, plan)
        try:
            for turn in range(plan.turns):
                watch.progress(turn, plan.turns, f"document {turn + 1} of {plan.turns} of each length")
                papers = plan.of_turn(turn)
                await say_all(client, abilities, papers, style, levels, None, found.said.append, settings.own)
            found.complete = True
            if 1 in levels:
                watch.progress(plan.turns, plan.turns, "the first document of each length again, for the noise")
                await say_again(client, abilities, plan.of_turn(0), style, found.again.append, settings.own)
        except SpentError as error:
            found.provenance["stopped"] = str(error)
        except asyncio.CancelledError:
            found.provenance["stopped"] = "interrupted"
        found.provenance |= provenance(settings, abilities, client, plan)
        return found


async def _plan(settings: Settings, client: Client, abilities: Abilities) -> Plan:
    check_lengths(settings.lengths, abilities)
    style = style_of(settings, abilities)
    rates = await line_rates(client, style)
    return make_plan(settings.lengths, settings.documents, style, settings.seed, rates, settings.own)


def check_own(settings: Settings, plan: Plan) -> None:
    """Raises ConfigError where a base was made with other asks of the user's than these."""
    given = None if settings.own is None else settings.own.sha256
    if given != plan.own_sha256:
        wanted = f"with --asks of sha256 {plan.own_sha256}" if plan.own_sha256 else "without --asks"
        raise ConfigError(f"the base was made {wanted}; give the same file, or make it anew")


async def run_gate(
    settings: Settings,
    profile: Profile,
    base: Sayings | None,
    watch: Watch,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Outcome:
    """The gate. An interruption (cancellation) or the end of the allowance ends the asking, not the judging."""
    if base is not None:
        check_own(settings, base.plan)
    async with client_of(settings, transport) as client:
        abilities = await probe(client, settings.model)
        lengths = settings.lengths if base is None else base.plan.lengths
        check_lengths(lengths, abilities)
        style = style_of(settings, abilities) if base is None else base.plan.style
        gate = _Gate(settings, profile, base, watch, client, abilities, style)
        await _kept(gate.outcome, gate.run)
        gate.outcome.levels = gate.judged()
        gate.outcome.provenance = provenance(settings, abilities, client, gate.plan)
        if base is not None:
            gate.outcome.provenance["base"] = {k: v for k, v in base.provenance.items() if k != "settings"}
        return gate.outcome


async def _kept(outcome: Outcome, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except SpentError as error:
        outcome.stopped = str(error)
    except asyncio.CancelledError:
        outcome.stopped, outcome.interrupted = "interrupted", True


class _Gate:
    def __init__(
        self,
        settings: Settings,
        profile: Profile,
        base: Sayings | None,
        watch: Watch,
        client: Client,
        abilities: Abilities,
        style: Style,
    ):
        self.settings, self.profile, self.watch = settings, profile, watch
        self.client, self.abilities, self.style = client, abilities, style
        self.plan: Plan | None = None if base is None else base.plan
        self.base = None if base is None else base.by_key()
        self.again = [] if base is None else base.again
        self.outcome = Outcome(profile)
        self.said: list[Said] = []
        self.levels = frozenset(settings.levels)
        self.exact: Exactness | None = None
        self.sampling: list[Finding] = []
        self.look = self.looks = 1

    async def run(self) -> None:
        rates = await line_rates(self.client, self.style)
        if 0 in self.levels:
            await self._exactness(rates)
        if self.plan is None:
            s = self.settings
            self.plan = make_plan(s.lengths, s.documents, self.style, s.seed, rates, s.own)
        if self.levels - {0}:
            await self._rounds(self.plan)

    async def _exactness(self, rates: Mapping[tuple[str, str], float]) -> None:
        fresh = secrets.randbits(30) if self.settings.fresh is None else self.settings.fresh
        self.exact = Exactness(
            self.client,
            self.abilities,
            self.profile,
            self.style,
            fresh,
            rates,
            self.settings.pressure_tokens,
            self.watch.evidence,
            lambda words: self.watch.progress(0, 1, f"level 0: {words}"),
        )
        self.watch.progress(0, 1, "level 0: the sampler")
        self.sampling = await Sampler(self.client, self.abilities, fresh, self.watch.evidence).run()
        for number in range(EXACT_DOCUMENTS):
            for length in self._lengths:
                self.watch.progress(0, 1, f"level 0: document {number + 1} of {EXACT_DOCUMENTS}, {length:,} tokens")
                await self.exact.run(length, pressure=number == 0)

    @property
    def _lengths(self) -> tuple[int, ...]:
        return self.settings.lengths if self.plan is None else self.plan.lengths

    async def _rounds(self, plan: Plan) -> None:
        """Turn by turn; looks at the answers a few times, and leaves out what is decided."""
        open_levels = self._possible()
        turns = plan.turns
        marks = sorted({max(1, math.ceil(turns * look / LOOKS)) for look in range(1, LOOKS + 1)} - {1, 2} | {turns})
        self.looks = len(marks)
        for turn in range(turns):
            self.watch.progress(turn, turns, f"document {turn + 1} of {turns} of each length")
            await say_all(
                self.client,
                self.abilities,
                plan.of_turn(turn),
                self.style,
                open_levels,
                self.base or {},
                self._keep,
                self.settings.own,
            )
            if turn + 1 in marks:
                self.look = marks.index(turn + 1) + 1
                open_levels = frozenset(level for level in open_levels if self._judge(level).verdict == "INCONCLUSIVE")
                if not open_levels:
                    self.outcome.decided_after = turn + 1
                    return

    def _possible(self) -> frozenset[int]:
        """Levels that can be asked for: without a base or log-probabilities level 1 cannot."""
        found = self.levels - {0}
        return found if self._not_run(1) is None else found - {1}

    def _not_run(self, level: int) -> str | None:
        if level == 1 and self.base is None:
            return "a base to compare with is needed (--base, made by `longread gate base`)"
        if level == 1 and not self.abilities.top:
            return f"the server tells no log-probabilities: {self.abilities.without.get('logprobs', '')}"
        if self.base is not None and not any(level in one.levels for one in self.base.values()):
            return f"the base holds no answers for level {level}; make it with --levels {level}"
        return None

    def _keep(self, said: Said) -> None:
        self.said.append(said)
        self.watch.evidence(said.model_dump(mode="json", exclude_defaults=True))

    def _judge(self, level: int) -> LevelResult:
        reason = self._not_run(level)
        if reason is not None:
            return LevelResult(level, not_run=reason)
        error = error_of_look(self.look, self.looks) if self.looks > 1 else ERROR
        return judge(level, self.said, self.base, self.profile, error, self.again)

    def judged(self) -> list[LevelResult]:
        """Every level that was asked for, from what is there."""
        out = []
        for level in sorted(self.levels):
            if level == 0:
                least = EXACT_DOCUMENTS * len(self._lengths)
                sampling = self.sampling or [Finding(0, "temperature", "INCONCLUSIVE", note="not reached")]
                empty = LevelResult(0, not_run=self.outcome.stopped or "not reached")
                out.append(empty if self.exact is None else self.exact.result(least, sampling))
            else:
                out.append(self._judge(level))
        return out


def compare_files(base: Sayings, candidate: Sayings, profile: Profile) -> Outcome:
    """Levels 1 to 4 of two files made by ``make_base``; no server is asked. Raises ConfigError where their plans
    differ.
    """
    if base.plan != candidate.plan:
        raise ConfigError(
            "the two files answer different plans (other lengths, seeds, style or lines); make the second one with "
            "`longread gate base --like FIRST`"
        )
    before = base.by_key()
    outcome = Outcome(profile, provenance={"base": base.provenance, "candidate": candidate.provenance})
    levels = sorted({level for one in base.said for level in one.levels})
    outcome.levels = [judge(level, candidate.said, before, profile, ERROR, base.again) for level in levels]
    outcome.levels = [_whole(one, base, candidate) for one in outcome.levels]
    if not (base.complete and candidate.complete):
        outcome.stopped = "one of the files is not complete"
    return outcome


def _whole(result: LevelResult, base: Sayings, candidate: Sayings) -> LevelResult:
    """A level of a comparison of files passes only where all that the base holds has been asked: what a file leaves
    out, for whatever reason, may be what differs.
    """
    there = {one.key for one in candidate.said}
    wanted = [one.key for one in base.said if result.level in one.levels]
    missing = [key for key in wanted if key not in there]
    if not missing or result.not_run is not None:
        return result
    note = f"{len(missing)} of {len(wanted)} asks are not in the candidate's file (first: {missing[0]})"
    lacking = Finding(result.level, "asks that are missing", "INCONCLUSIVE", float(len(missing)), note=note)
    return replace(result, findings=(lacking, *result.findings))
