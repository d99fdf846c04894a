"""Fixtures of sparse prefills."""

from __future__ import annotations

import pytest

from hetero_kv.families.sparse_prefill import known_patterns
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Patterns of tests are not the user's."""
    monkeypatch.setenv(known_patterns.ENVIRONMENT_VARIABLE, str(tmp_path / "patterns"))
    return tmp_path / "patterns"


@pytest.fixture(scope="module")
def qwen2():
    return tiny_model("qwen2", max_position_embeddings=2048)
