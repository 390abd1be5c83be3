"""The report's page: whole, alone, honest about quality and about what is missing; in a browser too."""

import copy
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import browser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_results import AIPERF, VLLM, Made, document, gate, samples, write

from longread.cli.main import main
from longread.measure.report import png
from longread.measure.report.files import Material, read_all
from longread.measure.report.page import render
from longread.spec.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden_report.txt"
VOID = {"meta", "link", "br"}
EVIL = "<script>alert(1)</script>&\"'\x00\u202e]]>"


class Checked(HTMLParser):
    """Fails on tags that do not close; keeps tags and text, an SVG's left out of the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and "svg" not in self.open and "style" not in self.open:
            self.text.append(data.strip())


def check(page: str) -> Checked:
    """Whole and alone: no script, no address, ids once; every drawing is XML whose shapes lie inside."""
    checked = Checked(page)
    names = [tag for tag, _ in checked.tags]
    assert not {"script", "img", "iframe", "object", "form"} & set(names)
    assert not [name for _, attrs in checked.tags for name in attrs if name.startswith("on")]
    addresses = {v for _, attrs in checked.tags for k, v in attrs.items() if k in ("href", "src", "action")}
    assert addresses == {"data:,"}
    ids = [attrs["id"] for _, attrs in checked.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(svg)
        _, _, width, height = (float(x) for x in root.attrib["viewBox"].split())
        for element in root.iter():
            for keys, most in ((("x", "x1", "x2", "cx"), width), (("y", "y1", "y2", "cy"), height)):
                values = [float(element.attrib[key]) for key in keys if key in element.attrib]
                assert all(-0.1 <= value <= most + 0.1 for value in values), element.attrib
            for pair in element.attrib.get("points", "").split():
                px, py = (float(v) for v in pair.split(","))
                assert 0 <= px <= width
                assert 0 <= py <= height
    text = " ".join(checked.text)
    assert re.search(r"\bnan\b|\bNone\b|\binf\b|Figure\(|Request\(", text) is None
    return checked


def saved(path: Path, told: object) -> Path:
    path.write_text(json.dumps(told))
    return path


def full(folder: Path) -> list[Path]:
    """A run with everything, and its gate."""
    made = Made(requests=80, seed=1, failing=0.05, samples=samples(), slos={"ttft": 2000.0}, warnings=["a busy client"])
    return [write(folder / "run.json", made), saved(folder / "gate.json", gate())]


def sweep(folder: Path, name: str, model: str, axis: str = "concurrency") -> Path:
    points = []
    for value in (1, 4, 16):
        made = Made(requests=30, seed=value, concurrency=value, slower=0.6 + 0.1 * value, model=model)
        made.isl = 4096 if axis == "concurrency" else 65536 * value
        point: dict[str, Any] = {"value": made.isl if axis == "context" else value, "result": document(made)[0]}
        if axis == "context":
            point["frontier"] = {"newest_ttft_ms": 900.0, "warm_ttft_ms": 90.0, "cold_ttft_ms": {"measured": 5000.0}}
        points.append(point)
    knee = {"value": 4, "interval": [1, 16], "method": "power"} if axis == "concurrency" else None
    best = {"value": 4, "interval": [4, 16], "slos": {"ttft": 900}, "share": 0.9, "goodput": 1.5, "note": None}
    told = {"longread_sweep": 1, "axis": axis, "partial": False, "points": points, "knee": knee}
    return saved(folder / name, told | {"max_goodput": best if knee else None})


PLAN = {
    "schema": "longread.plan/1",
    "kind": "search",
    "model": "DeepSeek-V4-Flash",
    "hardware": {"label": "8xH20-96"},
    "workload": {"isl": 4096, "osl": 24, "concurrency": 4},
    "feasible": [
        {
            "deployment": {"engine": "longread", "strategy": {"label": "TP8"}},
            "ttft": {
                "cold": {"interval": [0.2, 0.3, 0.5], "floor": 0.05},
                "warm": None,
                "at_load": {"interval": [0.5, 1.0, 2.0], "floor": 0.1},
            },
            "tpot": {
                "alone": {"interval": [0.01, 0.02, 0.03], "floor": 0.007},
                "at_load": {"interval": [0.001, 0.002, 0.003], "floor": 0.001},
            },
            "throughput": {"interval": [10.0, 60.0, 90.0], "floor": 400.0},
        }
    ],
}


def test_one_run_with_everything(tmp_path: Path) -> None:
    page = render(read_all([*full(tmp_path), saved(tmp_path / "plan.json", PLAN)])).html
    checked = check(page)
    text = " ".join(checked.text)
    for said in (
        "gate fp8-class: PASS",
        "mean; 95 %:",
        "bounded from 368 requests on",
        "Distribution of TTFT",
        "What TTFT is made of",
        "Errors and refusals over time",
        "KV cache",
        "Memory over time",
        "GPU temperature",
        "GPU power",
        "GPU SM clock",
        "Plan against measured against floor",
        "a busy client",
        "longread bench serve --base-url http://127.0.0.1:8000 --max-concurrency 4",
        "the server's /metrics: preemptions",
    ):
        assert said in text, said
    assert [tag for tag, _ in checked.tags].count("svg") == 13
    assert len(page) < 200_000


def test_the_text_of_the_page_is_the_golden_one(tmp_path: Path) -> None:
    """After a wanted change: run this file with ``python`` to write it anew, and read the difference."""
    assert golden(tmp_path) == GOLDEN.read_text(encoding="utf-8")


def golden(folder: Path) -> str:
    paths = [*full(folder), saved(folder / "plan.json", PLAN)]
    page = render(read_all(paths)).html
    assert page == render(read_all(paths)).html
    return "\n".join(Checked(page).text) + "\n"


def test_a_red_gate_strikes_speed_out_everywhere(tmp_path: Path) -> None:
    runs = write(tmp_path / "run.json", Made(requests=80)), saved(tmp_path / "gate.json", gate("FAIL"))
    page = render(read_all(list(runs))).html
    check(page)
    assert "gate fp8-class: FAIL" in page
    (mean,) = {f"{json.loads(runs[0].read_text())['mean_ttft_ms']:,.0f} ms"}
    assert f"<b><s>{mean}</s></b>" in page
    tiles = re.search(r'<div class="tiles">.*?</div></div>', page, re.DOTALL)
    assert tiles is not None
    assert tiles[0].count("<s>") == 4  # TTFT, TPOT, E2E, tokens/s; not the number of answers
    assert "its speed counts for nothing" in page


def test_every_plot_of_a_speed_says_its_gate(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.json", Made(requests=80)), sweep(tmp_path, "int4.json", "int4")]
    paths += [saved(tmp_path / "red.json", gate("FAIL", model="int4"))]
    for name, _, picture in render(read_all(paths)).pictures:
        said = "Quality: gate fp8-class FAIL." if name.endswith("concurrency") else "Quality: not checked."
        assert picture.caption.endswith(said), name


def test_without_a_gate_it_says_so(tmp_path: Path) -> None:
    page = render(read_all([write(tmp_path / "run.json", Made())])).html
    assert '<span class="badge warn">quality not checked</span>' in page
    assert "nothing says that the answers are right" in page


def test_sweeps_frontier_and_two_runs(tmp_path: Path) -> None:
    paths = [
        sweep(tmp_path, "base.json", "DeepSeek-V4-Flash"),
        sweep(tmp_path, "int4.json", "int4"),
        sweep(tmp_path, "context.json", "DeepSeek-V4-Flash", "context"),
        saved(tmp_path / "gate.json", gate("FAIL", model="int4")),
        write(tmp_path / "a.json", Made(seed=1)),
        write(tmp_path / "b.json", Made(seed=2, slower=1.5)),
    ]
    report = render(read_all(paths))
    checked = check(report.html)
    text = " ".join(checked.text)
    for said in (
        "int4, failed the quality gate",
        "Knee at concurrency 4 (between 1 and 16): power.",
        "90% of requests within ttft:900 ms), goodput 1.5 requests/s",
        "Context frontier",
        "context, asked again",
        "B is worse",
        "quality not checked of 8 runs",
    ):
        assert said in text, said
    assert {"ttft-concurrency", "tpot-concurrency", "throughput-concurrency", "frontier"} <= {
        n for n, *_ in report.pictures
    }


def test_two_runs_that_must_not_be_compared(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", Made()), write(tmp_path / "b.json", Made(workload_seed=1))]
    text = " ".join(check(render(read_all(paths)).html).text)
    assert "The two runs are not compared" in text
    assert "workload seed: 0 and 1" in text


def test_other_tools_beside_ours(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", Made()), saved(tmp_path / "v.json", VLLM), saved(tmp_path / "p.json", AIPERF)]
    text = " ".join(check(render(read_all(paths)).html).text)
    for said in ("vllm bench serve", "aiperf profile", "--save-detailed", "TTFT: vLLM's ends with the first chunk"):
        assert said in text, said


@pytest.mark.parametrize(
    "made",
    [
        Made(requests=1, kinds=("only",)),
        Made(requests=2, failing=1.0),
        Made(requests=12, usage=False, timing=False),
        Made(requests=5, samples={"schema": 1, "at": [], "series": {}, "gpus": [], "missing": {"all": "too short"}}),
    ],
)
def test_small_and_empty_runs(tmp_path: Path, made: Made) -> None:
    text = " ".join(check(render(read_all([write(tmp_path / "r.json", made)])).html).text)
    if made.failing:
        assert "0 of 2" in text
        assert not re.search(r"\b0 ms\b", text)
    if not made.usage:
        assert "total_output_tokens: 12 of 12 answers came without usage" in text
        assert "parts of TTFT: the server tells no times of its own" in text


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        render(Material())


def test_what_others_wrote_is_escaped(tmp_path: Path) -> None:
    made = Made(
        requests=20, model=EVIL, url=f"http://x/{EVIL}", kinds=(EVIL, "b"), warnings=[EVIL], workload={EVIL: EVIL}
    )
    told = gate("FAIL", model=EVIL)
    told["levels"][0]["findings"][0] |= {"name": EVIL, "note": EVIL}
    told["profile"]["name"] = EVIL
    paths = [
        write(tmp_path / "r.json", made),
        saved(tmp_path / "g.json", told),
        saved(tmp_path / "p.json", _evil(PLAN)),
    ]
    page = render(read_all(paths), EVIL).html
    check(page)
    assert "<script" not in page
    assert "\x00" not in page


def _evil(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _evil(each) if name not in ("schema", "kind") else each for name, each in told.items()}
    if isinstance(told, list):
        return [_evil(each) for each in told]
    return EVIL if isinstance(told, str) else told


WORSE: list[Any] = [
    None, True, -1, 0, 10**400, 1e308, math.nan, math.inf, -math.inf, "", EVIL, [], {}, [[]], {"a": None}, "9" * 5000,
]  # fmt: skip
WHOLE = [
    document(Made(requests=12, samples=samples(5), slos={"ttft": 900.0}))[0],
    gate("FAIL"),
    PLAN,
    {"longread_sweep": 1, "axis": "context", "points": [{"value": 1.0, "result": document(Made(requests=3))[0]}]},
]


def _places(told: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    return [path, *(place for key, each in children for place in _places(each, (*path, key)))]


@given(st.sampled_from(range(len(WHOLE))), st.integers(0, 2**32), st.integers(1, 30))
def test_values_that_are_none_break_no_page(which: int, seed: int, count: int) -> None:
    """Anything may stand anywhere in a file: it is refused, or missing, or shown; the page stays whole."""
    draw = random.Random(seed)
    told = copy.deepcopy(WHOLE[which])
    for _ in range(count):
        *path, last = draw.choice([place for place in _places(told) if place])
        inner: Any = told
        for key in path:
            inner = inner[key]
        inner[last] = copy.deepcopy(draw.choice(WORSE))
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path_ = Path(folder) / "x.json"
        path_.write_text(json.dumps(told))
        beside = write(Path(folder) / "a.json", Made(requests=4))
        try:
            page = render(read_all([path_, beside])).html
        except ConfigError:
            return
    check(page)


def test_requests_with_values_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", Made(requests=40))
    lines = (tmp_path / "r.requests.jsonl").read_text().splitlines()
    draw = random.Random(3)
    for number in range(0, 40, 2):
        row = json.loads(lines[number])
        for name in draw.sample(sorted(row), 6):
            value = draw.choice(
                [w for w in WORSE if not (isinstance(w, float) and not math.isfinite(w)) and w != 10**400]
            )
            row[name] = value
        lines[number] = json.dumps(row)
    (tmp_path / "r.requests.jsonl").write_text("\n".join(lines))
    check(render(read_all([path])).html)


def test_many_requests_make_no_large_page(tmp_path: Path) -> None:
    page = render(read_all([write(tmp_path / "r.json", Made(requests=5000))])).html
    check(page)
    assert len(page) < 300_000


def test_files_are_written_whole_and_plots_beside(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("resvg_py", reason="longread[plots] is not installed")
    paths = [str(path) for path in full(tmp_path)]
    out, plots = tmp_path / "out" / "page.html", tmp_path / "plots"
    assert main(["bench", "report", *paths, "-o", str(out), "--png", str(plots)]) == 0
    assert "1 runs, 1 gates, 0 plans" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    written = sorted(path.name for path in plots.iterdir())
    assert len(written) == 10
    assert {"ttft-distribution-r0.png", "ttft-parts-r0.png", "kv-cache-r0.png"} <= set(written)
    for path in plots.iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") == 1320
        assert len(data) > 5000


def test_plots_need_their_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    path = str(write(tmp_path / "r.json", Made()))
    assert main(["bench", "report", path, "-o", str(tmp_path / "p.html"), "--png", str(tmp_path / "x")]) == 2
    assert "pip install 'longread[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


def test_a_plots_style_has_no_variable(tmp_path: Path) -> None:
    report = render(read_all(full(tmp_path)))
    for _, title, picture in report.pictures:
        svg = png.standing_alone(title, picture)
        ElementTree.fromstring(svg)
        assert "var(" not in svg
        assert "#0969da" in svg


@pytest.mark.skipif(browser.find() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1200, False)])
def test_a_browser_has_nothing_to_say(tmp_path: Path, width: int, dark: bool) -> None:
    long = "a-very-long-name-of-a-run-that-somebody-made-of-all-its-options" * 2
    paths = [
        *full(tmp_path),
        write(tmp_path / f"{long}.json", Made(seed=2, model="M" * 150)),
        sweep(tmp_path, "base.json", "DeepSeek-V4-Flash"),
        saved(tmp_path / "plan.json", PLAN),
    ]
    page = tmp_path / "page.html"
    page.write_text(render(read_all(paths)).html, encoding="utf-8")
    seen = browser.visit(page, width, dark)
    assert seen.said == []
    assert seen.asked == [page.resolve().as_uri()]
    assert seen.scroll_width == seen.shown_width
    assert seen.shown_width <= width
    assert "What TTFT is made of" in seen.text


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(golden(Path(place)), encoding="utf-8")
