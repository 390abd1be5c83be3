"""Five times more than a server can do, from real clients: nothing hangs, every answer is a success or a clean refusal,
what is done is no less than at best, memory is bounded, and afterwards everything is as before.

    python scripts/overload.py                       a fake engine of a known speed in a process of its own
    python scripts/overload.py --model reader-v4     longread serve with a real model

Phases: ``best`` (as many clients as there are slots, each asks again at once), ``overload`` (clients come by chance,
``--factor`` times as many as are served at best; they do not come back), ``after`` (as ``best``). A third of the
clients reads its answer in one piece, one in twenty leaves in the middle of its own.

The clients share the machine with the server, so each is as cheap as a client can be: a connection of its own, a
request, what comes back as it is. ``cpu_seconds`` are those of clients, server and engine in each phase.

Prints one JSON object. Exit status 1 where a promise is broken; ``broken`` says which. ``fullness``, of the fake engine
only: slots that were used in a step of the overload, which does not depend on how fast this machine is.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import longread
from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.limits import Limits
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import bind, serve, url
from longread.server.state import ServerState
from longread.server.worker.child import attend
from longread.server.worker.supervise import Workers
from longread.spec.engine import Engine, Event, TokenEvent
from longread.wire.encoding import ENCODINGS
from longread.wire.tokenizer import Tokenizer

HANG_SECONDS = 120.0  # no answer takes that long: the queue is bounded
CLEAN = (429, 503, 504)
LEAVES, WHOLE = 0.05, 0.33
RUN_UP = 1.0  # seconds of the overload until the queue is full
MEMORY_FACTOR, MEMORY_BYTES = 1.3, 64 * 2**20  # growth that the overload may cost
GOODPUT = 0.9
METRIC = re.compile(r"^longread:(\w+)\{[^}]*\} (\S+)$", re.M)


class SlowEngine(FakeEngine):
    """A step takes ``seconds``. ``log``: where ``close`` writes when each step ended and how many slots it used."""

    def __init__(self, *, seconds: float, log: str, **options: Any):
        super().__init__(**options)
        self._seconds, self._log = seconds, log
        self._steps: list[tuple[float, int]] = []

    def step(self) -> Sequence[Event]:
        time.sleep(self._seconds)
        events = super().step()
        self._steps.append((time.monotonic(), sum(isinstance(event, TokenEvent) for event in events)))
        return events

    def close(self) -> None:
        super().close()
        Path(self._log).write_text(json.dumps(self._steps))


def load(task: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    return SlowEngine(**task), {}


def serve_fake(task: dict[str, Any], queued: int) -> None:
    """As ``longread serve`` puts it together."""
    data = (Path(longread.__file__).parent / "weights" / "fixture_tokenizer.json").read_bytes()
    probe = Tokenizer(data, bos_id=0, eos_id=1)
    eos = probe.id_of("<｜end▁of▁sentence｜>")
    assert eos is not None
    text = Tokenizer(data, bos_id=0, eos_id=eos)
    task |= {"vocab": text.vocab_size, "eos_id": eos, "model": "fake"}
    options = ServerOptions(port=0, limits=Limits(max_num_queued_reqs=queued))
    metrics = ServerMetrics("fake", lambda: driver.current, options.shared)
    workers = Workers((sys.executable, os.path.abspath(__file__)), task)
    driver = EngineDriver(workers.make, admission=Admission(options.limits), observer=metrics, restarts=Restarts())
    state = ServerState(driver, metrics, text, ENCODINGS["v3.1"], options, ("fake",), "overload")
    listener = bind("127.0.0.1", 0)
    serve(create_app(state), driver, options, listener, lambda _: print(f"serving fake on {url(listener)}", flush=True))


@contextmanager
def server(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process; it has ended afterwards."""
    if args.model == "fake":
        task = {"seconds": args.step_ms / 1000, "log": str(log), "max_num_seqs": args.slots, "max_model_len": 4096}
        command = [sys.executable, __file__, "--serve", json.dumps([task, args.queued])]
    else:
        command = [sys.executable, "-m", "longread.cli.main", "serve", args.model, "--port", "0"]
        command += ["--max-num-seqs", str(args.slots), "--max-num-queued-reqs", str(args.queued)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                yield found[1], psutil.Process(process.pid)
                break
        else:
            sys.exit("the server did not start")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@dataclass
class Ends:
    """How the requests of one phase ended."""

    ends: Counter[str] = field(default_factory=Counter)
    served: list[float] = field(default_factory=list)  # when each success ended
    first: list[float] = field(default_factory=list)  # seconds to each first piece of a success
    unclean: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def told(self, seconds: float) -> dict[str, Any]:
        return {
            "requests": dict(sorted(self.ends.items())),
            "served_per_second": round(len(self.served) / seconds, 2),
            "first_token_p50_s": round(statistics.median(self.first), 3) if self.first else None,
            "first_token_p95_s": round(quantile(self.first, 0.95), 3) if self.first else None,
            "health_p99_ms": round(1000 * quantile(self.health, 0.99), 1) if self.health else None,
            "memory_mib": [round(size / 2**20) for size in (min(self.memory), max(self.memory))],
        }


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@dataclass(slots=True)
class Reply:
    """One answer: ``pieces`` of the body as they come, without the framing of chunks."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces])


@asynccontextmanager
async def call(address: str, method: str, path: str, body: object = None) -> AsyncIterator[Reply]:
    """One request on a connection of its own, which is closed behind it. Raises OSError, EOFError, TimeoutError."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    async with asyncio.timeout(HANG_SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + b"\r\n\r\n" + data)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            yield Reply(int(first.split(" ")[1]), headers, _pieces(reader, headers))
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


class Load:
    """Clients of one server."""

    def __init__(self, address: str, process: psutil.Process, args: argparse.Namespace):
        self.address, self.process, self.args = address, process, args
        self.draw = random.Random(args.seed)

    def spent(self) -> dict[str, float]:
        """Processor seconds up to now of each party."""
        parties = {"clients": [psutil.Process()], "server": [self.process], "engine": self.process.children()}
        times = {name: [process.cpu_times() for process in processes] for name, processes in parties.items()}
        return {name: sum(each.user + each.system for each in found) for name, found in times.items()}

    async def ask(self, into: Ends) -> None:
        """One client: how it ended is booked."""
        draw, begun = self.draw, time.monotonic()
        whole, leaves = draw.random() < WHOLE, draw.random() < LEAVES
        prompt = [draw.randrange(3, 400) for _ in range(self.args.prompt)]
        body = {"prompt": prompt, "max_tokens": self.args.tokens, "ignore_eos": True, "stream": not whole}
        try:
            async with call(self.address, "POST", "/v1/completions", body) as reply:
                if reply.status != 200:
                    into.ends[str(reply.status)] += 1
                    self._check_refusal(reply, await reply.read(), into)
                    return
                first, pieces = 0.0, []
                async for piece in reply.pieces:
                    first = first or time.monotonic() - begun
                    pieces.append(piece)
                    if leaves and not whole:
                        into.ends["left"] += 1
                        return
                if self._complete(b"".join(pieces), whole, into):
                    into.ends["served"] += 1
                    into.served.append(time.monotonic())
                    into.first.append(first)
        except TimeoutError:
            into.ends["hung"] += 1
        except (OSError, EOFError) as error:
            into.ends["broken"] += 1
            into.unclean.append(repr(error)[:300])

    def _complete(self, data: bytes, whole: bool, into: Ends) -> bool:
        """Whether a success is one. A stream that was given up says so in its last event."""
        if whole:
            good = json.loads(data)["usage"]["completion_tokens"] == self.args.tokens
        else:
            good = data.endswith(b"data: [DONE]\n\n") and b'{"error":' not in data
            given_up = re.search(rb'\{"error":.*"code":"(\w+_timeout|timeout)"', data)
            if given_up is not None:
                into.ends["given up"] += 1
                return False
        if not good:
            into.ends["broken"] += 1
            into.unclean.append(data[-300:].decode(errors="replace"))
        return good

    def _check_refusal(self, reply: Reply, data: bytes, into: Ends) -> None:
        with suppress(ValueError, KeyError, TypeError):
            message = json.loads(data)["error"]["message"]
            if reply.status in CLEAN and message and int(reply.headers["retry-after"]) >= 1:
                return
        into.unclean.append(f"{reply.status}: {data[:300].decode(errors='replace')}")

    async def watch(self, into: Ends) -> None:
        """Health and memory, all along."""
        while True:
            begun = time.monotonic()
            async with call(self.address, "GET", "/health") as reply:
                await reply.read()
            into.health.append(time.monotonic() - begun)
            if reply.status != 200:
                into.unclean.append(f"/health: {reply.status}")
            processes = [self.process, *self.process.children(recursive=True)]
            into.memory.append(sum(each.memory_info().rss for each in processes))
            await asyncio.sleep(0.1)

    async def closed(self, seconds: float) -> Ends:
        """As many clients as there are slots."""
        into, end = Ends(), time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < end:
                await self.ask(into)

        await self._watched(into, [asyncio.create_task(one()) for _ in range(self.args.slots)])
        into.served = [at for at in into.served if at <= end]
        return into

    async def open(self, rate: float, seconds: float) -> tuple[Ends, float]:
        """Clients come by chance; returns how all of them ended, and when they began to come."""
        into, clients, begun = Ends(), list[asyncio.Task[None]](), time.monotonic()
        at = begun
        watching = asyncio.create_task(self.watch(into))
        while (at := at + self.draw.expovariate(rate)) < begun + seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            clients.append(asyncio.create_task(self.ask(into)))
        watching.cancel()
        await self._watched(into, clients)
        into.served = [t for t in into.served if begun + RUN_UP <= t <= begun + seconds]
        return into, begun

    async def _watched(self, into: Ends, clients: Sequence["asyncio.Task[None]"]) -> None:
        watching = asyncio.create_task(self.watch(into))
        await asyncio.gather(*clients)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    async def books(self) -> dict[str, int]:
        """What the server counted, once nothing is in flight any more."""
        end = time.monotonic() + HANG_SECONDS
        while True:
            found: Counter[str] = Counter()
            async with call(self.address, "GET", "/metrics") as reply:
                text = (await reply.read()).decode()
            for name, value in METRIC.findall(text):
                found[name] += int(float(value))
            rest = found["num_requests_running"] + found["num_requests_waiting"]
            accepted, ended = found["requests_accepted_total"], found["request_success_total"]
            if (not rest and accepted == ended) or time.monotonic() > end:
                refused = found["admission_rejections_total"]
                planned = found["memory_predicted_bytes"]
                return {"accepted": accepted, "ended": ended, "refused": refused, "in flight": rest, "planned": planned}
            await asyncio.sleep(0.05)


async def phases(load: Load, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """All phases, and when the overload began."""
    await load.closed(min(1.0, args.best_seconds))  # what is imported or compiled at first
    spent = [load.spent()]
    best = await load.closed(args.best_seconds)
    spent.append(load.spent())
    rate = args.rate or args.factor * len(best.served) / args.best_seconds
    overload, begun = await load.open(rate, args.seconds)
    spent.append(load.spent())
    middle = await load.books()
    after = await load.closed(args.best_seconds)
    books = await load.books()
    told: dict[str, Any] = {
        "best": best.told(args.best_seconds),
        "overload": overload.told(args.seconds - RUN_UP),
        "after": after.told(args.best_seconds),
        "books": books,
    }
    for name, before, behind in zip(("best", "overload"), spent, spent[1:], strict=False):
        told[name]["cpu_seconds"] = {party: round(behind[party] - before[party], 2) for party in before}
    told["broken"] = list(broken(best, overload, after, told, middle, args))
    return told, begun


def broken(
    best: Ends, overload: Ends, after: Ends, told: dict[str, Any], middle: dict[str, int], args: argparse.Namespace
) -> Iterator[str]:
    """The promises that were not kept."""
    for name, ends in (("best", best), ("overload", overload), ("after", after)):
        if ends.ends["hung"] or ends.ends["broken"] or ends.unclean:
            yield f"{name}: {dict(ends.ends)}, {ends.unclean[:3]}"
    if not overload.ends["429"]:
        yield "the overload was none: nobody was refused"
    for name, books in (("overload", middle), ("after", told["books"])):
        if books["in flight"] or books["accepted"] != books["ended"]:
            yield f"{name}: the books do not balance: {books}"
    seen = sum(ends.ends["429"] for ends in (best, overload, after))
    if told["books"]["refused"] < seen:
        yield f"clients were refused {seen} times, the server counted {told['books']['refused']}"
    # A real engine's cache is resident as far as it was used: what was planned for it is no growth.
    limit = max(MEMORY_FACTOR * max(best.memory), min(best.memory) + middle["planned"]) + MEMORY_BYTES
    if max(overload.memory + after.memory) > limit:
        yield f"memory: {max(overload.memory) / 2**20:.0f} MiB against {max(best.memory) / 2**20:.0f} MiB at best"
    at_best = told["best"]["served_per_second"]
    for name in ("overload", "after"):
        if told[name]["served_per_second"] < args.goodput * at_best:
            yield f"{name}: {told[name]['served_per_second']} served a second against {at_best} at best"


def fullness(log: Path, begun: float, args: argparse.Namespace) -> float:
    """Share of the slots that the engine's steps used while there was too much to do."""
    steps = [rows for at, rows in json.loads(log.read_text()) if begun + RUN_UP <= at <= begun + args.seconds]
    return round(sum(steps) / (len(steps) * args.slots), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fake", help="fake, or what longread serve takes")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the overload")
    parser.add_argument("--best-seconds", type=float, default=10.0, help="of the phases before and behind it")
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--rate", type=float, help="clients a second, in place of --factor")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queued", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=20, help="of an answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the fake engine")
    parser.add_argument("--goodput", type=float, default=GOODPUT, help="least share of the best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve_fake(*args.serve)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        with server(args, log) as (address, process):
            told, begun = asyncio.run(_phases(address, process, args))
        full = {"fullness": fullness(log, begun, args)} if args.model == "fake" else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"machine": machine, "command": " ".join(sys.argv), **told, **full}, indent=2))
    return 1 if told["broken"] else 0


async def _phases(address: str, process: psutil.Process, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    return await phases(Load(address, process, args), args)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():  # the engine's process
        attend(int(sys.argv[1]), load)
    sys.exit(main())
