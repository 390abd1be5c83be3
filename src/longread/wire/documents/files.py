"""One file to one text: UTF-8 text and Markdown as they are, PDF and DOCX through their libraries.

Knows formats, bytes and paths; must not know folders, prompts or stores. A text file's text is exactly its characters
(line ends included), so that whoever sends the same characters sends the same prompt; only a byte order mark is
dropped. The libraries for PDF and DOCX are an extra and are loaded when such a file is read.
"""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longread.spec.documents import MAX_NAME
from longread.spec.errors import DocumentError

MAX_BYTES = 256 << 20  # of one file; longer than any context, and what a mistyped path could name is longer still
MAX_UNPACKED = 512 << 20  # of a DOCX's parts together: a small file may unpack to any size
MAX_PAGES = 20_000
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
        return _pdf(data, name, shown)
    if data.startswith(b"PK\x03\x04"):
        return _docx(data, name, shown)
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


def _pdf(data: bytes, name: str, shown: str) -> DocumentText:
    """Each page's text, a blank line apart. Pages without text (scans) are told, not read."""
    try:
        import pypdf
    except ImportError as error:
        raise _missing(shown, "PDF") from error
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and not reader.decrypt("")
        count = 0 if locked else len(reader.pages)
        pages = [reader.pages[i].extract_text().strip() for i in range(count)] if count <= MAX_PAGES else []
    except Exception as error:  # what a damaged file raises in there is no closed list
        raise DocumentError(f"{shown}: is no readable PDF ({type(error).__name__}: {str(error)[:200]})") from error
    if locked:
        raise DocumentError(f"{shown}: needs a password; save a copy without one")
    if count > MAX_PAGES:
        raise DocumentError(f"{shown}: has {count:,} pages, the limit is {MAX_PAGES:,}: split it")
    blank = [i for i, page in enumerate(pages, start=1) if not page]
    if len(blank) == count:
        raise DocumentError(f"{shown}: none of its {count} pages has text; scans need text recognition first")
    notes = (f"{len(blank)} of {count} pages have no text (first: page {blank[0]}) and are left out",) if blank else ()
    return DocumentText(name, "\n\n".join(_well_formed(page) for page in pages if page) + "\n", notes)


def _docx(data: bytes, name: str, shown: str) -> DocumentText:
    """Headings with Markdown's marks, paragraphs, and tables row by row, in the order of the body."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts, unpacked = set(archive.namelist()), sum(part.file_size for part in archive.infolist())
    except zipfile.BadZipFile as error:
        raise DocumentError(f"{shown}: is a damaged ZIP archive ({error})") from error
    if "word/document.xml" not in parts:
        raise DocumentError(f"{shown}: is a ZIP archive, but no DOCX; unpack it and name the folder")
    if unpacked > MAX_UNPACKED:
        raise DocumentError(f"{shown}: unpacks to {unpacked:,} bytes, the limit is {MAX_UNPACKED:,}")
    try:
        import docx
    except ImportError as error:
        raise _missing(shown, "DOCX") from error
    try:
        blocks = [block for block in _blocks(docx.Document(io.BytesIO(data))) if block]
    except Exception as error:  # as above
        raise DocumentError(f"{shown}: is no readable DOCX ({type(error).__name__}: {str(error)[:200]})") from error
    if not blocks:
        raise DocumentError(f"{shown}: has no text")
    return DocumentText(name, "\n\n".join(map(_well_formed, blocks)) + "\n")


def _blocks(document: Any) -> Iterator[str]:
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            yield "\n".join(" | ".join(cell.text.replace("\n", " ") for cell in row.cells) for row in block.rows)
            continue
        style = block.style.name or "" if block.style is not None else ""
        level = style.removeprefix("Heading ")
        heading = "#" * int(level) + " " if style != level and level.isdecimal() and 1 <= int(level) <= 6 else ""
        yield heading + block.text.strip() if block.text.strip() else ""


def _well_formed(text: str) -> str:
    """A damaged font table can yield lone surrogates, which no UTF-8 has."""
    return text.encode(errors="replace").decode()


def _missing(shown: str, kind: str) -> DocumentError:
    return DocumentError(f"{shown}: reading {kind} needs an extra: pip install 'longread[documents]'")
