"""A folder to one text: its text files in sorted order, each under a heading with its path.

Knows folders, ``.gitignore`` files and which names are never source; must not know prompts or stores. The same tree
gives the same text on every machine: order and headings depend on relative paths alone. Links are not followed: they
could leave the tree or run in circles.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from longread.spec.documents import MAX_NAME
from longread.spec.errors import DocumentError
from longread.wire.documents.files import DocumentText, binary, decode, printable
from longread.wire.documents.ignore import read_ignore

MAX_FILE_BYTES = 1 << 20  # of one file in a tree: longer ones are data or generated
MAX_TREE_BYTES = 64 << 20
MAX_FILES = 50_000
MAX_DEPTH = 200  # folders inside one another; more is no source tree
MAX_TOLD = 10  # lines of .gitignore files left out, one note each
MATCH_SECONDS = 60.0  # for all of a tree's .gitignore rules together
# Never read, whatever .gitignore says: other people's code, caches, version control.
SKIPPED_FOLDERS = {".git", ".hg", ".svn", ".idea", ".vscode", ".venv", "venv", ".tox", ".nox", "node_modules"}
SKIPPED_FOLDERS |= {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(slots=True)
class _Found:
    """What a walk has come by: ``skipped`` counts by reason, with the first path of each as an example."""

    sections: list[str] = field(default_factory=list)
    size: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # of .gitignore files, what was left out
    matching: float = 0.0  # seconds spent on .gitignore rules

    def skip(self, why: str, path: PurePosixPath) -> None:
        self.skipped[why] += 1
        self.examples.setdefault(why, printable(str(path)))


def read_tree(root: Path) -> DocumentText:
    """Raises DocumentError: no folder, nothing to read in it, or more than a document may hold."""
    shown = printable(str(root))
    if not root.is_dir():
        raise DocumentError(f"{shown}: no such folder")
    found = _Found()
    for path, full in _files(root, PurePosixPath(), (), found):
        _read(path, full, found, shown)
    notes = tuple(
        f"skipped {count:,} {why} ({found.examples[why]}{', ...' if count > 1 else ''})"
        for why, count in sorted(found.skipped.items())
    )
    notes += tuple(found.ignored[:MAX_TOLD])
    if len(found.ignored) > MAX_TOLD:
        notes += (f"and {len(found.ignored) - MAX_TOLD:,} more .gitignore lines that were not followed",)
    if not found.sections:
        raise DocumentError("; ".join([f"{shown}: holds no text file", *notes]))
    return DocumentText(printable(root.resolve().name)[:MAX_NAME], "\n".join(found.sections), notes)


def _read(path: PurePosixPath, full: Path, found: _Found, shown: str) -> None:
    try:
        data = full.read_bytes()
    except OSError as error:
        found.skip(f"unreadable ({error.strerror})", path)
        return
    if binary(data):
        found.skip("binary", path)
        return
    try:
        text = decode(data, str(path))
    except DocumentError:
        found.skip("not UTF-8", path)
        return
    if not text.strip():
        found.skip("empty", path)
        return
    # A heading that no line of code looks like, and one blank line behind each file.
    found.sections.append(f"==> {path} <==\n{text}{'' if text.endswith(chr(10)) else chr(10)}")
    found.size += len(data)
    if found.size > MAX_TREE_BYTES or len(found.sections) > MAX_FILES:
        raise DocumentError(
            f"{shown}: has more than {MAX_FILES:,} text files or {MAX_TREE_BYTES:,} bytes of them (at {path}); "
            "name a smaller folder, or leave parts out by a .gitignore"
        )


Rules = tuple[tuple[PurePosixPath, GitIgnoreSpec], ...]


def _files(root: Path, folder: PurePosixPath, rules: Rules, found: _Found) -> Iterator[tuple[PurePosixPath, Path]]:
    """The files to read below ``folder``, in the order of their paths' parts; what is left out is counted."""
    here = root / folder
    if len(folder.parts) > MAX_DEPTH:
        raise DocumentError(
            f"{printable(str(root))}: has folders more than {MAX_DEPTH} deep (below {'/'.join(folder.parts[:3])}/...); "
            "name a folder further down, or leave them out by a .gitignore"
        )
    try:
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
    except OSError as error:
        found.skip(f"unreadable ({error.strerror})", folder)
        return
    spec, left_out = read_ignore(here / ".gitignore")
    for why in left_out:
        found.ignored.append(f"{printable(str(folder / '.gitignore'))} {why}: not followed")
    if spec is not None:
        rules = (*rules, (folder, spec))
    for entry in entries:
        path = folder / entry.name
        if not entry.name.isprintable():  # also names that are no UTF-8
            found.skip("with unprintable names", folder / ascii(entry.name))
            continue
        if entry.is_symlink():
            found.skip("links", path)
            continue
        try:
            about = entry.stat(follow_symlinks=False)
        except OSError as error:
            found.skip(f"unreadable ({error.strerror})", path)
            continue
        is_folder = stat.S_ISDIR(about.st_mode)
        if is_folder and (entry.name in SKIPPED_FOLDERS or entry.name.endswith(".egg-info")):
            found.skip("folders that are no source", path)
        elif _ignored(path, is_folder, rules, found):
            found.skip("ignored by .gitignore", path)
        elif is_folder:
            yield from _files(root, path, rules, found)
        elif not stat.S_ISREG(about.st_mode):
            found.skip("special files", path)
        elif about.st_size > MAX_FILE_BYTES:
            found.skip(f"larger than {MAX_FILE_BYTES:,} bytes", path)
        else:
            yield path, Path(entry.path)


def _ignored(path: PurePosixPath, is_folder: bool, rules: Rules, found: _Found) -> bool:
    """By the deepest .gitignore that says anything about the path, as git does."""
    began = time.monotonic()
    said = None
    for base, spec in reversed(rules):
        said = spec.check_file(f"{path.relative_to(base)}{'/' if is_folder else ''}").include
        if said is not None:
            break
    found.matching += time.monotonic() - began
    if found.matching > MATCH_SECONDS:
        raise DocumentError(
            f"{path}: the .gitignore rules above it took more than {MATCH_SECONDS:g} s to match; use fewer or simpler "
            "ones, or name a smaller folder"
        )
    return bool(said)
