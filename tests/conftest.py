"""Fixtures for every part of the suite."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The small real model on the CPU in float32, fetched into the usual cache; for tests marked `model`."""
    from hetero_kv.models import load_model

    return load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
