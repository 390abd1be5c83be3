"""What the routes share: the driver, the tokenizer, the chat encoding, the metrics, the names.

Knows: one server's parts. Must not know: how a request is answered.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from longread.server.body import BODIES_AT_ONCE, Bodies
from longread.server.calls import Call, Calls
from longread.server.driver import EngineDriver
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.reading import Readings
from longread.spec.documents import DocumentShelf
from longread.spec.errors import ModelNotFoundError
from longread.wire.encoding import ChatEncoding
from longread.wire.pages import PageHasher
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatTemplateKwargs


@dataclass(frozen=True, slots=True)
class ServerState:
    """``template_defaults``: the server's own ``chat_template_kwargs``; what a request says wins.

    ``observe`` is told of each call that ends, beside the metrics. ``shelf``: the stored documents, None: no store.
    """

    driver: EngineDriver
    metrics: ServerMetrics
    tokenizer: Tokenizer
    encoding: ChatEncoding
    options: ServerOptions
    model_names: tuple[str, ...]
    version: str
    template_defaults: ChatTemplateKwargs | None = None
    observe: Callable[[Call], None] | None = None
    shelf: DocumentShelf | None = None
    hasher: PageHasher = field(default_factory=PageHasher)
    bodies: Bodies = field(init=False)
    calls: Calls = field(init=False)
    readings: Readings = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        observers = [self.metrics.called, *([self.observe] if self.observe is not None else [])]
        object.__setattr__(self, "calls", Calls(observers))
        object.__setattr__(self, "bodies", Bodies(BODIES_AT_ONCE * self.options.max_body_bytes))
        object.__setattr__(self, "readings", Readings(self.driver, BODIES_AT_ONCE * self.options.max_body_bytes))

    def check_model(self, name: str | None) -> str:
        """The name to answer with; no name means the served model. Raises ModelNotFoundError."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ModelNotFoundError(
            f"the model {name[:200]!r} is not served here; served: {', '.join(self.model_names)}",
            param="model",
            code="model_not_found",
        )


def state_of(request: Request) -> ServerState:
    """The state of the server that this request came to."""
    state: ServerState = request.app.state.server
    return state
