"""The HTML page of a plan: whole, alone, escaped, the same every time; and the drawings' arithmetic."""

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from longread.plan.candidate import SearchResult
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Workload
from longread.plan.drawing import Axis, Bar, Series, bars, chart, log_range
from longread.plan.page import render
from longread.plan.search import search
from longread.spec.releases import release

VOID = {"meta", "link", "br"}
SHAPES = {"line", "rect", "polyline", "polygon", "circle"}


class Checked(HTMLParser):
    """Fails on tags that do not close, keeps text, addresses, ids and references."""

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
        self.text.append(data)


@cache
def result(model: str = "V4-Flash", machine: str = "8xH20-96", load: Workload | None = None) -> SearchResult:
    asked = load or Workload(524288, 512, 0.98, 100, "device", 2.0, 0.05)
    return search(release(model), parse_hardware(machine), asked)


@cache
def page() -> str:
    return render(result())


LOADS = [
    ("V4-Flash", "8xH20-96", Workload(524288, 512, 0.98, 100, "device", 2.0, 0.05)),
    ("V4-Flash", "2xH20-96", Workload(262144, 256, 0.9, 4, "host")),
    ("V3.2", "2x8xH200", Workload(131072, 1024, 0.0, 32)),
    ("V4-Pro", "2x8xH20-141", Workload(1000000, 512, 0.999, 2, "host", 5.0)),
    ("V2-Lite", "1xL40S", Workload(8192, 512, 0.0, 1)),
    ("V3", "1xRTX-4090", Workload(8192, 512, 0.0, 1)),  # nothing fits
    ("V4.1-Flash", "8xB200", Workload(131072, 1, 0.5, 8)),
]


@pytest.mark.parametrize(("model", "machine", "load"), LOADS)
def test_every_page_is_whole_and_stands_alone(model: str, machine: str, load: Workload) -> None:
    found = result(model, machine, load)
    text = render(found)
    checked = Checked(text)
    names = [tag for tag, _ in checked.tags]
    assert "script" not in names
    assert "img" not in names
    assert "@import" not in text
    assert "url(" not in text
    addresses = {
        v for _, attrs in checked.tags for k, v in attrs.items() if k in ("href", "src", "xlink:href", "action")
    }
    assert addresses == {"data:,"}
    ids = [attrs["id"] for _, attrs in checked.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in checked.tags:
        for reference in (attrs.get("aria-labelledby") or "").split():
            assert reference in ids
    assert names.count("svg") == (5 if found.feasible else 1)
    assert re.search(r"\bnan\b|\binf\b|\bNone\b|Estimate\(", " ".join(checked.text)) is None
    assert len(text) < 400_000


@pytest.mark.parametrize(("model", "machine", "load"), LOADS)
def test_every_drawing_is_xml_whose_shapes_lie_inside(model: str, machine: str, load: Workload) -> None:
    for svg in re.findall(r"<svg.*?</svg>", render(result(model, machine, load)), re.DOTALL):
        root = ElementTree.fromstring(svg)
        _, _, width, height = (float(x) for x in root.attrib["viewBox"].split())
        assert root.attrib["role"] == "img"
        children = [child.tag.rpartition("}")[2] for child in root]
        assert children[:2] == ["title", "desc"]
        assert SHAPES & set(children)
        for element in root.iter():
            values = {key: element.attrib[key] for key in ("x", "x1", "x2", "cx") if key in element.attrib}
            assert all(0 <= float(v) <= width for v in values.values()), element.attrib
            heights = {key: element.attrib[key] for key in ("y", "y1", "y2", "cy") if key in element.attrib}
            assert all(0 <= float(v) <= height for v in heights.values()), element.attrib
            for pair in element.attrib.get("points", "").split():
                px, py = (float(v) for v in pair.split(","))
                assert 0 <= px <= width
                assert 0 <= py <= height


def test_the_page_says_everything_that_it_should() -> None:
    text = page()
    heads = re.findall(r"<h2>(.*?)</h2>", text)
    assert heads == [
        "Ranked plans",
        "Memory of each GPU",
        "Time to the first token",
        "Latency and throughput",
        "Roofline",
        "Capacity",
        "What does not fit, and why",
        "Published runs and predictions",
        "Where every figure comes from",
    ]
    found = result()
    best = found.best
    assert best is not None
    assert f"{best.sessions:,}" in text
    for figure in found.hardware.card.flops.values():
        assert figure.source in text
    for refusal in found.infeasible:
        assert refusal.what.split(",")[0] in text
    assert "7 constants were set by hand" in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme:dark" in text
    assert "floor" in text


def test_the_memory_bar_adds_up_to_what_the_engine_may_take() -> None:
    best = result().best
    assert best is not None
    bar = next(value for value in re.findall(r"<li>(.*?)</li>", page()) if value.count("GiB") + value.count("MiB") > 5)
    sizes = [float(n) / (1024 if unit == "M" else 1) for n, unit in re.findall(r"([\d.]+) ([GM])iB", bar)]
    assert sum(sizes) == pytest.approx(best.memory.usable / 2**30, abs=0.4)


def test_the_same_result_gives_the_same_bytes() -> None:
    assert page() == render(result())


def test_what_others_wrote_is_escaped() -> None:
    hostile = '<script>alert("1")</script>&'
    found = result("V2-Lite", "1xL40S", Workload(8192, 512, 0.0, 1))
    card = found.hardware.card
    named = replace(card, name=hostile, memory=replace(card.memory, source=hostile))
    refused = tuple(replace(f, what=hostile, cure=hostile, limit=hostile) for f in found.infeasible)
    text = render(
        replace(
            found,
            spec=replace(found.spec, label=hostile),
            hardware=replace(found.hardware, card=named),
            notes=(hostile,),
            infeasible=refused,
            rule=hostile,
        )
    )
    Checked(text)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_axes_place_values_between_their_ends() -> None:
    log = Axis("", 1.0, 100.0, str)
    assert (log.share(1.0), log.share(10.0), log.share(1000.0)) == (0.0, pytest.approx(0.5), 1.0)
    assert Axis("", 0.0, 4.0, str, log=False).share(1.0) == 0.25
    assert Axis("", 0.0, 10.0, str, log=False).places() == (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    assert Axis("", 1.0, 1000.0, str).places() == (1.0, 10.0, 100.0, 1000.0)
    assert Axis("", 3.0, 40.0, str).places() == (5.0, 10.0, 20.0)
    assert len(Axis("", 1e-9, 1e12, str).places()) <= 8


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [1e-9, 1e9], [float("inf"), 2.0]])
def test_ranges_are_wide_enough_to_draw(values: list[float]) -> None:
    low, high = log_range(values)
    assert 0 < low < high
    assert high / low >= 9.99


def test_a_drawing_escapes_its_words() -> None:
    axis = Axis("<x>", 1.0, 10.0, lambda v: f"<{v:g}>")
    text = chart("a&b", "<t>", "<d>", axis, axis, [Series("<s>", ((1.0, 2.0), (5.0, 3.0)), 0, ((1.0, 1.0, 3.0),))])
    ElementTree.fromstring(text)
    assert "<s>" not in text
    drawn = bars("b", "t", "d", [Bar("<row>", (("<p>", 3.0, 1), ("q", 9.0, 2)))], 10.0, str, [("<limit>", 8.0)])
    root = ElementTree.fromstring(drawn)
    widths = [float(e.attrib["width"]) for e in root.iter() if e.attrib.get("class", "").startswith("part")]
    assert widths == [pytest.approx(128.4), pytest.approx(299.6)]  # the second is cut at the whole
