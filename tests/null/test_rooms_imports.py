"""The house rules that a machine can check: who may import whom, no cycles, torch-free rooms, sizes, broad excepts.

Imports are read from the syntax tree, so lazy and type-only ones count like the rest.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "longread"
EVERY = {"spec", "wire", "plan", "kv", "kernels", "weights", "models", "engine", "server", "measure"}
MAY_IMPORT: dict[str, set[str]] = {
    "spec": set(),
    "wire": {"spec"},
    "plan": {"spec"},
    "kv": {"spec"},
    "kernels": {"spec"},
    "weights": {"spec", "kernels"},
    "models": {"spec", "kernels"},
    "engine": {"spec", "plan", "kv", "kernels", "weights", "models"},
    "server": {"spec", "wire"},
    "measure": {"spec", "plan", "wire", "engine"},
    "cli": EVERY,
}
# Rooms and modules that must work where torch is not installed. A room's exceptions do its tensor work.
TORCH_FREE_ROOMS: dict[str, set[str]] = {
    "spec": set(),
    "wire": set(),
    "plan": set(),
    "server": set(),
    "kv": {"longread.kv.tensors", "longread.kv.device_copies", "longread.kv.layer_loads"},
    "cli": set(),
}
TORCH_FREE_MODULES = (
    "longread.engine.scheduler",
    "longread.engine.policy",
    "longread.engine.waiting",
    "longread.engine.reading",
    "longread.engine.rows",
    "longread.engine.slots",
    "longread.engine.standing",
    "longread.engine.batch",
    "longread.engine.virtual",
)
HEAVY = {"torch", "transformers"}
# Where an error of any kind is caught on purpose, and why: these are the edges of a process or of a request.
BROAD_EXCEPT: dict[str, str] = {
    "longread.cli.main": "the process's edge: an unknown error becomes one line and an exit code",
    "longread.server.driver": "the engine thread's edge: its failure becomes the end of every request",
    "longread.server.subscription": "one stream's edge: what breaks in it is raised in its own task and ends no other",
    "longread.server.worker.child": "the engine process's edge: what breaks is logged, and the server finds it gone",
    "longread.wire.tokenizer": "the edge of a third-party parser that raises Exception itself for a bad tokenizer.json",
    "longread.wire.documents.formats": "the edge of third-party readers: what a damaged PDF or DOCX raises is open",
    "longread.kv.transfer": "the I/O threads' edge: whatever breaks in there, no request waits for ever",
    "longread.kv.disk.ahead": "the reading threads' edge: whatever breaks in there is raised in the load that waits",
    "longread.engine.engine": "a step's edge: what breaks in the model fails the requests of that step only",
    "longread.engine.underway": "the same edge for chunks that are launched slice by slice: told when the step lands",
    "longread.engine.session": "the same edge for a session: half-written state is dropped, the error re-raised",
}
FILE_LINES, KERNEL_FILE_LINES, FUNCTION_LINES = 600, 900, 80


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def path_of(module: str) -> Path:
    path = SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def imports(module: str) -> frozenset[str]:
    """Everything that ``module`` imports, anywhere in it. ``from a import b`` counts as a.b where that is a module."""
    names: set[str] = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                names.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base)
        elif isinstance(node, ast.Call) and node.args and _is_import_call(node):
            argument = node.args[0]
            assert isinstance(argument, ast.Constant), f"{module}:{node.lineno}: an import of a computed name"
            names.add(str(argument.value))
    return frozenset(names)


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


def own_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name == "longread" or name.startswith("longread.")} - {module}


def torch_free() -> list[str]:
    return [
        name
        for name in modules()
        if (room(name) in TORCH_FREE_ROOMS and name not in TORCH_FREE_ROOMS[room(name)]) or name in TORCH_FREE_MODULES
    ]


def test_the_table_knows_every_room_and_is_acyclic() -> None:
    assert {room(name) for name in modules()} - {""} == set(MAY_IMPORT)
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {name for name, needs in MAY_IMPORT.items() if needs <= done} - done
        assert ready, f"the table itself has a cycle among {set(MAY_IMPORT) - done}"
        done |= ready


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        for target in own_imports(name)
        if room(name) and room(target) != room(name) and room(target) not in MAY_IMPORT[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_of_measure_import_only_from_lines_above_in_its_docstring() -> None:
    told = ast.get_docstring(modules()["longread.measure"], clean=False) or ""
    lines = [line.split("  ")[2].split(", ") for line in told.splitlines() if line.startswith("    ")]
    level = {part: number for number, parts in enumerate(lines) for part in parts}
    parts = {name: name.split(".")[2] for name in modules() if name.startswith("longread.measure.")}
    assert set(parts.values()) == set(level)
    wrong = [
        f"{name} imports {target}"
        for name, part in parts.items()
        for target in own_imports(name) & parts.keys()
        if parts[target] != part and level[parts[target]] >= level[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_imported_modules_exist() -> None:
    missing = [f"{n} imports {t}" for n in modules() for t in own_imports(n) if t not in modules()]
    assert not missing, "\n".join(missing)


def test_no_module_imports_itself_over_others() -> None:
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, " -> ".join([*trail, name])
        if name in state:
            return
        state[name] = 1
        for target in sorted(own_imports(name) & modules().keys()):
            visit(target, (*trail, name))
        state[name] = 2

    for name in modules():
        visit(name, ())


def test_torch_free_modules_name_no_torch() -> None:
    wrong = [f"{n} imports {t}" for n in torch_free() for t in imports(n) if t.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


def test_torch_free_modules_reach_no_torch_at_import() -> None:
    """With torch and transformers blocked, every torch-free module still imports. The cli may need torch to *run*."""
    program = (
        "import sys, importlib\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        f"for name in {torch_free()!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_broad_excepts_are_on_the_list() -> None:
    found = set()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                found.add(name)
    assert found == set(BROAD_EXCEPT), "broad excepts, against the list with reasons"


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(item) for item in kind.elts)
    return isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")


def test_files_keep_their_budget() -> None:
    over = []
    for name in modules():
        lines = len(path_of(name).read_text(encoding="utf-8").splitlines())
        budget = KERNEL_FILE_LINES if room(name) == "kernels" else FILE_LINES
        if lines > budget:
            over.append(f"{name}: {lines} lines, at most {budget}")
    assert not over, "\n".join(over)


def test_functions_keep_their_budget() -> None:
    over = [
        f"{name}.{node.name}: {(node.end_lineno or 0) - node.lineno + 1} lines, at most {FUNCTION_LINES}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not over, "\n".join(over)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("def f():\n    import torch.nn\n", {"torch.nn"}),
        ("if TYPE_CHECKING:\n    from torch import Tensor\n", {"torch"}),
        ("from . import model\n", {"longread.spec.model"}),
        ("from .model import ModelSpec\n", {"longread.spec.model"}),
        ("from ..plan import memory\n", {"longread.plan.memory"}),
        ("import importlib\nimportlib.import_module('longread.kv.cache')\n", {"importlib", "longread.kv.cache"}),
    ],
)
def test_the_reader_sees_every_kind_of_import(source: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_sample = modules() | {"longread.spec.sample": ast.parse(source)}
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: with_sample)
    assert imports.__wrapped__("longread.spec.sample") == wanted
