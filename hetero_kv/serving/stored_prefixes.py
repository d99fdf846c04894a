"""Prefixes in a folder of contexts: sequences that leave memory are saved, and loaded for later prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hetero_kv.contexts.addresses import PIECE
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.index import StoredContext
from hetero_kv.contexts.medium import UnreachableError
from hetero_kv.contexts.repair import can_roll_back_exactly
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, brief_error

_logger = logging.getLogger(__name__)


class StoredPrefixes:
    """Sequences of one model in a folder, which other processes and later ones find too.

    If every layer can roll back to any token, any common prefix is reused. Else a sequence is reused only for
    prompts that begin with all of it, and so the caller writes its prefixes up to its checkpoints too.

    Args:
        contexts: the folder, which `close` closes.
        empty: a cache of the model without tokens.
        store: the common store into which sequences are loaded.
        per_tenant: how many sequences a tenant may have in the folder; its least recently used ones are removed. None
            for no limit.

    Raises ContextError if hooks in the model have unknown effects.
    """

    def __init__(self, contexts: ContextStore, empty: HeteroCache, store: Store, per_tenant: int | None = None) -> None:
        self._contexts, self._store, self._per_tenant = contexts, store, per_tenant
        self._failures = 0
        #: Whether `fetch` must come before `longest`.
        self.is_remote = contexts.is_remote
        #: The longest wait for `fetch`, seconds.
        self.wait_s = contexts.wait_s
        self._injection = empty.injection
        #: Whether any prefix of a sequence can be reused.
        self.can_roll_back = can_roll_back_exactly(empty)
        sizes = [layout.block_size for group in empty.groups for layout in group.layouts]
        #: Fewer tokens than this are not worth writing or reading a file.
        self.min_tokens = max(sizes, default=PIECE)
        # Computed here, so that no request waits until all weights are hashed.
        self._identity: tuple[Any, Identity] = self._injection.state(), self._injection.identity

    def _present(self) -> Identity:
        """The model's identity, whose weights are hashed again only where a sample of them has changed."""
        now = self._injection.state()
        if not now.is_like(self._identity[0]):
            self._identity = now, self._injection.identity
        return self._identity[1]

    @property
    def failures(self) -> int:
        """How often the folder could not be used."""
        return self._failures + self._contexts.failures

    def fetch(self, prompt: Sequence[int], min_tokens: int, tenant: str = "") -> bool:
        """Fetch from other machines what `longest` finds for the same arguments. Other threads may call it.

        Returns whether the address answered in time; if not, it is logged.
        """
        if len(prompt) <= max(min_tokens, PIECE):
            return True
        try:
            self._contexts.fetch(self._present(), prompt, min_tokens, whole=not self.can_roll_back, salt=tenant)
        except UnreachableError as error:
            # The store logs the first of many failures as a warning.
            _logger.info("a prompt is computed without stored contexts: %s", error)
            return False
        except Exception as error:
            self._failures += 1
            _logger.warning("a stored context is not fetched, and the prompt is computed: %s", _text(error))
        return True

    def longest(self, prompt: Sequence[int], min_tokens: int, tenant: str = "") -> tuple[StoredContext, int] | None:
        """The tenant's sequence with the longest prefix of the prompt, at least `min_tokens` tokens, and its length.

        None if there is none, or the folder cannot be read, which is logged.
        """
        if len(prompt) <= max(min_tokens, PIECE):
            return None
        try:
            found = self._contexts.longest(self._present(), prompt, whole=not self.can_roll_back, salt=tenant)
        except Exception as error:
            self._failures += 1
            _logger.warning("no context is looked up in %s: %s", self._contexts.where, _text(error))
            return None
        return found if found is not None and found[1] >= min_tokens else None

    def has_here(self, stored: StoredContext, tokens: int) -> bool:
        """Whether the first `tokens` of a sequence can be loaded without the address: `fetch` may have failed."""
        return self._contexts.has_here(stored, tokens)

    def load(self, stored: StoredContext, tokens: int, tokenizer: Any) -> HeteroCache | None:
        """The first `tokens` of a sequence, in blocks of the common store; None, with a warning, if it is unusable."""
        cache: HeteroCache | None = None
        try:
            cache = self._contexts.load(
                stored, self._injection.model, identity=self._present(), repair=False, first=tokens,
                store=self._store, tokenizer=tokenizer,
            ).cache  # fmt: skip
            if tokens < cache.get_seq_length():
                cache.crop(tokens - cache.get_seq_length())
            for layer in cache.groups[0].family_layers:
                # The stored sequence's observation windows belong to other questions.
                layer.reopen()
        except Exception as error:
            self._failures += 1
            _logger.warning("a stored context cannot be used, and the prompt is computed: %s", _text(error))
            if cache is not None:
                cache.reset()
            return None
        return cache

    def keep(self, cache: HeteroCache, tokens: Sequence[int], tenant: str = "") -> bool:
        """Write a tenant's sequence if it has at least a block more than what is stored; a failure is logged.

        Returns whether it is stored then.
        """
        if len(tokens) < PIECE:
            return False
        try:
            identity = self._present()
            known = self._contexts.longest(identity, [*tokens, 0], whole=not self.can_roll_back, salt=tenant)
            if known is None or len(tokens) - known[1] >= self.min_tokens:
                self._contexts.save(cache, tokens, identity=identity, salt=tenant, per_tenant=self._per_tenant)
        except Exception as error:
            self._failures += 1
            _logger.warning(
                "the sequence of an ended request is not stored in %s: %s", self._contexts.where, _text(error)
            )
            return False
        return True

    def close(self) -> None:
        """Close the folder; uploads what is not at the address yet, as long as the address answers in time."""
        self._contexts.close()


def _text(error: Exception) -> str:
    """An error of this package in full, with its remedy; other errors in brief."""
    return str(error) if isinstance(error, HeteroKVError) else brief_error(error)
