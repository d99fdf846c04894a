"""A model whose weights stay as its files store them, for all methods of an evaluation alike."""

from __future__ import annotations

import os
from typing import Any

from hetero_kv.loading import load_model
from hetero_kv.models import DEFAULT_MODEL, LoadedModel
from hetero_kv.rules.injection import eject_around_packed_weights


def load_packed(name_or_path: str | os.PathLike[str] = DEFAULT_MODEL, **asked: Any) -> LoadedModel:
    """Load a model, weights of a GGUF file as it stores them, and leave them so beneath every method's rules.

    A recipe run by itself has them so too; what decodes under it and what is measured here are the same numbers.

    Args:
        asked: as `hetero_kv.load_model` takes it: `gguf_path`, `dtype`, `device`, `trust_remote_code`, `threads_num`.

    Raises:
        ModelError: the model cannot be found, or its files do not hold its weights.
    """
    loaded = load_model(name_or_path, config="dense", **asked)
    eject_around_packed_weights(loaded.model)
    return loaded
