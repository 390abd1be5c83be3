"""Texts of others, made safe to show: a terminal obeys what it is sent, and bidirectional marks show another order.

Knows characters. Must not know terminals, nor whose text it is.
"""

import unicodedata


def printable(text: str, newline: str = "⏎") -> str:
    """``text`` with every control and format character, and bytes that are no UTF-8, written as an escape. ``newline``:
    what a line feed becomes; "\\n" keeps the lines.
    """
    if text.isprintable():
        return text
    return "".join(newline if letter == "\n" else letter if _plain(letter) else _escape(letter) for letter in text)


def _plain(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs"  # the ideographic space, for one


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
