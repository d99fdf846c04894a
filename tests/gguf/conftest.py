"""Tiny GGUF files, each written once and paired with its original model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.support.gguf_models.conversion import write
from tests.support.gguf_models.variants import VARIANTS, tiny_model, vocabulary_of


@dataclass(frozen=True)
class Written:
    """A file and its original."""

    path: Path
    original: Any


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """name, type of matrices -> the file of that variant."""
    folder = tmp_path_factory.mktemp("gguf")

    @cache
    def make(name: str, kind: GGMLQuantizationType | None = None) -> Written:
        with warnings.catch_warnings():
            # Of settings that no published model has, for they show in 40 tokens.
            warnings.simplefilter("ignore")
            original = tiny_model(name, eighths=kind is not None)
        path = folder / f"{len(list(folder.iterdir()))}.gguf"
        return Written(write(path, original, vocabulary_of(VARIANTS[name][0]), kind), original)

    return make


@pytest.fixture(autouse=True, scope="module")
def _no_gradients(one_thread):
    with torch.inference_mode():
        yield
