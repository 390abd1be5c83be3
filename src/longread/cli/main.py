"""``longread``: finds the command, runs it, and turns every error into one line and an exit code.

Knows: the commands' parsers. Must not know: what the commands do; a command imports its rooms when it runs, since
``longread --help`` must not load torch.

Exit codes: 0 done; 1 it failed while running; 2 the command line, the configuration or the checkpoint is not usable;
130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

from longread.cli import (
    bench,
    claim,
    demo,
    doctor,
    experiment,
    explain,
    fixture,
    gate,
    ingest,
    plan,
    probe,
    serve,
    simulate,
    store,
    stress,
    trace,
)
from longread.cli.parser import Parser, UsageError, nearest, refuse_unknown, shorten
from longread.cli.threads import bound_spinning
from longread.cli.version import version
from longread.spec.errors import CheckpointError, ConfigError, LongreadError
from longread.spec.printing import printable

COMMANDS = {
    "serve": serve,
    "demo": demo,
    "plan": plan,
    "claim": claim,
    "simulate": simulate,
    "probe": probe,
    "doctor": doctor,
    "fixture": fixture,
    "bench": bench,
    "gate": gate,
    "stress": stress,
    "experiment": experiment,
    "ingest": ingest,
    "store": store,
    "trace": trace,
    "explain": explain,
}


def build_parser() -> Parser:
    parser = Parser(
        prog="longread",
        description="Serve DeepSeek models over very long documents, with a fast first token.",
        epilog="longread COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"longread {version()}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from, for bug reports")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        module.add_parser(commands, name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: the process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader of stdout went away (``| head``): nothing to say to anyone, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except LongreadError as error:
        if traceback:
            raise
        return _say(f"error: {error}", 2 if isinstance(error, ConfigError | CheckpointError) else 1)
    except OSError as error:  # a path or a device that the user named: what rooms expect to go wrong they say better
        if traceback:
            raise
        named = f": {shorten(repr(error.filename))}" if error.filename is not None else ""
        return _say(f"error: {error.strerror or error}{named}", 2)
    except Exception as error:  # the process edge
        if traceback:
            raise
        what = str(error).strip() or "no message"
        return _say(
            f"error: {type(error).__name__}: {what}; this is a bug: run `longread --traceback ...` to see where", 1
        )


def _run(arguments: list[str]) -> int:
    if any("\0" in text for text in arguments):
        raise UsageError("an argument holds a NUL character; no path and no option can")
    parser = build_parser()
    named = next((text for text in arguments if not text.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        raise UsageError(f"unknown command {named!r}{nearest(named, list(COMMANDS))} (all: {', '.join(COMMANDS)})")
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        refuse_unknown(unknown, parser)
        parser.print_help()
        return 2
    refuse_unknown(unknown, args.parser)
    bound_spinning()
    code: int = args.run(args)
    return code


def _say(text: str, code: int) -> int:
    # A message quotes servers and files, and a terminal obeys what it is sent.
    print(f"longread: {printable(text, newline=chr(10))}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
