"""The client measured against a server that does nothing, and whether a run's figures can be believed for it.

Knows the null server and a run's overhead. Must not know the server that was measured.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from longread.measure.load.client import Client
from longread.measure.load.estimates import Estimate
from longread.measure.load.metrics import Summary
from longread.measure.load.outcome import Outcome, Spread
from longread.measure.load.overhead import spread
from longread.measure.load.target import Target

ALONE, TOGETHER = 60, 60  # requests
MOST_STREAMS = 256
CHUNKS = 12
FIRST_SECONDS = 0.002
GAP_SECONDS = (0.002, 0.03)
SECONDS = 20.0
MARKUP = 4  # tokens of an answer that are no text: its end, and what closes the thinking
FAILED = 0.01  # of requests
SPARE_EVENTS = 2  # with text and without a token: a parser of tool calls may split and close what it held back


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the client adds to a TTFT on loopback, in seconds: with one stream, and with ``streams`` of them at ``gap``
    seconds a chunk. Less than this cannot be told apart.
    """

    alone: Spread | None
    loaded: Spread | None
    streams: int
    gap: float


async def calibrate(streams: int, gap: float) -> Calibration:
    """Takes one or two seconds. ``streams``, ``gap``: the run's own, brought within what is quick. OSError where no
    process can be started.
    """
    streams, gap = min(max(streams, 1), MOST_STREAMS), min(max(gap, GAP_SECONDS[0]), GAP_SECONDS[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "longread.measure.load.null_server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            port = int(await process.stdout.readline() or b"0")
            target = Target(f"http://127.0.0.1:{port}", "null")
            async with Client(target, SECONDS) as client:
                alone = await _ask(client, 1, ALONE, 1, gap)
                loaded = await _ask(client, streams, max(TOGETHER, 2 * streams), CHUNKS, gap) if streams > 1 else None
    except TimeoutError:
        return Calibration(None, None, streams, gap)
    finally:
        process.terminate()
        await process.wait()
    return Calibration(alone, loaded, streams, gap)


async def _ask(client: Client, streams: int, count: int, chunks: int, gap: float) -> Spread | None:
    """Added TTFTs of ``count`` requests by ``streams``, the first one of each stream (its connection) not counted."""
    body = orjson.dumps({"chunks": chunks, "gap": gap, "first": FIRST_SECONDS})
    added: list[float] = []

    async def stream(place: int) -> None:
        await asyncio.sleep(place / streams * chunks * gap)  # not in step with one another
        for number in range(count // streams + 1):
            outcome = Outcome("null", "null")
            await client.send(body, outcome)
            own = (outcome.server_timing or {}).get("first_ms")
            if number and outcome.ttft is not None and own is not None:
                added.append(outcome.ttft - own / 1000)

    await asyncio.gather(*(stream(place) for place in range(streams)))
    return spread(added)


def warnings(summary: Summary, calibration: Calibration | None) -> list[str]:
    """Why figures of this run are not to be trusted, or what they do not say; none where all is well."""
    over, said = summary.run.overhead, []
    ttft, tpot = (_median(summary.estimates.get(name)) for name in ("ttft", "tpot"))
    lag, late = over.loop_lag, over.lateness
    if lag is not None and lag.p99 > 0.005 and (lag.p99 > 0.05 * ttft or lag.p99 > tpot):
        said.append(
            f"the client's event loop woke {_ms(lag.p99)} late (p99): TTFT and gaps contain it; use a quieter machine "
            "or fewer streams"
        )
    if late is not None and late.p99 > 0.005 and late.p99 > 0.05 * ttft:
        said.append(f"requests were sent {_ms(late.p99)} (p99) after their time: the load was not the one asked for")
    if over.cpu_share is not None and over.cpu_share > 0.8:
        said.append(f"the client used {over.cpu_share:.0%} of a core, and it has one: it may be what limits the rate")
    added = (calibration.loaded or calibration.alone) if calibration is not None else None
    if added is not None and added.p99 > 0.001 and added.p99 > 0.1 * ttft:
        said.append(f"against a server that does nothing the client adds {_ms(added.p99)} to a TTFT (p99)")
    return said + _held(summary.run.outcomes) + _answers(summary)


def _held(outcomes: Sequence[Outcome]) -> list[str]:
    held = spread(each.held for each in outcomes if each.held > 0.001)
    if held is None:
        return []
    said = (
        f"{held.count} of {len(outcomes)} requests were held back for up to {held.largest:.3g} s by the cap on "
        "concurrency or by their session: the schedule was not kept, and latencies count from sending"
    )
    return [said]


def _answers(summary: Summary) -> list[str]:
    said = []
    outcomes = summary.run.outcomes
    if summary.failed > FAILED * len(outcomes):
        said.append(
            f"{summary.failed} of {len(outcomes)} requests were not answered: latencies are of the others only, which "
            "may be the lighter ones"
        )
    both = [each for each in outcomes if each.counted_tokens is not None and each.tokens_from == "usage"]
    told, counted = (sum(getattr(each, n) or 0 for each in both) for n in ("output_tokens", "counted_tokens"))
    if both and abs(told - counted) > 0.1 * max(told, counted) + MARKUP * len(both):
        said.append(
            f"the server counts {told:,} output tokens and the tokenizer {counted:,}: is it the model's tokenizer?"
        )
    said += _impossible(outcomes)
    opened = summary.run.overhead.new_connections
    if opened > 2 * summary.run.peak + 0.05 * len(outcomes):
        said.append(
            f"{opened} of {len(outcomes)} requests opened a new connection with at most {summary.run.peak} in flight: "
            "the server closes connections, and their TTFT contains opening one"
        )
    return said


def _impossible(outcomes: Sequence[Outcome]) -> list[str]:
    """Counts of the server's that cannot be: every figure that divides by them is worth nothing."""
    told = [each for each in outcomes if each.status == "ok" and each.tokens_from == "usage"]
    few = [each for each in told if (each.output_tokens or 0) + SPARE_EVENTS < len(each.chunk_times)]
    cached = [each for each in outcomes if (each.cached_tokens or 0) > (each.prompt_tokens or 0)]
    said = []
    if few:
        said.append(
            f"{len(few)} of {len(told)} answers had more events with text than the server counts output tokens "
            f"(first: {few[0].key}): TPOT and tokens per second are wrong by that"
        )
    if cached:
        said.append(f"{len(cached)} answers tell more cached tokens than their prompt has (first: {cached[0].key})")
    return said


def _median(estimate: Estimate | None) -> float:
    """In seconds; infinite where there is none, so that nothing is compared with it."""
    return float("inf") if estimate is None or estimate.median is None else estimate.median / 1000


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
