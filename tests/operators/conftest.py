"""Models that tests of operators share."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from tests.support.devices import model_on
from tests.support.simulated_cuda.graphs import CUDAGraph
from tests.support.tiny_models import tiny_model

_LLAMA = tiny_model("llama")
_DEEP_LLAMA = tiny_model("llama", num_hidden_layers=4)
_MODELS: dict[str, object] = {}


@pytest.fixture
def llama():
    """A shared tiny Llama, without rules before and after each test."""
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


@pytest.fixture
def deep_llama():
    """A shared tiny Llama of four layers with different choices, without rules before and after each test."""
    yield _DEEP_LLAMA
    if getattr(_DEEP_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_DEEP_LLAMA)


@pytest.fixture
def llama_on_gpu(gpu):
    """A tiny Llama in bfloat16 on the simulated GPU."""
    return model_on(torch.device("cuda", 0), tiny_model("llama").to(torch.bfloat16))


@pytest.fixture
def captures(monkeypatch):
    """The CUDA graphs whose capture has begun."""
    found, begin = [], CUDAGraph.capture_begin

    def noted(self, *args, **kwargs):
        found.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(CUDAGraph, "capture_begin", noted)
    return found


@pytest.fixture
def model_of():
    """A shared tiny model of an architecture, without rules before and after each test."""

    def made(architecture="llama"):
        if architecture not in _MODELS:
            _MODELS[architecture] = tiny_model(architecture, max_position_embeddings=1024)
        return _MODELS[architecture]

    yield made
    for model in _MODELS.values():
        if getattr(model, "hetero_kv_injection", None) is not None:
            eject(model)
