"""Opens the contexts that the settings name: in a folder, or at an address."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hetero_kv.cache_home import cache_home
from hetero_kv.contexts.settings import ContextSettings, is_address
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.errors import ContextError


def open_store(settings: ContextSettings, *, makes: bool = True) -> ContextStore:
    """The contexts that the settings name.

    makes: whether a missing folder or index is created; if False, a folder that the settings name must exist.

    Raises as `contexts_at`.
    """
    is_named = settings.context_folder != "auto"
    folder = settings.context_folder if is_named else cache_home() / "contexts"
    is_missing = is_named and not is_address(folder) and not Path(folder).expanduser().is_dir()
    if is_missing and not makes:
        raise ContextError(f"there is no folder {folder} (context_folder); name one that holds contexts")
    return contexts_at(
        folder, settings.context_cache_gb, settings.context_local_gb, settings.context_wait_s,
        makes=makes,
    )  # fmt: skip


def contexts_at(
    place: str | Path,
    cache_gb: float | str | None = None,
    local_gb: float | str | None = None,
    wait_s: float = 10.0,
    *,
    makes: bool = True,
) -> ContextStore:
    """The contexts in a folder, or at an fsspec address.

    Args:
        cache_gb: GB that all of them may take; None or "all" for no limit.
        local_gb: GB that the disk cache in front of an address may take; None or "all" for no limit.
        wait_s: the longest wait for an address, seconds.
        makes: whether a missing folder or index is created.

    Raises ContextError if the folder cannot be used, and ConfigError for an address that fsspec cannot use.
    """
    limit, local_limit = _bytes(cache_gb), _bytes(local_gb)
    if not is_address(place):
        return ContextStore(place, limit, makes=makes)
    # Imported here, because a folder needs none of it.
    from hetero_kv.contexts.shared_store import SharedContextStore

    address = str(place)
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    return SharedContextStore(address, limit, cache_home() / "context_cache" / name, local_limit, wait_s)


def _bytes(setting: float | str | None) -> int | None:
    """A setting in GB as bytes; None for "all"."""
    return None if setting is None or isinstance(setting, str) else round(setting * 1e9)
