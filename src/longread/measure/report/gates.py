"""Quality gates in files that anybody may have written: what each of them says at its worst, and whose it is.

Knows the gate's document and the ``quality`` block of a result (measure/quality.py). A red word anywhere is red: a file
that contradicts itself shows nothing better than the worst that it says.
"""

from collections.abc import Iterable, Mapping

from longread.measure.report.numbers import items, mapping, words
from longread.measure.report.run import Gate, Run

ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
KIND = "longread-gate"


def gate_of(document: Mapping[str, object], source: str) -> Gate:
    """A gate's own document. A PASS without a level that passed is none."""
    provenance, profile = mapping(document.get("provenance")), mapping(document.get("profile"))
    levels = [mapping(each) for each in items(document.get("levels"))]
    said = [document.get("verdict"), *(level.get("verdict") for level in levels)]
    said += [mapping(each).get("verdict") for level in levels for each in items(level.get("findings"))]
    return Gate(
        _worst([each for each in said if each is not None]) if levels else _worst([said[0], "INCONCLUSIVE"]),
        words(profile.get("name"), 60) or "unnamed",
        words(provenance.get("date")),
        words(provenance.get("model")),
        words(provenance.get("base_url")),
        document,
        source,
    )


def gate_in(own: Mapping[str, object], source: str) -> Gate | None:
    """The gate that stands in a result's own block; None where none was run."""
    quality = mapping(own.get("quality"))
    inside = mapping(quality.get("gate")) or mapping(own.get("gate"))
    if not quality and inside.get("kind") != KIND:
        return None
    found = gate_of(inside if inside.get("kind") == KIND else {}, source)
    said = [quality["verdict"]] if "verdict" in quality else []
    said += [each for each in mapping(quality.get("levels")).values() if each in ORDER]
    said += ["FAIL"] if quality.get("speed_counts") is False else []
    profile = found.profile if found.document else words(mapping(quality.get("profile")).get("name"), 60) or "unnamed"
    verdict = _worst([found.verdict, *said])
    return Gate(verdict, profile, found.date, found.model, found.url, found.document, found.source)


def gate_for(run: Run, gates: Iterable[Gate]) -> Gate | None:
    """The gate of the same model at the same address; the worst of several, so that a red one is never hidden."""
    url = words(run.part("server", "url"))
    fitting = [
        each
        for each in gates
        if each is run.gate
        or (each.model == run.model and (url is None or each.url is None or _address(each.url) == _address(url)))
    ]
    return min(fitting, key=lambda each: ORDER[each.verdict], default=None)


def _worst(said: Iterable[object]) -> str:
    """What is none of the three words shows nothing."""
    return min(
        (each if isinstance(each, str) and each in ORDER else "INCONCLUSIVE" for each in said), key=ORDER.__getitem__
    )


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
