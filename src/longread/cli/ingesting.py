"""Reads documents through an engine of its own and enters them in its store.

Knows: every room that this needs, and in which order things are done and said. What can be found wrong without the
weights is found before they are loaded. stdout gets the results, stderr everything else.
"""

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from longread.cli.checkpoint import origin, spec_of
from longread.cli.progress import tokens_bar
from longread.cli.serving import checked_defaults
from longread.kv.shelf import DiskShelf
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.spec.config import EngineOptions, ResolvedConfig
from longread.spec.documents import Document
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams
from longread.spec.errors import DocumentError, EngineFailedError, InvalidRequestError, StoreError
from longread.spec.state import PAGE_TOKENS
from longread.wire.documents.files import DocumentText, printable, read_file
from longread.wire.documents.prefix import document_pieces
from longread.wire.documents.tree import read_tree
from longread.wire.encoding import encoding_for
from longread.wire.tokenizer import Tokenizer

if TYPE_CHECKING:
    from longread.engine.engine import LocalEngine

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
FLUSH_SECONDS = 600.0  # a slow disk; a disk that hangs must not hold the process for ever


@dataclass(frozen=True, slots=True)
class Source:
    """A document before it is read by the model: ``ids`` is its prompt prefix."""

    path: str  # as it is shown
    document: DocumentText
    ids: tuple[int, ...]


def ingest(
    files: Sequence[Path],
    options: EngineOptions,
    *,
    chat_encoding: str,
    template_defaults: Mapping[str, object],
    name: str | None,
    pinned: bool,
    as_json: bool,
) -> None:
    """Read each file and print its id. Raises ConfigError, DocumentError, CheckpointError, StoreError."""
    path = Path(options.model)
    spec = spec_of(path)
    tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
    tokenizer.check_vocabulary(spec.vocab)
    has_think = tokenizer.has("<think>")
    encoding, why = encoding_for(chat_encoding, spec.family, spec.label, path.resolve().name, has_think=has_think)
    defaults = checked_defaults(template_defaults, encoding)
    resolved = resolve(options, spec, probe_machine())
    _say(f"{spec.label} from {origin(path)}, chat encoding {encoding.name} ({why})")
    sources = []
    for file in files:
        shown = printable(str(file))
        document = read_tree(file) if file.is_dir() else read_file(file)
        for note in document.notes:
            _say(f"{shown}: {note}")
        try:
            pieces = document_pieces(document.text, encoding, defaults)
        except InvalidRequestError as error:
            raise DocumentError(f"{shown}: {error}") from None
        ids = tuple(tokenizer.encode_prompt(pieces))
        _check_fits(shown, len(ids), resolved)
        sources.append(Source(shown, document, ids))
    from longread.engine.load import load_resolved  # loads torch
    from longread.weights.progress import loading_bar

    with loading_bar(f"loading {path.name}") as report:
        engine = load_resolved(path, spec, resolved, report)
    try:
        shelf = _shelf(engine, options)
        for source in sources:
            entered, reused = _read(engine, shelf, source, name or source.document.name, pinned)
            _tell(entered, reused, source, as_json)
    finally:
        engine.close()


def _check_fits(file: str, count: int, resolved: ResolvedConfig) -> None:
    """One token is for the engine's answer. Raises DocumentError."""
    room = min(resolved.max_model_len, resolved.num_pages * PAGE_TOKENS)
    if count + 1 > room:
        raise DocumentError(
            f"{file}: has {count:,} tokens, {room - 1:,} fit (max_model_len {resolved.max_model_len:,}, "
            f"{resolved.num_pages:,} pages of {PAGE_TOKENS}): split it, or raise --kv-cache-memory-bytes if memory is "
            "what is short"
        )


def _shelf(engine: "LocalEngine", options: EngineOptions) -> DiskShelf:
    if engine.store is None:
        raise StoreError(f"{options.store}: the store could not be opened (see above): nothing would be kept")
    return DiskShelf(engine.store)


def _read(
    engine: "LocalEngine", shelf: DiskShelf, source: Source, name: str, pinned: bool
) -> tuple[Document, FinishEvent]:
    """Through the engine, onto the disk, into the store's list. What an interruption leaves is written down, too:
    all of it where a signal asks for it, up to the last landing point where a second one tears the step.
    """
    request = GenerationRequest("ingest", source.ids, ONE_TOKEN)
    engine.submit(request)
    try:
        with tokens_bar(source.path, len(source.ids)) as report, _noted_signals() as noted:
            ended = None
            while ended is None:
                if noted:
                    _raise_signal(noted[0])
                ended = next((event for event in engine.step() if isinstance(event, FinishEvent)), None)
                report(engine.computed_tokens("ingest") if ended is None else len(source.ids))
    except (KeyboardInterrupt, SystemExit):
        engine.cancel("ingest")
        while engine.has_work():
            engine.step()
        kept = "" if engine.flush(FLUSH_SECONDS) else " in part"
        _say(f"{source.path}: interrupted; what was read is stored{kept}, the same command goes on from there")
        raise
    if ended.reason == "failed":
        raise EngineFailedError(f"{source.path}: the engine failed: {ended.error}")
    if not engine.flush(FLUSH_SECONDS):
        raise StoreError(f"{source.path}: was read, but not all of it could be written within {FLUSH_SECONDS:g} s")
    if not shelf.holds(source.ids):
        raise StoreError(
            f"{source.path}: was read, but the store could not keep it: give it more room (--store-size), or unpin or "
            "remove documents (longread store ls)"
        )
    return shelf.add(source.document.text, name=name, tokens=source.ids, pinned=pinned), ended


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted, to be looked at between two steps: raised inside one they would tear the state
    that it writes. Who cannot wait for the step sends a second one.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if len(noted) > 1:
            _raise_signal(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_signal(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _tell(document: Document, ended: FinishEvent, source: Source, as_json: bool) -> None:
    times = ended.times
    seconds = times.first_token - times.arrived
    if as_json:
        told = {
            "id": document.id,
            "name": document.name,
            "path": source.path,
            "model": document.model,
            "tokens": document.tokens,
            "bytes": document.size,
            "reused_tokens": ended.cached_tokens,
            "seconds": round(seconds, 3),
            "pinned": document.pinned,
        }
        print(json.dumps(told, ensure_ascii=False), flush=True)
        return
    reused = f", {ended.cached_tokens:,} of them read before" if ended.cached_tokens else ""
    print(f"{document.id}  {document.name}  {document.tokens:,} tokens{reused}, {seconds:.1f} s", flush=True)


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
