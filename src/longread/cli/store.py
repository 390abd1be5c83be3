"""``longread store``: what a store folder holds, and keeping it in order.

Knows: the store's own interface. Must not know: segments, SQL. A folder that a server has open can be looked at and
changed at the same time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longread.cli import explain
from longread.cli.parser import Parser, UsageError, nearest, shorten
from longread.spec.config import parse_bytes
from longread.spec.errors import StoreError, StoreReadOnlyError
from longread.wire.documents.files import printable

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.kv.disk.store import DiskStore
    from longread.kv.records import DocumentInfo

UNLIMITED = 2**60  # this command evicts only when it is told to; a server keeps its own limit


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="list, check, pin, move and remove stored documents",
        description="Look after a store: the folder that `--store` names, where read documents outlive the process.",
        epilog=f"longread {name} ACTION --help describes an action.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    _add_looking(actions)
    _add_keeping(actions)
    _add_moving(actions)
    explain.add_store_parser(actions, "explain")  # asks a server, not a folder
    parser.set_defaults(run=lambda args: _help(parser), parser=parser)


def _help(parser: Parser) -> int:
    parser.print_help()
    return 2


def _add_looking(actions: "_SubParsersAction[Parser]") -> None:
    _action(actions, "ls", ls, "list the documents, and what each model has here", document=None)
    _action(actions, "show", show, "show one document", document="one")
    verify = _action(actions, "verify", verify_store, "read everything back and drop what is damaged", document=None)
    verify.add_argument("--read-only", action="store_true", help="report damage, change nothing")
    verify.add_argument(
        "--rebuild", action="store_true", help="first make the index anew from the records; no server may be running"
    )


def _add_keeping(actions: "_SubParsersAction[Parser]") -> None:
    gc = _action(actions, "gc", collect, "give back space that nothing uses", document=None)
    gc.add_argument(
        "--store-size", metavar="SIZE", help="evict what was used longest ago down to this; default: evict nothing"
    )
    _action(actions, "pin", pin, "keep documents from eviction", document="some")
    _action(actions, "unpin", unpin, "let documents be evicted again", document="some")
    _action(actions, "rm", remove, "forget documents and all that was read of them", document="some")


def _add_moving(actions: "_SubParsersAction[Parser]") -> None:
    export = _action(actions, "export", export_document, "write one document with its cache to a file", document="one")
    export.add_argument("file", type=Path, metavar="FILE", help="file to be written")
    export.add_argument("--force", action="store_true", help="write over a file that exists")
    importing = _action(actions, "import", import_document, "enter a document that was exported", document=None)
    importing.epilog = (
        "Import trusts the file's numbers and text: nothing in them shows that the model made them, and a forged file "
        "changes answers. Import only what you or somebody you trust exported. A document that is in the store stays "
        "as it is."
    )
    importing.add_argument("file", type=Path, metavar="FILE", help="file that `longread store export` wrote")
    importing.add_argument("--pin", action="store_true", help="keep it from eviction")


def _action(
    actions: "_SubParsersAction[Parser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    document: str | None,
) -> Parser:
    parser: Parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    if document is not None:
        count = "+" if document == "some" else 1
        parser.add_argument("documents", nargs=count, metavar="DOCUMENT", help="id, beginning of an id, or name")
        parser.add_argument("--model", metavar="LABEL", help="only as this model read it")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="the store's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)
    return parser


def ls(args: argparse.Namespace) -> int:
    with _opened(args, read_only=True) as store:
        documents = [_described(store, each) for each in store.documents()]
        models: list[dict[str, Any]] = [
            {
                "label": each.layout.label,
                "dtype": each.layout.dtype,
                "root": each.layout.root.hex(),
                "records": each.records,
                "bytes": each.live_bytes,
            }
            for each in store.models()
        ]
        stats = store.stats()
    totals = {
        "records": stats.records,
        "bytes": stats.live_bytes,
        "file_bytes": stats.file_bytes,
        "document_bytes": stats.document_bytes,
        "reserve_bytes": stats.reserve_bytes,
    }
    if args.json:
        return _json({"documents": documents, "models": models, "total": totals})
    from rich.text import Text

    from longread.plan.tables import console, print_records

    screen = console()
    rows = []
    for each in documents:
        marks = ", ".join(mark for mark, on in (("pinned", each["pinned"]), ("incomplete", not each["whole"])) if on)
        row = (each["id"], each["name"], each["model"], f"{each['tokens']:,}", _size(each["bytes"]))
        rows.append([Text(_plain(text)) for text in (*row, _when(each["used"]), marks)])  # Text: no markup in it
    if rows:
        names = ("document", "name", "model", "tokens", "stored", "last used", "")
        print_records(screen, names, rows, left=("name", "model", "last used", ""))
    for model in models:
        screen.print(
            Text(f"{_plain(model['label'])} {model['dtype']}: {model['records']:,} records, {_size(model['bytes'])}")
        )
    screen.print(
        f"{len(documents)} documents, {_size(stats.document_bytes)} of texts and ids; {_size(stats.live_bytes)} of "
        f"records in {_size(stats.file_bytes)} of files"
    )
    return 0


def show(args: argparse.Namespace) -> int:
    with _opened(args, read_only=True) as store:
        info = _find(store, args.documents[0], args.model)
        told = _described(store, info)
    if args.json:
        return _json(told)
    for name, value in told.items():
        shown = _size(value) if "bytes" in name else _when(value) if name in ("created", "used") else _plain(value)
        print(f"{name:<12} {shown}")
    return 0


def verify_store(args: argparse.Namespace) -> int:
    """Exit 1 if anything was damaged."""
    from longread.kv.disk.store import DiskStore

    if args.rebuild and args.read_only:
        raise UsageError("--rebuild writes a new index; leave --read-only out")
    _require_store(args.store)
    rebuilt = None
    if args.rebuild:
        with _bar("indexing") as progress:
            store, rebuilt = DiskStore.rebuild(args.store, max_bytes=UNLIMITED, progress=progress)
    else:
        store = _open_to_verify(args)
    with closing(store), _bar("verifying") as progress:
        report = store.verify(progress)
    if args.json:
        _json(
            {
                "sound": report.sound,
                "rebuilt": rebuilt,
                "records": report.records,
                "bytes": report.bytes,
                "corrupt": [{"kind": kind, "key": key} for kind, key in report.corrupt],
                "unsound_rows": report.unsound_rows,
                "unreachable": report.unreachable,
                "broken_documents": report.broken_documents,
                "index_faults": report.index_faults,
                "foreign": report.foreign,
                "seconds": report.seconds,
            }
        )
        return 0 if report.sound else 1
    if rebuilt is not None:
        print(f"index made anew from {rebuilt:,} records; the old one, if any, is beside it (index.sqlite.damaged)")
    rate = report.bytes / max(report.seconds, 1e-9) / 1e9
    print(f"{report.records:,} records whole, {_size(report.bytes)} read in {report.seconds:.1f} s ({rate:.2f} GB/s)")
    done = "left as it is" if args.read_only else "dropped"
    for kind, key in report.corrupt:
        print(f"damaged {kind} {key}: {done}")
    if report.unsound_rows:
        print(f"{report.unsound_rows:,} rows of the index are damaged: {done}")
    for fault in report.index_faults:
        print(f"index: {_plain(fault)}; `longread store verify --rebuild --store {args.store}` makes it anew")
    for name in report.foreign:
        print(f"segments/{_plain(name)} is not the store's; left alone")
    for ident in report.broken_documents:
        print(f"{_plain(ident)}: not all of it is here; ingest it again")
    if report.unreachable:
        print(f"{report.unreachable:,} records that nothing leads to; `longread store gc` gives their space back")
    return 0 if report.sound else 1


def _open_to_verify(args: argparse.Namespace) -> "DiskStore":
    from longread.kv.disk.store import DiskStore

    try:
        return DiskStore.open(args.store, None, max_bytes=UNLIMITED, read_only=args.read_only)
    except StoreReadOnlyError as error:
        raise StoreReadOnlyError(f"{error}; --read-only reports damage and changes nothing") from error


def collect(args: argparse.Namespace) -> int:
    limit = UNLIMITED if args.store_size is None else parse_bytes("--store-size", args.store_size)
    with _opened(args) as store:
        done = store.gc(limit)
    if args.json:
        _json({name: getattr(done, name) for name in type(done).__slots__})
        return 1 if done.counted_bytes > limit else 0
    print(
        f"{_size(done.freed_bytes)} given back, {_size(done.counted_bytes)} left; {done.evicted:,} records evicted, "
        f"{done.documents:,} documents forgotten, {done.unreachable:,} unreachable, {done.corrupt:,} damaged"
    )
    if done.counted_bytes > limit:
        print(f"more than {_size(limit)}: the rest is pinned, or a running server is writing to it", file=sys.stderr)
        return 1
    return 0


def pin(args: argparse.Namespace) -> int:
    return _each(args, lambda store, ident: store.pin(ident), "pinned")


def unpin(args: argparse.Namespace) -> int:
    return _each(args, lambda store, ident: store.unpin(ident), "unpinned")


def remove(args: argparse.Namespace) -> int:
    return _each(args, lambda store, ident: store.remove(ident), "removed", tidy=True)


def export_document(args: argparse.Namespace) -> int:
    if args.file.exists() and not args.force:
        raise StoreError(f"{args.file} exists; --force writes over it")
    with _opened(args, read_only=True) as store:
        info = _find(store, args.documents[0], args.model)
        size = store.export(info.id, args.file)
    if args.json:
        return _json({"id": info.id, "file": str(args.file), "bytes": size})
    print(f"{_plain(info.id)}: {_size(size)} written to {args.file}")
    return 0


def import_document(args: argparse.Namespace) -> int:
    with args.file.open("rb"):
        pass  # before a store is made for it
    with _opened(args) as store:
        info = store.import_(args.file)
        if args.pin:
            store.pin(info.id)
    if args.json:
        return _json({"id": info.id, "name": info.name, "model": info.label, "tokens": info.tokens})
    print(f"{_plain(info.id)} ({_plain(info.name)}): {info.tokens:,} tokens as {_plain(info.label)} read them")
    return 0


def _require_store(path: Path) -> None:
    """Only import makes a store; elsewhere a wrong folder is a typing error."""
    from longread.kv.disk.folder import holds_store

    if not holds_store(path):
        raise StoreError(f"{path}: there is no store; `--store` makes one where a model is served or ingested")


@contextmanager
def _opened(args: argparse.Namespace, read_only: bool = False) -> Iterator["DiskStore"]:
    """The store of ``--store``; with ``--model``, as that model's process would open it."""
    from longread.kv.disk.store import DiskStore

    if args.action != "import":
        _require_store(args.store)
    store = DiskStore.open(args.store, None, max_bytes=UNLIMITED, read_only=read_only)
    with closing(store):
        label = getattr(args, "model", None)
        if label is None:
            yield store
            return
        layouts = [each.layout for each in store.models()]
        chosen = [each for each in layouts if label in (each.label, f"{each.label} {each.dtype}")]
        if len(chosen) != 1:
            names = [_plain(f"{each.label} {each.dtype}") for each in layouts]
            raise StoreError(
                f"{args.store}: {len(chosen) or 'no'} models are called {shorten(label)!r}{nearest(label, names)}; "
                f"it has: {', '.join(names) or 'none'}"
            )
        with closing(DiskStore.open(args.store, chosen[0], max_bytes=UNLIMITED, read_only=read_only)) as own:
            yield own


def _find(store: "DiskStore", text: str, label: str | None) -> "DocumentInfo":
    """By id, beginning of an id, or name. Raises StoreError, also when that says more than one."""
    root = store.layout.root if store.layout is not None else None
    every = [each for each in store.documents() if root is None or each.root == root]
    by_rank = (
        [each for each in every if each.id == text],
        [each for each in every if each.name == text],
        [each for each in every if text and each.id.startswith(text)],
    )
    found = next((some for some in by_rank if some), [])
    if not found:
        names = [_plain(name) for each in every for name in (each.id, each.name)]
        raise StoreError(
            f"{store.path}: there is no document {shorten(text)!r}{nearest(text, names)}; "
            f"`longread store ls --store {store.path}` lists them"
        )
    if len({each.id for each in found}) > 1:
        idents = sorted({_plain(each.id) for each in found})
        raise StoreError(f"{shorten(text)!r} can be {' or '.join(idents)}; give the id")
    return found[0]


def _each(args: argparse.Namespace, work: Callable[["DiskStore", str], bool], word: str, tidy: bool = False) -> int:
    with _opened(args) as store:
        # All are looked up before the first is changed: a typing error changes nothing.
        found = [_find(store, text, args.model) for text in args.documents]
        done = [info for info in found if work(store, info.id)]
        freed = store.gc(UNLIMITED).freed_bytes if tidy else 0
    if args.json:
        return _json({word: [info.id for info in done], "freed_bytes": freed})
    for info in done:
        print(f"{word}: {_plain(info.id)} ({_plain(info.name)})")
    if tidy:
        print(f"{_size(freed)} given back")
    return 0


def _described(store: "DiskStore", info: "DocumentInfo") -> dict[str, Any]:
    state = store.document_state(info)
    return {
        "id": info.id,
        "name": info.name,
        "model": info.label,
        "tokens": info.tokens,
        "text_bytes": info.text_bytes,
        "whole": state.whole,
        "pages": state.pages,
        "rings": state.rings,
        "bytes": state.bytes_stored,
        "pinned": info.pinned,
        "created": info.created,
        "used": info.used,
    }


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Progress in bytes on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _json(data: dict) -> int:
    """What is not printable, lone surrogates among it, as JSON's escapes: safe on a terminal, the same when read."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    print("".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text))
    return 0


def _plain(value: object) -> str:
    """What somebody else named, for a terminal. It is not escaped for rich, whose Text takes no markup."""
    return printable(str(value))


def _size(count: int) -> str:
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"


def _when(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # no time that this system can show
        return "?"
