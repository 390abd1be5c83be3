"""What a server said to a plan's asks, as a file: the base of a comparison, or the candidate's side of it.

JSON, versioned, with provenance. Knows no HTTP and judges nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from longread.measure.files import write_json
from longread.measure.gate.distribution import Position
from longread.measure.gate.documents import MIN_LENGTH, OWN, VERSION, Paper, Plan, Style
from longread.measure.workloads.ask import ExpectedKind
from longread.spec.errors import ConfigError

KIND = "longread-gate-base"
SCHEMA = 1
MOST_BYTES = 2 * 2**30
MOST_PAPERS, MOST_LINES = 20_000, 400_000
DIGITS = 9  # of a log-probability behind the point: near 0 float32 has so many

Logprob = Annotated[float, Field(le=0, ge=-9999)]
Pair = tuple[str, Logprob]


class FileModel(BaseModel):
    """Base of what is read from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Said(FileModel):
    """One answer. ``positions``: (token, its log-probability, best tokens). ``forced``: the candidate's positions over
    the base's answer, from position ``forced_from`` on, where the two answers are no longer the same text.
    ``prompt_ids``: fingerprint of the prompt's ids, which tells whether two tokenizers agree. ``error``: why no
    answer came.
    """

    key: str
    turn: int = Field(ge=0)
    paper: str
    length: int
    kind: str
    fingerprint: str
    levels: tuple[int, ...]
    text: str
    finish_reason: str | None
    positions: tuple[tuple[str, Logprob | None, tuple[Pair, ...]], ...] = ()
    forced: tuple[tuple[str, Logprob | None, tuple[Pair, ...]], ...] = ()
    forced_from: int = 0
    depth: float | None = None
    expected: str | None = None
    values: tuple[str, ...] = ()
    critical: bool = False
    judged: ExpectedKind | None = None
    alternatives: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached: int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_ids: str | None = None
    seconds: float = 0.0
    error: str | None = None

    @property
    def distributions(self) -> list[Position]:
        return [Position(*row) for row in self.positions]

    @property
    def forced_distributions(self) -> list[Position]:
        return [Position(*row) for row in self.forced]


class _Paper(FileModel):
    key: str
    turn: int = Field(ge=0, le=MOST_PAPERS)
    length: int = Field(ge=0, le=2**24)
    source: str = Field(pattern="^(reading|clauses|own)$")
    language: str = Field(pattern="^(en|zh)$")
    domain: str = Field(pattern="^(contract|statute|log|code|table|clauses|own)$")
    seed: int = Field(ge=0)
    lines: int = Field(ge=0, le=MOST_LINES)

    @model_validator(mode="after")
    def _has_lines(self) -> "_Paper":
        if self.source != OWN and (self.lines < 4 or self.length < MIN_LENGTH):
            raise ValueError("a document has lines and a length")
        return self


class _Plan(FileModel):
    version: int
    style: Style
    seed: int
    papers: tuple[_Paper, ...] = Field(max_length=MOST_PAPERS)
    own_sha256: str | None = None


class _File(FileModel):
    kind: str
    schema_: int = Field(alias="schema")
    provenance: dict[str, object]
    plan: _Plan
    complete: bool
    said: tuple[Said, ...]
    again: tuple[Said, ...] = ()


_FILE = TypeAdapter(_File)


@dataclass(slots=True)
class Sayings:
    """A whole file. ``provenance``: server, model, abilities, command, date. ``complete``: no ask was left out.
    ``again``: some of the asks a second time, in another order and cold: how far the server differs from itself.
    """

    provenance: dict[str, object]
    plan: Plan
    said: list[Said] = field(default_factory=list)
    complete: bool = False
    again: list[Said] = field(default_factory=list)

    def by_key(self) -> dict[str, Said]:
        return {one.key: one for one in self.said}

    def write(self, path: Path) -> None:
        """Write whole or not at all: beside, then renamed."""
        document = {
            "kind": KIND,
            "schema": SCHEMA,
            "provenance": self.provenance,
            "plan": self.plan.document(),
            "complete": self.complete,
            "said": [one.model_dump(mode="json", exclude_defaults=True) for one in self.said],
            "again": [one.model_dump(mode="json", exclude_defaults=True) for one in self.again],
        }
        write_json(path, document, indent=None)


def packed(positions: Iterable[Position]) -> tuple[tuple[str, float | None, tuple[Pair, ...]], ...]:
    """Positions as a file holds them."""
    return tuple(
        (
            one.token,
            None if one.logprob is None else round(one.logprob, DIGITS),
            tuple((token, round(value, DIGITS)) for token, value in one.top),
        )
        for one in positions
    )


def read(path: Path) -> Sayings:
    """Raises ConfigError for what is no such file, of another version or of another plan."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: larger than {MOST_BYTES // 2**30} GiB; that is no base of this command's")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a base ({error}); make one with `longread gate base`") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ConfigError(f"{path}: is no base; make one with `longread gate base`")
    if data.get("schema") != SCHEMA or (data.get("plan") or {}).get("version") != VERSION:
        raise ConfigError(
            f"{path}: written by another version (schema {data.get('schema')}, this one reads {SCHEMA}); make it anew"
        )
    try:
        found = _FILE.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: damaged at {where}: {first['msg']}") from None
    keys = {one.key for one in found.said}
    if len(keys) < len(found.said):
        raise ConfigError(f"{path}: damaged: it holds {len(found.said) - len(keys)} answers twice")
    papers = tuple(Paper(**paper.model_dump()) for paper in found.plan.papers)
    plan = Plan(found.plan.style, found.plan.seed, papers, found.plan.version, found.plan.own_sha256)
    return Sayings(dict(found.provenance), plan, list(found.said), found.complete, list(found.again))
