"""One file to one text: UTF-8 text and Markdown as they are, PDF and DOCX through their libraries.

Knows formats, bytes and paths; must not know folders, prompts or stores. A text file's text is exactly its characters
(line ends included), so that whoever sends the same characters sends the same prompt; only a byte order mark is
dropped. The libraries for PDF and DOCX are an extra; they run in a process of their own.
"""

from dataclasses import dataclass
from pathlib import Path

from longread.spec.documents import MAX_NAME
from longread.spec.errors import DocumentError
from longread.wire.documents.apart import parse_apart

MAX_BYTES = 256 << 20  # of one file; longer than any context, and what a mistyped path could name is longer still
_BINARY_PROBE = 8192
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A read document. ``notes`` tell what of the source is not in the text, for the person who reads it in."""

    name: str
    text: str
    notes: tuple[str, ...] = ()


def printable(name: str) -> str:
    """A name as it can be shown and stored: control characters, and bytes that are no UTF-8, as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in name
    )


def read_file(path: Path) -> DocumentText:
    """Raises DocumentError: no such file, too large, binary, not UTF-8, damaged, or no library for its format."""
    shown = printable(str(path))
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise DocumentError(f"{shown}: {'not a regular file' if path.exists() else 'no such file'}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DocumentError(f"{shown}: has {size:,} bytes, a document may have {MAX_BYTES:,}: split it")
        return read_bytes(path.read_bytes(), printable(path.name)[:MAX_NAME], shown)
    except OSError as error:
        raise DocumentError(f"{shown}: cannot be read: {error.strerror or error}") from error


def read_bytes(data: bytes, name: str, shown: str) -> DocumentText:
    """The same for a file's content. Its first bytes, not its name, say what it is. ``shown``: its name in errors."""
    if data.startswith(b"%PDF-"):
        return _parsed("PDF", data, name, shown)
    if data.startswith(b"PK\x03\x04"):
        return _parsed("DOCX", data, name, shown)
    return DocumentText(name, decode(data, shown))


def decode(data: bytes, shown: str) -> str:
    """A text file's characters. Raises DocumentError where it is binary, or no UTF-8."""
    if binary(data):
        raise DocumentError(f"{shown}: is a binary file; text, Markdown, source code, PDF and DOCX can be read")
    encoding = "utf-8"
    for mark, marked in _MARKS:
        if data.startswith(mark):
            data, encoding = data[len(mark) :], marked
            break
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{shown}: is not UTF-8 at byte {error.start:,} of {len(data):,}; convert it first, for example by "
            "`iconv -f GB18030 -t UTF-8`"
        ) from None


def binary(data: bytes) -> bool:
    """Whether the first bytes are no text's: a NUL, where no byte order mark explains it."""
    return b"\0" in data[:_BINARY_PROBE] and not data.startswith((b"\xff\xfe", b"\xfe\xff"))


def _parsed(kind: str, data: bytes, name: str, shown: str) -> DocumentText:
    try:
        return DocumentText(name, *parse_apart(kind, data))
    except DocumentError as error:
        raise DocumentError(f"{shown}: {error}") from error
