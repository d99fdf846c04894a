"""Spares a command's process the imports that no command uses, which are half the time of importing transformers.

torch's compiler. transformers imports `torch._dynamo`, and with it sympy, to mark functions for the compiler. Here it
is imported when something else of it is used; it then gets the marks that functions have got until then.

Tensors of several processes. transformers imports `torch.distributed.tensor` to recognise them. No command makes or
takes any; here transformers is told that torch has no `torch.distributed`.

The lists of classes. transformers reads the source of all its model files, twice, to learn which of them has which
class. Here the result is kept on the disk (`class_lists.py`).

All this is for the processes of commands alone: in another process, anything may be used.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from hetero_kv.start_up.class_lists import keep_class_lists

COMPILER = "torch._dynamo"
#: transformers' module that says what is installed, and lists classes.
AVAILABILITY = "transformers.utils.import_utils"
# The compiler's decorators that mark a function and return it.
_MARKS = ("allow_in_graph", "assume_constant_result")


def defer_imports() -> None:
    """Do what this module describes, unless torch or transformers is imported already."""
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the modules that are deferred or changed where they are."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loaders: dict[str, Any] = {COMPILER: _Deferring, AVAILABILITY: _Changing}
        if fullname not in loaders:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = loaders[fullname](spec.loader)
        return spec


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader


class _Changing(_Loader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        self._loader.exec_module(module)
        module.is_torch_distributed_available = lambda: False
        keep_class_lists(module)


class _Deferring(_Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)


class DeferredModule(ModuleType):
    """A module that is executed when it is first used: when it lacks an attribute, which does not mark functions."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_deferred"] = _Deferred(self)

    def __getattr__(self, name: str) -> Any:
        deferred = self.__dict__.get("_deferred")
        # Anyone may look for a module's `__path__` or `__warningregistry__`.
        if deferred is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return deferred.attribute(name)


class _Deferred:
    """What is left to do for a module that is not executed."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._lock = threading.RLock()
        self._is_executing = False
        self._marks: list[Callable[[], object]] = []

    def attribute(self, name: str) -> Any:
        """What the module has under a name that it lacks so far."""
        if name in (*_MARKS, "disable") and not self._is_executing:
            return functools.partial(self._marked, name)
        with self._lock:
            if self._is_executing:
                raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r} so far")
            self._execute()
        return getattr(self._module, name)

    def _marked(self, name: str, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the decorator `name` of the module returns for a function; for None, the decorator with its settings."""
        if function is None:
            return lambda function: self._marked(name, function, *args, **kwargs)
        if not isinstance(function, FunctionType):
            with self._lock:
                self._execute()
            return getattr(self._module, name)(function, *args, **kwargs)

        marked: Callable[..., Any] = function

        def mark() -> None:
            nonlocal marked
            marked = getattr(self._module, name)(function, *args, **kwargs)

        self._marks.append(mark)
        if name in _MARKS:
            return function

        # What is disabled must not be compiled; until the compiler is imported, nothing is.
        @functools.wraps(function)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return marked(*args, **kwargs)

        return disabled

    def _execute(self) -> None:
        module: Any = self._module
        if type(module) is ModuleType:  # another thread has done it
            return
        self._is_executing = True
        try:
            module.__loader__.exec_module(module)
        finally:
            self._is_executing = False
        module.__class__ = ModuleType
        del module._deferred
        for mark in self._marks:
            mark()
