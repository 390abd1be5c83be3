"""What goes when a store is over its limit: the chains used longest ago, each from its deepest page up, then the texts
of documents whose chains are gone.

Knows identities, ages and sizes only.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

RING = 2
PAGE = 0
DOCUMENT = 3  # no record, but the text of one whose state is gone


class Node(NamedTuple):
    """One record of the index, or a document. ``kind`` as in records.KINDS, or DOCUMENT; ``used`` in microseconds."""

    id: int
    kind: int
    key: bytes
    parent: bytes
    depth: int
    size: int
    used: int


NODE_TYPES = (int, int, bytes, bytes, int, int, int)


def unreachable(nodes: Sequence[Node]) -> list[Node]:
    """Records that no chain from a root leads to, and rings whose page or tail is gone."""
    reached: set[bytes] = set()
    lost = []
    pages = {node.key for node in nodes if node.kind == PAGE}
    for node in sorted((each for each in nodes if each.kind != RING), key=_depth):
        if node.depth == 1 or (node.parent in pages and node.parent in reached):
            reached.add(node.key)
        else:
            lost.append(node)
    return lost + [node for node in nodes if node.kind == RING and node.key not in reached]


def leading_to(nodes: Sequence[Node], ends: Sequence[bytes]) -> set[bytes]:
    """Keys of the chains that end there, the ends included."""
    parents = {node.key: node.parent for node in nodes if node.kind != RING}
    keys: set[bytes] = set()
    for end in ends:
        key: bytes | None = end
        while key is not None and key not in keys:
            keys.add(key)
            key = parents.get(key)
    return keys


def victims(nodes: Sequence[Node], keep: Collection[bytes], excess: int) -> list[Node]:
    """Records to drop so that at least ``excess`` bytes come free, in that order; fewer if the rest is in ``keep``.

    A page was used when anything below it was, so children always go before their parents. A ring counts by its own
    last use: an old landing point in the middle of a chain that is in use goes without the chain.
    """
    used: dict[bytes, int] = {}
    for node in sorted(nodes, key=lambda each: (-each.depth, each.kind != RING)):
        moment = max(used.get(node.key, 0), node.used)
        used[node.key] = moment
        if node.kind != RING:
            used[node.parent] = max(used.get(node.parent, 0), moment)
    order = sorted(
        (node for node in nodes if node.key not in keep),
        key=lambda node: (node.used if node.kind == RING else used[node.key], -node.depth, node.kind != RING),
    )
    chosen = []
    for node in order:
        if excess <= 0:
            break
        chosen.append(node)
        excess -= node.size
    return chosen


def _depth(node: Node) -> int:
    return node.depth
