"""First token of a document that was read before, by tier, against reading it: [--lengths N,N] [--output FILE].

For the bundled reader-v4 and for a V4-Flash-shaped random fixture: a document and a question are read cold; then other
questions find it in the pool (RAM), on disk after another document has pushed it out, and on disk after a restart in a
new process. The engine's own clock (request submitted to first token). Beside each figure the computation that no cache
saves, the suffix's prefill and the first sample, and for the disk the same bytes read by plain file reads in the same
run, the page cache dropped before both where the system allows it.
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
from longread.kv.disk.store import SEGMENTS
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
LONG = 32768  # from here on the disk is asked once: each time another document must be read cold before it


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


def figures(first: FirstToken) -> dict[str, object]:
    times, reuse = first.times, first.reuse
    parts = times.parts()
    return {
        "ttft_ms": round(1e3 * (times.first_token - times.arrived), 2),
        "suffix_ms": round(1e3 * (parts["prefill"] + parts["sample"]), 2),
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
    for prompt in asked[1 + REPEATS : 2 + REPEATS if length >= LONG else 1 + 2 * REPEATS]:
        engine.flush(60.0)
        first_token(engine, other)
        engine.flush(60.0)
        drop_cache(store)
        disk.append(figures(first_token(engine, prompt)))
    engine.flush(60.0)
    engine.close()
    print(json.dumps(out | {"disk": disk}))


def restarted(folder: Path, store: Path, length: int) -> None:
    """Child process: the first request of an engine on the store that another process left. Prints one JSON line."""
    asked, _ = prompts(folder, length)
    engine = open_engine(folder, store, length)
    drop_cache(store)
    out = figures(first_token(engine, asked[-1]))
    engine.close()
    drop_cache(store)
    seconds, read = raw_read(store)
    print(json.dumps(out | {"raw_bytes": read, "raw_ms": round(1e3 * seconds, 2)}))


def drop_cache(store: Path) -> None:
    """Ask the system to forget the segments' pages, so that a read is one of the disk."""
    for file in segments(store):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def segments(store: Path) -> list[Path]:
    return sorted(path for path in (store / SEGMENTS).rglob("*") if path.is_file())


def raw_read(store: Path) -> tuple[float, int]:
    """Seconds and bytes of reading all segments plainly."""
    started, read = time.perf_counter(), 0
    for file in segments(store):
        with file.open("rb", buffering=0) as handle:
            while block := handle.read(1 << 20):
                read += len(block)
    return time.perf_counter() - started, read


def child(mode: str, folder: Path, store: Path, length: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode, str(folder), str(store), str(length)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def line(row: dict[str, Any]) -> str:
    """One row for the terminal; medians."""

    def middle(tier: str, what: str) -> float:
        return median(each[what] for each in row[tier])

    restart = row["restart"]
    aim = 1.3 * (middle("ram", "suffix_ms") + 10)
    return (
        f"{row['model']:>16} {row['tokens']:>7} tokens: cold {row['cold']['ttft_ms']:.0f} ms; "
        f"RAM {middle('ram', 'ttft_ms'):.1f} (suffix alone {middle('ram', 'suffix_ms'):.1f}, aim {aim:.1f}); "
        f"disk {middle('disk', 'ttft_ms'):.1f} (load {median(e['parts_ms']['load_disk'] for e in row['disk']):.1f}); "
        f"restart {restart['ttft_ms']:.1f} (load {restart['parts_ms']['load_disk']:.1f}, suffix "
        f"{restart['suffix_ms']:.1f}); {restart['raw_bytes'] / 2**20:.1f} MiB of segments read plainly in "
        f"{restart['raw_ms']:.1f} ms"
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
            "machine": asdict(this_machine(("torch", "numba", "longread"))),
            "rows": rows,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
