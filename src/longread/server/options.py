"""What an operator may set about the HTTP side.

Knows: names, limits and defaults. Must not know: engine options, argument parsing.
"""

import ipaddress
from dataclasses import dataclass, field

from longread.server.limits import Limits
from longread.spec.errors import ConfigError
from longread.spec.profiler import ProfilerConfig

MEBIBYTE = 1 << 20
DAY = 86400


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Frozen; names as the command line's. Raises ConfigError for a value that cannot work.

    ``served_model_name``: what a request's ``model`` may be, the first is the one reported; empty: the engine's name.
    ``api_key``: accepted keys, empty: no check. ``limits``: what is taken on, and for how long, at first: they may be
    replaced while the server runs. ``max_body_bytes`` bounds a request body, ``shutdown_timeout`` (seconds) how long
    open requests may go on; writing to the store may then take as long again (``draining.writing_seconds``).
    ``step_timeout``: seconds of one step after which the engine counts as hung; 0: never.
    ``allowed_origins``: CORS is off unless it names origins. ``disable_log_stats``: no line of throughput in the log.
    ``profiler``: the engine's steps can be profiled, which slows it; None: they cannot.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_body_bytes: int = 64 * MEBIBYTE
    shutdown_timeout: float = 10.0
    step_timeout: float = 120.0
    allowed_origins: tuple[str, ...] = ()
    disable_log_stats: bool = False
    profiler: ProfilerConfig | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not in 0..65535")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes: {self.max_body_bytes} is below 1024, no request would fit")
        if not 0 <= self.shutdown_timeout <= DAY:  # also refuses nan
            raise ConfigError(f"shutdown_timeout: {self.shutdown_timeout} is not in 0..{DAY} seconds")
        if self.step_timeout != 0 and not 1 <= self.step_timeout <= DAY:  # also refuses nan
            raise ConfigError(f"step_timeout: {self.step_timeout} is neither 0 nor in 1..{DAY} seconds")
        for name in self.served_model_name:
            if not name.strip() or not name.isprintable():
                raise ConfigError(f"served_model_name: {name[:100]!r} is empty or holds characters that do not print")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("api_key: a key is empty; leave the option out to serve without keys")

    @property
    def exposed(self) -> bool:
        """Whether other machines may reach the server without a key."""
        if self.api_key:
            return False
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def shared(self) -> bool:
        """Whether those who may ask are several parties, who must not learn each other's prompts: not so with one API
        key, or with none on a loopback address.
        """
        return len(set(self.api_key)) > 1 or self.exposed
