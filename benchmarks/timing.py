"""Medians of interleaved repeats, which all benchmarks use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved_samples(actions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """The results of each action, over rounds in which every action runs once.

    A disturbance of the machine then affects all actions alike.
    """
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            samples[name].append(action())
    return samples


def interleaved_medians(actions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median result of each action, from `interleaved_samples`."""
    return {name: statistics.median(values) for name, values in interleaved_samples(actions, repeats).items()}
