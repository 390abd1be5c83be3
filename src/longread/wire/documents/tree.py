"""A folder to one text: its text files in sorted order, each under a heading with its path.

Knows folders, ``.gitignore`` files and which names are never source; must not know prompts or stores. The same tree
gives the same text on every machine: order and headings depend on relative paths alone. Links are not followed: they
could leave the tree or run in circles.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from longread.spec.errors import DocumentError
from longread.wire.documents.files import DocumentText, binary, decode

MAX_FILE_BYTES = 1 << 20  # of one file in a tree: longer ones are data or generated
MAX_TREE_BYTES = 64 << 20
MAX_FILES = 50_000
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

    def skip(self, why: str, path: PurePosixPath) -> None:
        self.skipped[why] += 1
        self.examples.setdefault(why, str(path))


def read_tree(root: Path) -> DocumentText:
    """Raises DocumentError: no folder, nothing to read in it, or more than a document may hold."""
    if not root.is_dir():
        raise DocumentError(f"{root}: no such folder")
    found = _Found()
    for path, full in _files(root, PurePosixPath(), (), found):
        _read(path, full, found, root)
    notes = tuple(
        f"skipped {count:,} {why} ({found.examples[why]}{', ...' if count > 1 else ''})"
        for why, count in sorted(found.skipped.items())
    )
    if not found.sections:
        raise DocumentError("; ".join([f"{root}: holds no text file", *notes]))
    return DocumentText(root.resolve().name, "\n".join(found.sections), notes)


def _read(path: PurePosixPath, full: Path, found: _Found, root: Path) -> None:
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
            f"{root}: has more than {MAX_FILES:,} text files or {MAX_TREE_BYTES:,} bytes of them (at {path}); "
            "name a smaller folder, or leave parts out by a .gitignore"
        )


Rules = tuple[tuple[PurePosixPath, GitIgnoreSpec], ...]


def _files(root: Path, folder: PurePosixPath, rules: Rules, found: _Found) -> Iterator[tuple[PurePosixPath, Path]]:
    """The files to read below ``folder``, in the order of their paths' parts; what is left out is counted."""
    here = root / folder
    try:
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
    except OSError as error:
        found.skip(f"unreadable ({error.strerror})", folder)
        return
    ignore = here / ".gitignore"
    if ignore.is_file() and not ignore.is_symlink():
        rules = (*rules, (folder, GitIgnoreSpec.from_lines(ignore.read_text("utf-8", "replace").splitlines())))
    for entry in entries:
        path = folder / entry.name
        if not entry.name.isprintable():  # also names that are no UTF-8
            found.skip("with unprintable names", folder / ascii(entry.name))
            continue
        if entry.is_symlink():
            found.skip("links", path)
            continue
        is_folder = entry.is_dir()
        if is_folder and (entry.name in SKIPPED_FOLDERS or entry.name.endswith(".egg-info")):
            found.skip("folders that are no source", path)
        elif _ignored(path, is_folder, rules):
            found.skip("ignored by .gitignore", path)
        elif is_folder:
            yield from _files(root, path, rules, found)
        elif not stat.S_ISREG(entry.stat().st_mode):
            found.skip("special files", path)
        elif entry.stat().st_size > MAX_FILE_BYTES:
            found.skip(f"larger than {MAX_FILE_BYTES:,} bytes", path)
        else:
            yield path, Path(entry.path)


def _ignored(path: PurePosixPath, is_folder: bool, rules: Rules) -> bool:
    """By the deepest .gitignore that says anything about the path, as git does."""
    for base, spec in reversed(rules):
        said = spec.check_file(f"{path.relative_to(base)}{'/' if is_folder else ''}").include
        if said is not None:
            return said
    return False
