"""The model's text to reasoning, content and tool calls, as it streams. An answer is never empty and no text is lost.

Every piece of text ends up in exactly one of the three, or is a recognised tag. The rules, each tested:

- ``</think>`` ends reasoning. Where it never comes, or nothing follows it, the reasoning is repeated as the
  content: a client that reads only content gets what there is, and streamed reasoning cannot be unsent. Not where
  the content is bound by a grammar (``repeat_reasoning`` False): prose would break what the client was promised.
- A second ``</think>`` (or a ``<think>``) is a tag as long as no content was written, later it is text.
- Markup of tool calls counts only where tools are offered; otherwise it is text.
- A call inside reasoning is a call if its name is an offered one, else it stays reasoning: it may be a quotation.
  The reasoning goes on behind the block.
- A call of an unknown name outside reasoning is a call: the client can answer it with an error.
- Malformed markup is text. A call that is cut off is ``complete = False``, its arguments as far as they came.

The result does not depend on how the text was cut into deltas.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longread.wire.detokenize import earliest, held_suffix
from longread.wire.encoding import ChatEncoding
from longread.wire.encoding.pieces import END_THINK, THINK
from longread.wire.tools import ToolBlock, closer, openers


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """``index`` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the arguments' JSON text of call ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Call ``index`` is whole."""

    index: int


ParseEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(slots=True)
class ParsedCall:
    """``complete`` False: the output ended inside the call; ``arguments`` is then no whole JSON."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """The JSON text as far as it came."""
        return "".join(self.parts)


def call_id() -> str:
    """A new call's id, in OpenAI's shape."""
    return "call_" + secrets.token_hex(12)


class OutputParser:
    """One answer. Feed text as it comes, then ``finish`` once; both return the events that became certain.

    ``in_reasoning``: the prompt ended inside ``<think>`` (``Rendered.in_reasoning``). ``tools``: names of the offered
    tools, empty for none.
    """

    def __init__(
        self,
        encoding: ChatEncoding,
        *,
        in_reasoning: bool,
        tools: Sequence[str] = (),
        make_id: Callable[[], str] = call_id,
        repeat_reasoning: bool = True,
    ):
        self._repeat_reasoning = repeat_reasoning
        self._thinks = encoding.thinks
        self._syntax = encoding.tool_syntax
        self._tools = frozenset(tools)
        self._openers = openers(self._syntax) if tools else ()
        self._markup = [*((THINK, END_THINK) if self._thinks else ()), *self._openers]
        self._begins = frozenset(word[0] for word in self._markup)
        self._make_id = make_id
        self.in_reasoning = in_reasoning
        self._buffer = ""
        self._block: ToolBlock | None = None
        self._unclosed = False
        self._spoke = {True: False, False: False}
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._events: list[ParseEvent] = []
        self.calls: list[ParsedCall] = []

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """All content so far."""
        return "".join(self._content)

    def feed(self, text: str) -> list[ParseEvent]:
        """Take a delta of any size."""
        if self._block is None and not self._buffer and not self._unclosed and self._begins.isdisjoint(text):
            self.text(text)  # no markup can begin here: most tokens come this way
            return self._take()
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self, *, truncated: bool = False) -> list[ParseEvent]:
        """The output ended. ``truncated``: at a limit or by cancelling, so an open call must not be completed."""
        while self._block is not None:  # what a block gives back may open the next one
            self._block.finish(truncated=truncated)
            while self._step():
                pass
        self.text(self._buffer)
        self._buffer = ""
        if self._repeat_reasoning and not self.calls and not self.content.strip() and self.reasoning.strip():
            self._content.append(self.reasoning)
            self._events.append(ContentDelta(self.reasoning))
        return self._take()

    def _take(self) -> list[ParseEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        if self._block is not None:
            self._block.feed(self._buffer)
            self._buffer = ""
            if not self._block.done:
                return False
            self._buffer = self._block.rest
            self._unclosed = not self._block.closed and bool(self.calls)
            self._block = None
            return bool(self._buffer)
        words = [*self._markup, closer(self._syntax)] if self._unclosed else self._markup
        found = earliest(self._buffer, words)
        if found is None:
            keep = held_suffix(self._buffer, words)
            self.text(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        at, word = found
        self.text(self._buffer[:at])
        self._buffer = self._buffer[at + len(word) :]
        if word in (THINK, END_THINK):
            self._think_tag(word)
        elif word in self._openers:
            known = self._tools if self.in_reasoning else None
            self._block = ToolBlock(self._syntax, self, word, known)
        else:
            self._unclosed = False
        return True

    def _think_tag(self, word: str) -> None:
        if self.in_reasoning and word == END_THINK:
            self.in_reasoning = False
        elif self._spoke[self.in_reasoning]:
            self.text(word)
        elif word == THINK:
            self.in_reasoning = True

    # The sink of a tool block; text outside of blocks takes the same way.

    def text(self, text: str) -> None:
        """Text that is no markup: reasoning or content, by where it stands."""
        if not text:
            return
        if text.strip():
            self._spoke[self.in_reasoning] = True
        (self._reasoning if self.in_reasoning else self._content).append(text)
        self._events.append(ReasoningDelta(text) if self.in_reasoning else ContentDelta(text))

    def start(self, name: str) -> None:
        """A call begins."""
        call = ParsedCall(self._make_id(), name)
        self.calls.append(call)
        self._events.append(ToolCallStart(len(self.calls) - 1, call.id, name))

    def arguments(self, text: str) -> None:
        """More arguments of the last call."""
        if text:
            self.calls[-1].parts.append(text)
            self._events.append(ToolArgumentsDelta(len(self.calls) - 1, text))

    def end(self) -> None:
        """The last call is whole."""
        self.calls[-1].complete = True
        self._events.append(ToolCallEnd(len(self.calls) - 1))
