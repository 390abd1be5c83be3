"""First token of a document that was read before, by tier, against reading it: [--lengths N,N] [--output FILE].

For the bundled reader-v4 and for a V4-Flash-shaped random fixture: a document and a question are read cold; then other
questions find it in the pool (RAM), on disk after another document has pushed it out, and on disk after a restart in a
new process. The engine's own clock (request submitted to first token). Beside each figure stands what no cache saves,
the suffix's prefill and the first sample. For the disk that and a plain read of as many bytes of the same files, in
blocks of 1 MiB, are the limit; the ratio is of the first token's time to it. The page cache is dropped before each
read. 64K tokens take some minutes a model: two documents are read cold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from longread.cli.checkpoint import locate
from longread.engine.engine import LocalEngine
from longread.engine.load import load_engine
from longread.kv.disk.store import SEGMENTS, DiskStore
from longread.measure.cpu import SHAPES
from longread.measure.reading import write
from longread.measure.result import this_commit, this_machine
from longread.spec.config import EngineOptions
from longread.spec.engine import FirstToken, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import pages_for
from longread.weights.fixture import write_fixture
from longread.wire.tokenizer import Tokenizer

QUESTION_ROOM = 512
REPEATS = 3
BLOCK_BYTES = 2**20
AIM = 1.5  # first token from the disk over its limit


def prompts(folder: Path, length: int) -> tuple[list[list[int]], list[int]]:
    """One document of about ``length`` tokens under several questions, and another document of the same size."""
    tokenizer = Tokenizer.open(folder, bos_id=0, eos_id=1)
    kept, other = (_document(tokenizer, length, seed) for seed in (1, 2))
    questions = [question.text for question in write(1, 200, "en", "contract").questions(2 + 2 * REPEATS)]
    asked = [[*kept, *tokenizer.encode(f"\n{text}")] for text in questions]
    return asked, [*other, *tokenizer.encode(f"\n{questions[0]}")]


def _document(tokenizer: Tokenizer, length: int, seed: int) -> list[int]:
    ids = tokenizer.encode(write(seed, length // 6, "en", "contract").text)
    return ids[:length]


def first_token(engine: LocalEngine, prompt: Sequence[int]) -> FirstToken:
    """Run one request to its first token and let it end."""
    engine.submit(GenerationRequest("r", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=1)))
    found = None
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.first:
                found = event.first
    if found is None:
        raise RuntimeError("no token came")
    return found


def figures(first: FirstToken) -> dict[str, Any]:
    times, reuse = first.times, first.reuse
    parts = times.parts()
    return {
        "ttft_ms": round(1e3 * (times.first_token - times.arrived), 2),
        "suffix_ms": round(1e3 * (parts["prefill"] + parts["sample"]), 2),
        "load_ms": round(1e3 * parts["load_disk"], 2),
        "parts_ms": {name: round(1e3 * seconds, 2) for name, seconds in parts.items()},
        "reused": None if reuse is None else [reuse.device_tokens, reuse.host_tokens, reuse.disk_tokens],
        "computed_tokens": times.prefill_tokens,
    }


def open_engine(folder: Path, store: Path, length: int) -> LocalEngine:
    """Room for one such document and a little: a second one pushes the first out."""
    longest = length + QUESTION_ROOM
    pages = pages_for(longest) + 2
    return load_engine(
        EngineOptions(
            model=str(folder),
            dtype="float32",
            max_model_len=longest,
            max_num_seqs=1,
            num_gpu_blocks_override=pages,
            store=str(store),
        )
    )


def fresh(folder: Path, store: Path, length: int) -> None:
    """Child process: cold, RAM, disk. Prints one JSON line."""
    asked, other = prompts(folder, length)
    engine = open_engine(folder, store, length)
    out: dict[str, object] = {"tokens": len(asked[0]), "cold": figures(first_token(engine, asked[0]))}
    out["ram"] = [figures(first_token(engine, prompt)) for prompt in asked[1 : 1 + REPEATS]]
    disk = []
    for prompt in asked[1 + REPEATS : 1 + 2 * REPEATS]:
        engine.flush(60.0)
        first_token(engine, other)  # read cold the first time, from the disk from then on
        engine.flush(60.0)
        drop_cache(store)
        disk.append(beside_raw(figures(first_token(engine, prompt)), store))
    engine.flush(60.0)
    engine.close()
    print(json.dumps(out | {"disk": disk}))


def restarted(folder: Path, store: Path, length: int) -> None:
    """Child process: the first request of an engine on the store that another process left. Prints one JSON line."""
    asked, _ = prompts(folder, length)
    engine = open_engine(folder, store, length)
    drop_cache(store)
    out = beside_raw(figures(first_token(engine, asked[-1])), store)
    engine.close()
    print(json.dumps(out))


def beside_raw(row: dict[str, Any], store: Path) -> dict[str, Any]:
    """The figures with the limit that the disk sets: a plain read of as many bytes, and the suffix."""
    wanted = loaded_bytes(store, row["reused"][2])
    times = []
    for _ in range(REPEATS):
        drop_cache(store)
        times.append(raw_read(store, wanted))
    raw_ms = 1e3 * median(times)
    limit = raw_ms + row["suffix_ms"]
    return row | {
        "loaded_bytes": wanted,
        "raw_ms": round(raw_ms, 2),
        "raw_GB/s": round(wanted / raw_ms / 1e6, 3),
        "limit_ms": round(limit, 2),
        "over_limit": round(row["ttft_ms"] / limit, 3),
    }


def loaded_bytes(store: Path, tokens: int) -> int:
    """Payloads of the pages that ``tokens`` lie on, and of one ring."""
    opened = DiskStore.open(store, None, max_bytes=2**40, read_only=True)
    [model] = opened.models()
    opened.close()
    return pages_for(tokens) * model.layout.page_bytes + model.layout.ring_bytes


def drop_cache(store: Path) -> None:
    """Ask the system to forget the segments' pages, so that a read is one of the disk."""
    for file in segments(store):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def segments(store: Path) -> list[Path]:
    return sorted(path for path in (store / SEGMENTS).rglob("*") if path.is_file())


def raw_read(store: Path, wanted: int) -> float:
    """Seconds to read ``wanted`` bytes of the segments plainly. Raises RuntimeError if there are not as many."""
    into, left = bytearray(BLOCK_BYTES), wanted
    started = time.perf_counter()
    for path in segments(store):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (got := file.readinto(memoryview(into)[: min(left, BLOCK_BYTES)])):
                left -= got
    if left:
        raise RuntimeError(f"{store} has {left} bytes less than {wanted}")
    return time.perf_counter() - started


def child(mode: str, folder: Path, store: Path, length: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode, str(folder), str(store), str(length)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def line(row: dict[str, Any]) -> str:
    """One row for the terminal; medians."""

    def middle(tier: str, what: str) -> float:
        return median(each[what] for each in row[tier])

    def from_disk(name: str, found: Sequence[dict[str, Any]]) -> str:
        ttft, limit, raw, load = (
            median(each[what] for each in found) for what in ("ttft_ms", "limit_ms", "raw_ms", "load_ms")
        )
        return f"{name} {ttft:.1f} ({ttft / limit:.2f}x the limit {limit:.1f}; load {load:.1f}, raw {raw:.1f})"

    aim = 1.3 * (middle("ram", "suffix_ms") + 10)
    return (
        f"{row['model']:>16} {row['tokens']:>7} tokens: cold {row['cold']['ttft_ms']:.0f} ms; "
        f"RAM {middle('ram', 'ttft_ms'):.1f} (suffix alone {middle('ram', 'suffix_ms'):.1f}, aim {aim:.1f}); "
        f"{from_disk('disk', row['disk'])}; {from_disk('restart', [row['restart']])}; aim {AIM}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,16384,65536")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=4, metavar=("MODE", "MODEL", "STORE", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        mode, folder, store, length = args.child
        {"fresh": fresh, "restarted": restarted}[mode](Path(folder), Path(store), int(length))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="longread-warm-") as scratch:
        shaped = Path(scratch) / "v4-flash-shaped"
        write_fixture(shaped, "v4-flash", **SHAPES["v4-flash"])
        for name, folder in (("reader-v4", locate("reader-v4")), (shaped.name, shaped)):
            for length in map(int, args.lengths.split(",")):
                store = Path(scratch) / f"store-{name}-{length}"
                row = {"model": name} | child("fresh", folder, store, length)
                row["restart"] = child("restarted", folder, store, length)
                rows.append(row)
                print(line(row), flush=True)
    if args.output:
        report = {
            "benchmark": "warm TTFT by tier",
            "commit": this_commit(),
            "command": " ".join(["python", *sys.argv]),
            "aim_over_limit": AIM,
            "machine": asdict(this_machine(("torch", "numba", "longread"))),
            "rows": rows,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
