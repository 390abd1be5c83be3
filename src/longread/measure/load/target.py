"""Whom is asked, and an ask as the JSON body that goes there.

Knows OpenAI's two routes and what the bench adds to a body. Must not know sockets, nor when a body is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson

from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# What the bench itself decides: a body that says otherwise would make the figures mean something else.
OWN_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "max_completion_tokens")
LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class Target:
    """A server and what every request to it carries. ``base_url``: without a trailing slash ("http://host:8000").
    ``extra``: body fields that win over the ask's own. ``headers``: as sent, an Authorization among them if need be.

    Raises ConfigError for fields that the bench decides, and for a backend that it does not know.
    """

    base_url: str
    model: str
    backend: Backend = "openai-chat"
    endpoint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"backend {self.backend!r} is not known (known: {', '.join(ENDPOINTS)})")
        for name in OWN_FIELDS:
            if name in self.extra:
                raise ConfigError(f"the body's {name!r} is the bench's own and cannot be set by hand")

    @property
    def url(self) -> str:
        return self.base_url + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def local(self) -> bool:
        """Whether it is on this machine: then no proxy of the environment is asked."""
        host = urlsplit(self.base_url).hostname or ""
        return host in LOOPBACK or host.startswith("127.")

    def body(self, ask: Ask, answers: Sequence[str] = ()) -> bytes:
        """The request. ``answers``: of the session's earlier turns, put where the ask leaves room for them.

        Raises ConfigError where the ask is not of the backend's kind.
        """
        fields: dict[str, Any] = {"model": self.model, **self._content(ask, answers), "max_tokens": ask.max_tokens}
        fields |= {"temperature": 0.0, **ask.extra, **self.extra}  # greedy unless told otherwise, as vLLM's bench
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            return orjson.dumps(fields)
        except TypeError as error:
            raise ConfigError(f"ask {ask.key[:60]!r} cannot be sent as JSON: {error}") from None

    def _content(self, ask: Ask, answers: Sequence[str]) -> dict[str, Any]:
        if self.backend == "openai":
            if ask.prompt is None:
                raise ConfigError(
                    f"ask {ask.key!r} is a chat, and --backend openai sends plain prompts; use --backend openai-chat"
                )
            return {"prompt": ask.prompt}
        if ask.messages is not None:
            return {"messages": _filled(ask, answers) if ask.answers else ask.messages}
        if not isinstance(ask.prompt, str):
            raise ConfigError(
                f"ask {ask.key!r} is a prompt of token ids, which no chat can carry; use --backend openai, or a form "
                "of the workload that is text"
            )
        return {"messages": [{"role": "user", "content": ask.prompt}]}


def base_url(text: str) -> str:
    """``"host:8000"`` and ``"http://host:8000/v1"`` as "http://host:8000". Raises ConfigError for what is no URL."""
    whole = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"{text[:200]!r} is not a server's address; give it as http://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError("the address holds a user name or password; give a key as OPENAI_API_KEY or by --header")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _filled(ask: Ask, answers: Sequence[str]) -> list[Mapping[str, Any]]:
    """The messages, each assistant turn without content filled by the next answer of the session."""
    filled, used = [], 0
    for message in ask.messages or ():
        if message.get("role") == "assistant" and message.get("content") is None and "tool_calls" not in message:
            if used >= len(answers):
                raise ConfigError(f"ask {ask.key!r} wants {used + 1} earlier answers; its session has {len(answers)}")
            message = {**message, "content": answers[used]}
            used += 1
        filled.append(message)
    return filled


def warmed(ask: Ask, number: int) -> Ask:
    """``ask`` with another beginning, so that warming up does not put the measured prompts into a prefix cache."""
    mark = f"[warm-up {number}] "
    common: dict[str, Any] = {"key": f"warm-up/{number}", "max_tokens": ask.max_tokens, "kind": ask.kind}
    common |= {"extra": ask.extra, "messages": None, "prompt": None}
    if isinstance(ask.prompt, str):
        return Ask(**{**common, "prompt": mark + ask.prompt})
    if ask.prompt is not None:
        return Ask(**{**common, "prompt": (*ask.prompt[::-1][number + 1 :], *ask.prompt[: number + 1])})
    first, *rest = ask.messages or ()
    content = first.get("content")
    if isinstance(content, str):
        first = {**first, "content": mark + content}
    else:
        rest = [first, *rest]
        first = {"role": "system", "content": mark}
    return Ask(**{**common, "messages": (first, *rest)})
