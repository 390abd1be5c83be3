"""Known texts, driver errors, versions and options out of a log, of whatever length.

The log stays bytes: each known text is searched for in one sweep, and only lines that hold one are decoded. Knows: how
logs look. Must not know: what a text means (``known_texts``).
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from longread.plan.doctor.facts import Facts, LogHit, Package, Server, Versions, Xid
from longread.plan.doctor.known_texts import KNOWN
from longread.plan.doctor.saved.text import LINE_CHARACTERS, Saved, clean, value
from longread.plan.doctor.servers import recognise
from longread.plan.doctor.texts_gpu import Known
from longread.plan.doctor.xid import parse_xids

OCCURRENCES = 2000  # looked at one by one for each text; the rest is only counted
XIDS = 20_000
BEFORE = 16_384  # bytes before a text in which the traceback above it is looked for
SHOWN = 300  # characters of a line
STARTS = (
    b"Initializing a V1 LLM engine",
    b"Initializing an LLM engine",
    b"non-default args:",
    b"server_args=ServerArgs(",
)
READY = (b"Application startup complete", b"The server is fired up and ready to roll")
WORDS = (
    b"INFO",
    b"WARNING",
    b"ERROR",
    b"DEBUG",
    b"Traceback (most recent",
    b"NVRM:",
    b"kernel:",
    b"NCCL WARN",
    b"systemd",
    b"longread",
)
KERNEL = re.compile(rb"^(?:<\d{1,3}>)?\[ {0,8}\d{1,9}\.\d{3,6}\] ", re.MULTILINE)
# What a traceback's frames name, and whose memory or kernel it then is; the frame nearest to the error decides.
FRAMES: tuple[tuple[bytes, str], ...] = (
    (b"mqa_logits", "indexer"),
    (b"sparse_attn_indexer", "indexer"),
    (b"indexer", "indexer"),
    (b"compute_logits", "vocabulary logits"),
    (b"logits_processor", "vocabulary logits"),
    (b"sampler", "vocabulary logits"),
    (b"initialize_kv_cache", "KV cache"),
    (b"_allocate_kv_cache", "KV cache"),
    (b"init_memory_pool", "KV cache"),
    (b"memory_pool.py", "KV cache"),
    (b"Capture cuda graph failed", "graphs"),
    (b"capture_model", "graphs"),
    (b"cuda_graph_runner", "graphs"),
    (b"cudagraph", "graphs"),
    (b"profile_run", "activations"),
    (b"determine_available_memory", "activations"),
    (b"process_weights_after_loading", "weights"),
    (b"create_weights", "weights"),
    (b"load_weights", "weights"),
    (b"load_model", "weights"),
    (b"fused_moe", "experts"),
    (b"fused_experts", "experts"),
    (b"mhc_", "hyper-connections"),
    (b"hc_pre", "hyper-connections"),
)
PROGRAMS = ("vllm", "sglang", "longread", "python", "python3", "-m")
COMMANDS = (
    b"vllm serve ",
    b"vllm.entrypoints.openai.api_server ",
    b"sglang.launch_server",
    b"sglang serve ",
    b"longread serve ",
)
LOGGED = ((b"non-default args:", ("vllm", "serve")), (b"server_args=ServerArgs(", ("sglang", "serve")))
OPTION = re.compile(r"['\"]?([a-z][a-z0-9_]{1,60})['\"]?(?:=|: )('[^']{0,200}'|\"[^\"]{0,200}\"|[\w./+-]{1,200})")
VERSIONS = re.compile(r"(?:LLM engine \(v|vLLM API server version |█ {1,4}version )(\d[\w.+-]{0,40})")


def looks_like_log(data: bytes) -> bool:
    return any(word in data for word in WORDS) or KERNEL.search(data[:65536]) is not None


def read_log(saved: Saved) -> Facts:
    """``logs`` always; ``xids`` where kernel lines were seen; servers and their version where the log names them."""
    data = saved.data
    phases = Phases(data)
    hits = [hit for known in KNOWN for hit in _hits(known, saved, phases)]
    hits.sort(key=lambda hit: hit.line)
    servers = tuple(_servers(data))
    version = _version(data)
    versions = None
    if version is not None:
        versions = Versions(packages={"vllm": Package(name="vllm", version=version)})
    unread = {}
    if saved.skipped:
        unread["log"] = f"{saved.name}: {saved.skipped:,} of {saved.size:,} bytes in the middle were left out"
    return Facts(logs=tuple(hits), xids=_xids(data), servers=servers or None, versions=versions, unread=unread)


def _hits(known: Known, saved: Saved, phases: "Phases") -> Iterator[LogHit]:
    """One a phase, with how often."""
    data = saved.data
    groups: dict[tuple[str, str], LogHit] = {}
    counted: set[int] = set()
    for needle in known.needles:
        at, looked = data.find(needle), 0
        while at >= 0 and looked < OCCURRENCES:
            looked += 1
            begin, line = _line_at(data, at, needle)
            if begin not in counted and not any(word in line for word in known.excluding):
                counted.add(begin)
                _count(groups, known, saved, begin, line, phases.at(begin))
            at = data.find(needle, at + len(needle))
        if at >= 0 and groups:  # too many to look at: they count for the last group
            key = next(reversed(groups))
            groups[key] = replace(groups[key], count=groups[key].count + data.count(needle, at))
    yield from groups.values()


def _count(
    groups: dict[tuple[str, str], LogHit], known: Known, saved: Saved, begin: int, line: bytes, phase: str
) -> None:
    around = _around(saved.data, begin + len(line)) if known.kind in ("cuda oom", "illegal access") else ""
    key = (phase, around)
    if key in groups:  # the first one's numbers stand for all: a pattern is tried a few times a file, not a million
        groups[key] = replace(groups[key], count=groups[key].count + 1)
        return
    text = clean(line.decode("utf-8", "replace"))
    match = known.pattern.search(text) if known.pattern else None
    values = {name: value(found) for name, found in match.groupdict().items() if found is not None} if match else {}
    groups[key] = LogHit(
        kind=known.kind,
        file=saved.name,
        line=saved.data.count(b"\n", 0, begin) + 1,
        text=text.strip()[:SHOWN],
        phase=phase,
        values=values,
        around=around,
    )


def _line_at(data: bytes, at: int, needle: bytes) -> tuple[int, bytes]:
    """Where the line begins, and a part of it around ``at`` that is not too long."""
    begin = data.rfind(b"\n", max(0, at - LINE_CHARACTERS), at) + 1
    if begin == 0 and at > LINE_CHARACTERS:
        begin = at - 200
    end = data.find(b"\n", at, at + len(needle) + LINE_CHARACTERS)
    return begin, data[begin : end if end >= 0 else at + len(needle) + LINE_CHARACTERS].rstrip(b"\r")


class Phases:
    """Where in a log a server began to start, and where it was ready: a sweep each, asked many times."""

    def __init__(self, data: bytes):
        marks = [(at, "start") for mark in STARTS for at in _places(data, mark)]
        marks += [(at, "serving") for mark in READY for at in _places(data, mark)]
        self._marks = sorted(marks)

    def at(self, place: int) -> str:
        """ "" before the first mark."""
        before = bisect_right(self._marks, (place, ""))
        return self._marks[before - 1][1] if before else ""


def _places(data: bytes, mark: bytes) -> Iterator[int]:
    at, number = data.find(mark), 0
    while at >= 0 and number < OCCURRENCES:
        number += 1
        yield at
        at = data.find(mark, at + len(mark))


def _around(data: bytes, at: int) -> str:
    before = data[max(0, at - BEFORE) : at]
    nearest, found = -1, ""
    for word, part in FRAMES:
        where = before.rfind(word)
        if where > nearest:
            nearest, found = where, part
    return found


def _lines(data: bytes, needle: bytes, at_most: int) -> Iterator[str]:
    at = data.find(needle)
    while at >= 0 and at_most > 0:
        at_most -= 1
        yield clean(_line_at(data, at, needle)[1].decode("utf-8", "replace"))
        at = data.find(needle, at + len(needle))


def _version(data: bytes) -> str | None:
    """vLLM's, of its banner or its engine's first line."""
    for mark in (b"LLM engine (v", b"vLLM API server version ", "█  version ".encode()):
        for line in _lines(data, mark, 3):
            found = VERSIONS.search(line)
            if found:
                return value(found[1])
    return None


def _xids(data: bytes) -> tuple[Xid, ...] | None:
    """None where the file shows no kernel line: then it cannot say that there was no error."""
    found = parse_xids(line for mark in (b"NVRM: Xid", b"SXid (") for line in _lines(data, mark, XIDS))
    if found or b"NVRM:" in data or b" kernel: " in data or KERNEL.search(data[:65536]):
        return tuple(replace(xid, text=value(xid.text), when=value(xid.when)) for xid in found)
    return None


def _servers(data: bytes) -> Iterator[Server]:
    """Out of command lines, or of the options that vLLM and SGLang log at their start. The last one is the newest."""
    seen = [server for mark in COMMANDS for line in _lines(data, mark, 20) if (server := _command(line)) is not None]
    for mark, start in LOGGED:
        for line in _lines(data, mark, 20):
            server = recognise([*start, *_options(line.partition(mark.decode())[2])])
            if server is not None and server.arguments:
                seen.append(server)
    yield from list(dict.fromkeys(seen))[-2:]


def _command(line: str) -> Server | None:
    """Prose that mentions a command has neither options nor a model's name behind it."""
    words = line.replace("\\", " ").split()
    for at, word in enumerate(words[:40]):
        if word.rsplit("/", 1)[-1] in PROGRAMS:
            server = recognise(words[at : at + 200])
            if server is not None:
                first = server.arguments[0] if server.arguments else ""
                options = any(argument.startswith("--") for argument in server.arguments)
                return server if options and ("/" in first or "-" in first) else None
    return None


def _options(text: str) -> list[str]:
    words = []
    for name, found in OPTION.findall(text):
        plain = found.strip("'\"")
        if plain not in ("None", "False"):
            words += [f"--{name.replace('_', '-')}"] + ([] if plain == "True" else [plain])
    return words
