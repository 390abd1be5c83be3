"""Bytes of a file somebody sent, as lines that are safe to look at and to print.

Knows: encodings, terminal colours, lengths. Must not know: what a file is.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from longread.spec.errors import ConfigError

FILE_BYTES = 64 * 2**20  # of one file; of a longer log its two ends are read, other kinds are refused
HEAD_BYTES = 16 * 2**20
STRUCTURED_BYTES = 16 * 2**20  # XML, JSON and tables: eight GPUs take 0.2 MB
LINE_CHARACTERS = 4096
VALUE_CHARACTERS = 400
COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Saved:
    """``data``: UTF-8, of a long file its beginning and end. ``skipped``: bytes left out between; ``skipped_lines`` is
    not known. ``size``: of the file.
    """

    name: str
    data: bytes
    size: int
    skipped: int = 0

    def lines(self) -> list[str]:
        """Without colours and control characters, each cut at 4,096 characters."""
        return [clean(line) for line in self.data.decode("utf-8", "replace").split("\n")]


def read_file(path: Path) -> Saved:
    """ConfigError for what is no regular file, cannot be read, is empty or binary. Never waits for a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--from {path}: {reason}") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--from {path}: not a regular file; save what it gives into one first")
        data, skipped = _both_ends(handle, status.st_size)
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror}") from None
    finally:
        os.close(handle)
    data = _utf8(data)
    if not data.strip():
        raise ConfigError(f"--from {path}: the file is empty")
    if b"\0" in data[:65536]:
        raise ConfigError(f"--from {path}: a binary file, not text (is it compressed? unpack it first)")
    return Saved(name=str(path), data=data, size=status.st_size, skipped=skipped)


def _both_ends(handle: int, size: int) -> tuple[bytes, int]:
    """All of a file, or its beginning and its end in whole lines, and how much is left out between."""
    with os.fdopen(handle, "rb", closefd=False) as file:
        if size <= FILE_BYTES:
            return file.read(FILE_BYTES), 0
        head = file.read(HEAD_BYTES)
        file.seek(size - (FILE_BYTES - HEAD_BYTES))
        tail = file.read(FILE_BYTES - HEAD_BYTES)
    return head[: head.rfind(b"\n") + 1] + tail[tail.find(b"\n") + 1 :], size - FILE_BYTES


def _utf8(data: bytes) -> bytes:
    """PowerShell writes UTF-16 with a byte order mark."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data.removeprefix(b"\xef\xbb\xbf")


def clean(line: str, at_most: int = LINE_CHARACTERS) -> str:
    """One line without colours; what a terminal could take for a command becomes a space."""
    text = line[: at_most + 200]
    if text.isprintable():
        return text[:at_most].rstrip()
    text = COLOURS.sub("", text)[:at_most]
    return "".join(character if character.isprintable() else " " for character in text).rstrip()


def value(text: str) -> str:
    """What a file says of one thing, cleaned and short."""
    return clean(text.strip(), VALUE_CHARACTERS).strip()
