"""What the tests of operators have in common."""

from __future__ import annotations

import pytest
from tiny_models import tiny_model

from hetero_kv import eject

_LLAMA = tiny_model("llama")
_DEEP_LLAMA = tiny_model("llama", num_hidden_layers=4)
_MODELS: dict[str, object] = {}


@pytest.fixture
def llama():
    """A tiny Llama, the same for all tests, without rules before and after each."""
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


@pytest.fixture
def deep_llama():
    """A tiny Llama of four layers, which differ in what they choose, the same for all tests, without rules beside."""
    yield _DEEP_LLAMA
    if getattr(_DEEP_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_DEEP_LLAMA)


@pytest.fixture
def model_of():
    """The tiny model of an architecture, the same for all tests, without rules before and after each."""

    def made(architecture="llama"):
        if architecture not in _MODELS:
            _MODELS[architecture] = tiny_model(architecture, max_position_embeddings=1024)
        return _MODELS[architecture]

    yield made
    for model in _MODELS.values():
        if getattr(model, "hetero_kv_injection", None) is not None:
            eject(model)
