"""Seeded, offline workloads for benchmarks and quality gates: what is asked, how long it is, and what is right.

    build("documents", {"isl": "64K", "tokenizer": folder, "questions": 4}) -> Workload

Asks are made when they are taken: documents of a million tokens do not stand in memory together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from longread.measure.workloads import agent, chat, custom, documents, mixed, random_ids, security, trace
from longread.measure.workloads.answers import Scored, score
from longread.measure.workloads.ask import Ask, Expected, Workload
from longread.measure.workloads.options import Option, Settings, settings
from longread.spec.errors import ConfigError

__all__ = ["KINDS", "Ask", "Expected", "Kind", "Scored", "Workload", "build", "score"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A workload by name: what may be set, and what it is, in a line."""

    options: Sequence[Option]
    build: Callable[[Settings], Workload]
    about: str


KINDS: Final[Mapping[str, Kind]] = {
    "documents": Kind(documents.OPTIONS, documents.build, "long documents with questions whose answers are known"),
    "chat": Kind(chat.CHAT_OPTIONS, chat.build_chat, "short turns of varied lengths"),
    "shared-prefix": Kind(chat.SHARED_OPTIONS, chat.build_shared, "short questions behind a long system prompt"),
    "agent": Kind(agent.OPTIONS, agent.build, "sessions whose prefix grows, with tools, calls and results"),
    "mixed": Kind(mixed.OPTIONS, mixed.build, "short chats beside long documents"),
    "security": Kind(security.OPTIONS, security.build, "code to audit and logs to triage, with planted findings"),
    "random": Kind(random_ids.OPTIONS, random_ids.build, "random token ids, as vLLM's random dataset"),
    "trace": Kind(trace.OPTIONS, trace.build, "a Mooncake trace: its arrivals, lengths and shared blocks"),
    "custom": Kind(custom.OPTIONS, custom.build, "your own prompts from a file"),
}


def build(name: str, options: Mapping[str, object] | None = None) -> Workload:
    """The workload ``name``. Values may be texts, as on a command line. Raises ConfigError for an unknown name or
    option, a value outside its limits, and a file that cannot be used.
    """
    kind = KINDS.get(name)
    if kind is None:
        near = get_close_matches(name, KINDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no workload {name[:60]!r}{hint} (all: {', '.join(KINDS)})")
    return kind.build(settings(name, kind.options, options or {}))
