"""The folder of contexts that settings name."""

from __future__ import annotations

from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.contexts.store import ContextStore
from hetero_kv.models.fetching import cache_home


def open_store(settings: ContextSettings) -> ContextStore:
    """The folder's contexts. Raises ContextError where it cannot be used."""
    folder = cache_home() / "contexts" if settings.context_folder == "auto" else settings.context_folder
    limit = None if isinstance(settings.context_cache_gb, str) else round(settings.context_cache_gb * 1e9)
    return ContextStore(folder, limit)
