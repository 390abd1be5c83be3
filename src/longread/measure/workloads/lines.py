"""Workloads as files of JSON lines: whole, to be read back by ``custom``, or as vLLM's custom dataset.

Knows rows and files, not what is asked.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longread.measure.files import appearing
from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError


def row(ask: Ask) -> dict[str, Any]:
    """What ``custom`` reads; what is as by default is left out."""
    found: dict[str, Any] = {"key": ask.key, "kind": ask.kind, "max_tokens": ask.max_tokens}
    if ask.messages is not None:
        found["messages"] = [dict(message) for message in ask.messages]
    else:
        found["prompt"] = list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt
    for name in ("at", "session", "isl"):
        if getattr(ask, name) is not None:
            found[name] = getattr(ask, name)
    if ask.think_seconds:
        found["think_seconds"] = ask.think_seconds
    if ask.expected is not None:
        found["expected"] = {name: value for name, value in asdict(ask.expected).items() if value != ()}
    if ask.extra:
        found["extra"] = dict(ask.extra)
    if ask.answers:
        found["answers"] = True
    return found


def vllm_row(ask: Ask) -> dict[str, Any]:
    """``prompt`` and ``output_tokens``: what ``vllm bench serve --dataset-name custom --custom-output-len -1
    --disable-shuffle`` reads, which puts its chat template around the prompt. A chat's turns are joined.

    Raises ConfigError for what it cannot carry.
    """
    if isinstance(ask.prompt, tuple):
        raise ConfigError(f"{ask.key}: vLLM's custom dataset has no token ids; take form=text")
    if ask.answers:
        raise ConfigError(f"{ask.key}: vLLM's custom dataset cannot put answers into a session; take answers=false")
    said = [str(message.get("content") or "") for message in ask.messages or ()]
    prompt = ask.prompt if ask.prompt is not None else "\n\n".join(text for text in said if text)
    return {"prompt": prompt, "output_tokens": ask.max_tokens}


def write(path: Path, asks: Sequence[Ask], form: str = "longread", tell: Callable[[int], None] | None = None) -> int:
    """One ask after the other, so that one at a time is in memory; ``tell`` hears how many are written. The file is
    there whole or not at all. Returns its bytes. Raises ConfigError.
    """
    make = {"longread": row, "vllm": vllm_row}[form]
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path}: {'is a folder; name a file' if path.is_dir() else 'its folder does not exist'}")
    if form == "vllm" and path.suffix != ".jsonl":
        raise ConfigError(f"{path}: vLLM reads its custom dataset from files whose name ends in .jsonl only")
    size = 0
    with appearing(path) as out:
        for index in range(len(asks)):
            line = json.dumps(make(asks[index]), ensure_ascii=False) + "\n"
            out.write(line)
            size += len(line.encode())
            if tell is not None:
                tell(index + 1)
    return size
