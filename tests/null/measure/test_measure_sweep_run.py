"""Sweeps as wholes: on a queue that is computed (no clock, no socket), and as a user runs them against scripts."""

import json
import os
import signal
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from queues import answered, limit, md1
from scripted_server import DONE, End, Head, Wait, scripted_thread, text, usage

from longread.cli.main import main
from longread.measure.load.bench import Job, Measured
from longread.measure.load.metrics import Wanted, flat, summarise
from longread.measure.load.outcome import Outcome, Overhead, Run
from longread.measure.load.result import block
from longread.measure.load.schedule import Schedule
from longread.measure.sweep import frontier, predict
from longread.measure.sweep.axis import Axis, parse_axis
from longread.measure.sweep.run import At, Frontier, Goal, Sweep, Task
from longread.measure.sweep.store import Book, read
from longread.measure.workloads.ask import Workload
from longread.spec.errors import ConfigError

SERVICE = 0.1


@dataclass
class Queue:
    """Measures jobs without a server: open loops are M/D/1, closed loops have ``slots`` servers. ``interrupted``: the
    runs during which the user presses Ctrl-C, by their number. Its clock is the sum of what runs would have taken.
    """

    slots: int = 4
    interrupted: tuple[int, ...] = ()
    slos: dict[str, float] | None = None
    now: float = 0.0
    runs: list[At] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def job(self, at: At) -> Job:
        self.runs.append(at)
        return Job("http://unused", lambda: Workload("queue", 0, [], {}), Schedule())

    def measure(self, job: Job) -> Measured:
        at = self.runs[-1]
        if at.axis == "rate":
            rows = md1(at.value, at.requests, SERVICE, zlib.crc32(at.key.encode()))
        else:
            latency = SERVICE * max(at.value / self.slots, 1)
            rows = [
                answered(i, i // int(at.value) * latency, latency - SERVICE, SERVICE * (1 + i % 3 / 100))
                for i in range(at.requests)
            ]
        stopped = len(self.runs) in self.interrupted
        return self.done(rows[: len(rows) // 2] if stopped else rows, stopped)

    def done(self, rows: list[Outcome], stopped: bool) -> Measured:
        seconds = max((row.ended or 0.0 for row in rows), default=0.0)
        self.now += seconds
        run = Run(rows, [], 0.0, seconds, len(rows), stopped, Overhead(None, None, None))
        summary = summarise(run, Wanted(slos=self.slos))
        own = block(summary, provenance={}, server=None, calibration=None, warnings=[], requests_file=None)
        return Measured(summary, {**flat(summary), "longread": own}, [], None, None, stopped)


def swept(queue: Queue, axis: Axis, path: Path, resume: bool = False, **more: Any) -> tuple[Sweep, dict[str, Any]]:
    task = Task(axis, queue.job, requests=60, waves=4, min_seconds=5.0, **more)
    book = Book(path, axis, {"settings": {"isl": "32"}, "date": "today"}, {})
    if resume:
        book.resume()
    sweep = Sweep(task, book, queue.measure, lambda: queue.now, queue.said.append)
    sweep.run()
    return sweep, read(path)


def test_each_point_is_in_the_file_and_the_knee_is_the_queues(tmp_path: Path) -> None:
    queue = Queue(slots=8)
    sweep, found = swept(queue, parse_axis("concurrency=1:64"), tmp_path / "s.json")
    assert (found["longread_sweep"], found["axis"], found["partial"], found["stopped"]) == (
        1,
        "concurrency",
        False,
        None,
    )
    assert [point["value"] for point in found["points"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["knee"]["value"] == 8
    assert [at.requests for at in queue.runs[1:]] == [60, 60, 60, 60, 64, 128, 256]
    assert len({at.key for at in queue.runs}) == len(queue.runs)
    assert "7 points: " in queue.said[0]
    least, most = predict.span("concurrency", [(at.value, at.requests) for at in queue.runs[1:]], SERVICE)
    assert least < queue.now < most
    assert not sweep.interrupted


def test_an_interrupted_point_is_kept_and_measured_again(tmp_path: Path) -> None:
    axis, path = parse_axis("concurrency=1,2,4,8"), tmp_path / "s.json"
    sweep, found = swept(Queue(interrupted=(4,)), axis, path)
    assert sweep.interrupted
    assert found["partial"] is True
    assert [(p["value"], p.get("stopped", False)) for p in found["points"]] == [(1, False), (2, False), (4, True)]
    assert found["points"][2]["result"]["completed"] == 30
    queue = Queue()
    _, again = swept(queue, axis, path, resume=True)
    assert [at.value for at in queue.runs] == [1, 4, 8]  # one alone, to predict
    assert [p["result"]["completed"] for p in again["points"]] == [60, 60, 60, 60]
    assert again["points"][:2] == found["points"][:2]
    assert again["partial"] is False
    assert again["provenance"]["resumed_from"] == ["today"]
    assert all(at.key.endswith(", 1") for at in queue.runs)  # other prompts than the interrupted run's


def test_only_the_same_sweep_is_taken_up(tmp_path: Path) -> None:
    axis, path = parse_axis("concurrency=1,2"), tmp_path / "s.json"
    swept(Queue(), axis, path)
    for settings, said in (
        ({"isl": "64"}, 'measured with isl "32", this command says "64"'),
        ({"isl": "32", "osl": "8"}, "osl"),
    ):
        with pytest.raises(ConfigError, match=said):
            Book(path, axis, {"settings": settings}, {}).resume()
    for content, said in (
        ("[]", "no sweep's file"),
        ("{", "no JSON"),
        ('{"longread_sweep": 2}', "format is 2"),
        ("[" * 100_000, "no JSON"),
        ('{"longread_sweep": 1, "provenance": {}, "points": [{"value": "x", "result": {}}]}', "its points"),
        ('{"longread_sweep": 1, "provenance": {}, "points": {}}', "its points"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=said):
            read(path)


def test_a_sweep_ends_before_a_point_that_does_not_fit_its_time(tmp_path: Path) -> None:
    queue = Queue(slots=1)
    _, found = swept(queue, parse_axis("concurrency=1,2,4,64"), tmp_path / "s.json", max_seconds=30.0)
    assert [point["value"] for point in found["points"]] == [1, 2, 4]
    assert queue.now < 30
    assert "concurrency 64 is predicted to take 26 s" in found["stopped"]
    assert found["partial"] is True


def test_automatic_loads_end_where_throughput_stands_still(tmp_path: Path) -> None:
    _, found = swept(Queue(slots=8), parse_axis("concurrency=auto"), tmp_path / "s.json")
    assert [point["value"] for point in found["points"]] == [1, 2, 4, 8, 16, 32, 64]  # 16 is a little better than 8
    queue = Queue(slots=8)
    _, found = swept(queue, parse_axis("rate=auto"), tmp_path / "r.json")
    capacity = found["anchors"]["saturated"]["request_throughput"]
    assert capacity == pytest.approx(80, rel=0.1)
    assert [point["value"] / capacity for point in found["points"]] == pytest.approx(
        [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1], rel=0.01
    )


def test_the_most_rate_under_an_slo_is_found_and_taken_up_again(tmp_path: Path) -> None:
    slos = {"ttft": 300.0}
    goal, truth, path = Goal(slos, 0.9, 0.05, 12), limit(SERVICE, 0.3, 0.9), tmp_path / "s.json"
    axis = parse_axis("rate=auto")
    whole = Queue(slos=slos)
    _, found = swept(whole, axis, path, goal=goal)
    most = found["max_goodput"]
    assert most["interval"][0] <= truth <= most["interval"][1]
    assert most["goodput"] == pytest.approx(most["value"], rel=0.25)
    assert {point["probe"]["said"] for point in found["points"]} >= {"met", "missed"}
    assert all(at.requests >= 60 for at in whole.runs[1:])
    path.unlink()
    first = Queue(slos=slos, interrupted=(5,))
    sweep, part = swept(first, axis, path, goal=goal)
    assert sweep.interrupted
    assert part["max_goodput"]["ended"].startswith("stopped")
    kept = {p["value"]: p["probe"]["said"] for p in part["points"] if not p.get("stopped")}
    assert kept
    second = Queue(slos=slos)
    _, again = swept(second, axis, path, resume=True, goal=goal)
    assert not {at.value for at in second.runs[1:]} & set(kept)
    assert again["max_goodput"]["interval"][0] <= truth <= again["max_goodput"]["interval"][1]


def outcome(kind: str, sent: float, ttft: float, prompt: int, cached: int | None) -> Outcome:
    found = answered(0, sent, ttft, 0.02, tokens=3)
    found.kind, found.prompt_tokens, found.cached_tokens = kind, prompt, cached
    return found


def steps(points: Sequence[tuple[int, int | None, float]], warm: float = 0.1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for length, cached, ttft in points:
        rows = [outcome(frontier.NEWEST, 0, ttft, length, cached)]
        rows += [outcome(frontier.WARM, 1, warm, length, length - 1)] * 2
        found.append(frontier.step(length, rows, found).as_json())
    return found


def test_the_frontier_says_what_was_measured_and_what_is_derived() -> None:
    one, two, three = steps([(1024, 0, 1.1), (2048, 1024, 1.3), (4096, 2000, 2.6)])
    assert (one["new_tokens"], two["new_tokens"], three["new_tokens"]) == (1024, 1024, 2096)
    assert (two["reused"], three["reused"]) == (True, True)
    assert [each["newest_ttft_ms"] for each in (one, two, three)] == pytest.approx([1100, 1300, 2600])
    assert [one["cold_ttft_ms"][side] for side in ("low", "high")] == pytest.approx([1100, 1100])
    # Overheads of 100 ms: 1000 and 1200 and 2500 ms of work, and one overhead, or three.
    assert [two["cold_ttft_ms"][side] for side in ("low", "high")] == pytest.approx([2300, 2400])
    assert [three["cold_ttft_ms"][side] for side in ("low", "high")] == pytest.approx([4800, 5000])
    assert two["tpot_ms"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("points", "note"),
    [
        ([(1024, 0, 1.0), (2048, None, 1.0)], "does not tell cached tokens"),
        ([(1024, 0, 1.0), (2048, 0, 2.0)], "nothing was reused"),
        ([(8192, 0, 1.0), (65536, 30_000, 2.0)], "no earlier point"),
        ([(1024, 0, 1.0), (2048, 1024, 1.0), (4096, 1024, 3.0)], "more than the newest interval"),
        ([(1024, 1023, 0.1)], "take another --seed"),
    ],
)
def test_a_frontier_whose_prefix_was_not_reused_says_so(points: list[tuple[int, int | None, float]], note: str) -> None:
    last = steps(points)[-1]
    assert note in last["note"]
    if "nothing" in note:
        assert last["cold_ttft_ms"]["low"] == last["cold_ttft_ms"]["high"] == last["newest_ttft_ms"]
    if "cached tokens" in note or "no earlier" in note or "seed" in note:
        assert last["cold_ttft_ms"]["low"] is None


def test_what_is_left_of_a_frontier_follows_a_line() -> None:
    """Prefill of a + b L seconds a token: two points give both."""

    def seconds(low: int, high: int) -> float:
        return (high - low) * (1e-4 + 1e-8 * (low + high) / 2)

    found = steps([(1024, 0, seconds(0, 1024)), (2048, 1024, seconds(1024, 2048))])
    assert frontier.seconds_left(found, [4096, 65536]) == pytest.approx(seconds(2048, 65536))
    assert frontier.seconds_left([], [4096]) is None
    assert frontier.seconds_left(found, []) == 0


def test_a_frontier_taken_up_again_reads_the_last_prompt_first(tmp_path: Path) -> None:
    asked: list[tuple[int, str]] = []

    class Prefix(Queue):
        cached = 0

        def measure(self, job: Job) -> Measured:
            asks = list(job.workload().asks)
            rows = []
            for ask in asks:
                size = len(ask.prompt or ())
                asked.append((size, ask.kind))
                cached = min(self.cached, size - 1) if ask.kind not in ("cold", "warm-up") else 0
                rows.append(outcome(ask.kind, 0, 0.01 + (size - cached) * 1e-4, size, cached))
                if ask.kind not in ("cold", "warm-up"):
                    self.cached = max(self.cached, size)
            stopped = len(asked) in self.interrupted
            return self.done(rows, stopped)

    counter = frontier.Counter(len, False, "none")

    def made(length: int, seed: int) -> frontier.Source:
        return frontier.source("random", seed, length, counter, 100, "en")

    def job(workload: Any, file: str | None) -> Job:
        return Job("http://unused", workload, Schedule())

    front = Frontier(made(8192, 0), lambda place, n: made(n, 1 + place), job, 3, 1, (4096,))
    axis, path = parse_axis("context=1K:8K"), tmp_path / "s.json"
    sweep, _ = swept(Prefix(interrupted=(5,)), axis, path, frontier=front)
    assert sweep.interrupted
    assert asked == [(1024, "warm-up"), *[(n, k) for n in (1024, 2048) for k in (frontier.NEWEST, frontier.WARM)]]
    asked.clear()
    _, found = swept(Prefix(), axis, path, resume=True, frontier=front)
    assert asked[:3] == [(1024, "warm-up"), (1024, "read again"), (2048, frontier.NEWEST)]
    assert asked[-1] == (4096, "cold")
    assert [p["frontier"]["new_tokens"] for p in found["points"]] == [1024, 1024, 2048, 4096]
    assert [p["frontier"]["cold_ttft_ms"]["measured"] is not None for p in found["points"]] == [
        False,
        False,
        True,
        False,
    ]
    cold = found["points"][2]["frontier"]["cold_ttft_ms"]
    assert cold["low"] <= cold["measured"] + 1e-6 <= cold["high"]


def test_axes_are_read_and_hostile_ones_refused() -> None:
    assert parse_axis("concurrency=1:10").values == (1, 2, 4, 8, 10)
    assert parse_axis("rate=0.5,1.5").values == (0.5, 1.5)
    assert parse_axis("context=16K:64K:16K").values == (16384, 32768, 49152, 65536)
    assert parse_axis("context=1K:max").to_max
    assert parse_axis("rate=auto").values is None
    for text_, said in (
        ("concurency=1", "did you mean concurrency"),
        ("rate", "give its values"),
        ("rate=", "give its values"),
        ("concurrency=4,2", "must rise"),
        ("concurrency=0", "from 1 to 65536"),
        ("rate=nan", "from 0.0001"),
        ("rate=1e9", "from 0.0001"),
        ("rate=fast", "is not a number"),
        ("context=1:2:3:4", "it is context"),
        ("rate=1:2:3", "it is rate"),
        ("context=16:1M:16", "at most 64"),
        ("concurrency=" + ",".join(map(str, range(1, 100))), "more than 64"),
        ("concurrency=64:1", "above the lower"),
        ("context=2M", "from 16 to"),
        ("rate=inf", "from 0.0001"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_axis(text_)


def ids_script(n: int, body: dict[str, Any]) -> list:
    size = len(body["prompt"])
    steps_ = [Head(), Wait(0.005), *[text("a")] * body["max_tokens"]]
    return [*steps_, usage(size, body["max_tokens"], prompt_tokens_details={"cached_tokens": 0}), DONE, End()]


def sweep(url: str, out: Path, *more: str) -> int:
    base = ["bench", "sweep", "--base-url", url, "--dataset-option", "vocab_size=1000", "--osl", "4"]
    return main([*base, "--no-calibration", "--output", str(out), *more])


def test_sweeps_over_http(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pages = {"/v1/models": json.dumps({"data": [{"id": "scripted", "max_model_len": 5000}]})}
    out = tmp_path / "s.json"
    load = ("--isl", "16", "--num-prompts", "8", "--waves", "1", "--sweep", "concurrency=1,2,4,8")
    with scripted_thread(ids_script, pages) as server:
        assert sweep(server.url, out, *load) == 0
        prompts = [tuple(seen.body["prompt"]) for seen in server.seen]
        assert len(set(prompts)) == len(prompts)  # no point sends what an earlier one put into the cache
        said = capsys.readouterr()
        assert "point 4 of 4: concurrency 8" in said.err
        assert "concurrency  " in said.out
        before = out.read_text()
        assert sweep(server.url, out, *load) == 2
        assert "--resume goes on" in capsys.readouterr().err
        assert sweep(server.url, out, *load, "--isl", "24", "--resume") == 2
        assert 'measured with isl "16"' in capsys.readouterr().err
        assert out.read_text() == before
        assert sweep(server.url, out, *load, "--resume") == 0
        capsys.readouterr()
        context = ("--sweep", "context=1K:max", "--warm-repeats", "1")
        assert sweep(server.url, tmp_path / "c.json", *context) == 0
        told = json.loads((tmp_path / "c.json").read_text())
        assert [p["value"] for p in told["points"]] == [1024, 2048, 4096, 4996]
        assert [p["frontier"]["base"] for p in told["points"]] == [0, 0, 0, 0]
        assert "nothing was reused" in capsys.readouterr().out
        assert sweep(server.url, tmp_path / "d.json", "--sweep", "context=1K:8K") == 2
        assert "end at 4,996" in capsys.readouterr().err
        for more, said_ in (
            (["--isl", "32"], "--isl: a context sweep says its prompts itself"),
            (["--num-prompts", "3"], "--num-prompts: a context sweep"),
            (["--osl", "uniform:1:2"], "--osl uniform:1:2"),
            (["--cold-at", "3K"], "it is no point of the sweep"),
            (["--cold-at", "x"], "--cold-at x"),
            (["--dataset-option", "prefix_len=3"], "takes vocab_size and language"),
            (["--dataset-name", "chat"], "cuts one document"),
            (["--backend", "openai-chat"], "--backend openai"),
        ):
            assert sweep(server.url, tmp_path / "e.json", "--sweep", "context=1K:4K", *more) == 2
            assert said_ in capsys.readouterr().err
        assert not (tmp_path / "e.json").exists()
    assert (tmp_path / "s.points" / "concurrency-8.requests.jsonl").read_text().count("\n") == 8
    assert json.loads((tmp_path / "s.points" / "concurrency-8.json").read_text())["max_concurrency"] == 8


def test_ctrl_c_keeps_the_points_so_far(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def script(n: int, body: dict[str, Any]) -> list:
        if n == 18:
            os.kill(os.getpid(), signal.SIGINT)
        return ids_script(n, body)

    with scripted_thread(script) as server:
        code = sweep(
            server.url, tmp_path / "s.json", *("--isl", "16", "--num-prompts", "10", "--sweep", "concurrency=1,2,4")
        )
    found = json.loads((tmp_path / "s.json").read_text())
    assert code == 130
    assert [(p["value"], p.get("stopped", False)) for p in found["points"]] == [(1, False), (2, True)]
    assert 0 < found["points"][1]["result"]["completed"] < 10
    assert found["stopped"] == "interrupted"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", "rate=1", "--request-rate", "3"], "--request-rate is what --sweep rate"),
        (["--sweep", "concurrency=1", "--max-concurrency", "3"], "not set in a sweep of concurrency"),
        (["--sweep", "rate=1", "--save-result"], "one file"),
        (["--sweep", "rate=auto", "--max-goodput"], "needs the SLOs"),
        (["--sweep", "rate=1,2", "--max-goodput", "--goodput", "ttft:5"], "chooses the loads itself"),
        (["--sweep", "context=1K:4K", "--max-goodput", "--goodput", "ttft:5"], "searches a rate"),
        (["--sweep", "rate=auto", "--max-goodput", "--goodput", "ttft:5", "--num-prompts", "4"], "give at least 30"),
        (["--sweep", "rate=auto", "--max-goodput", "--goodput", "ttft:5", "--goodput-share", "1"], "between 0 and 1"),
        (["--sweep", "rate=auto", "--max-goodput", "--goodput", "ttft:5", "--precision", "0"], "from 0.001 to 1"),
        (["--sweep", "rate=1", "--dataset-name", "trace", "--dataset-path", "x"], "arrivals of its own"),
        (["--sweep", "rate=1", "--resume"], "is not there"),
        (["--sweep", "rate=1", "--cold-at", "8K"], "--cold-at is of"),
        (["--sweep", "rate=1", "--max-time", "0"], "above 0"),
        (["--sweep", "rate=1", "--dataset-option", "nonsense=1"], "no option 'nonsense'"),
    ],
)
def test_hostile_options_are_refused_before_the_server_is_asked(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert sweep("http://127.0.0.1:9", tmp_path / "s.json", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "s.json").exists()
