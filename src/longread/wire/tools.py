"""One block of tool calls in the output, letter by letter: the markup of each family to names and JSON arguments.

Knows one block, from its opening tag to whatever ends it; what stands around it is ``parsing``'s. Text that is no
markup goes back through the sink, so nothing is lost. Three syntaxes (facts: models.md section 10):

- "fenced" (V3, R1): ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, newline, arguments in a json fence;
- "bare" (V3.1): ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments``;
- DSML (V3.2, V4, V4.1): one tag a parameter, each raw or JSON; arguments written as JSON inside the call are taken too.

Inside a JSON string an end tag is text. Where that string never ends (malformed JSON), the first such tag was the end
after all; that is known only when the output ends, so what follows the tag is held until then. A DSML value that claims
to be JSON and is not becomes a JSON string, so complete DSML calls always have valid arguments. Arguments of a call
that is cut off stay cut off: they must not look callable.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Protocol

import orjson

from longread.wire.detokenize import earliest, held_suffix
from longread.wire.encoding import ToolSyntax, dsml
from longread.wire.encoding.v3 import CALL, CALLS, END_CALL, END_CALLS, SEP

MAX_HEAD = 1024
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_STRING_END = re.compile(r'["\\]')
_NAME = re.compile(r'\s*name="([^"]+)"\s*')
_PARAMETER = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*')
_FENCE = "```json\n"


class Sink(Protocol):
    """Where a block's findings go, in order."""

    def start(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def end(self) -> None: ...
    def text(self, text: str) -> None: ...


def openers(syntax: ToolSyntax) -> tuple[str, ...]:
    """The tags that open a block; models leave the outer one out at times, so the call's own tag opens one too. DSML's
    blank line before belongs to the tag.
    """
    if isinstance(syntax, dsml.Names):
        tags = (syntax.open(syntax.block) + ">", syntax.open(syntax.invoke) + " ")
        return tags + tuple("\n\n" + tag for tag in tags)
    return (CALLS, CALL)


def closer(syntax: ToolSyntax) -> str:
    """The tag that ends a block."""
    return syntax.close(syntax.block) if isinstance(syntax, dsml.Names) else END_CALLS


class ToolBlock:
    """A state machine over a small buffer. ``done``: the block is over and ``rest`` belongs to the text around it.

    ``known``: where given, a call of another name is text (inside reasoning, where markup may be a quotation); None:
    any name is a call, which the client can answer with an error.
    """

    def __init__(self, syntax: ToolSyntax, sink: Sink, opener: str, known: Collection[str] | None):
        self._syntax = syntax
        self._sink = sink
        self._known = known
        self._pending = opener
        self._calls = 0
        self._junk = False
        self._parameters = 0
        self._value: list[str] = []
        self._in_string = False
        self._held_from: int | None = None
        self._string = ""  # of a JSON value: see ``_string_after``
        self.rest = ""
        self.done = False
        self.closed = False
        names = syntax if isinstance(syntax, dsml.Names) else None
        self._call_open = names.open(names.invoke) + " " if names else CALL
        self._call_close = names.close(names.invoke) if names else END_CALL
        self._param_open = names.open(names.parameter) + " " if names else ""
        self._param_close = names.close(names.parameter) if names else ""
        fences = ("\n```", "```", "\n```\n", "```\n")
        fenced = tuple(fence + END_CALL for fence in fences) if syntax == "fenced" else ()
        self._args_close = (self._call_close, *fenced, closer(syntax))
        self._state: Callable[[], bool] = self._between
        if opener.lstrip("\n") == self._call_open:
            self._state = self._head

    def feed(self, text: str) -> None:
        """Take text of any size; what became certain goes to the sink."""
        self.rest += text
        while not self.done and self._state():
            pass

    def finish(self, *, truncated: bool) -> None:
        """The output ended inside the block. ``truncated``: by a limit, not by the model; then nothing is completed."""
        while not self.done and self._recover():
            while not self.done and self._state():
                pass
        if self.done:
            return
        rest, self.rest = self.rest, ""
        self.done = True
        if self._state == self._head or (self._state == self._between and not self._calls):
            self._sink.text(self._pending + rest)
        elif self._state == self._text_value:
            self._sink.arguments(_escape(rest))
        elif self._state == self._json_value:
            self._sink.arguments("".join(self._value) + rest)
        elif self._state == self._json_args:
            if _is_json("".join(self._value)):  # whole already; the rest is the beginning of an end tag
                self._sink.end()
            else:
                self._sink.arguments(rest)
        elif self._state == self._body:
            self._trailing(rest)
            if not truncated:
                self._close_call()
        else:
            self._trailing(rest)

    def _trailing(self, rest: str) -> None:
        """Behind a call: the beginning of a closing tag is that tag, cut off; anything else is text."""
        tags = (self._call_close, closer(self._syntax), self._call_open, self._param_open)
        if rest.strip() and not any(tag.startswith(rest.strip()) for tag in tags):
            self._sink.text(rest)

    # Between calls.

    def _between(self) -> bool:
        close = closer(self._syntax)
        body = self.rest.lstrip()
        if body.startswith(self._call_open):
            self._pending = "" if self._calls else self._pending
            self._pending += self.rest[: len(self.rest) - len(body)] + self._call_open
            self.rest = body[len(self._call_open) :]
            self._state = self._head
        elif body.startswith(close):
            if not self._calls:
                self._sink.text(self._pending + self.rest[: len(self.rest) - len(body)] + close)
            self.rest = body[len(close) :]
            self.done = self.closed = True
        elif not body or self._call_open.startswith(body) or close.startswith(body):
            return False
        else:
            if not self._calls:
                self._sink.text(self._pending)
            self.done = True
        return not self.done

    # The head of a call, up to its arguments.

    def _head(self) -> bool:
        parts = self._split_head()
        if parts is None:
            return False if len(self.rest) <= MAX_HEAD + len(_FENCE) else self._no_call()
        name, behind, head = parts
        if not name or len(head) > MAX_HEAD or (self._known is not None and name not in self._known):
            return self._no_call()
        self.rest = behind
        self._pending = ""
        self._calls += 1
        self._parameters = 0
        self._value = []
        self._in_string = self._junk = False
        self._sink.start(name)
        self._state = self._body if isinstance(self._syntax, dsml.Names) else self._json_args
        return True

    def _no_call(self) -> bool:
        """What looked like a call is text; the text around the block goes on from there."""
        self._sink.text(self._pending)
        self.done = True
        return False

    def _split_head(self) -> tuple[str, str, str] | None:
        """Name (empty where malformed), what follows the head, and the head itself; None: not complete yet."""
        if isinstance(self._syntax, dsml.Names):
            end = self.rest.find(">")
            if end < 0:
                return None
            match = _NAME.fullmatch(self.rest[:end])
            return match[1] if match else "", self.rest[end + 1 :], self.rest[: end + 1]
        before, sep, behind = self.rest.partition(SEP)
        if not sep:
            return None
        if self._syntax == "bare":
            return before.strip(), behind, before + sep
        if before.strip() != "function":  # the only type there is; anything else would be lost with the head
            return "", behind, before + sep
        name, newline, body = behind.partition("\n")
        if not newline or (len(body) < len(_FENCE) and _FENCE.startswith(body)):
            return None
        if body.startswith(_FENCE):
            return name.strip(), body[len(_FENCE) :], before + sep + name + newline + _FENCE
        return name.strip(), body, before + sep + name + newline

    # Arguments in one JSON text.

    def _json_args(self) -> bool:
        """Stream JSON up to an end tag outside its strings."""
        if self._held_from is not None:
            return self._held_string()
        if self._in_string:
            return self._string_part()
        found = earliest(self.rest, ('"', *self._args_close))
        if found is None:
            keep = held_suffix(self.rest, self._args_close)
            self._pass(len(self.rest) - keep)
            return False
        at, word = found
        if word == '"':
            self._pass(at + 1)
            self._in_string = True
            return True
        self._pass(at)
        if word != closer(self._syntax):  # a missing end of the call: the block's end stands in for it
            self.rest = self.rest[len(word) :]
        self._sink.end()
        self._state = self._between
        return True

    def _string_part(self) -> bool:
        """Inside a string: up to its end, an escape, or an end tag, which is held with all that follows."""
        tag = self.rest.find(self._call_close)
        match = _STRING_END.search(self.rest)
        if match is not None and (tag < 0 or match.start() < tag):
            if match[0] == "\\":
                if len(self.rest) < match.end() + 1:
                    self._pass(match.start())
                    return False
                self._pass(match.end() + 1)
            else:
                self._pass(match.end())
                self._in_string = False
            return True
        if tag >= 0:
            self._pass(tag)
            self._held_from = 0
            return True
        self._pass(len(self.rest) - held_suffix(self.rest, (self._call_close,)))
        return False

    def _held_string(self) -> bool:
        """The string with an end tag in it goes on until a quote; only then was the tag text."""
        at = _IN_STRING.match(self.rest, self._held_from or 0)
        end = at.end() if at else 0
        if self.rest[end : end + 1] != '"':
            self._held_from = end
            return False
        self._held_from = None
        self._pass(end + 1)
        self._in_string = False
        return True

    def _pass(self, size: int) -> None:
        if size:
            text, self.rest = self.rest[:size], self.rest[size:]
            self._value.append(text)
            self._sink.arguments(text)

    # DSML parameters.

    def _body(self) -> bool:
        """Between the tags of a call: parameters, or the whole arguments as one JSON object."""
        close, block_close = self._call_close, closer(self._syntax)
        if not self._parameters and not self._junk and self.rest.lstrip().startswith("{"):
            self.rest = self.rest.lstrip()
            self._state = self._json_args
            return True
        words = (self._param_open, close, self._call_open, block_close)
        found = earliest(self.rest, words)
        size = found[0] if found else len(self.rest) - held_suffix(self.rest, words)
        if self._junk or self.rest[:size].strip():
            self._sink.text(self.rest[:size])
            self.rest = self.rest[size:]
            self._junk = True
        elif found:
            self.rest = self.rest[size:]
        if not found:
            return False
        if found[1] == self._param_open:
            self.rest = self.rest[len(self._param_open) :]
            self._state = self._param_head
            return True
        if found[1] == close:
            self.rest = self.rest[len(close) :]
        self._close_call()
        self._state = self._between
        return True

    def _close_call(self) -> None:
        self._sink.arguments("}" if self._parameters else "{}")
        self._sink.end()

    def _param_head(self) -> bool:
        end = self.rest.find(">")
        if end < 0 and len(self.rest) <= MAX_HEAD:
            return False
        match = _PARAMETER.fullmatch(self.rest[:end]) if 0 <= end <= MAX_HEAD else None
        if match is None:
            self._sink.text(self._param_open)
            self._junk = True
            self._state = self._body
            return True
        self.rest = self.rest[end + 1 :]
        self._junk = False
        self._sink.arguments((", " if self._parameters else "{") + _quote(match[1]) + ": ")
        self._parameters += 1
        self._value = []
        self._string = ""
        self._held_from = None
        if match[2] == "true":
            self._sink.arguments('"')
            self._state = self._text_value
        else:
            self._state = self._json_value
        return True

    def _text_value(self) -> bool:
        at = self.rest.find(self._param_close)
        size = at if at >= 0 else len(self.rest) - held_suffix(self.rest, (self._param_close,))
        self._sink.arguments(_escape(self.rest[:size]))
        self.rest = self.rest[size:]
        if at < 0:
            return False
        self.rest = self.rest[len(self._param_close) :]
        self._sink.arguments('"')
        self._state = self._body
        return True

    def _json_value(self) -> bool:
        """Collected whole: only at its end is it known whether it is JSON. Each letter is looked at once."""
        at = self.rest.find(self._param_close)
        if at < 0:
            self._collect(self.rest[: len(self.rest) - held_suffix(self.rest, (self._param_close,))])
            return False
        self._collect(self.rest[:at])
        if self._string:
            if self._held_from is None:
                self._held_from = sum(map(len, self._value))
            self._collect(self._param_close)
            return True
        self.rest = self.rest[len(self._param_close) :]
        self._end_value("".join(self._value))
        return True

    def _collect(self, text: str) -> None:
        """The next letters of a value, from ``rest``."""
        self.rest = self.rest[len(text) :]
        self._value.append(text)
        self._string = _string_after(text, self._string)

    def _end_value(self, value: str) -> None:
        self._sink.arguments(value.strip() if _is_json(value) else _quote(value))
        self._held_from = None
        self._state = self._body

    def _recover(self) -> bool:
        """At the end of the output: an end tag that was held for standing in a string was the end after all."""
        if self._held_from is None:
            return False
        if self._state == self._json_value:
            value = "".join(self._value)
            self.rest = value[self._held_from + len(self._param_close) :] + self.rest
            self._end_value(value[: self._held_from])
        else:
            self.rest = self.rest[len(self._call_close) :]
            self._sink.end()
            self._held_from = None
            self._state = self._between
        return True


def _string_after(text: str, state: str) -> str:
    """Where JSON stands behind ``text``: "" outside its strings, a quote in one, a backslash in an escape."""
    at = 0
    while at < len(text):
        if state == "\\":
            at, state = at + 1, '"'
        elif state:
            match = _STRING_END.search(text, at)
            if match is None:
                return state
            at, state = match.end(), "" if match[0] == '"' else "\\"
        else:
            at = text.find('"', at) + 1
            if not at:
                return ""
            state = '"'
    return state


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
