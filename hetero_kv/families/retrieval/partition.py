"""How retrieval divides a sequence into Initial | Context | Local, and how much of it a step attends to."""

from __future__ import annotations

from hetero_kv.families.retrieval.settings import RetrievalSettings


def initial_tokens(settings: RetrievalSettings) -> int:
    """Tokens of Initial: `initial_len`, in whole blocks."""
    return -(-settings.initial_len // settings.block_size) * settings.block_size


def context_tokens(length: int, settings: RetrievalSettings) -> int:
    """Tokens of the Context of a sequence of `length`: a block enters when `local_windows_len` tokens follow it."""
    end = (length - settings.local_windows_len) // settings.block_size * settings.block_size
    return max(0, end - initial_tokens(settings))


def attended_tokens(length: int, settings: RetrievalSettings, budget: int | None) -> int:
    """Tokens that a step attends to of `length`, with a budget of so many blocks of the Context; None for all."""
    if budget is None:
        return length
    context = context_tokens(length, settings)
    return length - context + min(context, budget * settings.block_size)
