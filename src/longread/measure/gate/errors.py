"""What a gate may meet: a server that refuses, one that cannot be reached, and the end of what it may spend."""

from longread.spec.errors import LongreadError


class GateError(LongreadError):
    """The gate cannot go on; the message says what to do."""


class RefusedError(GateError):
    """The server answered one request with an error. ``status``: its HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class UnreachableError(GateError):
    """No answer: no connection, a broken one, or none in time."""


class MalformedError(GateError):
    """An answer that is not what OpenAI's API says."""


class SpentError(GateError):
    """The time or the number of requests that the user allowed is used up."""
