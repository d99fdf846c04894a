"""Finding, fetching and loading models: `load_model` is the one front door."""

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
