"""Attributes the frames and the time of a decoded token to the project, the kernels, the model or other libraries."""

from __future__ import annotations

import cProfile
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "hetero_kv"
#: Owners of time besides the project.
MODEL, KERNELS = "(model)", "(kernels)"

# CPU time of the single computing thread, which excludes other programs.
clock = time.thread_time


class FrameCount:
    """A profile function that counts entered frames; resuming a generator enters its frame again."""

    def __init__(self, layers: Any) -> None:
        self._layers = {id(layer) for layer in layers}
        self._inside = [False]
        self.ours: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.in_layers = self.others = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event == "call":
            inside = self._inside[-1] or id(frame.f_locals.get("self")) in self._layers
            self._inside.append(inside)
            if _is_ours(frame):
                self.ours[_name(frame)] += 1
                self.in_layers += inside
                return
            # Frames of the measurement do not count.
            self.others += frame.f_globals.get("__name__") not in ("__main__", __name__)
            if frame.f_back is not None and _is_ours(frame.f_back):
                self.called[_name(frame)] += 1
        elif event == "return" and len(self._inside) > 1:
            self._inside.pop()
        elif event == "c_call" and _is_ours(frame):
            self.called[getattr(arg, "__qualname__", repr(arg))] += 1


class Attribution:
    """Sums the seconds of a `cProfile` profile by owner.

    A function of the project owns its time and that of all callees, including C functions and other libraries, up to
    the next function of the project, a compiled kernel, or a function of transformers' models, which own theirs. Time
    of a callee with several callers is divided by the time of each caller's calls; one level further, by the number of
    calls. `torch.no_grad` as a decorator belongs to the project: the untouched model has one, not one per layer.

    Args:
        folders: the folders of the project's functions.
        kernels: the function that calls compiled ones.
    """

    def __init__(self, folders: tuple[str, ...], kernels: Any) -> None:
        self._folders, self._kernels = folders, kernels
        self.profile = cProfile.Profile(clock)
        self._compiled: set[Any] = set()
        self._call_seconds = profiler_seconds_per_call()

    def seconds(self, plain: float) -> Counter[str]:
        """Seconds by owner that add up to `plain`, the time without the profiler.

        The profiler's overhead is proportional to the calls of Python functions and of native ones, and counts half for
        the caller and half for the callee.
        """
        entries = self.profile.getstats()
        # Numba reports a compiled function to the profiler as if Python had called its source.
        called = (entry.calls or () for entry in entries if entry.code is self._kernels)
        self._compiled = {call.code for calls in called for call in calls if not isinstance(call.code, str)}
        callers: dict[Any, dict[Any, Any]] = {}
        for entry in entries:
            for call in entry.calls or ():
                callers.setdefault(call.code, {})[entry.code] = call
        shares: dict[Any, dict[str, float]] = {}
        spent: Counter[str] = Counter()
        overhead: Counter[str] = Counter()
        for entry in entries:
            anchor = self._anchor(entry.code)
            if anchor or entry.code not in callers:
                spent[anchor or MODEL] += entry.inlinetime
            for caller, call in callers.get(entry.code, {}).items():
                cost = call.callcount * self._call_seconds[isinstance(entry.code, str)] / 2
                for owner, share in self._shares(caller, callers, shares).items():
                    spent[owner] += 0 if anchor else share * call.inlinetime
                    overhead[owner] += share * (cost if anchor else 2 * cost)
                if anchor:
                    overhead[anchor] += cost
        scale = (spent.total() - plain) / overhead.total()
        return Counter({owner: seconds - scale * overhead[owner] for owner, seconds in spent.items()})

    def _shares(self, code: Any, callers: Any, shares: dict[Any, dict[str, float]]) -> dict[str, float]:
        """The owners of a function's calls: owner -> share; cached in `shares`."""
        if code not in shares:
            anchor = self._anchor(code)
            # In a recursion, the model owns it.
            shares[code] = {anchor or MODEL: 1.0}
            if anchor is None and code in callers:
                found: Counter[str] = Counter()
                total = sum(call.callcount for call in callers[code].values())
                for caller, call in callers[code].items():
                    for owner, share in self._shares(caller, callers, shares).items():
                        found[owner] += share * call.callcount / total
                shares[code] = dict(found)
        return shares[code]

    def _anchor(self, code: Any) -> str | None:
        file = getattr(code, "co_filename", "")
        if code is self._kernels or code in self._compiled:
            return KERNELS
        if file.startswith(self._folders):
            return f"{Path(file).stem}: {code.co_qualname}"
        if file.endswith("torch/utils/_contextlib.py"):
            return "torch: no_grad as a decorator"
        return MODEL if "/transformers/models/" in file else None


def _is_ours(frame: Any) -> bool:
    # By module, not by file: methods generated by `dataclass` have no file.
    return frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE


def _name(frame: Any) -> str:
    return f"{frame.f_globals.get('__name__', '').rpartition('.')[2]}: {frame.f_code.co_qualname}"


@contextmanager
def counted(count: FrameCount) -> Iterator[None]:
    """Within this context `count` gets the events of `sys.setprofile`."""
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def profiler_seconds_per_call(calls: int = 5000) -> tuple[float, float]:
    """The overhead of `cProfile` per call of a Python function, and of a native one."""

    def python() -> None:
        pass

    def took(action: Callable[[], object]) -> float:
        start = clock()
        for _ in range(calls):
            action()
        return (clock() - start) / calls

    added = []
    for action in (python, int):
        plain = min(took(action) for _ in range(3))
        with cProfile.Profile(clock):
            added.append(min(took(action) for _ in range(3)) - plain)
    return added[0], added[1]
