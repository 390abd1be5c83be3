"""Puts a server together: config, tokenizer, encoding, port, engine, app.

Knows: every room that serving needs, and in which order things are done and said. Everything that can be found wrong
without the weights is found before the port opens.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from longread.cli.checkpoint import origin, spec_of
from longread.cli.describe import config_lines, memory_line, ready_line, step_line
from longread.cli.version import version
from longread.cli.worker import COMMAND, layout_of, task_of
from longread.kv.disk.store import DiskStore
from longread.kv.shelf import LateShelf
from longread.plan.machine import probe_machine
from longread.plan.resolve import resolve
from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.limits import Limits
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import bind, serve, url
from longread.server.spans import from_environment as spans_from_environment
from longread.server.state import ServerState
from longread.server.worker.engine import WorkerEngine
from longread.server.worker.supervise import Workers
from longread.spec.config import EngineOptions, ResolvedConfig
from longread.spec.engine import EngineInfo
from longread.spec.errors import ConfigError, InvalidRequestError, StoreError
from longread.spec.model import ModelSpec
from longread.spec.reduced import random_spec
from longread.wire.encoding import ChatEncoding, encoding_for
from longread.wire.encoding.conversation import conversation
from longread.wire.placeholder import placeholder
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatRequest, ChatTemplateKwargs, validate

STOP_SECONDS = 10.0  # for a load that was interrupted: its process is killed

logger = logging.getLogger(__name__)


def serve_checkpoint(
    options: EngineOptions,
    http: ServerOptions,
    chat_encoding: str,
    template_defaults: Mapping[str, object],
    read_limits: Callable[[], Limits] | None = None,
) -> None:
    """Serve until stopped. ``read_limits`` is asked for the limits anew at each SIGHUP. Raises ConfigError,
    CheckpointError, and EngineLostError where the engine does not live.
    """
    path = Path(options.model)
    spec = random_spec(options.model, options.layers) if options.random_weights else spec_of(path)
    resolved = resolve(options, spec, probe_machine())
    tokenizer = _tokenizer(path, spec, options.random_weights)
    encoding, why = encoding_for(
        chat_encoding, spec.family, spec.label, path.resolve().name, has_think=tokenizer.has("<think>")
    )
    defaults = checked_defaults(template_defaults, encoding)
    names = http.served_model_name or (resolved.served_model_name,)
    source = "random weights" if options.random_weights else origin(path)
    _say(f"{spec.label} from {source}", *config_lines(resolved), f"  chat encoding {encoding.name} ({why})")
    if options.random_weights:
        _say("warning: the weights are random: what this server answers means nothing, only its times do")
    listener = bind(http.host, http.port)
    address = url(listener)
    if http.exposed:
        _say(f"warning: {http.host} is open to the network and no API key is set: anyone there can use this server")

    metrics = ServerMetrics(names[0], lambda: driver.current, http.shared)
    shelf = LateShelf(Path(options.store)) if options.store is not None else None
    workers = Workers(COMMAND, task_of(resolved, http.profiler), step_timeout=http.step_timeout)
    driver = EngineDriver(
        lambda: _with_shelf(workers.make(), resolved, shelf),
        admission=Admission(http.limits, resolved.slo),
        observer=metrics,
        restarts=Restarts(),
    )
    spans = spans_from_environment()
    state = ServerState(driver, metrics, tokenizer, encoding, http, names, version(), defaults, spans, shelf)

    def on_ready(info: EngineInfo) -> None:
        _say(memory_line(resolved.memory, info))
        _say(step_line(info))
        _say(f"  queue: {driver.admission.told(info, driver.stats.known_cost)}")
        _say(ready_line(replace(info, model=names[0]), address))

    # A large vocabulary takes a second to load again; until then the slower library serves.
    hastening = threading.Thread(target=lambda: _say(f"  tokenising with {tokenizer.hasten()}"), name="longread-fast")
    try:
        hastening.start()
        on_hangup = None if read_limits is None else partial(reload_limits, driver.admission, read_limits)
        serve(create_app(state), driver, http, listener, on_ready, on_hangup)
    finally:
        workers.stop()
        hastening.join(STOP_SECONDS)
        driver.join(STOP_SECONDS)
        if shelf is not None:
            shelf.close()
        if spans is not None:
            spans.close()


def _tokenizer(path: Path, spec: ModelSpec, random_weights: bool) -> Tokenizer:
    """The checkpoint's; a model of random weights without one gets one that spells numbers."""
    if random_weights and not (path / "tokenizer.json").is_file():
        return Tokenizer(placeholder(spec.vocab), bos_id=spec.bos_id, eos_id=spec.eos_id)
    tokenizer = Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id)
    tokenizer.check_vocabulary(spec.vocab)
    return tokenizer


def reload_limits(admission: Admission, read: Callable[[], Limits]) -> None:
    """Replace the limits, for what is asked from now on. Limits that cannot be read change nothing."""
    try:
        limits = read()
    except ConfigError as error:
        logger.error("the limits stay as they are: %s", error)
        return
    before, admission.limits = asdict(admission.limits), limits
    changes = [f"{name} {before[name]} -> {value}" for name, value in asdict(limits).items() if value != before[name]]
    logger.info("limits read again: %s", ", ".join(changes) or "no change")


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


def _with_shelf(engine: WorkerEngine, resolved: ResolvedConfig, shelf: LateShelf | None) -> WorkerEngine:
    """On the driver's thread. The server's own opening of the store, for documents, outlives the engine's process."""
    layout = layout_of(engine.told)
    if shelf is None or shelf.attached or layout is None or resolved.store is None:
        return engine
    try:
        shelf.attach(DiskStore.open(Path(resolved.store), layout, max_bytes=resolved.store_size))
    except StoreError as error:
        logger.error("the documents in the store cannot be used: %s", error)
    return engine


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stdout, flush=True)
