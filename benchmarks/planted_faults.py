"""Is the gate sensitive and specific? Plants each fault into a bundled reader, runs the gate against the sound one's
base and writes which level caught it, after how many samples. Changes that change nothing must pass.

    python benchmarks/planted_faults.py --jobs 9 --threads 2                  # all; about 8 minutes on 16 quiet cores
    python benchmarks/planted_faults.py --only "temperature ignored" --lengths 1K --documents 3 --jobs 1
    python benchmarks/planted_faults.py --dtype bfloat16 --levels 0 --only "stale ring on a hit" --lengths 1K

Each fault has a process of its own, with its server in it; ``--budget`` bounds each of them. Result:
results/gate-faults.json.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

RESERVE = 512  # tokens of a request besides the document
SURPLUS = 1.1  # times its length at most: documents end with a whole paragraph
PAGE = 256
HELD = 4  # requests of the longest length that the cache holds: level 0 must be able to push one out
EXACT_LENGTHS = 2  # the shortest ones, at which level 0 asks: it reads each document many times
ALLOWED_OVERRUN = 120.0  # seconds a process may take beyond its budget: loading, and judging


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1K,4K,12K")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--levels", default="0,1,2,3,4")
    parser.add_argument("--profile", default="lossless")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the readers")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of one fault")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once")
    parser.add_argument("--threads", type=int, default=2, help="of each")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "gate-faults.json")
    parser.add_argument("--child", choices=("base", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part[:-1]) * 1024 if part.endswith("K") else int(part) for part in text.split(","))


def child(args: argparse.Namespace) -> None:
    """One server with one fault, and the gate (or the recording of the base) against it; JSON to ``--output``."""
    from longread.cli.threads import bound_spinning

    bound_spinning()  # before torch: several of these share a machine
    import torch
    from planted_faults import fault_of, faulty_server

    from longread.measure.gate import record
    from longread.measure.gate.profiles import profile_of
    from longread.measure.gate.run import Settings, Watch, make_base, run_gate

    torch.set_num_threads(args.threads)
    fault, lengths = fault_of(args.fault), numbers(args.lengths)
    room = int(max(lengths) * SURPLUS) + RESERVE
    levels = numbers(args.levels)
    say = Watch(progress=lambda done, total, words: print(f"{fault.name}: {words}", file=sys.stderr, flush=True))
    begun = time.perf_counter()

    def settings(chosen: tuple[int, ...], at: tuple[int, ...]) -> Settings:
        left = max(1.0, args.budget - (time.perf_counter() - begun))
        return Settings(
            address, lengths=at, documents=args.documents, levels=chosen, seconds=left, concurrency=4, fresh=1
        )

    with faulty_server(fault, room, HELD * -(-room // PAGE), args.dtype) as address:
        if args.child == "base":
            asyncio.run(make_base(settings((1, 2, 3, 4), lengths), None, say)).write(args.output)
            return
        outcomes = []
        profile, base = profile_of(args.profile), record.read(args.base)
        if 0 in levels:
            outcomes.append(asyncio.run(run_gate(settings((0,), lengths[:EXACT_LENGTHS]), profile, None, say)))
        others = tuple(level for level in levels if level)
        if others:
            outcomes.append(asyncio.run(run_gate(settings(others, lengths), profile, base, say)))
    whole = outcomes[-1]
    whole.levels = [level for outcome in outcomes for level in outcome.levels]
    whole.stopped = next((outcome.stopped for outcome in outcomes if outcome.stopped), None)
    whole.provenance["requests"] = sum(int(str(outcome.provenance["requests"])) for outcome in outcomes)
    record.write_json(args.output, whole.document(), indent=1)


def start(args: argparse.Namespace, kind: str, fault: str, base: Path | None, output: Path, budget: float) -> float:
    """A child process to its end; seconds. Raises where it failed. The base runs by itself, so it has more threads."""
    threads = args.threads if base is not None else args.threads * min(args.jobs, 4)
    command = [sys.executable, __file__, "--child", kind, "--fault", fault, "--output", str(output)]
    command += ["--lengths", args.lengths, "--documents", str(args.documents), "--levels", args.levels]
    command += ["--profile", args.profile, "--dtype", args.dtype, "--budget", str(budget), "--threads", str(threads)]
    if base is not None:
        command += ["--base", str(base)]
    begun = time.perf_counter()
    environment = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, timeout=budget + ALLOWED_OVERRUN, env={**os.environ, **environment})
    return time.perf_counter() - begun


def row(fault: object, document: dict, seconds: float) -> dict:
    """What the table says of one fault."""
    levels = {}
    for level in document["levels"]:
        failed = [f for f in level["findings"] if f["verdict"] == "FAIL"]
        levels[str(level["level"])] = {
            "verdict": level["verdict"],
            "caught_by": [
                {key: f[key] for key in ("name", "value", "low", "high", "limit", "samples", "needed", "note")}
                for f in failed
            ],
            "needed": level["needed"],
        }
    described = {key: value for key, value in asdict(fault).items() if key in ("name", "what", "reader", "harmless")}  # type: ignore[call-overload]
    return {
        **described,
        "verdict": document["verdict"],
        "levels": levels,
        "stopped": document["stopped"],
        "requests": document["provenance"].get("requests"),
        "seconds": round(seconds, 1),
    }


def table(rows: Sequence[dict]) -> str:
    """Markdown: fault, verdict, and per level what caught it with how many samples."""
    out = ["| planted | verdict | 0 exactness | 1 likelihood | 2 needles | 3 answers | 4 critical |", "|" + "---|" * 7]
    for one in rows:
        cells = []
        for level in "01234":
            found = one["levels"].get(level)
            if found is None:
                cells.append("–")
            elif found["caught_by"]:
                first = min(found["caught_by"], key=lambda f: f["samples"] or 1)
                enough = f", {first['needed']} are enough" if first["needed"] else ""
                cells.append(f"FAIL ({first['name']}, {first['samples']}{enough})")
            else:
                more = f", {found['needed']} needed" if found["needed"] else ""
                cells.append(found["verdict"] + more)
        out.append(f"| {one['name']} | {one['verdict']} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> int:
    args = arguments()
    if args.child:
        child(args)
        return 0
    from planted_faults import FAULTS, HARMLESS

    from longread.measure.result import command_line, this_commit, this_machine

    longest = max(numbers(args.lengths))
    chosen = [
        fault
        for fault in (*FAULTS, *HARMLESS)
        if (not args.only or fault.name in args.only) and longest > fault.longer_than
    ]
    with tempfile.TemporaryDirectory(prefix="gate-faults-") as folder:
        base = Path(folder) / "base.json"
        # The base has all cores to itself, and is not bounded as tightly: without it there is nothing.
        took = start(args, "base", "none", None, base, 2 * args.budget)
        print(f"base: {took:.0f} s", file=sys.stderr)

        def judge(at: int) -> dict:
            output = Path(folder) / f"{at}.json"
            seconds = start(args, "run", chosen[at].name, base, output, args.budget)
            return row(chosen[at], json.loads(output.read_text()), seconds)

        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(judge, range(len(chosen))))
    document = {
        "benchmark": "planted faults",
        "commit": this_commit(),
        "command": command_line(),
        "machine": asdict(this_machine(["torch", "numba", "longread"])),
        "lengths": args.lengths,
        "documents": args.documents,
        "profile": args.profile,
        "dtype": args.dtype,
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(table(rows))
    # A fault must fail; what is harmless must not, and passes if its time was enough.
    wrong = [one["name"] for one in rows if (one["verdict"] == "FAIL") == one["harmless"]]
    print(f"wrong: {', '.join(wrong)}" if wrong else "every fault failed, nothing else did")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
