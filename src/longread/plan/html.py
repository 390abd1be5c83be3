"""A page that stands alone, and its parts: no script, no network, light and dark, readable on a phone.

Knows HTML and drawings. Must not know what is said on a page.
"""

from collections.abc import Iterable, Sequence
from html import escape

from longread.plan.drawing import Picture
from longread.plan.page_style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, sections: Iterable[str], style: str = "") -> str:
    """The page. ``sections`` are HTML, empty ones are left out; ``style``: more than the common one."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def figure(title: str, picture: Picture) -> str:
    """A drawing with its caption and legend; the values are there for who wants them."""
    legend = "".join(
        f'<li><i class="key s{style}"></i>{escape(name)}</li>' for style, name in dict.fromkeys(picture.legend)
    )
    values = "".join(f"<li>{escape(value)}</li>" for value in picture.values)
    more = f"<details><summary>Values</summary><ul>{values}</ul></details>\n" if values else ""
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<figure>\n{picture.svg}\n<figcaption>{escape(picture.caption)}"
        f'<ul class="legend">{legend}</ul></figcaption>\n</figure>\n{more}</section>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Cells are HTML: whoever fills them escapes. Wide tables scroll by themselves."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table><caption>'
        f"{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )
