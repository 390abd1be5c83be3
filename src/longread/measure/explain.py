"""Says why a call did not reuse more of what was read before, with the two texts around the first difference.

Knows the records and a terminal; the texts come decoded from the server.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from longread.measure.calls import head_line, reuse_line
from longread.spec.printing import printable

# What a reason means and what can be done about it.
ADVICE = {
    "complete": "All that could be reused was: at least the last token is always computed.",
    "new text": "It goes on from a text that was read before, which was reused; new text is always computed (or the "
    "server has forgotten that it read it).",
    "never seen": "No prompt that begins like this one was read before (beyond what all have in common), or the server "
    "has forgotten that it was.",
    "differs": "A prompt is reused up to its first difference only: put what changes (dates, names, the question) "
    "behind what stays.",
    "evicted": "It was read before and made room for others: give the cache or --store-size more, or pin the document.",
    "other model or format": "The text was read by another model, with other weights, rope or cache type: such state "
    "never fits, so it is read once more for this one.",
    "no snapshot": "The pages are there, the state of the rings at this position is not: the next landing point before "
    "it was used. --snapshot-interval sets how far apart they are.",
    "corrupt record": "A record on disk failed its checksum, was dropped, and is written again: run `longread store "
    "verify`, and look at the disk if it comes again.",
    "store failed": "The store could not be read just then, and its files are as they were: the server's log has the "
    "first such error.",
    "caching off": "The server runs without prefix caching.",
}


def draw(record: Mapping[str, Any], console: Console) -> None:
    """The explanation of one record, from ``calls.Source.one``."""
    reuse = record["longread"]["reuse"]
    console.print(Text(head_line(record)))
    console.print(Text(reuse_line(reuse)))
    if reuse is None:
        console.print(Text("The request was never admitted, or has not been yet."))
        return
    console.print(Text(ADVICE.get(reuse["reason"], "")))
    found = record.get("difference")
    if found is None:
        return
    if found["withheld"]:
        console.print(Text("The texts are withheld: the server has several API keys, or is open to the network."))
        return
    console.print(Text(f"from token {found['start']:,}, the first difference is token {found['at']:,}:", style="dim"))
    for name, style in (("asked", "green"), ("known", "red")):
        said = printable(found[name]) or "(ends here)"
        console.print(Text.assemble((f"{name:>6}  ", "dim"), (printable(found["same"]), ""), (said, style)))
    ids = {name: found[f"{name}_ids"][found["at"] - found["start"] :][:8] for name in ("asked", "known")}
    console.print(Text(f"   ids  asked {ids['asked']}, known {ids['known']}", style="dim"))
