"""One ``.gitignore`` file's rules, matched in bounded time.

Knows git's patterns (through pathspec) and what in them can be slow; must not know folders' contents. A line that git
could not use, or that could take too long, is left out and told: a folder from anywhere must not stop its own reading.

A star's regular expression is ``[^/]*``, and several in one name try every way to share it out. Of two stars in one
part of a path the first may always take as little as it can, since the second takes any rest; an atomic group says so,
and leaves nothing to try again.
"""

import re
import stat
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

MAX_IGNORE_BYTES = 256 << 10  # of one .gitignore
MAX_PATTERNS = 1_000  # of one .gitignore; each is tried on each path below it
MAX_PATTERN = 512  # characters
_MAX_STARS = 3  # that no atomic group holds, in one pattern with brackets
_MAX_DEEP = 3  # ``**`` in one pattern: each tries every folder of a path
_STAR = "[^/]*"


def read_ignore(path: Path) -> tuple[GitIgnoreSpec | None, list[str]]:
    """The rules of the file at ``path``, None where there are none, and what was left out, a reason each."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            return None, ["is no regular file"]
        if about.st_size > MAX_IGNORE_BYTES:
            return None, [f"has {about.st_size:,} bytes, the limit is {MAX_IGNORE_BYTES:,}"]
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [f"cannot be read ({error.strerror})"]
    patterns: list[GitIgnoreSpecPattern] = []
    left_out = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if len(patterns) == MAX_PATTERNS:
            left_out.append(f"line {number} and what follows: more than {MAX_PATTERNS:,} patterns")
            break
        made = _pattern(line)
        if isinstance(made, str):
            left_out.append(f"line {number}: {made}")
        elif made is not None:
            patterns.append(made)
    # The backend by name: another one may be installed, and not know atomic groups.
    return (GitIgnoreSpec(patterns, backend="simple") if patterns else None), left_out


def _pattern(line: str) -> GitIgnoreSpecPattern | str | None:
    """One line's rule; a text: why it is left out; None: it says nothing."""
    if len(line) > MAX_PATTERN:
        return f"a pattern of {len(line):,} characters, the limit is {MAX_PATTERN}"
    try:
        made = GitIgnoreSpecPattern(line)
    except (ValueError, re.error):
        return "no pattern that git knows"
    if made.include is None or made.regex is None:
        return None
    source = str(made.regex.pattern)
    if source.count(".+") > _MAX_DEEP:
        return f"more than {_MAX_DEEP} ** in one pattern"
    if "[" in line and source.count(_STAR) > _MAX_STARS:
        return f"more than {_MAX_STARS} * in one pattern with brackets"
    return GitIgnoreSpecPattern(re.compile(_atomic(source)), include=made.include)


def _atomic(source: str) -> str:
    first, *rest = source.split(_STAR)
    if not rest:
        return source
    made = [first]
    for between in rest[:-1]:
        # A slash ends the part of the path: the star before it must be free to take more.
        within = "/" not in between.replace("[^/]", "")
        made.append(f"(?>[^/]*?{between})" if within else f"{_STAR}{between}")
    return "".join([*made, _STAR, rest[-1]])
