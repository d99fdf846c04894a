"""Recomputes the damaged part of a context from its tokens."""

from __future__ import annotations

import logging

import torch

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.errors import HeteroKVError, OutOfMemoryError

_logger = logging.getLogger(__name__)


def recompute(cache: HeteroCache, context: OpenContext, damage: DamagedContextError) -> int:
    """Fill the cache with the KV of a damaged context.

    The tokens before the first damaged block keep the file's KV, if the layers can roll back to there and continue
    exactly. Else all tokens are computed, as one prompt.

    Returns the number of computed tokens per row. Raises `damage` if the token ids are unusable.
    """
    rows = context.stored_tokens
    vocabulary = cache.injection.model.get_input_embeddings().num_embeddings
    if not all(0 <= token < vocabulary for row in rows for token in row):
        raise damage
    kept = _kept(cache, len(rows[0]), damage.whole) if len({len(row) for row in rows}) == 1 else 0
    width = max(map(len, rows))
    try:
        # Recomputed KV is not mapped from a file, so it must fit into memory.
        cache.injection.max_seq_len(
            width, len(rows), resident=context.resident_prefix().first(kept), own=cache.groups[0].store
        )
    except OutOfMemoryError as error:
        raise ContextError(f"{damage}; it does not fit into memory to be recomputed: {error}") from error
    if kept:
        cache.crop(kept - width)
    else:
        cache.reset()
    _logger.warning("%s; the %d tokens from there on are recomputed", damage, width - kept)
    # Left-padded, since rows may differ in length.
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    model = cache.injection.model
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    try:
        ids, mask = ids[:, kept:].to(model.device), mask.to(model.device)
        model(input_ids=ids, attention_mask=mask, **as_cache(model.forward, cache), **last)
    except HeteroKVError as error:
        raise ContextError(f"{damage}; recomputing it failed: {error}") from error
    return width - kept


def _kept(cache: HeteroCache, length: int, whole: int) -> int:
    """The number of tokens whose stored KV stays; 0 if all are recomputed."""
    is_whole = cache.columns.count == length and len(cache.groups) == 1 and 0 < whole < length
    return whole if is_whole and can_roll_back_exactly(cache) else 0


def can_roll_back_exactly(cache: HeteroCache) -> bool:
    """Whether a prompt after a rollback to any token is computed as if the later tokens had never existed."""
    if not all(each.continues_exactly for each in cache.injection.attention_operators()):
        return False
    try:
        for group in cache.groups:
            group.require_croppable()
    except HeteroKVError:
        return False
    return True
