"""Opens the context folder that the settings name."""

from __future__ import annotations

from pathlib import Path

from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError
from hetero_kv.models.fetching import cache_home


def open_store(settings: ContextSettings, *, makes: bool = True) -> ContextStore:
    """The store in the context folder.

    makes: whether a missing folder is created; if False, a folder that the settings name must exist.

    Raises ContextError if the folder cannot be used.
    """
    is_named = settings.context_folder != "auto"
    folder = settings.context_folder if is_named else cache_home() / "contexts"
    if is_named and not makes and not Path(folder).expanduser().is_dir():
        raise ContextError(f"there is no folder {folder} (context_folder); name one that holds contexts")
    limit = None if isinstance(settings.context_cache_gb, str) else round(settings.context_cache_gb * 1e9)
    return ContextStore(folder, limit)
