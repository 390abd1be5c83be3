"""The text of a PDF or a DOCX, by their libraries.

Knows both formats and what in them can be without end; must not know files, folders or processes. Runs in a process of
its own (apart.py): a small file can ask these libraries for any time and memory, and only some of that is seen early.
Errors name no file: whoever knows its name puts it in front.
"""

import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from longread.spec.errors import DocumentError

MAX_UNPACKED = 512 << 20  # of a DOCX's parts together, pictures included
MAX_BODY = 64 << 20  # of the part with the text: as a tree in memory it takes twenty times that
MAX_TAGS = 2_000_000  # in that part: each paragraph or run costs the library some 20 microseconds, be it empty
MAX_PAGES = 20_000
MAX_TEXT = 64 << 20  # characters
MAX_COLUMNS = 1_000  # columns of one table row; a cell may claim any number, and the library makes a cell of each
_BODY = "word/document.xml"
_BLOCK = 1 << 20
LIBRARIES = {"PDF": "pypdf", "DOCX": "docx"}  # by format: the module to import

Parsed = tuple[str, tuple[str, ...]]  # text, and notes on what is not in it


def parse(kind: str, data: bytes) -> Parsed:
    """Raises DocumentError: damaged, locked, without text, or beyond a limit. MemoryError where memory is bounded."""
    return pdf_text(data) if kind == "PDF" else docx_text(data)


def pdf_text(data: bytes) -> Parsed:
    """Each page's text, a blank line apart. Pages without text (scans) are told, not read."""
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("needs a password; save a copy without one")
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise DocumentError(f"has {count:,} pages, the limit is {MAX_PAGES:,}: split it")
        pages = _pages(reader, count)
    except (DocumentError, MemoryError):
        raise
    except Exception as error:  # what a damaged file raises in there is no closed list
        raise DocumentError(f"is no readable PDF ({type(error).__name__}: {str(error)[:200]})") from error
    blank = [i for i, page in enumerate(pages, start=1) if not page]
    if len(blank) == count:
        raise DocumentError(f"none of its {count} pages has text; scans need text recognition first")
    notes = (f"{len(blank)} of {count} pages have no text (first: page {blank[0]}) and are left out",) if blank else ()
    return "\n\n".join(_well_formed(page) for page in pages if page) + "\n", notes


def _pages(reader: Any, count: int) -> list[str]:
    pages: list[str] = []
    known: dict[tuple[int, int], str] = {}  # one page object may be named any number of times
    size = 0
    for i in range(count):
        page = reader.pages[i]
        where = page.indirect_reference
        key = (where.idnum, where.generation) if where is not None else (-i - 1, 0)
        if key not in known:
            known[key] = page.extract_text().strip()
        pages.append(known[key])
        size += len(known[key])
        _check_size(size, f"page {i + 1:,} of {count:,}")
    return pages


def docx_text(data: bytes) -> Parsed:
    """Headings with Markdown's marks, paragraphs, and tables row by row, in the order of the body."""
    _check_docx(data)
    import docx

    blocks, size = [], 0
    try:
        for block in _blocks(docx.Document(io.BytesIO(data))):
            if block:
                blocks.append(block)
                size += len(block)
                _check_size(size, f"paragraph or table {len(blocks):,}")
    except (DocumentError, MemoryError):
        raise
    except Exception as error:  # as above
        raise DocumentError(f"is no readable DOCX ({type(error).__name__}: {str(error)[:200]})") from error
    if not blocks:
        raise DocumentError("has no text")
    return "\n\n".join(map(_well_formed, blocks)) + "\n", ()


def _check_docx(data: bytes) -> None:
    """What can be seen before the library makes a tree of it. Raises DocumentError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            sizes = [(part.filename, part.file_size) for part in archive.infolist()]
            _check_parts(sizes)
            with archive.open(_BODY) as part:
                elements = sum(block.count(b"<") for block in iter(lambda: part.read(_BLOCK), b""))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError, RuntimeError) as error:
        raise DocumentError(f"is a damaged ZIP archive, or a locked one ({error})") from error
    if elements > MAX_TAGS:
        raise DocumentError(f"has {elements:,} tags in its body ({_BODY}), the limit is {MAX_TAGS:,}: split it")


def _check_parts(sizes: Sequence[tuple[str, int]]) -> None:
    """The parts by the sizes that the archive claims; none is read beyond its own."""
    body, unpacked = max((size for name, size in sizes if name == _BODY), default=None), sum(size for _, size in sizes)
    if body is None:
        raise DocumentError("is a ZIP archive, but no DOCX; unpack it and name the folder")
    if unpacked > MAX_UNPACKED:
        raise DocumentError(f"unpacks to {unpacked:,} bytes, the limit is {MAX_UNPACKED:,}")
    if body > MAX_BODY:
        raise DocumentError(f"has a body ({_BODY}) of {body:,} bytes unpacked, the limit is {MAX_BODY:,}: split it")


def _check_size(size: int, where: str) -> None:
    if size > MAX_TEXT:
        raise DocumentError(f"has {size:,} characters of text up to {where}, the limit is {MAX_TEXT:,}: split it")


def _blocks(document: Any) -> Iterator[str]:
    marks: dict[str | None, str] = {}  # by style id: the library goes through all styles for each paragraph
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            yield _table(block)
            continue
        text = block.text.strip()
        style = block._p.style
        if text and style not in marks:
            marks[style] = _heading(block.style.name or "" if block.style is not None else "")
        yield marks[style] + text if text else ""


def _heading(style: str) -> str:
    """Markdown's mark for the paragraphs of a style; nothing for those that are no headings."""
    level = style.removeprefix("Heading ")
    return "#" * int(level) + " " if style != level and level.isdecimal() and 1 <= int(level) <= 6 else ""


def _table(table: Any) -> str:
    rows, size = [], 0
    for number, row in enumerate(table.rows, start=1):
        # Before ``cells``, which repeats a cell once for each column that it covers.
        span = sum(cell.grid_span for cell in row._tr.tc_lst)
        if span > MAX_COLUMNS:
            raise DocumentError(f"has a table row of {span:,} columns, the limit is {MAX_COLUMNS:,}")
        rows.append(" | ".join(cell.text.replace("\n", " ") for cell in row.cells))
        size += len(rows[-1])
        _check_size(size, f"row {number:,} of a table")
    return "\n".join(rows)


def _well_formed(text: str) -> str:
    """A damaged font table can yield lone surrogates, which no UTF-8 has."""
    return text.encode(errors="replace").decode()
