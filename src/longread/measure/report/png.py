"""A report's plots as PNG files: the page's own drawings with title and legend, in light colours.

Needs resvg (``longread[plots]``). Knows drawings; must not know what they show.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from longread.plan.drawing import WIDTH, Picture
from longread.plan.page_style import STYLE
from longread.spec.errors import ConfigError

ZOOM = 3  # pixels a unit: 1,320 wide
_TITLE, _LINE, _MARGIN = 30, 18, 8
_CHARACTERS = 68
FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica, sans-serif"


def check() -> None:
    """Raises ConfigError where nothing can be drawn: before any work, not after it."""
    try:
        import resvg_py
    except ImportError:
        raise ConfigError("--png needs resvg, which is not installed: pip install 'longread[plots]'") from None
    empty = f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONTS}">'
    marks = [bytes(resvg_py.svg_to_bytes(svg_string=f"{empty}{text}</svg>")) for text in ("", '<text y="15">M</text>')]
    if marks[0] == marks[1]:
        raise ConfigError("--png: this machine has no font to write with; install one (Debian: fonts-dejavu-core)")


def write(folder: Path, pictures: Sequence[tuple[str, str, Picture]]) -> list[Path]:
    """A file a picture. Raises ConfigError where the folder cannot be made, or resvg is missing."""
    check()
    import resvg_py

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, title, picture in pictures:
        path = folder / f"{re.sub(r'[^a-z0-9-]+', '-', name.lower())}.png"
        svg = standing_alone(title, picture)
        path.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM, background="#ffffff")))
        found.append(path)
    return found


def standing_alone(title: str, picture: Picture) -> str:
    """An SVG that needs no page: title above, caption and legend below, colours in it."""
    size = re.search(r'viewBox="0 0 \d+ (\d+)"', picture.svg)
    height = int(size[1]) if size else 0
    lines, below = [], _TITLE + height + _LINE
    for style, name in dict.fromkeys(picture.legend):
        lines.append(
            f'<rect class="s{style}" fill="currentColor" x="{_MARGIN}" y="{below - 10}" width="11" height="11" rx="2"/>'
            f'<text x="{_MARGIN + 17}" y="{below}">{escape(_cut(name))}</text>'
        )
        below += _LINE
    for line in _wrapped(picture.caption):
        lines.append(f'<text class="tick" x="{_MARGIN}" y="{below}">{escape(line)}</text>')
        below += _LINE
    inner = picture.svg.replace("<svg ", f'<svg x="0" y="{_TITLE}" width="{WIDTH}" height="{height}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{below}" viewBox="0 0 {WIDTH} {below}" '
        f'font-family="{FONTS}"><style>{light(STYLE)}</style>'
        f'<text x="{_MARGIN}" y="20" style="font-size:15px;font-weight:bold">{escape(_cut(title))}</text>'
        f"{inner}{''.join(lines)}</svg>"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"


def _wrapped(text: str) -> list[str]:
    found = [""]
    for word in text.split():
        if found[-1] and len(found[-1]) + 1 + len(word) > _CHARACTERS:
            found.append("")
        found[-1] = f"{found[-1]} {_cut(word)}".strip()
    return found


def light(style: str) -> str:
    """The rules of the drawings with their light colours in place: resvg knows no variables."""
    values = dict(re.findall(r"--(\w+):(#\w+)", style.partition("@media")[0]))
    own = [
        rule for rule in re.findall(r"[^{}]+\{[^{}]*\}", style) if rule.strip().startswith(("svg .", "svg text", ".s"))
    ]
    text = "".join(own).replace("svg ", "").replace("font-family:inherit", "")
    return re.sub(r"var\(--(\w+)\)", lambda match: values.get(match[1], "#000"), text)
