"""Prefix caching: finds the stored context with the longest common prefix of a prompt, and continues from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.repair import can_roll_back_exactly
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import HeteroKVError

_logger = logging.getLogger(__name__)


class PrefixCache:
    """A prefix cache on a context store.

    If every layer can roll back to any token and continue exactly, as retrieval does, any common prefix is reused. Else
    a context is reused only for prompts that begin with all of it.

    Args:
        writes: whether `keep` stores contexts.
    """

    def __init__(self, store: ContextStore, *, writes: bool) -> None:
        self.store, self.writes = store, writes

    def with_stored_prefix(self, empty: HeteroCache, prompt: Sequence[int], **settings: Any) -> HeteroCache | None:
        """A cache with the longest stored prefix of `prompt`; None if none is stored.

        Args:
            empty: a cache of the model, without tokens.
            settings: further arguments of HeteroCache.
        """
        goes_back = can_roll_back_exactly(empty)
        model = empty.injection.model
        try:
            identity = empty.injection.identity
            self._fetch(identity, prompt, whole=not goes_back)
            found = self.store.longest(identity, prompt, whole=not goes_back)
            if found is None:
                return None
            stored, common = found
            cache = self.store.load(stored, model, first=common, **settings).cache
            if common < cache.get_seq_length():
                cache.crop(common - cache.get_seq_length())
            for layer in cache.groups[0].family_layers:
                # The saved context's observation windows belong to other questions.
                layer.reopen()
        except HeteroKVError as error:
            _logger.warning("a stored context cannot be used: %s", error)
            return None
        return cache

    def _fetch(self, identity: Identity, prompt: Sequence[int], *, whole: bool) -> None:
        try:
            self.store.fetch(identity, prompt, whole=whole)
        except ContextError as error:
            _logger.warning("a stored context is not fetched: %s", error)

    def keep(self, cache: HeteroCache, tokens: Sequence[int], notes: dict[str, Any]) -> None:
        """Store a cache of one sequence if the cache `writes`; a failure is logged as a warning."""
        if not self.writes:
            return
        try:
            self.store.save(cache, tokens, None, notes)
        except ContextError as error:
            _logger.warning("the context cannot be stored: %s", error)
