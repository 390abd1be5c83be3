"""Short chats beside a long prompt, against a real model: ``longread serve`` in a process of its own.

Idle: ``--chats`` short chats, one each ``--every`` seconds, and nothing else. Beside: as many others at the same pace
while a prompt of ``--tokens`` is being read; all of them must have ended before it has its first token. Meanwhile
/health is asked every 20 ms. A long prompt that takes too long is given up then: its TTFT is null. No prompt begins as
another does: nothing is reused.

Lone: what short steps cost a long prompt that nobody comes beside, ``--lone`` times in a server with the given options
and in one with ``--step-target none`` (the least time of each; 0: not at all).

Prints one JSON object: the chats' TTFT in both, their ratio, the long prompt's TTFT beside them and lone, /health, and
the step target that the server chose, with its reason. Run on a quiet machine:
python benchmarks/fairness.py
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

AIM_RATIO, AIM_HEALTH_MS, AIM_LONE = 2.5, 50.0, 1.15
TIMEOUT = 600.0
WORDS = (
    "river",
    "valley",
    "mill",
    "bridge",
    "road",
    "stone",
    "winter",
    "market",
    "letter",
    "house",
    "night",
    "morning",
)


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Its address, and what it says of its steps."""
    command = [sys.executable, "-m", "longread.cli.main", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        steps = ""
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if line.startswith("  steps: "):
                steps = line.removeprefix("  steps: ").strip()
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                yield found[1], steps
                break
        else:
            sys.exit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


class Client:
    """Asks one server and keeps the times."""

    def __init__(self, http: httpx.AsyncClient, args: argparse.Namespace):
        self.http, self.args = http, args
        self.draw = random.Random(args.seed)

    async def first_token(self, path: str, body: dict[str, Any]) -> float:
        """Seconds to it; the answer is read to its end."""
        begun, first = time.monotonic(), 0.0
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                sys.exit(f"{response.status_code}: {(await response.aread())[:400]!r}")
            async for line in response.aiter_lines():
                # The role's chunk comes with the first token; completions have none.
                if not first and line.startswith("data: {"):
                    first = time.monotonic() - begun
                if '"error"' in line:
                    sys.exit(line[:400])
        return first

    async def chat(self) -> float:
        text = " ".join(self.draw.choice(WORDS) for _ in range(self.args.chat_words))
        messages = [{"role": "user", "content": f"{self.draw.random()} {text}"}]
        return await self.first_token("/v1/chat/completions", {"messages": messages, "max_tokens": self.args.answer})

    async def chats(self) -> list[float]:
        """``--chats`` of them, one each ``--every`` seconds."""
        asked = []
        for _ in range(self.args.chats):
            asked.append(asyncio.create_task(self.chat()))
            await asyncio.sleep(self.args.every)
        return await asyncio.gather(*asked)

    async def read_long(self, tokens: int) -> float:
        prompt = [self.draw.randrange(3, self.args.vocab) for _ in range(tokens)]
        return await self.first_token("/v1/completions", {"prompt": prompt, "max_tokens": 1, "ignore_eos": True})

    async def health(self, into: list[float]) -> None:
        while True:
            begun = time.monotonic()
            response = await self.http.get("/health")
            into.append(time.monotonic() - begun)
            if response.status_code != 200:
                sys.exit(f"/health: {response.status_code}")
            await asyncio.sleep(0.02)


def figures(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * share))]
        for name, share in (("p95", 0.95), ("p99", 0.99))
    }
    return {"p50_ms": _ms(statistics.median(ordered)), **{f"{name}_ms": _ms(value) for name, value in at.items()}}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


async def measure(address: str, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT, limits=limits) as http:
        client, health = Client(http, args), dict[str, list[float]](idle=[], beside=[])
        for _ in range(3):  # what is compiled at first
            await client.chat()
        await client.read_long(1024)
        watching = asyncio.create_task(client.health(health["idle"]))
        idle = await client.chats()
        watching.cancel()
        watching = asyncio.create_task(client.health(health["beside"]))
        begun = time.monotonic()
        reading = asyncio.create_task(client.read_long(args.tokens))
        await asyncio.sleep(min(1.0, args.every))
        beside = await client.chats()
        seconds, was_read = time.monotonic() - begun, reading.done()
        if was_read:
            sys.exit(f"the long prompt was read before the chats had ended ({seconds:.1f} s): ask for more --tokens")
        await asyncio.wait({reading}, timeout=args.patience)
        long = round(await reading, 2) if reading.done() else None
        reading.cancel()
        watching.cancel()
    ratio = figures(beside)["p95_ms"] / figures(idle)["p95_ms"]
    slow = figures(health["beside"])["p99_ms"]
    return {
        "chat_ttft_idle": figures(idle),
        "chat_ttft_beside": figures(beside),
        "p95_ratio": round(ratio, 2),
        "long_prompt_ttft_s": long,
        "chats_took_s": round(seconds, 2),
        "health_idle": figures(health["idle"]),
        "health_beside": figures(health["beside"]),
        "aims": {
            f"p95_ratio <= {AIM_RATIO}": ratio <= AIM_RATIO,
            f"health p99 <= {AIM_HEALTH_MS:g} ms": slow <= AIM_HEALTH_MS,
        },
    }


async def measure_lone(address: str, args: argparse.Namespace) -> float:
    """Seconds to a long prompt's first token with nothing beside it, the least of ``--lone``."""
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT) as http:
        client = Client(http, args)
        client.draw = random.Random(args.seed + 1)  # not the prompts that this server has read
        await client.read_long(1024)
        return min([await client.read_long(args.tokens) for _ in range(args.lone)])


def lone(seconds: float, without: float) -> dict[str, Any]:
    """The figures of a long prompt by itself, with the given options and with steps of any length."""
    ratio = seconds / without
    return {
        "lone_long_ttft_s": round(seconds, 2),
        "lone_long_ttft_step_target_none_s": round(without, 2),
        "lone_ratio": round(ratio, 3),
        "lone_aims": {f"lone_ratio <= {AIM_LONE}": ratio <= AIM_LONE},
    }


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reader-v4")
    parser.add_argument("--tokens", type=int, default=32 * 1024, help="of the long prompt")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for the long prompt behind the chats")
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one chat to the next")
    parser.add_argument("--chat-words", type=int, default=60)
    parser.add_argument("--answer", type=int, default=8, help="tokens of a chat's answer")
    parser.add_argument("--vocab", type=int, default=1500, help="ids of the long prompt are below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lone", type=int, default=2, help="times that the long prompt is read alone; 0: never")
    parser.add_argument("serve_options", nargs="*", help="behind --: more options for longread serve")
    args = parser.parse_args()
    options = args.serve_options or ["--max-num-seqs", "32"]
    load = os.getloadavg()[0]
    with server(args.model, options) as (address, steps):
        told = asyncio.run(measure(address, args))
        seconds = asyncio.run(measure_lone(address, args)) if args.lone else 0.0
    if args.lone:
        with server(args.model, [*options, "--step-target", "none"]) as (address, _):
            told |= lone(seconds, asyncio.run(measure_lone(address, args)))
    head = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(load, 1),
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(sys.argv),
        "serve_options": options,
        "steps": steps,
    }
    print(json.dumps(head | told, indent=2))


if __name__ == "__main__":
    main()
