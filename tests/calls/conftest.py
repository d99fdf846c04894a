"""The injected model with and without a HeteroCache."""

from __future__ import annotations

import pytest

from hetero_kv import HeteroCache, eject, inject
from tests.calls.reference_model import ASSISTANT, EVERYTHING, MODEL, Call


@pytest.fixture(scope="module", params=["a cache", "no cache"])
def call(request, one_thread):
    """An injected model, called with a HeteroCache, and without one."""
    for model in (MODEL, ASSISTANT):
        inject(model, "quest", command_line=EVERYTHING)
    make_cache = (lambda: HeteroCache(MODEL)) if request.param == "a cache" else (lambda: None)
    yield Call(MODEL, ASSISTANT, make_cache)
    for model in (MODEL, ASSISTANT):
        eject(model)


@pytest.fixture(scope="module")
def injected(call):
    """The same, for tests that work with and without a cache."""
    return call
