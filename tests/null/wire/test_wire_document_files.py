"""Files and folders as documents: what is read, exactly; what is skipped and told; what is refused and how."""

import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

from longread.spec.errors import DocumentError
from longread.wire.documents import apart, files, formats, ignore, tree
from longread.wire.documents.files import read_bytes, read_file
from longread.wire.documents.tree import read_tree


def write(root: Path, path: str, content: str | bytes) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_a_text_file_is_its_characters(tmp_path):
    text = "# Titre\r\n\r\nnaïve\t中文 😀\n\n  <｜User｜>\n"
    assert read_file(write(tmp_path, "a.md", text)).text == text
    assert read_file(write(tmp_path, "a.md", b"\xef\xbb\xbf" + text.encode())).text == text
    assert read_file(write(tmp_path, "a.md", b"\xff\xfe" + text.encode("utf-16-le"))).text == text
    assert read_file(write(tmp_path, "a.md", b"\xfe\xff" + text.encode("utf-16-be"))).text == text
    assert read_file(tmp_path / "a.md").name == "a.md"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"abc\xffdef", "not UTF-8 at byte 3 of 7; convert"),
        (b"\x7fELF\0\0", "binary"),
        (b"\xff\xfea", "not UTF-8"),
        (b"%PDF-1.7 and then nothing", "no readable PDF"),
        (b"PK\x03\x04 nothing", "damaged ZIP"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, data, says):
    with pytest.raises(DocumentError, match=says) as caught:
        read_file(write(tmp_path, "x.txt", data))
    assert str(caught.value).startswith(str(tmp_path / "x.txt"))


def test_paths_that_are_no_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DocumentError, match="no such file"):
        read_file(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DocumentError, match="not a regular file"):
        read_file(tmp_path / "pipe")
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(DocumentError, match=r"has 11 bytes, a document may have 10"):
        read_file(write(tmp_path, "long", "x" * 11))


def test_a_zip_that_is_no_docx_and_one_that_explodes(monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "x" * 100_000)
    with pytest.raises(DocumentError, match="no DOCX; unpack it"):
        read_bytes(buffer.getvalue(), "a.zip", "a.zip")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "x" * 100_000)
    monkeypatch.setattr(formats, "MAX_BODY", 99_999)
    with pytest.raises(DocumentError, match="of 100,000 bytes unpacked, the limit is 99,999"):
        formats.docx_text(buffer.getvalue())
    monkeypatch.setattr(formats, "MAX_UNPACKED", 99_999)
    with pytest.raises(DocumentError, match="unpacks to 100,000 bytes"):
        formats.docx_text(buffer.getvalue())


def docx_bytes(fill) -> bytes:
    document = pytest.importorskip("docx").Document()
    fill(document)
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def test_docx_keeps_the_order_of_headings_paragraphs_and_tables():
    def fill(document):
        document.add_heading("Lease", level=1)
        document.add_paragraph("Between A\nand B. 中文")
        cells = document.add_table(rows=2, cols=2)
        for i, text in enumerate(("rent", "1,200", "term", "two\nyears")):
            cells.cell(i // 2, i % 2).text = text
        document.add_paragraph("")
        document.add_heading("Terms", level=2)
        document.add_paragraph("End.")

    read = read_bytes(docx_bytes(fill), "lease.docx", "lease.docx")
    assert read.text == "# Lease\n\nBetween A\nand B. 中文\n\nrent | 1,200\nterm | two years\n\n## Terms\n\nEnd.\n"
    with pytest.raises(DocumentError, match="has no text"):
        read_bytes(docx_bytes(lambda document: None), "a.docx", "a.docx")


def pdf_bytes(*pages: str) -> bytes:
    """A small PDF by hand: one line of Helvetica a page."""
    bodies = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        bodies.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        bodies.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(bodies)} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        kids.append(f"{len(bodies)} 0 R")
    bodies[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, offsets = b"%PDF-1.4\n", []
    for i, body in enumerate(bodies, start=1):
        offsets.append(len(out))
        out += f"{i} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start = len(out)
    out += f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n{table}".encode()
    return out + f"trailer << /Size {len(bodies) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()


def test_pdf_pages_in_order_and_pages_without_text_are_told():
    pytest.importorskip("pypdf")
    read = read_bytes(pdf_bytes("First page.", "", "Third page."), "a.pdf", "a.pdf")
    assert read.text == "First page.\n\nThird page.\n"
    assert read.notes == ("1 of 3 pages have no text (first: page 2) and are left out",)
    with pytest.raises(DocumentError, match="none of its 1 pages has text; scans"):
        read_bytes(pdf_bytes(""), "a.pdf", "a.pdf")


def test_a_damaged_pdf_is_refused_wherever_it_is_cut():
    pytest.importorskip("pypdf")
    whole = pdf_bytes("First page.", "Second page.")
    for cut in range(9, len(whole), 37):
        try:
            assert "page" in read_bytes(whole[:cut], "a.pdf", "a.pdf").text
        except DocumentError as error:
            assert str(error).startswith("a.pdf: ")


@pytest.mark.parametrize(("module", "data"), [("pypdf", pdf_bytes("x")), ("docx", None)])
def test_a_missing_library_names_the_extra(module, data, monkeypatch):
    data = data or docx_bytes(lambda document: document.add_paragraph("x"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DocumentError, match=r"pip install 'longread\[documents\]'"):
        read_bytes(data, "x", "x")


def test_a_cell_over_any_number_of_columns_is_refused():
    def fill(document):
        cell = document.add_table(rows=1, cols=1).cell(0, 0)
        cell.text = "x"
        cell._tc.grid_span = 100_000_000

    with pytest.raises(DocumentError, match=r"a.docx: has a table row of 100,000,000 columns, the limit is"):
        read_bytes(docx_bytes(fill), "a.docx", "a.docx")


def test_one_page_many_times_is_read_once_and_its_text_is_bounded(monkeypatch):
    pypdf = pytest.importorskip("pypdf")
    data = pdf_bytes("Same page.").replace(b"/Kids [5 0 R] /Count 1", b"/Kids [" + b"5 0 R " * 500 + b"] /Count 500")
    reads = []
    real = pypdf.PageObject.extract_text
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda page: reads.append(1) or real(page))
    assert formats.pdf_text(data)[0].count("Same page.") == 500
    assert len(reads) == 1
    monkeypatch.setattr(formats, "MAX_TEXT", 100)
    with pytest.raises(DocumentError, match=r"has 110 characters of text up to page 11 of 500, the limit is 100"):
        formats.pdf_text(data)
    monkeypatch.setattr(formats, "MAX_PAGES", 499)
    with pytest.raises(DocumentError, match="has 500 pages, the limit is 499"):
        formats.pdf_text(data)


def test_parsing_has_a_limit_of_time_and_of_memory(monkeypatch):
    data = pdf_bytes("x")
    monkeypatch.setattr(apart, "MEMORY", 200 << 20)
    large = docx_bytes(lambda document: [document.add_paragraph("x" * 3_000_000) for _ in range(15)])
    with pytest.raises(DocumentError, match=r"a.docx: .*209,715,200 bytes of memory"):
        read_bytes(large, "a.docx", "a.docx")
    monkeypatch.setattr(apart, "SECONDS", 0)
    with pytest.raises(DocumentError, match=r"a.pdf: as a PDF it took more than 0 s to read, the limit: split it"):
        read_bytes(data, "a.pdf", "a.pdf")


def test_a_tree_in_sorted_order_under_headings(tmp_path):
    write(tmp_path, "b.py", "b = 1")
    write(tmp_path, "a/z.py", "z\n")
    write(tmp_path, "a/y/x.md", "x\n")
    write(tmp_path, "a-b.txt", "dash\n")
    read = read_tree(tmp_path)
    assert read.text == ("==> a/y/x.md <==\nx\n\n==> a/z.py <==\nz\n\n==> a-b.txt <==\ndash\n\n==> b.py <==\nb = 1\n")
    assert read.name == tmp_path.name
    assert read.notes == ()


def test_what_a_tree_leaves_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILE_BYTES", 100)
    write(tmp_path, "keep.py", "keep\n")
    write(tmp_path, "logo.png", b"\x89PNG\0")
    write(tmp_path, "latin.txt", b"caf\xe9")
    write(tmp_path, "empty/__init__.py", "\n")
    write(tmp_path, "big.csv", "x" * 101)
    write(tmp_path, "node_modules/a.js", "a")
    write(tmp_path, ".git/config", "a")
    (tmp_path / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path, "bad\nname.py", "x")
    read = read_tree(tmp_path)
    assert read.text == "==> keep.py <==\nkeep\n"
    assert read.notes == (
        "skipped 1 binary (logo.png)",
        "skipped 1 empty (empty/__init__.py)",
        "skipped 2 folders that are no source (.git, ...)",
        "skipped 1 larger than 100 bytes (big.csv)",
        "skipped 1 links (link)",
        "skipped 1 not UTF-8 (latin.txt)",
        "skipped 1 special files (pipe)",
        "skipped 1 with unprintable names ('bad\\nname.py')",
    )


IGNORES = {
    ".gitignore": "*.log\n/build/\n!keep.log\nsecret\ndocs/*.tmp\n",
    "sub/.gitignore": "!special.log\nlocal.*\n/only-here\n",
}
TREE = [
    "a.py",
    "a.log",
    "keep.log",
    "build/x.py",
    "sub/build/x.py",
    "secret",
    "sub/secret",
    "docs/a.tmp",
    "docs/b/a.tmp",
    "sub/special.log",
    "sub/a.log",
    "sub/local.txt",
    "local.txt",
    "sub/only-here",
    "sub/deep/only-here",
    "sub/deep/local.md",
    "sub/deep/b.log",
]


def test_gitignore_as_git_reads_it(tmp_path):
    for path, text in IGNORES.items():
        write(tmp_path, path, text)
    for path in TREE:
        write(tmp_path, path, "x\n")
    listed = [line[4:-4] for line in read_tree(tmp_path).text.splitlines() if line.startswith("==> ")]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    command = ["git", "-C", str(tmp_path), "ls-files", "--others", "--exclude-standard"]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(wanted)
    assert "sub/special.log" in listed and "a.log" not in listed


def test_a_tree_has_limits(tmp_path, monkeypatch):
    with pytest.raises(DocumentError, match="holds no text file"):
        read_tree(tmp_path)
    with pytest.raises(DocumentError, match="no such folder"):
        read_tree(tmp_path / "none")
    for i in range(4):
        write(tmp_path, f"{i}.txt", "0123456789")
    monkeypatch.setattr(tree, "MAX_TREE_BYTES", 30)
    with pytest.raises(DocumentError, match=r"more than .* 30 bytes of them \(at 3.txt\)"):
        read_tree(tmp_path)
    monkeypatch.setattr(tree, "MAX_TREE_BYTES", 40)
    assert read_tree(tmp_path).text.count("==>") == 4


def test_bad_gitignore_lines_are_told_and_skipped(tmp_path):
    write(tmp_path, ".gitignore", "!\n*.log\n[\n" + "x" * 600 + "\n**/a/**/b/**/c/**/d\n")
    write(tmp_path, "a.log", "x\n")
    write(tmp_path, "b.txt", "x\n")
    read = read_tree(tmp_path)
    assert "==> b.txt <==" in read.text and "a.log" not in read.text
    assert ".gitignore line 1: no pattern that git knows: not followed" in read.notes
    assert ".gitignore line 4: a pattern of 600 characters, the limit is 512: not followed" in read.notes
    assert ".gitignore line 5: more than 3 ** in one pattern: not followed" in read.notes


def test_a_gitignore_that_cannot_be_followed_is_told(tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "x\n")
    os.mkfifo(tmp_path / ".gitignore")
    assert read_tree(tmp_path).notes[-1] == ".gitignore is no regular file: not followed"
    (tmp_path / ".gitignore").unlink()
    write(tmp_path, ".gitignore", "a.txt\nb.txt\n")
    write(tmp_path, "b.txt", "x\n")
    monkeypatch.setattr(ignore, "MAX_PATTERNS", 1)
    read = read_tree(tmp_path)
    assert "==> b.txt" in read.text and "==> a.txt" not in read.text
    assert read.notes[-1] == ".gitignore line 2 and what follows: more than 1 patterns: not followed"
    monkeypatch.setattr(ignore, "MAX_IGNORE_BYTES", 3)
    assert read_tree(tmp_path).notes[-1] == ".gitignore has 12 bytes, the limit is 3: not followed"


def denied(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def test_an_unreadable_gitignore_is_told(tmp_path, monkeypatch):
    write(tmp_path, ".gitignore", "a.txt\n")
    write(tmp_path, "a.txt", "x\n")
    monkeypatch.setattr(Path, "read_text", denied)
    assert read_tree(tmp_path).notes[-1] == ".gitignore cannot be read (Permission denied): not followed"


@pytest.mark.timeout(20)
def test_stars_never_take_long(tmp_path):
    write(tmp_path, ".gitignore", "*a" * 13 + "b\n" + "*a*a" * 40 + "[bc]\n" + "a*" * 60 + "c\n*a*b*\n")
    write(tmp_path, "a" * 200, "x\n")
    write(tmp_path, "xaxbx", "x\n")
    text = read_tree(tmp_path).text
    assert "a" * 200 in text and "xaxbx" not in text


@given(
    st.text("ab*?/", min_size=1, max_size=9), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)
)
@settings(max_examples=500, deadline=None)
def test_atomic_stars_match_as_before(line, parts):
    try:
        plain = GitIgnoreSpec.from_lines([line])
    except ValueError:
        return
    made = ignore._pattern(line)
    if not isinstance(made, str):
        ours = GitIgnoreSpec([] if made is None else [made], backend="simple")
        path = "/".join(parts)
        assert ours.check_file(path).include == plain.check_file(path).include


def test_deep_folders_are_refused(tmp_path):
    here = tmp_path
    for _ in range(tree.MAX_DEPTH + 1):
        here = here / "d"
    here.mkdir(parents=True)
    (here / "f").write_text("x\n")
    with pytest.raises(DocumentError, match=r"has folders more than 200 deep \(below d/d/d/\.\.\.\)"):
        read_tree(tmp_path)
    (here / "f").rename(here.parent / "f")
    here.rmdir()
    assert read_tree(tmp_path).text.endswith("/f <==\nx\n")


def test_names_are_shown_and_stored_without_control_characters(tmp_path):
    path = tmp_path / os.fsdecode(b"evil\x1b]0;\xff\n.txt")
    path.write_text("x\n")
    assert read_file(path).name == "evil\\x1b]0;\\udcff\\n.txt"
    path.write_bytes(b"\0")
    with pytest.raises(DocumentError) as caught:
        read_file(path)
    assert str(caught.value).isprintable()
    folder = tmp_path / os.fsdecode(b"bad\xff")
    write(folder, "a.txt", "x\n")
    assert read_tree(folder).name == "bad\\udcff"


def raw_docx(body: str) -> bytes:
    """An empty document with this in its body."""
    source = zipfile.ZipFile(io.BytesIO(docx_bytes(lambda document: document.add_paragraph("end"))))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for part in source.infolist():
            data = source.read(part.filename)
            if part.filename == "word/document.xml":
                data = data.replace(b"<w:body>", b"<w:body>" + body.encode(), 1)
            made.writestr(part.filename, data)
    return out.getvalue()


@pytest.mark.parametrize("element", ["<w:p/>", "<w:p><w:r/></w:p>", "<!---->", "<w:tbl></w:tbl>"])
def test_a_docx_of_too_many_elements_is_refused_before_it_is_a_tree(element, monkeypatch):
    """A few kilobytes hold ten million of them, which would take the library minutes."""
    data = raw_docx(element * (formats.MAX_BODY // len(element) - 1000))
    monkeypatch.setitem(sys.modules, "docx", None)  # not even asked
    began = time.monotonic()
    with pytest.raises(DocumentError, match=r"tags in its body .*the limit is 2,000,000: split it"):
        formats.docx_text(data)
    assert time.monotonic() - began < 5


def test_many_paragraphs_take_time_in_proportion():
    """The library goes through all styles for each paragraph that names none."""
    paragraph = "<w:p><w:r><w:t>x</w:t></w:r></w:p>"
    data = raw_docx("<w:p/>" * 5000 + paragraph * 5000)
    began = time.monotonic()
    text, _ = formats.docx_text(data)
    assert text == "x\n\n" * 5000 + "end\n"
    assert time.monotonic() - began < 5


def test_without_limits_of_the_system_documents_are_read_all_the_same():
    """Windows has no ``resource``; macOS refuses a limit of the address space."""
    data = docx_bytes(lambda document: document.add_paragraph("words"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for begin in (
        "import sys; sys.modules['resource'] = None",
        "import resource\ndef no(*_): raise ValueError('current limit exceeds maximum limit')\nresource.setrlimit = no",
    ):
        program = (
            f"{begin}\nimport sys\nfrom longread.wire.documents import apart\n"
            "sys.argv = ['', 'DOCX', '3000000000', '60']\napart.main()"
        )
        ran = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, env=env)
        assert b'"words\\n"' in ran.stdout, ran.stderr
