"""Which of a test's variants run in `make test`, and which in `make test-slow` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def _marks(is_slow: bool) -> Any:
    return pytest.mark.slow if is_slow else ()
