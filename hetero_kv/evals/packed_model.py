"""A model whose weights stay packed as its files store them, for all methods of an evaluation."""

from __future__ import annotations

import os
from typing import Any

from hetero_kv.loading import load_model
from hetero_kv.models import DEFAULT_MODEL, LoadedModel
from hetero_kv.rules.injecting import eject_around_packed_weights


def load_packed(name_or_path: str | os.PathLike[str] = DEFAULT_MODEL, **arguments: Any) -> LoadedModel:
    """Load a model with a GGUF file's weights packed, and keep them packed under every method's rules.

    A recipe by itself also keeps them packed, so that evaluations measure the same numbers as the chat computes.

    Args:
        arguments: of `hetero_kv.load_model`: `gguf_path`, `dtype`, `device`, `trust_remote_code`, `threads_num`.

    Raises:
        ModelError: the model cannot be found, or its files lack its weights.
    """
    loaded = load_model(name_or_path, config="dense", **arguments)
    eject_around_packed_weights(loaded.model)
    return loaded
