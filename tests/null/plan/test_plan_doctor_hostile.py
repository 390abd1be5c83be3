"""Damaged and hostile input of every kind: an error in words, or facts that can be judged, shown and written."""

import io
import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metrics_pages import histogram, page
from rich.console import Console
from saved_files import CHECK_ENV, COLLECT_ENV, DMESG, NVLINK, PEERS, SMI_TEXT, TOPOLOGY, smi_xml

from longread.cli.doctor import show, show_machine
from longread.plan.doctor.checks_live import check_live
from longread.plan.doctor.diagnose import diagnose, plain
from longread.plan.doctor.facts import Facts
from longread.plan.doctor.finding import as_json
from longread.plan.doctor.live import compare
from longread.plan.doctor.saved.reading import read_saved
from longread.plan.doctor.saved.report import read_report
from longread.plan.doctor.saved.text import Saved
from longread.plan.doctor.series import read_metrics
from longread.spec.errors import ConfigError

LINES = (Path(__file__).parents[2] / "support" / "known_lines.txt").read_text(encoding="utf-8")
REPORT = json.dumps({"schema": "longread.doctor/1", "facts": {"gpus": [{"index": 0, "name": "H20", "cpus": [0, 1]}]}})
FILES = (smi_xml(), SMI_TEXT, TOPOLOGY, PEERS, NVLINK, COLLECT_ENV, CHECK_ENV, DMESG, LINES, REPORT)
PAGES = (
    page("vllm", {"num_requests_running": 1, "time_to_first_token_seconds": histogram(3, 0.5)}),
    page("sglang", {"token_usage": 0.5, "cached_tokens_total": 10, "prompt_tokens_total": 20}),
)
PIECES = st.sampled_from(
    [
        b"",
        b"\0",
        b"\x1b[2J",
        b"{}",
        b"%s%n",
        b"[bold]",
        b"<",
        b"&x;",
        b": ",
        b"\n",
        b"9" * 400,
        b"-1",
        b"NaN",
        b"1e999",
        b"\xff\xfe",
        b"GPU0",
        b"=",
    ]
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES), max_size=8)


def damaged(text: str, edits: list[tuple[float, int, bytes]]) -> bytes:
    data = text.encode()
    for place, length, piece in edits:
        at = int(place * len(data))
        data = data[:at] + piece + data[at + length :]
    return data


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(FILES), EDITS), min_size=1, max_size=3))
def test_damaged_files(tmp_path: Path, files: list[tuple[str, list[tuple[float, int, bytes]]]]) -> None:
    paths = []
    for at, (text, edits) in enumerate(files):
        paths.append(tmp_path / f"f{at}")
        paths[-1].write_bytes(damaged(text, edits))
    try:
        facts = read_saved(paths)
    except ConfigError as error:
        assert str(error).startswith("--from ")
        return
    findings = diagnose(facts)
    json.dumps({**as_json(findings), "facts": plain(facts)})
    shown = io.StringIO()
    console = Console(file=shown, width=160)
    show_machine(facts, console)
    show(findings, console, facts.origin)
    assert "\x1b" not in shown.getvalue() and "\0" not in shown.getvalue()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.from_type(Facts))
def test_any_report_of_the_right_types_is_read_and_judged(facts: Facts) -> None:
    """Whoever writes a report decides on every field."""
    text = json.dumps({"schema": "longread.doctor/1", "facts": plain(facts)})
    try:
        again = read_report(Saved(name="r", data=text.encode("utf-8", "replace"), size=len(text)))
    except ConfigError as error:
        assert "matrix" in str(error) or "is not" in str(error) or ", not " in str(error)
        return
    findings = diagnose(again)
    json.dumps({**as_json(findings), "facts": plain(again)})
    console = Console(file=io.StringIO(), width=160)
    show_machine(again, console)
    show(findings, console, again.origin)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PAGES), EDITS, EDITS)
def test_damaged_metrics(
    text: str, before: list[tuple[float, int, bytes]], after: list[tuple[float, int, bytes]]
) -> None:
    try:
        first, second = (read_metrics(damaged(text, edits).decode("utf-8", "replace")) for edits in (before, after))
        live = compare("http://x", first, second, 5.0)
    except ConfigError:
        return
    json.dumps(plain(Facts(live=live)))
    list(check_live(Facts(live=live)))
