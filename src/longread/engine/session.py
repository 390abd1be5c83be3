"""A session: one token timeline under the caller's own control, over the same cache, model and sampler as requests.

Knows one timeline; must not know events, queues or text. A session holds its slot and pages until it is closed: running
requests are preempted for it, never the other way round. It belongs to the engine's thread, between two steps.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch import Tensor

from longread.engine import session_file
from longread.engine.batch import gather
from longread.engine.core import Core
from longread.engine.sampling_state import SamplingState
from longread.engine.sequence import Grant, Timeline
from longread.kv.lease import Lease
from longread.spec.engine import SamplingParams
from longread.spec.errors import CapacityError, EngineFailedError, InvalidRequestError, OverloadedError
from longread.spec.limits import check_length, check_sampling, check_tokens


class Session:
    """One token timeline. Made by ``LocalEngine.session``; use it as a context manager or close it. ``land``: has what
    requests have launched on a device come to its end, before their state or the device's is touched.
    """

    def __init__(self, core: Core, land: Callable[[], None]):
        self._core = core
        self._land = land
        self._info = core.info
        self._cache = core.cache
        self._timeline = Timeline("", ())
        self._logits: Tensor | None = None
        self._sampling: SamplingState | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything on the timeline; all of it is computed."""
        return tuple(self._timeline.tokens)

    @property
    def logits(self) -> Tensor:
        """float32 [vocab] of the last position (a copy). Raises InvalidRequestError before the first ``sync``."""
        if self._logits is None:
            raise InvalidRequestError("the session has no tokens yet: call sync or load first", param="session")
        return self._logits.clone()

    def sync(self, tokens: Sequence[int]) -> int:
        """Make the timeline equal ``tokens`` and return how many had to be computed.

        The timeline is kept if it is a prefix of ``tokens``; otherwise the longest prefix that the cache knows is.
        Sampling starts anew behind them. Raises InvalidRequestError, ContextLengthError, OverloadedError (no pages
        left; a timeline that is not a prefix is empty then) and EngineFailedError (the model failed; it is empty).
        """
        check_tokens(tokens, self._info.vocab)
        check_length(len(tokens), 0, self._info)
        self._land()
        wanted = list(tokens)
        now = self._timeline.tokens
        if self._timeline.lease is None or len(now) > len(wanted) or wanted[: len(now)] != now:
            self._begin(wanted, len(wanted))
        elif len(now) == len(wanted):
            return 0
        else:
            self._reserve(self._timeline.lease, len(wanted))
        self._timeline.tokens = wanted
        self._timeline.prompt_length = len(wanted)
        self._sampling = None
        missing = self._timeline.remaining
        self._compute()
        return missing

    def step(self, sampling: SamplingParams | None = None) -> int:
        """Choose the next token by ``sampling`` (default: ``SamplingParams()``), append and compute it; returns it.

        Penalties, seed and grammar count from the last ``sync``. Ends (eos, stop ids, max_tokens) are the caller's to
        see; min_tokens is honoured. Raises as ``sync``, and InvalidRequestError where no token can be chosen.
        """
        params = sampling if sampling is not None else SamplingParams()
        check_sampling(params, self._info.vocab)
        check_length(len(self._timeline.tokens), 1, self._info)
        self._land()
        state, lease = self._state(params), self._timeline.lease
        if lease is not None:
            self._reserve(lease, len(self._timeline.tokens) + 1)
        choice = self._core.runner.choose(self.logits[None], [state])[0]
        if choice.error is not None:
            raise InvalidRequestError(choice.error, param="sampling")
        state.accept(choice.token)
        self._timeline.tokens.append(choice.token)
        self._compute()
        return choice.token

    def fork(self) -> "Session":
        """A second session with the same past; each goes its own way. Raises OverloadedError."""
        self._land()
        child = Session(self._core, self._land)
        lease = self._timeline.lease
        if lease is not None:
            child._timeline.tokens = list(self._timeline.tokens)
            child._timeline.prompt_length = self._timeline.prompt_length
            child._timeline.lease = self._take(lambda: self._cache.fork(lease))
            child._logits = self._logits
        return child

    def save(self, path: Path) -> None:
        """Write the whole timeline, its state and its logits as one file (see ``session_file``).

        A generation that is continued from it says what it would have said. Raises SessionFileError.
        """
        if self._timeline.lease is None:
            raise InvalidRequestError("the session has no tokens yet: nothing to save", param="session")
        session_file.save(
            path,
            self._cache.index.root.key,
            self._timeline.lease,
            self._timeline.prompt_length,
            self.logits,
            self._core.groups,
            self._core.state,
        )

    def load(self, path: Path) -> None:
        """Replace the timeline by a saved one. Raises SessionFileError (other identity, damaged), ContextLengthError,
        OverloadedError; a file that cannot be used leaves the session as it was.
        """
        groups, state = self._core.groups, self._core.state
        saved = session_file.read(path, self._cache.index.root.key, self._info.vocab, groups, state)
        check_tokens(saved.tokens, self._info.vocab)
        check_length(len(saved.tokens), 0, self._info)
        self._land()
        lease = self._begin((), len(saved.tokens))
        session_file.restore(saved, lease, groups, state)
        self._cache.commit(lease, saved.tokens)
        self._cache.snapshot(lease)  # prompts that begin like the saved timeline land here
        self._timeline.tokens = saved.tokens
        self._timeline.prompt_length = saved.prompt_length
        self._logits = saved.logits

    def close(self) -> None:
        """Give slot and pages back; what was computed stays cached. Idempotent."""
        self._land()
        self._reset()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reset(self, keep_tail: bool = True) -> None:
        self._timeline.release(self._cache, keep_tail)
        if self._core.tiers is not None:
            self._core.tiers.work()
        self._timeline = Timeline("", ())
        self._logits = self._sampling = None

    def _begin(self, tokens: Sequence[int], total: int) -> Lease:
        """Start over: a lease on what the cache knows of ``tokens``, with pages for ``total`` tokens."""
        self._reset()
        chain = self._cache.chain(tokens)
        if self._core.tiers is not None:
            with suppress(CapacityError):  # no pages for a load beside what runs: what is missing is computed
                self._core.tiers.promote(chain)
        lease = self._timeline.lease = self._take(lambda: self._cache.open(chain))
        try:
            self._reserve(lease, total)
        except OverloadedError:
            self._reset()
            raise
        self._cache.count_lookup(lease)
        return lease

    def _compute(self) -> None:
        """Prefill or decode what the cache lacks, in chunks, on reserved pages; leaves the last position's logits."""
        timeline = self._timeline
        try:
            while timeline.remaining:
                assert timeline.lease is not None
                length = min(timeline.remaining, self._info.max_num_batched_tokens)
                self._cache.prepare(timeline.lease, timeline.prompt_length, length, self._core.snapshot_interval)
                batch = gather([Grant(timeline, length)], self._cache.num_slots)
                logits = self._core.runner.forward(batch)
                timeline.advance(self._cache, length)
                if self._core.tiers is not None:
                    self._core.tiers.work()
            self._logits = logits[0].clone()  # the runner's own are overwritten by the next step
        except BaseException as error:
            # The ring state may be half written, an interrupt included: only starting again from the cache is safe.
            self._reset(keep_tail=False)
            if not isinstance(error, Exception):
                raise
            raise EngineFailedError(f"the model failed: {type(error).__name__}: {error}; sync again") from error

    def _state(self, params: SamplingParams) -> SamplingState:
        """The sampling state of these parameters, with the output since the last sync taken in."""
        if self._sampling is None or self._sampling.params != params:
            split, tokens = self._timeline.prompt_length, self._timeline.tokens
            state = self._core.sampling(params, tokens[:split])
            for token in tokens[split:]:
                state.accept(token)
            self._sampling = state
        return self._sampling

    def _take(self, opening: Callable[[], Lease]) -> Lease:
        """Get a slot, preempting requests for it."""
        while True:
            try:
                return opening()
            except CapacityError as error:
                self._make_room(error)

    def _reserve(self, lease: Lease, total: int) -> None:
        """Get pages, preempting requests for them."""
        while True:
            try:
                return self._cache.reserve(lease, total)
            except CapacityError as error:
                self._make_room(error)

    def _make_room(self, error: CapacityError) -> None:
        if self._core.scheduler.preempt_latest() is None and not self._core.scheduler.drop_loads():
            raise OverloadedError(f"no room beside the open sessions: {error}; close one") from error
