"""torch's compiler is imported when it is used, and gets the marks of before."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetero_kv.start_up import deferred_imports

# A compiler that knows which functions are marked, and is imported in a circle.
PACKAGE = """
import compiler_of_tests.parts
marked, disabled = [], []
def allow_in_graph(function):
    marked.append(function)
    return function
def disable(function=None, recursive=True, *, reason=None):
    def wrapped(*arguments):
        return function(*arguments), recursive, reason
    disabled.append(function)
    return wrapped
def compile(function):
    return function
"""
PARTS = """
import compiler_of_tests
early = hasattr(compiler_of_tests, "marked")
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, found by the finder of deferred modules."""
    name = "compiler_of_tests"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "parts.py").write_text(PARTS)
    monkeypatch.setattr(deferred_imports, "COMPILER", name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [deferred_imports._Finder(), *sys.meta_path])
    yield __import__(name)
    for each in (name, f"{name}.parts"):
        sys.modules.pop(each, None)


def is_executed(module: ModuleType) -> bool:
    return "compile" in vars(module)


def test_it_is_executed_when_it_is_used(compiler: Any):
    assert not hasattr(compiler, "__wrapped__")
    assert compiler.__path__
    assert not is_executed(compiler)
    assert compiler.compile(len) is len
    assert type(compiler) is ModuleType
    assert not compiler.parts.early
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        compiler.other  # noqa: B018


def test_it_gets_the_marks_of_before(compiler: Any):
    def function(number: int) -> int:
        return number

    assert compiler.allow_in_graph(function) is function
    disabled = compiler.disable(function, False, reason="why")
    also_disabled = compiler.disable(recursive=False)(function)
    assert disabled(3) == also_disabled(3) == 3
    assert not is_executed(compiler)
    assert compiler.marked == [function]
    assert compiler.disabled == [function, function]
    assert disabled(3) == (3, False, "why")
    assert also_disabled(3) == (3, False, None)


def test_what_is_no_function_is_marked_by_the_module(compiler: Any):
    assert compiler.allow_in_graph(len) is len
    assert compiler.marked == [len]


def test_threads_that_use_it_at_once_execute_it_once(compiler: Any):
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.marked)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(marked is found[0] for marked in found)


def test_an_error_is_raised_at_every_use(compiler: Any):
    path = Path(compiler.__file__)
    path.write_text("import no_such_module")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            compiler.compile  # noqa: B018


def test_a_process_that_has_torch_is_left_alone():
    before = list(sys.meta_path)
    deferred_imports.defer_imports()
    assert sys.meta_path == before
