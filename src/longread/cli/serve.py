"""``longread serve``: options to a running server.

Knows: which options there are, what is printed at start. Must not know: routes, engine internals. Names are vLLM's
where vLLM has the option.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.checkpoint import BUNDLED, locate
from longread.cli.engine_flags import (
    add_device_flags,
    add_drawn_flags,
    add_memory_flags,
    add_serving_flags,
    options_from,
)
from longread.cli.limit_flags import add_limit_flags, limits_from
from longread.cli.parser import Parser, UsageError, shorten, whole
from longread.cli.peer_options import PEER_OPTIONS
from longread.server.options import ServerOptions
from longread.spec.config import EngineOptions, parse_bytes
from longread.spec.profiler import profiler_config

if TYPE_CHECKING:
    from argparse import _SubParsersAction

# As in wire/encoding, which loads pydantic: too slow for --help. A test holds the two together.
ENCODINGS = ("auto", "v3", "r1", "v3.1", "v3.2", "v4", "v4-0731", "v4.1")
SAFE_HOST = "127.0.0.1"


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="serve a checkpoint to OpenAI clients",
        description="Serve a checkpoint in DeepSeek's own format over an OpenAI-compatible HTTP API. "
        "What is left out is chosen for this machine and printed with its reason.",
        epilog="Amounts: 128K is 131072, 128k is 128000; sizes in bytes, or 512MiB, 4GiB.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help=f"folder with config.json, tokenizer.json, *.safetensors; or a bundled model: {', '.join(BUNDLED)}",
    )
    engine = parser.add_argument_group("engine")
    add_memory_flags(engine)
    add_serving_flags(engine)
    add_device_flags(engine)
    add_drawn_flags(engine)
    engine.add_argument(
        "--step-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="an engine that takes longer over one step hangs and is started again; 0: never",
    )
    _add_http(parser)
    _add_log(parser)
    add_limit_flags(parser)
    add_chat_flags(parser)
    parser.elsewhere = PEER_OPTIONS
    parser.set_defaults(run=run, parser=parser)


def _add_http(parser: Parser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument(
        "--host", default=SAFE_HOST, help="address to listen on; others than loopback open it to the network"
    )
    group.add_argument("--port", type=whole, default=8000, help="port to listen on; 0 takes a free one")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="accept this key; repeatable")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="accept the keys in this file, one a line (not visible to `ps`)",
    )
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names a request may use; default: the folder's name"
    )
    group.add_argument("--max-body-bytes", default="64MiB", metavar="SIZE", help="largest request body; more gets 413")
    group.add_argument(
        "--allowed-origins",
        type=_json_list,
        default=[],
        metavar="JSON",
        help='CORS origins, ["https://..."]; default: none',
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long open requests may go on at the end; then the engine may write what is due to the store for as "
        "long again (5 to 45 s); a second signal stops at once",
    )


def _add_log(parser: Parser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument(
        "--profiler-config",
        type=_json_object,
        metavar="JSON",
        help='\'{"profiler": "torch"}\': POST /start_profile and /stop_profile tell where steps spend their time; '
        "slows the engine a little. torch_profiler_dir: traces, too; max_iterations: steps of a profile",
    )
    group.add_argument(
        "--disable-log-stats",
        action="store_true",
        help="no line of throughput, queue and cache use each 10 s while there is traffic",
    )


def add_chat_flags(parser: Parser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat-encoding", choices=ENCODINGS, default="auto", help="prompt format; auto: by the checkpoint"
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='default of chat_template_kwargs, e.g. {"thinking": true}; a request\'s own come first',
    )


def run(args: argparse.Namespace) -> int:
    options, http = engine_options(args), server_options(args)
    from longread.cli.serving import serve_checkpoint  # the rooms that serving needs
    from longread.cli.worker import log_to_stderr

    log_to_stderr()
    read_limits = (lambda: limits_from(args)) if args.limits is not None else None
    serve_checkpoint(options, http, args.chat_encoding, args.default_chat_template_kwargs, read_limits)
    return 0


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Raises ConfigError and CheckpointError."""
    drawn = args.random_weights and args.checkpoint not in BUNDLED
    model = args.checkpoint if drawn else str(locate(args.checkpoint))
    return options_from(args, model, args.served_model_name[0] if args.served_model_name else None)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Raises ConfigError."""
    return ServerOptions(
        host=args.host,
        port=args.port,
        served_model_name=tuple(args.served_model_name or ()),
        api_key=(*args.api_key, *_read_keys(args.api_key_file)),
        limits=limits_from(args),
        max_body_bytes=parse_bytes("max_body_bytes", args.max_body_bytes),
        shutdown_timeout=args.shutdown_timeout,
        step_timeout=args.step_timeout,
        allowed_origins=tuple(args.allowed_origins),
        disable_log_stats=args.disable_log_stats,
        profiler=None if args.profiler_config is None else profiler_config(args.profiler_config),
    )


def _read_keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path}: cannot be read: {error}") from error
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key; write one a line")
    return keys


def _json_list(text: str) -> list[str]:
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not a JSON list of texts")
    return value


def _json_object(text: str) -> dict[str, object]:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not a JSON object")
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is nested too deep") from None
    except ValueError as error:  # json.JSONDecodeError, and Python's limit on the digits of an int
        raise argparse.ArgumentTypeError(f"{shorten(repr(text))} is not JSON: {error}") from None
