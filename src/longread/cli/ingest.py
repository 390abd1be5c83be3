"""``longread ingest``: files and folders, read into a store once, so that they can be asked about at once.

Knows: which options there are. Must not know: how files are read, nor engines.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate
from longread.cli.engine_flags import add_device_flags, add_store_flags, options_from
from longread.cli.parser import Parser, UsageError
from longread.cli.serve import add_chat_flags
from longread.spec.documents import MAX_NAME

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="read documents into a store, to be asked about later",
        description="Read each FILE (text, Markdown, source code, PDF, DOCX) or folder (a source tree) into the store "
        "and print its document id. Whoever serves the same model over the same store answers about it without reading "
        "it again, whether a request names the id or sends the text. Stopped at any moment, the same command goes on "
        "from where the store is.",
        epilog="Amounts: 128K is 131072, 128k is 128000; sizes in bytes, or 512MiB, 4GiB.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a file, or a folder as one document")
    parser.add_argument(
        "--model",
        default=BUNDLED[0],
        metavar="CHECKPOINT",
        help=f"checkpoint folder or bundled model ({', '.join(BUNDLED)}) that is to read",
    )
    parser.add_argument("--name", metavar="NAME", help="of the document, with one FILE; default: the file's name")
    parser.add_argument("--pin", action="store_true", help="never evict it from the store")
    parser.add_argument("--json", action="store_true", help="print one JSON object a document")
    engine = parser.add_argument_group("engine")
    add_store_flags(engine, required=True)
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="as the server's")
    add_device_flags(engine)
    engine.add_argument("--max-num-batched-tokens", metavar="N", help="tokens of one step; default: chosen")
    engine.add_argument("--kv-cache-memory-bytes", metavar="SIZE", help="memory of the KV cache; default: chosen")
    engine.add_argument(
        "--snapshot-interval", metavar="N", default="32K", help="tokens between points that a stopped run goes on from"
    )
    add_chat_flags(parser)
    parser.set_defaults(run=run, parser=parser, max_num_seqs=1)


def run(args: argparse.Namespace) -> int:
    if args.name is not None and len(args.files) > 1:
        raise UsageError(f"--name is for one FILE, {len(args.files)} are given; leave it out, or ingest them apart")
    if args.name is not None and not (1 <= len(args.name) <= MAX_NAME and args.name.isprintable()):
        raise UsageError(f"--name must have 1 to {MAX_NAME} printable characters")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    options = options_from(args, str(locate(args.model)))
    # Ended from outside, what has been read is still written down.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from longread.cli.ingesting import ingest  # the rooms that reading needs

    ingest(
        args.files,
        options,
        chat_encoding=args.chat_encoding,
        template_defaults=args.default_chat_template_kwargs,
        name=args.name,
        pinned=args.pin,
        as_json=args.json,
    )
    return 0
