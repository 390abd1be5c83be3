"""Kill processes that read documents into a store, at random moments, and check what each leaves behind:
``python scripts/torture_store.py --kills 200 --seed 1``.

Each victim opens an engine over the store (a tiny V4-Flash, every fourth time a V3), ingests, evicts, collects, pins,
removes and closes without end, and dies by SIGKILL: at a random time, or just after a random operation of the store.
Every fifth time two of them share the store. Then, on a copy of the folder as it was left: the store opens, every
record is whole, what was acknowledged is there, and a fresh engine goes on from the last landing point to the same
bits that an engine without a store has computed. The next victim finds the folder as the kill has left it.

Prints one JSON object; exits with 1 and the seed where anything is wrong. The process has one thread, and forks.
"""

import argparse
import json
import mmap
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: a process with threads cannot fork safely

import torch
from torch import Tensor

from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.disk.catalogue import Catalogue
from longread.kv.disk.collector import Collector
from longread.kv.disk.segments import SegmentWriter
from longread.kv.disk.store import DiskStore
from longread.kv.records import Kind
from longread.kv.shelf import DiskShelf
from longread.spec.config import EngineOptions
from longread.spec.documents import landing_key
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams
from longread.spec.errors import StoreError
from longread.spec.state import PAGE_TOKENS, pages_for
from longread.weights.fixture import write_fixture

LENGTHS = (300, 512, 600, 700, 768, 900)  # tokens of the documents: page ends among them
LIMITS = {"v4-flash": 1_800_000, "v3": 3_600_000}  # about three documents
SECONDS = 0.7  # about as long as a victim needs to start, to ingest a document and to enter it
OPERATIONS = {"store": 60, "collector": 40}  # in about that time, and in some more
ALARM = 60  # seconds after which a victim ends by itself, whatever has become of its parent
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)

PLACES = ("behind the document", "behind an answer")
State = tuple[Tensor, dict[str, Tensor]]  # last logits, and the content of the cache by state group
References = tuple[list[State], list[State]]  # of one document, as ``reference`` gives them


def document(number: int) -> tuple[int, ...]:
    draw = random.Random(number)
    return tuple(draw.randrange(10, 400) for _ in range(LENGTHS[number]))


def start(model: Path, store: Path | None, **options: object) -> LocalEngine:
    given: dict[str, object] = {
        "num_gpu_blocks_override": 8,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 128,
        "snapshot_interval": 256,
    }
    if store is not None:
        given |= {"store": str(store), "store_size": LIMITS[model.name]}
    return load_engine(EngineOptions(model=str(model), dtype="float32", **(given | options)))  # type: ignore[arg-type]


# The victim


class Marks:
    """What a victim is doing, in memory that its parent sees after its death: a byte each for the engine, the collector
    and the store. Tells the parent once, at the operation number ``call``: of the store, or of the collector alone.
    """

    ENGINE, COLLECTOR, STORE = range(3)
    NAMES = (
        *("", "between", "starting", "computing", "waiting for the store", "entering", "collecting", "removing"),
        *("closing", "tidying", "evicting", "compacting", "writing", "syncing", "undoing", "committing"),
    )

    def __init__(self, call: int = 0, of_collector: bool = False) -> None:
        self.memory = mmap.mmap(-1, 3)
        self.memory[self.ENGINE] = self.NAMES.index("between")
        self.calls = 0
        self.call = call
        self.of_collector = of_collector
        self.tell: Callable[[], None] = lambda: None

    @contextmanager
    def at(self, name: str, place: int = ENGINE) -> Iterator[None]:
        before = self.memory[place]
        self.memory[place] = self.NAMES.index(name)
        if place and not (self.of_collector and not self.memory[self.COLLECTOR]):
            self.calls += 1
            if self.calls == self.call:
                self.tell()
        try:
            yield
        finally:
            self.memory[place] = before

    def watch(self, owner: type, method: str, name: str, place: int) -> None:
        real = getattr(owner, method)

        def watched(*given: Any, **named: Any) -> Any:
            with self.at(name, place):
                return real(*given, **named)

        setattr(owner, method, watched)

    def told(self) -> str:
        """The engine goes on while the store works, so the store's is told before."""
        engine, *store = (self.NAMES[each] for each in self.memory[:3])
        return f"store: {', '.join(filter(None, store))}" if any(store) else f"engine: {engine}"


def watch_store(marks: Marks, report: Callable[..., None]) -> None:
    for method, name in (("append", "writing"), ("sync", "syncing"), ("rollback", "undoing")):
        marks.watch(SegmentWriter, method, name, Marks.STORE)
    for method, name in (("tidy", "tidying"), ("_evict", "evicting"), ("_compact", "compacting")):
        marks.watch(Collector, method, name, Marks.COLLECTOR)
    transaction, write = Catalogue.transaction, DiskStore.write

    @contextmanager
    def watched(self: Catalogue) -> Iterator[Any]:
        with marks.at("committing", Marks.STORE), transaction(self) as connection:
            yield connection

    def told(self: DiskStore, records: Any, **named: Any) -> int:
        done = write(self, records, **named)
        report(wrote=[[record.kind, record.key.hex()] for record in records])
        return done

    Catalogue.transaction = watched  # type: ignore[method-assign]
    DiskStore.write = told  # type: ignore[method-assign]


def live(
    model: Path, folder: Path, draw: random.Random, marks: Marks, report: Callable[..., None], alone: bool
) -> None:
    """A victim's life, which does not end by itself."""
    while True:
        with marks.at("starting"):
            engine = start(model, folder)
        if engine.store is None:
            raise AssertionError("the store could not be opened")
        for what in draw.choices(("ingest", "collect", "remove"), weights=(8, 2, 1), k=3):
            if what == "collect":
                with marks.at("collecting"):
                    report(other=what)
                    engine.store.gc(LIMITS[model.name] * 2 // 3)
            elif what == "remove":
                with marks.at("removing"):
                    report(other=what)
                    for each in engine.store.documents()[:2]:
                        engine.store.remove(each.id)
            else:
                ingest(engine, DiskShelf(engine.store), draw, marks, report, alone)
                break  # a second document would lie in pages that are no row, and round differently
        stats = engine.stats()
        if stats.store_corrupt_records or (alone and stats.store_errors):
            raise AssertionError(f"{stats.store_corrupt_records} records damaged, {stats.store_errors} errors")
        with marks.at("closing"):
            engine.close()


def ingest(
    engine: LocalEngine,
    shelf: DiskShelf,
    draw: random.Random,
    marks: Marks,
    report: Callable[..., None],
    alone: bool,
) -> None:
    """As the command does it."""
    assert engine.store is not None
    number = draw.randrange(len(LENGTHS))
    report(ingests=number)
    ids = document(number)
    with marks.at("computing"):
        engine.submit(GenerationRequest("ingest", ids, GREEDY))
        while not any(isinstance(event, FinishEvent) for event in engine.step()):
            pass
    with marks.at("waiting for the store"):
        if not engine.flush(30):
            raise AssertionError("not all was written")
    with marks.at("entering"):
        for each in engine.store.documents():
            if each.pinned:
                engine.store.unpin(each.id)
        if shelf.holds(ids):
            entered = shelf.add(f"text {number}", name=str(number), tokens=ids, pinned=draw.random() < 0.3)
            report(entered=entered.id)
        elif alone:  # else the other one may have removed it
            raise AssertionError("all was written, but the store does not hold it")


# The parent


@dataclass
class Victim:
    """A forked process, and what it has told: the document in hand, and what was written of it since."""

    pid: int
    pipe: int
    marks: Marks
    said: bytes = b""
    called: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        whole = self.said[: self.said.rfind(b"\n") + 1]  # the last one may be torn
        return [json.loads(line) for line in whole.splitlines()]

    def hear(self, seconds: float) -> bool:
        """Read what comes within that time; False at the end of the pipe."""
        if not select.select([self.pipe], [], [], max(seconds, 0))[0]:
            return True
        got = os.read(self.pipe, 2**16)
        self.said += got
        self.called = self.called or b'"called"' in self.said[-(2**17) :]
        return bool(got)


def fork(work: Callable[[Callable[..., None]], None]) -> tuple[int, int]:
    """Run ``work`` in a child, which tells what it reports, or its error, through the returned pipe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise AssertionError(f"{threads} threads: a fork would not be safe")
    out, into = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    os.close(out)  # whoever writes to a parent that is gone gets an error, and ends

    def report(**told: object) -> None:
        os.write(into, json.dumps(told).encode() + b"\n")

    status = 1
    try:
        signal.alarm(ALARM)
        work(report)
        status = 0
    except BaseException:  # noqa: BLE001 - a process's edge: the parent is told
        with suppress(OSError):
            report(error=traceback.format_exc())
    finally:
        os._exit(status)


def begin(model: Path, folder: Path, seed: int, marks: Marks, alone: bool) -> Victim:
    def work(report: Callable[..., None]) -> None:
        marks.tell = lambda: report(called=True)
        watch_store(marks, report)
        live(model, folder, random.Random(seed), marks, report, alone)

    return Victim(*fork(work), marks)


def kill(victims: list[Victim], draw: random.Random, by_call: bool) -> None:
    """After a random time, or within two milliseconds after the operation that was drawn for the first one."""
    limit = time.monotonic() + (20 if by_call else draw.uniform(0.0, SECONDS))
    while time.monotonic() < limit and not (by_call and victims[0].called):
        for victim in victims:
            if not victim.hear(min((limit - time.monotonic()) / len(victims), 0.005)):
                limit = 0.0
    if by_call:
        time.sleep(draw.random() * 0.002)
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    for victim in victims:
        _, status = os.waitpid(victim.pid, 0)
        while victim.hear(1.0):
            pass
        os.close(victim.pipe)
        errors = [each["error"] for each in victim.messages if "error" in each]
        if errors or os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"a victim ended by itself: {status}\n{''.join(errors)}")


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` returns, run in a process of its own that lives to its end."""
    victim = Victim(*fork(lambda report: report(**work())), Marks())
    while victim.hear(ALARM):
        pass
    os.close(victim.pipe)
    os.waitpid(victim.pid, 0)
    last = victim.messages[-1] if victim.messages else {"error": "no answer"}
    if "error" in last:
        raise AssertionError(last["error"])
    return last


# What must hold


def look(engine: LocalEngine, tokens: tuple[int, ...]) -> tuple[int, list[State]]:
    """How many tokens were computed; logits and cache behind the document, and after three tokens of an answer."""
    states = []
    with engine.session() as session:
        computed = session.sync(tokens)
        for answered in range(2):
            for _ in range(3 * answered):
                session.step(GREEDY)
            lease = session._timeline.lease
            assert lease is not None
            length, parts = len(session.tokens), {}
            for group in engine._core.groups:
                state = engine._core.state[group.name]
                if group.kind == "ring":
                    parts[group.name] = state[:, lease.slot].clone()
                else:
                    rows = state[:, lease.pages[: pages_for(length)]].flatten(1, 2)
                    parts[group.name] = rows[:, : length // group.tokens_per_row].clone()
            states.append((session.logits, parts))
    return computed, states


def differences(found: list[State], known: list[State]) -> list[str]:
    """Which parts are not the same bits, and by how much."""
    said = []
    for place, ((logits, parts), (known_logits, known_parts)) in zip(
        PLACES, zip(found, known, strict=True), strict=True
    ):
        for name, one, two in [("logits", logits, known_logits), *((n, parts[n], known_parts[n]) for n in known_parts)]:
            if not torch.equal(one, two):
                said.append(f"{name} {place} by {(one - two).abs().max().item():.1e}")
    return said


def reference(model: Path, number: int) -> References:
    """From engines that have no store: one that reads all of it, one that goes on before the last token.

    That token may round differently alone. Steps end at page ends, so whoever goes on from one takes the first's steps.
    """
    engine = start(model, None, enable_prefix_caching=False)
    computed, cold = look(engine, document(number))
    assert computed == LENGTHS[number]
    engine = start(model, None)
    look(engine, document(number))
    computed, warm = look(engine, document(number))
    assert computed == 1
    return cold, warm


def landing(store: DiskStore, ids: tuple[int, ...]) -> int:
    """Where the store's records let an engine go on: the last position before the end that has all that it needs."""
    if not store.models():
        return 0  # not even the model was entered
    layout = store.models()[0].layout
    root, rings = layout.root, bool(layout.ring_bytes)

    def there(kind: Kind, at: int) -> bool:
        return store.get(kind, landing_key(root, ids[:at])) is not None

    pages = 0
    while (pages + 1) * PAGE_TOKENS <= len(ids) and there("page", (pages + 1) * PAGE_TOKENS):
        pages += 1
    whole, last = pages * PAGE_TOKENS, len(ids) - 1
    places = {0, *(at for at in range(PAGE_TOKENS, whole + 1, PAGE_TOKENS) if at <= last and there("ring", at))}
    if not rings:
        places.add(min(whole, last))
    if last % PAGE_TOKENS and whole >= last // PAGE_TOKENS * PAGE_TOKENS:  # a tail behind full pages that are there
        if there("tail", last) and (not rings or there("ring", last)):
            places.add(last)
        if not rings and len(ids) % PAGE_TOKENS and there("tail", len(ids)):
            places.add(last)
    return max(places)


def check(
    model: Path,
    folder: Path,
    victims: list[list[dict[str, Any]]],
    numbers: list[int],
    known: list[References],
    lost: int,
) -> dict[str, Any]:
    """The store as it was left: opened, read back, and asked. ``lost``: records that were unreachable before."""
    store = DiskStore.open(folder, None, max_bytes=LIMITS[model.name])
    files = {path.name: path.stat().st_size for path in (folder / "segments").iterdir()}
    report = store.verify()
    assert not (report.corrupt or report.unsound_rows or report.index_faults or report.foreign), report
    # Of two, one may evict the page that the other is about to write behind: room that is lost until a collection.
    assert store.corrupt == 0 and (report.unreachable <= lost or len(victims) > 1), report
    size = store.stats().file_bytes
    assert sum(files.values()) == size, f"torn ends or orphans are left: {files}, {size} bytes are known"
    # Of two that make room at once each may write into the other's, the one portion that it has in hand.
    assert size <= LIMITS[model.name] * (1 if len(victims) == 1 else 1.2), f"{size} bytes, {len(victims)} writers"
    if len(victims) == 1:  # another one may have removed the document
        acknowledged(store, victims[0])
    others = [number for number in numbers[1:] if landing(store, document(number))]
    store.close()
    landings: list[str] = []
    for number in [*numbers[:1], *others[:1]]:
        engine, ids = start(model, folder), document(number)
        assert engine.store is not None
        at = landing(engine.store, ids)  # again: for the first document something of the second may have been evicted
        computed, states = look(engine, ids)
        assert computed == len(ids) - at, f"document {number}: {computed} computed, could go on from {at} of {len(ids)}"
        wrong = differences(states, known[number][computed == 1])
        assert not wrong, f"{model.name}, document {number}, from {at} of {len(ids)}: {', '.join(wrong)}"
        assert not engine.stats().store_corrupt_records and not engine.stats().store_errors
        engine.close()
        landings.append("nothing" if not at else "the end" if at == len(ids) - 1 else "inside")
    return {"records": report.records, "landings": landings, "lost": report.unreachable}


def acknowledged(store: DiskStore, messages: list[dict[str, Any]]) -> None:
    """All writes of the document in hand that had returned are there (eviction takes what is older)."""
    last = max((at for at, each in enumerate(messages) if "ingests" in each or "other" in each), default=None)
    if last is None or "other" in messages[last]:
        return
    for each in messages[last:]:
        for kind, key in each.get("wrote", ()):
            assert store.get(kind, bytes.fromhex(key)) is not None, f"{kind} {key} was written, and is not there"
        if "entered" in each:
            entered = store.document(each["entered"], any_model=True)
            assert entered is not None and store.document_state(entered).whole, (
                "a document was entered, and is not there"
            )


@dataclass
class Tally:
    kills: int = 0
    doing: Counter[str] = field(default_factory=Counter)
    landings: Counter[str] = field(default_factory=Counter)
    records: int = 0


def torture(place: Path, kills: int, seed: int) -> dict[str, Any]:
    draw, tally, began = random.Random(seed), Tally(), time.monotonic()
    known: dict[str, list[References]] = {}
    lost = dict.fromkeys(LIMITS, 0)
    for kind in LIMITS:
        write_fixture(place / kind, kind)
        start(place / kind, None).close()  # what is imported late is imported here, once
        file = place / f"{kind}.states"
        in_child(lambda: torch.save([reference(place / kind, n) for n in range(len(LENGTHS))], file) or {})  # noqa: B023
        known[kind] = torch.load(file)
    while tally.kills < kills:
        kind = "v3" if tally.kills % 4 == 3 else "v4-flash"
        number = 2 if tally.kills % 5 == 4 and kills - tally.kills > 1 else 1
        how = draw.choice(("time", "store", "collector"))
        call = draw.randrange(1, OPERATIONS[how]) if how in OPERATIONS else 0
        seeds = [draw.randrange(2**32) for _ in range(number)]
        model, folder, copy = place / kind, place / f"{kind}.store", place / "copy"
        victims = [begin(model, folder, each, Marks(call, how == "collector"), number == 1) for each in seeds]
        kill(victims, draw, by_call=call > 0)
        tally.kills += number
        tally.doing.update(victim.marks.told() for victim in victims)
        said = [victim.messages for victim in victims]
        in_hand = {each["ingests"] for messages in said for each in messages[::-1] if "ingests" in each}
        others = draw.sample(range(len(LENGTHS)), len(LENGTHS))
        numbers = list(dict.fromkeys([*sorted(in_hand), *others]))
        if folder.exists():
            shutil.copytree(folder, copy)
            found = in_child(lambda: check(model, copy, said, numbers, known[kind], lost[kind]))  # noqa: B023
            shutil.rmtree(copy)
            lost[kind] = found["lost"]
            tally.records += found["records"]
            tally.landings.update(found["landings"])
        if tally.kills // 20 > (tally.kills - number) // 20:
            print(f"{tally.kills} of {kills} kills, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {
        "kills": tally.kills,
        "seed": seed,
        "killed_while": dict(tally.doing.most_common()),
        "records_read_back": tally.records,
        "went_on_from": dict(tally.landings.most_common()),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes that fill a store, and check what they leave.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torture-") as place:
        try:
            print(json.dumps(torture(Path(place), arguments.kills, arguments.seed)))
        except (AssertionError, StoreError):
            traceback.print_exc()
            print(f"seed {arguments.seed}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
