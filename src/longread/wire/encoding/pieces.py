"""The rendered prompt: text in which markup is told apart from what people wrote.

A prompt is a list of pieces. Only a *markup* piece may become a special token; a text piece is tokenised as plain
text whatever it contains, so a document that quotes ``<｜User｜>`` or ``</think>`` cannot open a turn. Fixed template
text is a text piece too, and neighbouring text is joined: then the ids equal those of the whole rendered string for
every prompt in which no one quotes markup. Knows no tokenizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"


class Piece(NamedTuple):
    """A stretch of a prompt; only where ``markup`` is set may it become a special token."""

    text: str
    markup: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """``in_reasoning``: the prompt ends inside an open ``<think>``, so the output starts with reasoning."""

    pieces: tuple[Piece, ...]
    in_reasoning: bool

    @property
    def text(self) -> str:
        """The prompt as one string, for people and logs; encode ``pieces``, never this."""
        return "".join(piece.text for piece in self.pieces)


class PieceWriter:
    """Collects pieces, joining neighbouring text."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._open: list[str] = []

    def text(self, *parts: str) -> None:
        """Append plain text."""
        self._open.extend(part for part in parts if part)

    def markup(self, *tokens: str) -> None:
        """Append special tokens, each a piece of its own."""
        self._close()
        self._pieces.extend(Piece(token, True) for token in tokens)

    def mixed(self, template: str, tokens: Iterable[str]) -> None:
        """Trusted template text in which every occurrence of ``tokens`` is markup."""
        marks = list(tokens)
        while template:
            at, token = min(((template.find(t), t) for t in marks if t in template), default=(len(template), ""))
            self.text(template[:at])
            if token:
                self.markup(token)
            template = template[at + len(token) :]

    def _close(self) -> None:
        if self._open:
            self._pieces.append(Piece("".join(self._open), False))
            self._open.clear()

    def done(self) -> tuple[Piece, ...]:
        """All pieces so far."""
        self._close()
        return tuple(self._pieces)
