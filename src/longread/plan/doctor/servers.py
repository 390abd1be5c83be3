"""Model servers that run on this machine, by their command lines.

Knows: how each engine is started. Must not know: what its options mean. Values of options that may hold a secret are
left out.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import psutil

from longread.plan.doctor.facts import Server

SECRET = re.compile(r"^--?[\w-]*(key|token|secret|password)[\w-]*$", re.IGNORECASE)


def read_servers() -> tuple[Server, ...]:
    """Of processes that this user may look at."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        server = recognise(process.info["cmdline"] or (), process.info["pid"])
        if server is not None:
            found.append(server)
    return tuple(found)


def recognise(command: Sequence[str], pid: int | None = None) -> Server | None:
    """A process's words as a server, or None. Workers that an engine starts have titles of their own: not counted."""
    words = list(command)
    for at, word in enumerate(words):
        program = word.rsplit("/", 1)[-1]
        following = words[at + 1] if at + 1 < len(words) else ""
        engine: Literal["longread", "vllm", "sglang"] | None = None
        if program in ("vllm", "longread", "sglang") and following == "serve":
            engine, skip = ("vllm" if program == "vllm" else "longread" if program == "longread" else "sglang"), 2
        elif word == "-m" and following.startswith("vllm.entrypoints"):
            engine, skip = "vllm", 2
        elif word == "-m" and following == "sglang.launch_server":
            engine, skip = "sglang", 2
        if engine is not None:
            return Server(engine=engine, arguments=tuple(_without_secrets(words[at + skip :])), pid=pid)
        if at >= 3:  # an interpreter and its options come first, a server's name soon or never
            break
    return None


def _without_secrets(arguments: Iterable[str]) -> list[str]:
    kept: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide and not argument.startswith("--"):
            kept.append("(hidden)")
            continue
        hide = bool(SECRET.match(name)) and not equals
        kept.append(f"{name}=(hidden)" if equals and SECRET.match(name) else argument)
    return kept
