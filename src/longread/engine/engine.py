"""The engine: requests in, events out, one batch a step. Implements ``spec.engine.Engine`` over one loaded model.

Knows requests and how a step is put together; must not know text, HTTP, checkpoints or a model's inside. One step is
schedule → gather → forward → choose → settle. All that touches the model lies between gather and choose; the caller's
text work runs on another thread meanwhile, since torch releases the interpreter lock. Everything belongs to one thread,
but ``validate``.

On a device the order is another where a step's rows are the next one's, too: once its tokens are known and nobody has
ended, the next is launched, and then the step is settled, while the device computes. No row runs ahead of its token.
Whatever needs the rows' state as it is booked (a cancel, a session) has the launched step land first.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from longread.engine.ahead import Ahead
from longread.engine.batch import gather
from longread.engine.core import Core
from longread.engine.device_runner import DeviceRunner
from longread.engine.request import Request
from longread.engine.sampler import Sample
from longread.engine.scheduler import Schedule
from longread.engine.sequence import Grant, Timeline
from longread.engine.session import Session
from longread.engine.underway import Underway
from longread.kv.disk.store import DiskStore
from longread.kv.explain import explain
from longread.spec.engine import EngineInfo, EngineStats, Event, FinishReason, GenerationRequest, Standing, TokenEvent
from longread.spec.errors import InvalidRequestError
from longread.spec.limits import check_request
from longread.spec.reuse import MissReason

SLICE = 0.04  # seconds of a chunk's layers between two steps of decoding rows, on a device
AUDIT_REST = 99  # times what the last audit took, until the next one
IDLE_WAIT = 0.005  # seconds a step waits for the I/O threads when it has nothing else: commands may be waiting, too

log = logging.getLogger(__name__)
Taken = tuple[Request, TokenEvent | None, FinishReason | None, str | None]  # as Request.accept says


class LocalEngine:
    """A loaded model on this machine; ``load.load_engine`` makes one from a checkpoint."""

    def __init__(self, core: Core):
        self._core = core
        self._info = core.info
        self._cache = core.cache
        self._scheduler = core.scheduler
        self._tiers = core.tiers
        self._requests: dict[str, Request] = {}
        self._events: list[Event] = []
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._reused: Counter[str] = Counter()  # tokens by tier
        self._misses: Counter[MissReason] = Counter()
        self._audit_due = False
        self._audited = 0.0, 0.0  # when the last audit ended, monotonic, and its seconds
        self._underway: Underway | None = None
        self._ahead: Ahead | None = None
        self._scheduler.cost, self._scheduler.predicts = core.costs.cost, core.costs.known

    @property
    def info(self) -> EngineInfo:
        return self._info

    def validate(self, request: GenerationRequest) -> None:
        """Check limits, ids, sampling and grammar. Raises RequestError; changes nothing; callable from any thread."""
        check_request(request, self._info)
        self._core.prepare_grammar(request.sampling)

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request; it starts with a coming step. Raises RequestError, and then nothing is kept."""
        check_request(request, self._info)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        sampling = self._core.sampling(request.sampling, request.prompt)
        accepted = Request(request, sampling, self._info.eos_id, self._info.max_request_tokens)
        self._requests[request.request_id] = accepted
        self._scheduler.add(accepted.timeline, request.priority, request.owner)

    def cancel(self, request_id: str) -> None:
        """End a request in any state; its event comes with the next step. Unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if self._ahead is not None and request in self._ahead.requests:
            self._land_ahead(without=request)
        if request_id in self._requests:  # its step may have broken
            self._finish(request, "cancelled")

    def has_work(self) -> bool:
        busy = self._tiers is not None and self._tiers.busy
        return bool(self._requests or self._events or self._audit_due or busy)

    def step(self) -> Sequence[Event]:
        """Run one step of the batch; returns the events since the last one. Never raises for a request's sake.

        The first idle step audits the cache, though not all the time: the books must balance. An interrupt
        (KeyboardInterrupt, SystemExit) passes through; the requests whose state it may have torn are cancelled.
        """
        if self._tiers is not None:
            self._tiers.work()  # a launched step is computed meanwhile; behind it this would wait for the next one
        if not self._requests and not self._events:
            self._rest()
            return ()
        self._audit_due = True
        if self._underway is not None:
            self._go_on(self._underway)
        elif self._ahead is not None:
            known = not self._ahead.work.choosing.there()  # else the caller came late, which says nothing of the step
            self._land_rows(self._ahead, learn=known)
        else:
            self._step()
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        """Schedule a step and run it; one whose chunks would keep its rows waiting is only begun."""
        start = time.perf_counter()
        plan = self._scheduler.schedule()
        self._note(plan)
        runner, rows = self._core.runner, plan.decodes[0]
        if isinstance(runner, DeviceRunner) and rows == len(plan.grants) > 0:
            self._decode(runner, plan)
        elif isinstance(runner, DeviceRunner) and rows and runner.sliceable([g.length for g in plan.grants[rows:]]):
            if self._decode(runner, plan, then_chunks=True):
                self._begin(runner, plan.grants[rows:], plan.chunks)
        elif plan.grants and self._run(plan.grants):
            self._learn(plan.decodes, plan.chunks, time.perf_counter() - start)
        elif self._tiers is not None and not plan.grants and not self._events:
            self._tiers.wait(IDLE_WAIT)

    def _decode(
        self,
        runner: DeviceRunner,
        plan: Schedule,
        *,
        then_chunks: bool = False,
        behind: Callable[[], None] | None = None,
    ) -> bool:
        """Run a schedule's decoding rows on a device. False: as ``_land_rows``. ``then_chunks``: chunks will follow;
        ``behind``: launches the next slice of such, which the device computes while the rows' tokens are handed out.
        """
        grants = plan.grants[: plan.decodes[0]]
        requests = [self._requests[grant.timeline.key] for grant in grants]
        with self._whole(grants):
            try:
                step = Ahead.launched(runner, grants, requests, plan.decodes, self._cache.num_slots)
            except Exception as error:  # the edge between a model and the requests, as in _run
                log.exception("a step of %d requests could not be launched", len(grants))
                self._failed(grants, error)
                return False
            if behind is not None:
                behind()
        return self._land_rows(step, last=then_chunks or behind is not None, learn=behind is None)

    def _land_rows(
        self, step: Ahead, *, last: bool = False, learn: bool = True, without: Request | None = None
    ) -> bool:
        """Wait for a launched step's tokens; launch the next, unless this is the ``last`` of its kind or the rows do
        not go on as they are; book it. ``without``: this request's token is not wanted. False: as ``_run``.
        """
        self._ahead, grants = None, step.grants
        with self._whole(grants):
            try:
                samples = step.work.choosing.result()
            except Exception as error:  # the edge between a model and the requests, as in _run
                log.exception("a step of %d requests failed", len(grants))
                self._failed(grants, error)
                return False
            now = time.monotonic()
            for request in step.requests:
                if not request.first_token:
                    request.computed(1, step.started, now)
            taken = self._take((r, s) for r, s in zip(step.requests, samples, strict=True) if r is not without)
            broken: Exception | None = None
            if not last and without is None and self._goes_on(grants, taken):
                try:
                    self._ahead = step.following([sample.token for sample in samples])
                except Exception as error:  # the same edge; told when the books are as the others expect them
                    log.exception("a step of %d requests could not be launched", len(grants))
                    broken = error
            for grant in grants:
                grant.timeline.advance(self._cache, 1)
            self._hand_out(taken)
            if learn:
                self._learn(step.decodes, (), now - step.started)
            if broken is not None:
                self._failed(grants, broken)
            return True

    def _goes_on(self, grants: Sequence[Grant], taken: Sequence[Taken]) -> bool:
        return all(reason is None for _, _, reason, _ in taken) and self._scheduler.goes_on(grants)

    def _land_ahead(self, without: Request | None = None) -> None:
        """Have the step that was launched ahead land, with none behind it; see ``_land_rows``."""
        if self._ahead is not None:
            self._land_rows(self._ahead, last=True, learn=False, without=without)

    def _begin(self, runner: DeviceRunner, grants: list[Grant], chunks: Sequence[tuple[int, int]]) -> None:
        """Start a step's chunks; their rest comes slice by slice, with the steps of decoding rows in between."""
        batch = gather(grants, self._cache.num_slots)
        rows = [self._requests[timeline.key].sampling for timeline in batch.sampling]
        self._underway = Underway(grants, chunks, batch, rows, runner.begin_chunks(batch))
        self._scheduler.underway = self._underway.timelines()
        self._next_slice(self._underway)

    def _next_slice(self, underway: Underway) -> None:
        with self._whole(underway.grants):
            underway.advance(self._scheduler.slice_seconds(SLICE))

    def _go_on(self, underway: Underway) -> None:
        """Rows, and behind them the next slice of the chunks, which the device computes while the rows' tokens are
        handed out; or the chunks' end, where all of them is launched or a row needs a page of somebody.
        """
        if not underway.launched:
            plan = self._scheduler.schedule_rows()
            if plan is not None:
                runner = self._core.runner
                assert isinstance(runner, DeviceRunner)
                self._decode(runner, plan, behind=partial(self._next_slice, underway))
                return
            with self._whole(underway.grants):
                underway.advance(None)
        self._land(underway)

    def _land(self, underway: Underway) -> None:
        """Book chunks that are computed, as ``_run`` does for a step."""
        self._underway, self._scheduler.underway = None, ()
        grants = underway.grants
        with self._whole(grants):
            try:
                if underway.error is not None:
                    raise underway.error
                assert underway.work.logits is not None
                samples = self._core.runner.choose(underway.work.logits, underway.rows)
                for grant in grants:
                    self._requests[grant.timeline.key].computed(grant.length, underway.started, time.monotonic())
            except Exception as error:  # the same edge as in _run
                log.exception("chunks of %d requests failed", len(grants))
                self._failed(grants, error)
                return
            live = underway.timelines()
            chosen = zip(underway.batch.sampling, samples, strict=True)
            self._settle(grants, [pair for pair in chosen if pair[0] in live])
            if len(grants) == len(underway.batch.segments):
                self._learn((0, 0), underway.chunks, underway.work.seconds())

    def _rest(self) -> None:
        """A step without requests: what the tiers still have to do, then the audit."""
        if self._tiers is not None and self._tiers.busy:
            self._tiers.wait(IDLE_WAIT)
            self._tiers.collect()
        elif self._audit_due:
            self._audit_due = False
            self._audit()

    def _audit(self) -> None:
        """Whether the books balance. Many pages take tens of milliseconds, in which a request waits: a hundredth of the
        time at most.
        """
        start, (end, took) = time.monotonic(), self._audited
        if start - end < AUDIT_REST * took:
            return
        self._cache.check()
        if self._tiers is not None:
            self._tiers.check()
        end = time.monotonic()
        self._audited = end, end - start

    def _learn(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take note of what a step took: decoding rows on a device from their launch on, others with their schedule."""
        self._core.costs.observe(decodes, chunks, seconds)
        self._scheduler.cost, self._scheduler.predicts = self._core.costs.cost, self._core.costs.known

    def _run(self, grants: Sequence[Grant]) -> bool:
        """Model and sampler on what was granted. False: something broke in there; then the one request of this step
        ends, or its requests are tried again one by one.

        Until the step is booked, rings may be ahead of the tokens or half written, and pages half filled. Pages that
        are not committed were never published: all of that dies with the lease, and no tail is kept.
        """
        start = time.monotonic()
        batch = gather(grants, self._cache.num_slots)
        rows = [self._requests[timeline.key].sampling for timeline in batch.sampling]
        with self._whole(grants):
            try:
                logits = self._core.runner.forward(batch)
                for grant in grants:
                    self._requests[grant.timeline.key].computed(grant.length, start, time.monotonic())
                samples = self._core.runner.choose(logits, rows)
            except Exception as error:  # the edge between a model and the requests: reported, never swallowed
                log.exception("a step of %d tokens and %d requests failed", len(batch.token_ids), len(grants))
                self._failed(grants, error)
                return False
            self._settle(grants, zip(batch.sampling, samples, strict=True))
            return True

    @contextmanager
    def _whole(self, grants: Sequence[Grant]) -> Iterator[None]:
        """A step is booked as a whole or not at all: what tears it (an interrupt, or a fault that nothing can work
        with) passes through, and the requests whose state it may have torn end here.
        """
        try:
            yield
        except BaseException:
            self._ahead = None
            self._drop(grants, "cancelled")
            raise

    def _failed(self, grants: Sequence[Grant], error: Exception) -> None:
        """What happens to the requests of a step that broke. Raises the error again where nothing more can work."""
        if self._core.runner.lost(error):
            raise error
        if len(grants) > 1:
            self._scheduler.retry_alone(grants)
        else:
            self._drop(grants, "failed", f"{type(error).__name__}: {error}")

    def _drop(self, grants: Sequence[Grant], reason: FinishReason, error: str | None = None) -> None:
        """End the requests of a step that broke, without the state that it left."""
        for grant in list(grants):
            request = self._requests.get(grant.timeline.key)
            if request is not None:
                self._finish(request, reason, error, keep_tail=False)

    def _settle(self, grants: Sequence[Grant], chosen: Iterable[tuple[Timeline, Sample]]) -> None:
        """Book the step: publish what was computed, then hand out tokens and ends."""
        for grant in grants:
            grant.timeline.advance(self._cache, grant.length)
            self._prompt_tokens += self._requests[grant.timeline.key].newly_read()
        self._hand_out(self._take((self._requests[timeline.key], choice) for timeline, choice in chosen))

    def _take(self, chosen: Iterable[tuple[Request, Sample]]) -> list[Taken]:
        """Let requests have their tokens: what comes of it."""
        taken = []
        for request, choice in chosen:
            taken.append((request, *request.accept(choice)))
            self._prompt_tokens += request.newly_read()
        return taken

    def _hand_out(self, taken: Sequence[Taken]) -> None:
        for request, event, reason, error in taken:
            if event is not None:
                self._events.append(event)
                self._generation_tokens += 1
            if reason is not None:
                self._finish(request, reason, error)

    def _note(self, plan: Schedule) -> None:
        """Carry the schedule's decisions over to the requests."""
        for timeline in plan.admitted:
            self._explain(self._requests[timeline.key])
        for timeline, reason in plan.failed:
            request = self._requests.pop(timeline.key)
            self._events.append(request.finish("failed", 0, reason))

    def _explain(self, request: Request) -> None:
        """Say once what a request reuses, and why not more."""
        lease, admission = request.timeline.lease, request.timeline.admission
        assert lease is not None
        if self._tiers is not None:
            self._tiers.used(lease)
        if request.reuse is not None:
            return
        start = time.monotonic()
        reuse = explain(self._cache, self._tiers, lease.prompt, lease.cached_tokens, admission.transfers)
        admission.lookup += time.monotonic() - start
        self._reused.update(device=reuse.device_tokens, host=reuse.host_tokens, disk=reuse.disk_tokens)
        self._misses[reuse.reason] += 1
        request.started(reuse)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None, keep_tail: bool = True) -> None:
        """End a request: exactly one FinishEvent, slot and pages given back."""
        timeline = request.timeline
        if self._underway is not None and self._underway.drop(timeline):
            keep_tail = False  # its rings are ahead of its tokens
            if not self._underway.grants:
                self._underway, self._scheduler.underway = None, ()
        preemptions = self._scheduler.preemptions_of(timeline)
        self._scheduler.remove(timeline, keep_tail)
        del self._requests[timeline.key]
        self._events.append(request.finish(reason, preemptions, error))

    def session(self, path: Path | None = None) -> Session:
        """A token timeline of the caller's own, beside the requests; it holds a slot until closed. ``path``: a file
        that ``Session.save`` wrote (see ``Session.load``).
        """
        session = Session(self._core, self._land_ahead)
        if path is not None:
            session.load(path)
        return session

    def stats(self) -> EngineStats:
        cache, tiers, pages = self._cache, self._tiers, self._info.num_pages
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            kv_cache_usage_perc=cache.pages_held / pages,
            prefix_cache_queries=cache.prefix_queries,
            prefix_cache_hits=cache.prefix_hits,
            num_preemptions=self._scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            pages_free=cache.pages_free,
            pages_cached=cache.pages_cached,
            pages_held=cache.pages_held,
            snapshots_held=cache.snapshots_held,
            pages_evicted=cache.pages_evicted,
            snapshots_evicted=cache.snapshots_evicted,
            num_requests_loading=self._scheduler.num_loading,
            reused_device_tokens=self._reused["device"],
            reused_host_tokens=self._reused["host"],
            reused_disk_tokens=self._reused["disk"],
            misses=tuple(self._misses.items()),
            host_cache_bytes=tiers.host.nbytes if tiers is not None else 0,
            host_cache_used_bytes=tiers.host.used_bytes if tiers is not None else 0,
            store_written_bytes=tiers.written_bytes if tiers is not None else 0,
            store_skipped_writes=tiers.skipped if tiers is not None else 0,
            store_errors=tiers.errors if tiers is not None else 0,
            store_corrupt_records=tiers.corrupt if tiers is not None else 0,
            step_cost=self._core.costs.cost,
            step_cost_error=self._core.costs.error,
            step_cost_known=self._core.costs.known,
        )

    @property
    def store(self) -> DiskStore | None:
        """The disk store, for its documents; None: there is none, or it could not be opened."""
        return self._core.store

    def computed_tokens(self, request_id: str) -> int:
        """How far a request's prompt has been computed or reused; 0 for one that has not started or has ended."""
        request = self._requests.get(request_id)
        return request.timeline.computed if request is not None else 0

    def explain(self, request_id: str) -> Standing | None:
        """Where a request stands and why; None for one that is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        timeline, waited = request.timeline, time.monotonic() - request.arrived
        return self._scheduler.explain(timeline, waited)

    def flush(self, seconds: float) -> bool:
        """Wait until every landing point that is due is on the disk. False: not within ``seconds``."""
        return self._tiers is None or self._tiers.flush(seconds)

    def close(self) -> None:
        """Drop all requests without events and give their pages back; finish the store's writes. Idempotent."""
        self._underway, self._ahead, self._scheduler.underway = None, None, ()
        for request in list(self._requests.values()):
            self._scheduler.remove(request.timeline, keep_tail=False)
        self._requests.clear()
        self._events.clear()
        self._audit_due = False
        if self._tiers is not None:
            self._tiers.close()
