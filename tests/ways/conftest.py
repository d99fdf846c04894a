"""The injected model, with a HeteroCache and without."""

from __future__ import annotations

import pytest
from called import ASSISTANT, EVERYTHING, MODEL, Call

from hetero_kv import HeteroCache, eject, inject


@pytest.fixture(scope="module", params=["a cache", "no cache"])
def call(request, one_thread):
    """An injected model, called with a HeteroCache, and without one."""
    for model in (MODEL, ASSISTANT):
        inject(model, "quest", command_line=EVERYTHING)
    given = (lambda: HeteroCache(MODEL)) if request.param == "a cache" else (lambda: None)
    yield Call(MODEL, ASSISTANT, given)
    for model in (MODEL, ASSISTANT):
        eject(model)


@pytest.fixture(scope="module")
def injected(call):
    """The same, where it makes no difference whether a cache is given."""
    return call
