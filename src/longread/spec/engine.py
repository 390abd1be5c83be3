"""The protocol between an engine and whoever drives it: token ids in, token ids out.

Server, CLI, bench and gates know only this. Text, chat templates, stop strings and tool calls are the caller's.
Every accepted request produces zero or more ``TokenEvent`` and then exactly one ``FinishEvent``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from longread.spec.cost import StepCost
from longread.spec.reuse import MissReason, Reuse
from longread.spec.state import HashedTokens

FinishReason = Literal["stop", "length", "cancelled", "failed"]
RequestClass = Literal["interactive", "batch", "ingest"]
Phase = Literal["waiting", "loading", "prefill", "decode"]
WaitReason = Literal["", "turn", "slots", "pages", "prefix", "load", "step"]


BATCH_PRIORITY, INGEST_PRIORITY = 1, 100  # the least ``priority`` of these classes


def class_of(priority: int) -> RequestClass:
    """The class that a request's ``priority`` puts it in."""
    if priority < BATCH_PRIORITY:
        return "interactive"
    return "batch" if priority < INGEST_PRIORITY else "ingest"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Constrains the output. ``value``: a JSON schema as text, a regular expression, or a JSON list of choices."""

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen (names and meaning as in vLLM).

    temperature 0 is greedy. top_k 0 means off, top_p 1.0 off, min_p 0.0 off. ``seed`` None: the engine draws one.
    The same seed gives the same tokens whatever else is in the batch. ``logprobs``: top entries returned a token,
    None: none; they are taken from the model's own distribution, before penalties, bias, temperature and truncation.
    ``max_tokens`` None: up to the context limit. ``stop_token_ids`` end the output and are not part of it.
    ``grammar`` starts at the first output token, or behind the first ``grammar_after`` token (``</think>``) when that
    is set.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    grammar_after: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, one output. ``request_id`` is unique among the requests that have not ended. ``hashed``: the
    prompt's bytes and page identities under the root of its salt, if the caller has computed them. ``cache_salt``: it
    shares cached state with requests of the same salt only (as in vLLM); None: with all others that have none.
    ``priority``: lower is served first (as in vLLM): up to 0 interactive, 1 to 99 batch, from 100 on ingest. ``owner``:
    who shares its class's time as one party, a digest of an API key; "": all who have none.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hashed: HashedTokens | None = None
    cache_salt: str | None = None
    priority: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Monotonic seconds; 0.0 where a request never got there. TTFT = first_token - arrived, a sum of named parts.

    Moments in order: ``arrived`` (submitted), ``looked_up`` (its prompt was looked up for the first time), ``loaded``
    (what the slower tiers gave could be used; equals ``looked_up`` where nothing was loaded), ``scheduled``
    (admitted), ``prefill_started`` and ``prefill_finished`` (around all
    its prompt's steps), ``first_token``, ``finished``. Durations: ``lookup`` (hashing and asking the tiers),
    ``load_host`` and ``load_disk`` (wall time of the load until it could be used, shared out by what each tier took: a
    load from pinned memory that comes layer by layer is used while it comes, and what is waited for then is part of
    prefill). ``prefill_tokens`` were computed in ``prefill_chunks`` steps.
    """

    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    looked_up: float = 0.0
    loaded: float = 0.0
    prefill_started: float = 0.0
    prefill_finished: float = 0.0
    prefill_tokens: int = 0
    prefill_chunks: int = 0
    lookup: float = 0.0
    load_host: float = 0.0
    load_disk: float = 0.0

    def parts(self) -> dict[str, float]:
        """The engine's parts of the TTFT in seconds: queue, lookup, load_host, load_disk, prefill, sample. They add up
        to first_token - arrived; {} before the first token. ``queue`` is all waiting: for slots, pages, other requests'
        steps and the loader.
        """
        if not self.first_token:
            return {}
        queue = self.prefill_started - self.arrived - self.lookup - self.load_host - self.load_disk
        return {
            "queue": queue,
            "lookup": self.lookup,
            "load_host": self.load_host,
            "load_disk": self.load_disk,
            "prefill": self.prefill_finished - self.prefill_started,
            "sample": self.first_token - self.prefill_finished,
        }


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What is known of a request when its first token comes: the times up to then, and what it reused."""

    times: RequestTimes
    reuse: Reuse | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One output token. ``logprob`` and ``top`` (id, logprob; best first) only where logprobs were asked for.
    ``first`` is set on a request's first token only.
    """

    request_id: str
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    first: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The one end of a request. ``stop_token`` is the id that ended it, for reason "stop". ``error`` for "failed".
    ``reuse``: None for a request that was never admitted.
    """

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int = 0
    stop_token: int | None = None
    error: str | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    reuse: Reuse | None = None


Event = TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a caller may rely on. Lengths in tokens; ``max_request_tokens`` is what one request can hold at most."""

    model: str
    max_model_len: int
    max_request_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab: int
    eos_id: int
    page_tokens: int
    num_pages: int
    predicted_bytes: int
    allocated_bytes: int
    cache_root: bytes = b""  # what the identity of every page begins with
    step_target: float | None = None  # seconds that a step may take where no target of the SLO is shorter; None: any
    step_reason: str = ""  # why these
    dtype: str = ""  # what it computes in, and what it keeps; "": not told
    cache_dtype: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges since the engine was made; names as in vLLM's metrics."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    snapshots_held: int = 0
    pages_evicted: int = 0
    snapshots_evicted: int = 0
    num_requests_loading: int = 0  # of those waiting: their pages are on the way from host memory or disk
    reused_device_tokens: int = 0
    reused_host_tokens: int = 0
    reused_disk_tokens: int = 0
    misses: tuple[tuple[MissReason, int], ...] = ()  # requests by why no more was reused
    host_cache_bytes: int = 0
    host_cache_used_bytes: int = 0
    store_written_bytes: int = 0
    store_skipped_writes: int = 0  # landing points that were not written: the writer was behind
    store_errors: int = 0
    store_corrupt_records: int = 0
    step_cost: StepCost | None = None  # as learnt so far; None: this engine measures nothing
    step_cost_error: float = 0.0  # mean of |measured / predicted - 1|
    step_cost_known: bool = True  # whether times may be told by it

    @property
    def known_cost(self) -> StepCost | None:
        """The cost that waiting times are told by; None: not known yet."""
        return self.step_cost if self.step_cost_known else None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request that has not ended stands, and why it is not further.

    ``reason``: it waits for its "turn" behind others, for "slots", for "pages", for a "prefix" that another request is
    computing, for a "load" from a slower tier, or only for its share of the next "step"; ``detail`` says so in one
    sentence with numbers and names no other request. ``position``: waiting requests before it. ``waited``: seconds
    since it was submitted. ``starts_in``, ``first_token_in``: seconds as the step cost predicts them, None: past, or
    not known, as long as what steps cost is not ``cost_known``. ``step_target``: seconds that a step should take now
    (None: any), and the ``step_reason``.
    """

    request_id: str
    phase: Phase
    reason: WaitReason
    detail: str
    request_class: RequestClass
    position: int
    num_waiting: int
    num_running: int
    prompt_tokens: int
    computed_tokens: int
    preemptions: int
    waited: float
    starts_in: float | None = None
    first_token_in: float | None = None
    cost_known: bool = True
    step_target: float | None = None
    step_reason: str = ""


class Engine(Protocol):
    """A loaded model. ``validate`` is pure and may be called from any thread; all else belongs to one thread."""

    @property
    def info(self) -> EngineInfo: ...

    def validate(self, request: GenerationRequest) -> None:
        """Check limits, ids and grammar. Raises RequestError with limit and value; changes nothing."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request (validated again). Raises RequestError; nothing is kept then."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its FinishEvent ("cancelled") comes with the next step. Unknown or ended ids are ignored."""
        ...

    def computed_tokens(self, request_id: str) -> int:
        """How far a request's prompt has been computed or reused; 0 for one that has not started or has ended."""
        ...

    def explain(self, request_id: str) -> Standing | None:
        """Where a request stands and why; None for one that is unknown or has ended."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` would produce or prepare anything."""
        ...

    def step(self) -> Sequence[Event]:
        """Run one step of the batch. A request whose step fails ends as "failed"; the others go on."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Release everything. Requests that have not ended are dropped."""
        ...
