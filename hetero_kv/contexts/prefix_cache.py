"""Stored contexts that a new prompt begins with: found by the prompt's tokens, and gone on from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hetero_kv.contexts.repair import goes_back_exactly
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import HeteroKVError

_logger = logging.getLogger(__name__)


class PrefixCache:
    """What a store has of prompts.

    Where every layer can go back to any token and attends to all of a later prompt's past, as retrieval does, any
    stored beginning serves; else a context serves prompts that begin with all of it.

    Args:
        writes: whether contexts are stored too (`keep`).
    """

    def __init__(self, store: ContextStore, *, writes: bool) -> None:
        self.store, self.writes = store, writes

    def begun(self, empty: HeteroCache, prompt: Sequence[int], **settings: Any) -> HeteroCache | None:
        """A cache that holds a beginning of `prompt`, the longest that is stored; None where none is.

        Args:
            empty: a cache of the model, without tokens.
            settings: as HeteroCache takes them beside the model.
        """
        goes_back = goes_back_exactly(empty)
        model = empty.injection.model
        try:
            found = self.store.longest(empty.injection.identity, prompt, whole=not goes_back)
            if found is None:
                return None
            stored, common = found
            cache = self.store.load(stored, model, **settings).cache
            if common < cache.get_seq_length():
                cache.crop(common - cache.get_seq_length())
            for layer in cache.cohorts[0].family_layers:
                # The questions that it has heard are not this prompt's.
                layer.reopen()
        except HeteroKVError as error:
            _logger.warning("a stored context cannot be used: %s", error)
            return None
        return cache

    def keep(self, cache: HeteroCache, tokens: Sequence[int], notes: dict[str, Any]) -> None:
        """Store what a cache of one sequence holds, if it is to be; a warning says where that fails."""
        if not self.writes:
            return
        try:
            self.store.save(cache, tokens, None, notes)
        except ContextError as error:
            _logger.warning("the context is not stored: %s", error)
