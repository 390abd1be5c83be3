"""What a workload is made of: one ask, what a right answer to it says, and the sequence of them.

Knows no text, no tokenizer and no HTTP: the client sends what stands here, the scorer reads `Expected`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ExpectedKind = Literal["exact", "absent", "contains", "reference", "critical"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a right answer says.

    exact: the answer is `text` or one of `alternatives`, nothing else. contains: one of them stands in it. absent: the
    document does not hold it, and the answer must say so (`text` and `alternatives` are ways to say it). reference:
    `text` is a model answer, compared by overlap. critical: every value in `critical` must stand in the answer
    unchanged.
    """

    kind: ExpectedKind
    text: str
    alternatives: tuple[str, ...] = ()
    critical: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload: a chat (`messages`) or a completion (`prompt`, text or ids); exactly one is set.

    key: stable within a workload ("doc-3/q-1"). at: seconds from the start, where the workload fixes arrivals.
    session: asks of one session are sent one after the other, in order. think_seconds: the pause after the previous
    answer of the session. kind: what it is counted as in tables (document, chat, agent, security, short, long).
    isl: prompt tokens intended, by the workload's tokenizer; None where none was given. extra: further body fields.
    answers: True where the client puts the session's own answers in: an assistant turn that has no tool calls and whose
    content is None stands for the answer to the session's n-th ask (n counts those turns), and is filled before
    sending.
    """

    key: str
    messages: tuple[Message, ...] | None
    prompt: str | tuple[int, ...] | None
    max_tokens: int
    at: float | None = None
    session: str | None = None
    think_seconds: float = 0.0
    kind: str = "chat"
    isl: int | None = None
    expected: Expected | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    answers: bool = False

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError(f"ask {self.key!r} needs messages or a prompt, and not both")


@dataclass(slots=True)
class Workload:
    """Asks in the order in which they are sent. `asks` may build each one when it is taken (long documents do), so
    index it once per request and do not keep what came out. described: JSON for a result's provenance."""

    name: str
    seed: int
    asks: Sequence[Ask]
    described: dict[str, Any]
