"""Kernels are found without running any, and compiled side by side: with a stand-in for Triton, whose hooks it has."""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longread.engine import compile_ahead
from longread.engine.compile_ahead import Mark, compile_all, missing_kernels

CPU = torch.device("cpu")


class Hooks:
    """Of Triton: a chain that is called before each launch."""

    def __init__(self) -> None:
        self.calls: list[Callable[[object], None]] = []
        self.add, self.remove = self.calls.append, self.calls.remove


class Kernel:
    """A function of a module, compiled for each key that it is launched with."""

    def __init__(self, knobs: Any, name: str, compiled: Callable[[str], None] = lambda key: None):
        self.runtime, self.name, self.module, self.compiled = knobs.runtime, name, "kernels", compiled
        self.there: set[str] = set()
        self.loaded: set[str] = set()
        self.ran: list[str] = []

    def launch(self, key: str) -> None:
        if key not in self.there:
            hook = self.runtime.jit_cache_hook
            given = {"fn": SimpleNamespace(module=self.module, name=self.name, jit_function=self), "key": key}
            given |= {"compile": {"specialization_data": key}, "repr": "", "is_manual_warmup": False}
            if hook is not None and hook(**given):
                return
            self.preload(key).load()
        for call in self.runtime.launch_enter_hook.calls:
            call({})
        self.ran.append(key)

    def preload(self, key: str) -> "Loaded":
        self.compiled(key)
        self.there.add(key)
        return Loaded(self, key)


class Loaded:
    """A compiled kernel, loaded when its launcher is first asked for."""

    def __init__(self, kernel: Kernel, key: str):
        self.kernel, self.key = kernel, key

    def load(self) -> None:
        self.kernel.loaded.add(self.key)

    @property
    def run(self) -> None:
        self.load()


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    runtime = SimpleNamespace(jit_cache_hook=None, launch_enter_hook=Hooks())
    found = SimpleNamespace(runtime=runtime, cache=SimpleNamespace(dir=str(tmp_path / "cache")))
    module = ModuleType("triton")
    vars(module).update(knobs=found, __version__="3.6.0")
    monkeypatch.setitem(sys.modules, "triton", module)
    return found


def unhooked(knobs: Any) -> bool:
    return knobs.runtime.jit_cache_hook is None and not knobs.runtime.launch_enter_hook.calls


def test_each_missing_kernel_is_found_once_and_none_runs(knobs: Any) -> None:
    a, b = Kernel(knobs, "a"), Kernel(knobs, "b")
    work = [lambda: (a.launch("1"), b.launch("1"), a.launch("2")), lambda: (a.launch("2"), b.launch("3"))]
    found = missing_kernels(work)
    assert [(kernel.function, kernel.launch) for kernel in found] == [(a, "1"), (b, "1"), (a, "2"), (b, "3")]
    assert not a.ran and not b.ran and not a.there and unhooked(knobs)
    assert compile_all(found, CPU, lambda done, total: None) > 0
    assert (a.there, b.there) == (a.loaded, b.loaded) == ({"1", "2"}, {"1", "3"})


def test_a_kernel_that_is_there_ends_the_work_without_running(knobs: Any) -> None:
    """On what the missing ones did not write."""
    a, b = Kernel(knobs, "a"), Kernel(knobs, "b")
    b.preload("1")
    after: list[str] = []
    work = [lambda: (a.launch("1"), b.launch("1"), after.append("not come to")), lambda: a.launch("2")]
    assert [kernel.launch for kernel in missing_kernels(work)] == ["1", "2"]
    assert not b.ran and not after and unhooked(knobs)


def test_launches_of_other_threads_run(knobs: Any) -> None:
    """Of an engine that serves in the same process while this one is loaded."""
    a, b = Kernel(knobs, "a"), Kernel(knobs, "b")
    b.preload("1")

    def serve() -> None:
        other = threading.Thread(target=lambda: (b.launch("1"), b.launch("2")))
        other.start()
        other.join()
        a.launch("1")

    assert [kernel.function for kernel in missing_kernels([serve])] == [a]
    assert b.ran == ["1", "2"] and not a.ran


def test_what_breaks_in_the_work_is_raised_and_leaves_no_hook(knobs: Any) -> None:
    def breaks() -> None:
        raise RuntimeError("no such shape")

    with pytest.raises(RuntimeError, match="no such shape"):
        missing_kernels([breaks])
    assert unhooked(knobs)


def test_kernels_are_compiled_side_by_side(knobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time: one alone would wait for the others until the time is over."""
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: range(4))
    together = threading.Barrier(4)
    a = Kernel(knobs, "a", lambda key: together.wait(30) and None)
    found = missing_kernels([lambda: [a.launch(str(i)) for i in range(8)]])
    told: list[tuple[int, int]] = []
    assert compile_all(found, CPU, lambda done, total: told.append((done, total))) == 4
    assert told == [(i, 8) for i in range(1, 9)] and len(a.there) == 8
    assert compile_all([], CPU, lambda done, total: None) == 0


def test_filters_of_warnings_are_as_before(knobs: Any) -> None:
    """However threads leave them that each save, change and restore them."""

    def compiled(key: str) -> None:
        warnings.simplefilter("ignore", DeprecationWarning)

    before, a = list(warnings.filters), Kernel(knobs, "a", compiled)
    compile_all(missing_kernels([lambda: [a.launch(str(i)) for i in range(8)]]), CPU, lambda done, total: None)
    assert len(a.there) == 8 and list(warnings.filters) == before


def test_a_kernel_that_cannot_be_compiled_says_what_it_would_have_said(
    knobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: range(1))

    def compiled(key: str) -> None:
        if key == "1":
            raise SyntaxError("at 3:4: no such operator")
        time.sleep(0.01)

    a = Kernel(knobs, "a", compiled)
    found = missing_kernels([lambda: [a.launch(str(i)) for i in range(100)]])
    with pytest.raises(SyntaxError, match="no such operator"):
        compile_all(found, CPU, lambda done, total: None)
    assert len(a.there) < 99, "what was not begun is not compiled any more"


def test_a_mark_is_of_all_that_it_was_left_for(knobs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernel.py").write_text("one")
    monkeypatch.setattr(compile_ahead, "PACKAGE", package)
    mark = Mark("spec", 8192)
    assert not mark.there()
    mark.leave()
    assert Mark("spec", 8192).there() and not Mark("spec", 4096).there()
    (package / "kernel.py").write_text("two")
    assert not Mark("spec", 8192).there()


def test_a_cache_that_cannot_be_written_is_told(knobs: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    mark = Mark("spec")
    mark.leave()
    assert "compiled at each start" in caplog.text and not mark.there()
