"""A repository of made-up source files as an endless stream of lines: constants, owners, and which file defines what.

Knows how such files look. The code is plausible, not run; names are drawn, and a function's name occurs in one
definition only.
"""

from collections.abc import Iterator
from random import Random

from longread.measure.reading.grammar import words
from longread.measure.workloads import genres_en, genres_zh
from longread.measure.workloads.genre import Genre, Quantity, Rule
from longread.measure.workloads.stream import Key, Said

PACKAGES = words("billing ledger search ingest gateway scheduler storage identity catalog pricing shipping telemetry")
AREAS = words("core api jobs models adapters policy cache queue export audit rules state sync render limits replay")
NOUNS = words("""
    session invoice tenant cursor batch shard ticket parcel voucher quota lease snapshot replica token receipt tariff
    manifest bucket journal profile webhook refund route index partition consumer digest policy window cluster
    payload balance carrier address contract variant segment channel archive mandate
""")
PARTS = words("store loader writer parser router planner merger checker encoder reaper tracker mapper builder sender")
VERBS = words("""
    flush merge load route verify expand seal split drain rank fetch encode apply collect release rotate resolve index
    replay reserve publish trim attach settle compact mirror refresh rebuild detach balance
""")
ADJECTIVES = words("""
    pending stale partial late open nested remote hidden signed local frozen orphaned duplicate expired active delayed
    cached shared private urgent
""")
_CONSTANTS = (
    Quantity("MAX_RETRIES", "{v}", 2, 99),
    Quantity("TIMEOUT_MS", "{v}", 50, 999),
    Quantity("POOL_SIZE", "{v}", 2, 512),
    Quantity("BATCH_LIMIT", "{v}", 10, 999),
    Quantity("BACKOFF_FACTOR", "{v}", 11, 99, 1),
    Quantity("SAMPLE_RATIO", "{v}", 1, 99, 2),
    Quantity("LEASE_SECONDS", "{v}", 5, 900),
    Quantity("QUEUE_DEPTH", "{v}", 4, 999),
    Quantity("SHARD_COUNT", "{v}", 2, 256),
    Quantity("CACHE_MEGABYTES", "{v}", 8, 999),
)
_BODIES = (
    ("    rows = [row for row in {n}s if row.state == {n}.OPEN]", "    if not rows:", "        return 0"),
    ("    for attempt in range(1, limit):", "        if self_check({n}):", "            break"),
    (
        "    key = ({n}.tenant, {n}.number)",
        "    seen = table.get(key)",
        "    if seen is not None:",
        "        return seen",
    ),
    ("    with lock_of({n}) as held:", "        held.write({n}.encoded())", '    metrics.count("{n}.written")'),
    ("    total = sum(part.amount for part in {n}.parts)", "    if total < 0:", '        raise ValueError("negative")'),
    ("    window = clock.now() - {n}.opened", "    if window > grace:", "        notify({n}.owner, window)"),
    ('    log.debug("{f}: %d", len({n}.parts))', "    queue.extend(sorted({n}.parts, key=age))"),
    ("    try:", "        {n}.commit()", "    except ConflictError:", "        {n}.rollback()", "        raise"),
)
_IMPORTS = (
    "from dataclasses import dataclass",
    "import logging",
    "from collections.abc import Iterable",
    "import time",
)


def _genre(base: Genre, **changes: object) -> Genre:
    shape = {name: getattr(base, name) for name in Genre.__slots__}
    return Genre(**{**shape, **changes})


_SHARED = {
    "name": "codebase",
    "firsts": PACKAGES,
    "seconds": AREAS,
    "entity": "{x}/{y}/main.py",
    "periods": ("",),
    "quantities": _CONSTANTS,
    "headings": (),
    "states": ("{a} = {v}",),
    "amends": (),
}
ENGLISH = _genre(
    genres_en.MANUAL,
    **_SHARED,
    numbered=False,
    title="# Repository snapshot {n}. Files follow one another, each after a line with its path.",
    roles=("maintainer",),
    rules=(
        Rule(
            "retry",
            '    """Retries after a timeout."""',
            '    """Does not retry after a timeout."""',
            "By its docstring, does the function {e} retry after a timeout?",
        ),
        Rule(
            "lock",
            '    """The caller must hold the lock."""',
            '    """The caller must not hold the lock."""',
            "By its docstring, must the caller of the function {e} hold the lock?",
        ),
    ),
    assigns=("# Maintainer: {v}",),
    fillers=(
        "# Formatting is checked on every change; see the contribution guide.",
        "# Types are checked strictly, also in tests and in scripts.",
        "# Generated parts of this package are rebuilt by the release job.",
    ),
    short=("# End", "#", "# See above", "# Nothing is defined below this line in this file."),
    key="{a} in the file {e}",
    role_key="the {a} of the file {e}",
    what=("What is the value of {k}?", "State the value of {k}."),
    all_of=("State the values of {k}.", "What are the values of {k}?"),
    where=("Which file defines the function {e}?", "In which file is the function {e} defined?"),
)
CHINESE = _genre(
    genres_zh.MANUAL,
    **_SHARED,
    numbered=False,
    title="# 代码库快照{n}。各文件依次排列，每个文件之前有一行路径。",
    roles=("维护者",),
    rules=(
        Rule(
            "retry",
            '    """超时后会重试。"""',
            '    """超时后不会重试。"""',
            "根据文档字符串，函数 {e} 超时后是否会重试？",
        ),
        Rule(
            "lock",
            '    """调用方必须持有锁。"""',
            '    """调用方不得持有锁。"""',
            "根据文档字符串，函数 {e} 的调用方是否必须持有锁？",
        ),
    ),
    assigns=("# 维护者：{v}",),
    fillers=(
        "# 每次修改都会检查代码格式，参见贡献指南。",
        "# 类型检查为严格模式，测试和脚本也包括在内。",
        "# 本软件包中自动生成的部分由发布任务重建。",
    ),
    short=("# 完", "#", "# 见上文", "# 在本文件中此行以下没有任何定义。"),
    key="文件 {e} 中的 {a}",
    role_key="文件 {e} 的{a}",
    what=("{k} 的值是多少？", "请说明{k} 的值。"),
    all_of=("{k} 的值分别是多少？", "请分别说明{k} 的值。"),
    where=("哪个文件定义了函数 {e}？", "函数 {e} 定义在哪个文件中？"),
)


def stream(genre: Genre, seed: int) -> Iterator[Said]:
    """Lines without end, file by file; ``genre`` gives the language of comments. Memory: the names so far."""
    return _Repository(genre, seed).lines()


class _Repository:
    def __init__(self, genre: Genre, seed: int):
        self.genre, self.rng = genre, Random(seed)
        self.paths: set[str] = set()
        self.functions: set[str] = set()

    def lines(self) -> Iterator[Said]:
        yield Said(self.genre.title.format(n=1000 + self.rng.randrange(9000)) + "\n")
        while True:
            path, noun = self._path()
            yield from self._head(path)
            for _ in range(3 + self.rng.randrange(6)):
                yield from self._function(path, noun)

    def _path(self) -> tuple[str, str]:
        rng = self.rng
        while True:
            noun = rng.choice(NOUNS)
            path = f"{rng.choice(PACKAGES)}/{rng.choice(AREAS)}/{noun}_{rng.choice(PARTS)}.py"
            if path not in self.paths:
                self.paths.add(path)
                return path, noun

    def _head(self, path: str) -> Iterator[Said]:
        genre, rng = self.genre, self.rng
        yield Said(f"# ==== {path} ====\n")
        value = rng.choice(genre.people)
        yield Said(genre.assigns[0].format(v=value) + "\n", Key(path, genre.roles[0]), "role", value)
        yield Said(rng.choice(_IMPORTS) + "\n")
        constants = list(genre.quantities)
        rng.shuffle(constants)
        for quantity in constants[: 3 + rng.randrange(4)]:
            value = quantity.value(rng)
            text = genre.states[0].format(a=quantity.name, v=value)
            yield Said(text + "\n", Key(path, quantity.name), "figure", value)

    def _function(self, path: str, noun: str) -> Iterator[Said]:
        rng = self.rng
        while True:
            name = f"{rng.choice(VERBS)}_{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}_{rng.choice(PARTS)}"
            if name not in self.functions:
                self.functions.add(name)
                break
        yield Said(f"def {name}({noun}, limit, grace):\n", Key(name, "definition"), "where", path)
        rule: Rule = rng.choice(self.genre.rules)
        holds = rng.randrange(2) == 0
        yield Said((rule.holds if holds else rule.fails) + "\n", Key(name, rule.name), "rule", "yes" if holds else "no")
        for _ in range(1 + rng.randrange(3)):
            for line in rng.choice(_BODIES):
                yield Said(line.format(n=noun, f=name) + "\n")
        yield Said(f"    return {noun}\n")
