"""Which variants of a test run in `make test`, and which only in `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def with_slow(values: Iterable[Any] | Mapping[str, Any], slow: Collection[Any]) -> list[Any]:
    """Parameters of a test, those of `slow` among the slow tests; of a mapping its values, by its names.

    For variants that differ from others by what another test has: a kernel is compiled for each of its shapes, which
    takes seconds.
    """
    if isinstance(values, Mapping):
        assert values.keys() >= set(slow), slow
        return [pytest.param(value, marks=_marks(name in slow), id=name) for name, value in values.items()]
    values = list(values)
    assert set(values) >= set(slow), slow
    # A tuple has a value for each name of the parameter.
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*part, marks=_marks(value in slow)) for part, value in zip(parts, values, strict=True)]


def with_few(values: Iterable[Any], quick: int | Collection[Any] = 1) -> list[Any]:
    """Parameters of a test, those of `quick`, or as many of the first, in `make test`, and all others slow tests.

    For variants of one behaviour, of which `make test` needs an example.
    """
    found = []
    for place, value in enumerate(values):
        is_quick = place < quick if isinstance(quick, int) else value in quick
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=_marks(not is_quick)))
    assert isinstance(quick, int) or len(quick) <= sum(not each.marks for each in found), quick
    return found


def combined(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test that takes one value of each axis: every combination of them.

    In `make test` are as many as the longest axis has values, in which every value of every axis comes up; all others
    are slow tests.
    """
    longest = max(map(len, axes))
    quick = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values, marks=_marks(places not in quick)))
    return found


def _marks(is_slow: bool) -> Any:
    return pytest.mark.slow if is_slow else ()
