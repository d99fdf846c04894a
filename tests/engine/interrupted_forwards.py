"""Ctrl-C at a chosen moment of a model's forward.

Python raises KeyboardInterrupt where it looks for signals: when a function begins or goes on after a `yield`, and when
a call has returned. A profiler is told of these moments, may raise there, and sees nothing that lies between. Moments
count when the function that would be interrupted is the engine's or the model's:

- a function that begins or goes on (event `call`): itself;
- a call that has returned (`return` of Python's own functions, `c_return` of others): the one that made the call.

Left out is what no code can be guarded against, and what undoes an interrupt itself:

- everything in or below an `except` or `finally` block of the engine;
- what begins when Python lets go of an object, `__del__`, a weak set's forgetting and generator expressions, whose
  exceptions it swallows;
- the moment behind `__enter__` and `__exit__`: a `with` does not guard it yet, or any more. So a forward is over when
  its outermost `with` is.
"""

from __future__ import annotations

import _weakrefset
import ast
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

import hetero_kv

_ENGINE = str(Path(hetero_kv.__file__).parent)
_MODELS = str(Path(transformers.__file__).parent / "models")
_GUARD_ENDS = ("__enter__", "__exit__")


class Moments:
    """A profiler that counts a forward's moments, and interrupts it at one of them.

    Args:
        at: the moment that raises KeyboardInterrupt, from 0; None counts only.

    Attributes:
        passed: moments so far.
        where: the one that raised, as "file:line function".
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.passed = 0
        self.where: str | None = None
        self._undoing: FrameType | None = None

    def run(self, forward: Callable[[], Any]) -> Any:
        """What `forward` gives, unless it is interrupted."""
        sys.setprofile(self._notice)
        try:
            return forward()
        finally:
            sys.setprofile(None)

    def _notice(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._undoing is not None:
            if frame is self._undoing and event == "return":
                self._undoing = None
            return
        if event == "call" and _is_undoing(frame):
            self._undoing = frame
            return
        if event != "c_return" and frame.f_code.co_name == "<genexpr>":
            return
        interrupted = self._moment(frame, event, argument)
        if interrupted is None or interrupted.f_lineno in _undoing_lines(interrupted.f_code.co_filename):
            return
        self.passed += 1
        if self.passed - 1 == self.at:
            sys.setprofile(None)
            code = interrupted.f_code
            self.where = f"{Path(code.co_filename).name}:{interrupted.f_lineno} {code.co_name} ({event})"
            raise self._raised()

    def _moment(self, frame: FrameType, event: str, argument: Any) -> FrameType | None:
        """The function that would be interrupted at this event; None where the event is no moment."""
        interrupted: FrameType | None = frame
        if event == "return":
            interrupted = None if frame.f_code.co_name in _GUARD_ENDS else frame.f_back
        if event == "c_call" or interrupted is None or not is_ours(interrupted.f_code.co_filename):
            return None
        return interrupted

    def _raised(self) -> BaseException:
        return KeyboardInterrupt(self.where)


@functools.cache
def is_ours(file: str) -> bool:
    """Whether a file is the engine's or a model's."""
    return file.startswith((_ENGINE, _MODELS))


def _is_undoing(frame: FrameType) -> bool:
    caller = frame.f_back
    code = frame.f_code
    if code.co_name == "__del__" or (code.co_name, code.co_filename) == ("_remove", _weakrefset.__file__):
        return True
    return caller is not None and caller.f_lineno in _undoing_lines(caller.f_code.co_filename)


@functools.cache
def _undoing_lines(file: str) -> frozenset[int]:
    """The lines of the engine's `except` and `finally` blocks in a file."""
    if not file.startswith(_ENGINE):
        return frozenset()
    blocks: list[ast.stmt] = []
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Try):
            blocks += node.finalbody
        elif isinstance(node, ast.ExceptHandler):
            blocks += node.body
    return frozenset(line for block in blocks for line in range(block.lineno, block.end_lineno + 1))


@torch.no_grad()
def unobserved(model: Any, cache: Any, parts: Iterable[torch.Tensor]) -> None:
    """Run a conversation as it is: a profiler would follow Numba through the kernels that it compiles."""
    for part in parts:
        model(part, past_key_values=cache)
