"""Every error that Longread raises on purpose.

    LongreadError
    ├── ConfigError                  a bad option or value, found before any work
    │   └── DocumentError            a file or folder that cannot be read as a document
    ├── CheckpointError              a checkpoint that cannot be served as it is
    │   ├── UnsupportedModelError    a config.json field that is unknown or differs from what is implemented
    │   ├── CheckpointPathError      no directory, no config.json or no safetensors where a checkpoint should be
    │   ├── MissingShardError        the index names a file that is not there
    │   ├── TruncatedShardError      a file that is shorter (or longer) than its header says
    │   ├── ShardHeaderError         a header that is not a safetensors header, or whose offsets are impossible
    │   ├── IndexMismatchError       index and shards disagree about where a tensor lives
    │   ├── DuplicateTensorError     a tensor that lies in two shards
    │   ├── MissingTensorError       a tensor that the model needs is in no shard
    │   ├── UnexpectedTensorError    a tensor that the model does not know
    │   ├── TensorShapeError         a tensor of another shape than the config implies
    │   ├── TensorDtypeError         a tensor of a type that this format does not allow
    │   └── NonFiniteTensorError     a tensor with NaN or infinity
    ├── SessionFileError             a saved session that is damaged or belongs to another model or cache type
    ├── StoreError                   the disk store cannot do what was asked; service goes on without it
    │   ├── StoreFullError           no room: the disk, or the size limit with all that is left pinned
    │   ├── StoreReadOnlyError       the folder, the disk or the way it was opened forbids writing
    │   ├── StoreVersionError        written in a format that this version does not read, or no store at all
    │   ├── StoreDamagedError        the index cannot be read
    │   └── DocumentFileError        an exported document that is damaged, or not one
    ├── EngineLostError              the engine's process has ended or hangs; another one can be started
    │   └── CrashLoopError           it has ended too often: nobody starts it again
    ├── CapacityError                a pool is exhausted; the scheduler handles it, users never see it
    └── RequestError                 one request is refused; the engine goes on
        ├── InvalidRequestError      400
        ├── ContextLengthError       400, names the limit and the given length
        ├── AuthenticationError      401
        ├── ModelNotFoundError       404
        ├── DocumentNotFoundError    404, no document of that id is stored
        ├── RecordNotFoundError      404, no record of that request is kept
        ├── RequestTimeoutError      408, the request did not arrive in time
        ├── PayloadTooLargeError     413
        ├── PoisonedPromptError      422, the engine died over this prompt; says when it may be tried again
        ├── HeadTooLargeError        431
        ├── OverloadedError          503
        │   └── AdmissionError       429, not accepted now; says when to try again
        ├── DeadlineError            504, accepted, but not done in the time that the server or the client gives
        └── EngineFailedError        500, the request failed inside the engine

User input never meets ``assert``; internal invariants do.
"""


class LongreadError(Exception):
    """Root of the tree. The message says what is wrong and what to do next."""


class ConfigError(LongreadError):
    """An option or a value is not acceptable."""


class DocumentError(ConfigError):
    """A file or folder cannot be read as a document."""


class CheckpointError(LongreadError):
    """A checkpoint cannot be served as it is."""


class UnsupportedModelError(CheckpointError):
    """config.json asks for something that is not implemented; ``field`` names it."""

    def __init__(self, field: str, message: str):
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


class CheckpointPathError(CheckpointError):
    """The path is no directory, or config.json or every safetensors file is missing from it."""


class MissingShardError(CheckpointError):
    """The index names a file that is not there."""


class TruncatedShardError(CheckpointError):
    """A file's size disagrees with its own header."""


class ShardHeaderError(CheckpointError):
    """A file does not begin with a safetensors header, or its offsets overlap, leave gaps or contradict the shapes."""


class IndexMismatchError(CheckpointError):
    """Index and shards disagree."""


class DuplicateTensorError(CheckpointError):
    """A tensor lies in two shards."""


class MissingTensorError(CheckpointError):
    """A tensor that the model needs is in no shard."""


class UnexpectedTensorError(CheckpointError):
    """A tensor that the model does not know."""


class TensorShapeError(CheckpointError):
    """A tensor of another shape than the config implies."""


class TensorDtypeError(CheckpointError):
    """A tensor of a type that this format does not allow."""


class NonFiniteTensorError(CheckpointError):
    """A tensor or scale has NaN or infinity, in the file or in the compute type."""


class SessionFileError(LongreadError):
    """A saved session is damaged or belongs to another model, weights or cache type."""


class StoreError(LongreadError):
    """The disk store cannot do what was asked. Nothing wrong is served; what was being written is not there."""


class StoreFullError(StoreError):
    """The disk is full, or the store's size limit is reached and the rest is pinned."""


class StoreReadOnlyError(StoreError):
    """The store cannot be written to."""


class StoreVersionError(StoreError):
    """The folder holds a store of another format, or something else."""


class StoreDamagedError(StoreError):
    """The store's index is damaged; the records can be indexed anew."""


class DocumentFileError(StoreError):
    """A file that should hold one exported document is damaged, or something else."""


class EngineLostError(LongreadError):
    """The engine ran in another process, which has ended by itself, was killed, hangs, or sends nonsense."""


class CrashLoopError(EngineLostError):
    """The engine was started again and again and did not live."""


class CapacityError(LongreadError):
    """Pages, slots or snapshots are exhausted right now."""


class RequestError(LongreadError):
    """One request is refused or failed. ``status`` is the HTTP status, ``param`` the offending field."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    """A field is malformed, out of range or not honoured."""


class ContextLengthError(RequestError):
    """Prompt plus output cannot fit the model's context or the pool. ``param`` is the route's: it names the prompt."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    kind = "not_found_error"


class DocumentNotFoundError(RequestError):
    """The request names a document that is not stored here."""

    status = 404
    kind = "not_found_error"


class RecordNotFoundError(RequestError):
    """No record of that request is kept."""

    status = 404
    kind = "not_found_error"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    status = 413


class HeadTooLargeError(RequestError):
    """The request line and headers are larger than the server accepts."""

    status = 431


class PoisonedPromptError(RequestError):
    """The engine died more than once while it worked on this prompt; it may be tried again in ``retry_after`` seconds.

    Not a 503: clients' libraries send those again by themselves.
    """

    status = 422

    def __init__(self, message: str, code: str, retry_after: float):
        super().__init__(message, code=code)
        self.retry_after = retry_after


class RequestTimeoutError(RequestError):
    """The client stopped sending in the middle of its request."""

    status = 408


class OverloadedError(RequestError):
    """The queue is full or the server is not ready; try again later, in ``retry_after`` seconds where that is known."""

    status = 503
    kind = "overloaded_error"

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ):
        super().__init__(message, param, code)
        self.retry_after = retry_after


class AdmissionError(OverloadedError):
    """A request was not accepted: too much waits. ``code`` says which limit it met."""

    status = 429
    kind = "rate_limit_error"


class DeadlineError(RequestError):
    """A time limit of a request passed; ``code`` says which one. ``retry_after``: seconds, where that is known."""

    status = 504
    kind = "timeout_error"

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ):
        super().__init__(message, param, code)
        self.retry_after = retry_after


class EngineFailedError(RequestError):
    """The engine failed while it worked on this request."""

    status = 500
    kind = "server_error"
