"""A PDF or DOCX parsed in a child process with bounded time and memory.

Knows processes and their limits; must not know formats or files. The content goes in on the child's stdin, what was
read comes back as one JSON object. A child that is killed, or dies, costs its document and nothing else. Windows cannot
limit a process's memory, macOS does not: there the time and what the formats themselves may have are the only limits.
"""

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress

from longread.spec.errors import DocumentError
from longread.wire.documents.formats import LIBRARIES, Parsed, parse

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SECONDS = 300  # a thousand pages of a usual PDF take about one minute
MEMORY = 3 << 30  # bytes of address space


def parse_apart(kind: str, data: bytes) -> Parsed:
    """``formats.parse`` in a child. Raises DocumentError, which names no file; also where a limit was reached."""
    if importlib.util.find_spec(LIBRARIES[kind]) is None:
        raise DocumentError(f"reading {kind} needs an extra: pip install 'longread[documents]'")
    # -P: a file beside the document must not be taken for a library.
    command = [sys.executable, "-P", "-m", __spec__.name, kind, str(MEMORY), str(SECONDS)]
    try:
        ended = subprocess.run(
            command, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DocumentError(f"as a {kind} it took more than {SECONDS} s to read, the limit: split it") from None
    except OSError as error:
        raise DocumentError(f"no process could be started to read it as a {kind}: {error.strerror}") from error
    try:
        told = json.loads(ended.stdout)
    except ValueError:
        raise DocumentError(
            f"reading it as a {kind} ended with {ended.returncode} and no text; it may need more than the limit of "
            f"{MEMORY:,} bytes of memory: split it"
        ) from None
    if "error" in told:
        raise DocumentError(told["error"])
    return told["text"], tuple(told["notes"])


def main() -> None:
    kind, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if resource is not None:
        _lower(resource.RLIMIT_AS, memory)
        _lower(resource.RLIMIT_CPU, seconds)  # should nobody be left to end this process
        _lower(resource.RLIMIT_CORE, 0)
    try:
        text, notes = parse(kind, sys.stdin.buffer.read())
        told = json.dumps({"text": text, "notes": notes})
    except DocumentError as error:
        told = json.dumps({"error": str(error)})
    except MemoryError:
        told = json.dumps({"error": f"needs more than {memory:,} bytes of memory as a {kind}, the limit: split it"})
    sys.stdout.write(told)


def _lower(what: int, limit: int) -> None:
    """Never above what the parent itself was given."""
    _, hard = resource.getrlimit(what)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with suppress(ValueError, OSError):  # macOS refuses a limit of the address space
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
