"""What the tests of operators have in common."""

from __future__ import annotations

import pytest
from tiny_models import tiny_model

from hetero_kv import eject

_LLAMA = tiny_model("llama")


@pytest.fixture
def llama():
    """A tiny Llama, the same for all tests, without rules before and after each."""
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)
