"""The prefix index: which token runs are published, on which page, and what they hang on.

Knows identities (chained hashes), token runs and page numbers; not who holds a page, and not what a snapshot row is.

An entry is a full page or a *tail* (a shorter run after a full page: a prompt or turn that ended inside a page).
Entries form a tree under the root. Several entries may live on one page: a full page and tails that are prefixes of
it. Rows below a run's length depend on nothing behind it, so a tail can live on the page of any longer sibling.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from longread.kv.chain import ID_BYTES, TokenChain, common_tokens, leading
from longread.spec.state import PAGE_TOKENS


class Entry:
    """A published run of at most PAGE_TOKENS tokens after ``parent``; ``key`` is its chained hash."""

    __slots__ = ("children", "depth", "key", "page", "parent", "rolling_of", "run", "snapshot")

    def __init__(self, key: bytes, parent: "Entry | None", run: bytes, page: int):
        self.key = key
        self.parent = parent
        self.run = run
        self.page = page
        self.depth: int = parent.depth + 1 if parent else 0  # pages from the root; this one included
        self.children: list[Entry] = []  # sorted by run: neighbours share the longest prefixes
        self.snapshot: int | None = None  # row of the ring state behind this run's last token
        self.rolling_of: object = None  # the lease that will replace the snapshot at its next page end

    @property
    def length(self) -> int:
        return len(self.run) // ID_BYTES

    @property
    def full(self) -> bool:
        return len(self.run) == PAGE_TOKENS * ID_BYTES

    @property
    def end(self) -> int:
        """Position behind the run: tokens from the root to here."""
        return (self.depth - 1) * PAGE_TOKENS + self.length if self.parent else 0


def _run(entry: Entry) -> bytes:
    return entry.run


class PrefixIndex:
    """Entries by identity, by place in the tree, and by page. Trees of different roots share nothing."""

    def __init__(self, root: bytes):
        self.root = Entry(root, None, b"", -1)
        self.salted: dict[bytes, Entry] = {}  # other roots, while anything hangs on them
        self.entries: dict[bytes, Entry] = {}
        self.on_page: dict[int, list[Entry]] = {}

    def base(self, root: bytes) -> Entry:
        """Where the chains hang that begin with ``root``: the cache's, or a salted one."""
        if root == self.root.key:
            return self.root
        return self.salted.get(root) or Entry(root, None, b"", -1)

    def get(self, key: bytes) -> Entry | None:
        return self.entries.get(key)

    def deepest(self, chain: TokenChain, pages: int) -> Entry:
        """The last of the chain's first ``pages`` full pages that is published, so that all before it are, too; the
        chain's root where none is.
        """
        known = leading(pages, lambda page: chain.page_hash(page) in self.entries)
        return self.entries[chain.page_hash(known - 1)] if known else self.base(chain.root)

    def add(self, key: bytes, parent: Entry, run: bytes, page: int) -> tuple[Entry, list[int]]:
        """Publish a new run, and say which pages have lost their last entry by it.

        The entry goes to the page of a longer sibling if there is one, else to ``page``. A page that carries nothing
        but prefixes of the run is emptied into the same page, so that one lineage does not go on occupying two.
        """
        at, bare = 0, list[int]()
        if parent.children:  # else nothing stands beside it: so for nearly every page of a book
            at = bisect_left(parent.children, run, key=_run)
            if self.extends(parent, run):
                page = parent.children[at].page
            bare = [
                old
                for shorter in self.prefixes(parent, run)
                if (old := shorter.page) != page and self._carries_only(old, run) and self._move(shorter, page)
            ]
        entry = Entry(key, parent, run, page)
        if parent.parent is None and parent is not self.root:
            self.salted[parent.key] = parent
        parent.children.insert(at, entry)
        self.entries[key] = entry
        self.on_page.setdefault(page, []).append(entry)
        return entry, bare

    def remove(self, entry: Entry) -> bool:
        """Unpublish an entry without children. True: it was the last one on its page."""
        if entry.children or entry.parent is None:
            raise AssertionError(f"entry at {entry.end} still has {len(entry.children)} children")
        siblings = entry.parent.children
        del siblings[bisect_left(siblings, entry.run, key=_run)]
        if not siblings:
            self.salted.pop(entry.parent.key, None)
        del self.entries[entry.key]
        return self._leave(entry)

    def is_leaf(self, page: int) -> bool:
        """Whether nothing published hangs on this page's entries."""
        return not any(entry.children for entry in self.on_page.get(page, ()))

    def subtree(self, entry: Entry) -> list[Entry]:
        """The entry and all below it, children before parents."""
        order = [entry]
        for each in order:  # grows while it is read: breadth first
            order.extend(each.children)
        order.reverse()
        return order

    def extends(self, parent: Entry, run: bytes) -> bool:
        """Whether a child of ``parent`` is ``run`` or begins with it."""
        return self.covering(parent, run) is not None

    def covering(self, parent: Entry, run: bytes) -> Entry | None:
        """The first child of ``parent`` that is ``run`` or begins with it."""
        at = bisect_left(parent.children, run, key=_run)
        found = at < len(parent.children) and parent.children[at].run.startswith(run)
        return parent.children[at] if found else None

    def prefixes(self, parent: Entry, run: bytes) -> Iterator[Entry]:
        """Children of ``parent`` whose run is a proper prefix of ``run``, longest first."""
        limit = run[:-ID_BYTES] if run else run
        while limit:
            at = bisect_right(parent.children, limit, key=_run)
            if not at:
                return
            entry = parent.children[at - 1]
            common = common_tokens(entry.run, limit)
            limit = limit[: common * ID_BYTES]
            if common == entry.length:
                yield entry
                limit = limit[:-ID_BYTES]

    def closest(self, parent: Entry, run: bytes) -> tuple[Entry | None, int]:
        """The child that shares most tokens with ``run``, and how many. (None, 0) if none shares any."""
        at = bisect_left(parent.children, run, key=_run)
        best, most = None, 0
        for entry in parent.children[max(at - 1, 0) : at + 1]:
            common = common_tokens(entry.run, run)
            if common > most:
                best, most = entry, common
        return best, most

    def _move(self, entry: Entry, page: int) -> bool:
        """Put an entry on another page. True: its old page has no entry left."""
        bare = self._leave(entry)
        entry.page = page
        self.on_page.setdefault(page, []).append(entry)
        return bare

    def _carries_only(self, page: int, run: bytes) -> bool:
        return all(run.startswith(entry.run) for entry in self.on_page[page])

    def _leave(self, entry: Entry) -> bool:
        others = self.on_page[entry.page]
        others.remove(entry)
        if others:
            return False
        del self.on_page[entry.page]
        return True
