"""Puts a server together: config, tokenizer, encoding, port, engine, app.

Knows: every room that serving needs, and in which order things are done and said. Everything that can be found wrong
without the weights is found before the port opens.
"""

import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from longread.cli.checkpoint import origin, spec_of
from longread.cli.describe import config_lines, memory_line, ready_line
from longread.cli.version import version
from longread.kv.shelf import LateShelf
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.runner import bind, serve, url
from longread.server.spans import from_environment as spans_from_environment
from longread.server.state import ServerState
from longread.spec.config import EngineOptions, ResolvedConfig
from longread.spec.engine import Engine, EngineInfo, EngineStats
from longread.spec.errors import ConfigError, InvalidRequestError
from longread.spec.model import ModelSpec
from longread.wire.encoding import ChatEncoding, encoding_for
from longread.wire.encoding.conversation import conversation
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatRequest, ChatTemplateKwargs, validate

STOP_SECONDS = 10.0  # for a load that was interrupted: it ends at the next tensor


class LoadInterruptedError(ConfigError):
    """The server was stopped while the model loaded."""


def serve_checkpoint(
    options: EngineOptions, http: ServerOptions, chat_encoding: str, template_defaults: Mapping[str, object]
) -> None:
    """Serve until stopped. Raises ConfigError and CheckpointError."""
    path = Path(options.model)
    spec = spec_of(path)
    resolved = resolve(options, spec, probe_machine())
    tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
    tokenizer.check_vocabulary(spec.vocab)
    encoding, why = encoding_for(
        chat_encoding, spec.family, spec.label, path.resolve().name, has_think=tokenizer.has("<think>")
    )
    defaults = checked_defaults(template_defaults, encoding)
    names = http.served_model_name or (resolved.served_model_name,)
    _say(f"{spec.label} from {origin(path)}", *config_lines(resolved), f"  chat encoding {encoding.name} ({why})")
    listener = bind(http.host, http.port)
    address = url(listener)
    if http.exposed:
        _say(f"warning: {http.host} is open to the network and no API key is set: anyone there can use this server")

    stopping = threading.Event()

    def read() -> tuple[EngineInfo, EngineStats] | None:
        return (driver.engine_info, driver.stats) if driver.state == "ready" else None

    metrics = ServerMetrics(names[0], read, http.shared)
    shelf = LateShelf(Path(options.store)) if options.store is not None else None
    driver = EngineDriver(
        lambda: _load(path, spec, resolved, stopping, shelf),
        max_num_queued_reqs=http.max_num_queued_reqs,
        observer=metrics,
    )
    spans = spans_from_environment()
    state = ServerState(driver, metrics, tokenizer, encoding, http, names, version(), defaults, spans, shelf)

    def on_ready(info: EngineInfo) -> None:
        _say(memory_line(resolved.memory, info))
        _say(ready_line(replace(info, model=names[0]), address))

    # A large vocabulary takes a second to load again; until then the slower library serves.
    hastening = threading.Thread(target=lambda: _say(f"  tokenising with {tokenizer.hasten()}"), name="longread-fast")
    try:
        hastening.start()
        serve(create_app(state), driver, http, listener, on_ready)
    finally:
        stopping.set()
        hastening.join(STOP_SECONDS)
        driver.join(STOP_SECONDS)
        if spans is not None:
            spans.close()


def checked_defaults(given: Mapping[str, object], encoding: ChatEncoding) -> ChatTemplateKwargs | None:
    """``--default-chat-template-kwargs``, tried on one question: what this encoding cannot do is found at the start and
    not by every user. Raises ConfigError.
    """
    if not given:
        return None
    question = validate(ChatRequest, {"messages": [{"role": "user", "content": "?"}]})
    try:
        defaults = validate(ChatTemplateKwargs, given)
        conversation(question, encoding.abilities, defaults)
        return defaults
    except InvalidRequestError as error:
        raise ConfigError(f"--default-chat-template-kwargs: {error}") from error


def _load(
    path: Path, spec: ModelSpec, resolved: ResolvedConfig, stopping: threading.Event, shelf: LateShelf | None
) -> Engine:
    """On the engine thread. A stop during loading ends it at the next tensor. The shelf gets the engine's store."""
    from longread.engine.load import load_resolved  # loads torch: not before the port is open
    from longread.weights.progress import loading_bar

    with loading_bar(f"loading {path.name}") as report:

        def progress(done: int, total: int) -> None:
            if stopping.is_set():
                raise LoadInterruptedError("stopped while the model was loading")
            report(done, total)

        engine = load_resolved(path, spec, resolved, progress)
    if shelf is not None:
        shelf.attach(engine.store)
    return engine


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stdout, flush=True)
