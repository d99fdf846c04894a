"""Finds, fetches and loads models: `load_model` with its weights, `open_model` without."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_kv.models.configuration import model_config
    from hetero_kv.models.errors import ModelError
    from hetero_kv.models.fetching import cache_home, fetch
    from hetero_kv.models.loading import LoadedModel, OpenedModel, load_model, open_model
    from hetero_kv.models.named import DEFAULT_MODEL, NAMED_MODELS, ModelFile, NamedModel
    from hetero_kv.models.progress import ProgressReport

__all__ = [
    "DEFAULT_MODEL",
    "NAMED_MODELS",
    "LoadedModel",
    "ModelError",
    "ModelFile",
    "NamedModel",
    "OpenedModel",
    "ProgressReport",
    "cache_home",
    "fetch",
    "load_model",
    "model_config",
    "open_model",
]

_HOME = {
    "DEFAULT_MODEL": "named",
    "LoadedModel": "loading",
    "ModelError": "errors",
    "ModelFile": "named",
    "NAMED_MODELS": "named",
    "NamedModel": "named",
    "OpenedModel": "loading",
    "ProgressReport": "progress",
    "cache_home": "fetching",
    "fetch": "fetching",
    "load_model": "loading",
    "model_config": "configuration",
    "open_model": "loading",
}


def __getattr__(name: str) -> Any:
    # Lazy, because layers import only `placing`, which does not need the readers of model files.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
