"""Files that appear whole or not at all. Knows paths, text and JSON; no format."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from longread.spec.errors import ConfigError


@contextmanager
def appearing(path: Path) -> Iterator[TextIO]:
    """A file to write to, which stands at ``path`` once the block ends without an error; until then what was there
    before is. Its folder is made. Raises ConfigError where it cannot be written.
    """
    draft = path.with_name(f".{path.name[:80]}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate (a path that is no UTF-8, say) becomes an escape, which JSON reads as what it was.
        with draft.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Raises ConfigError where ``path`` cannot be written, ValueError for a number that JSON does not have."""
    with appearing(path) as out:
        json.dump(document, out, indent=indent, ensure_ascii=False, allow_nan=False)
        out.write("\n")
