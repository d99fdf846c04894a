"""How a ShadowKV layer partitions a sequence, and how much of it a step attends to."""

from __future__ import annotations

import math

from hetero_kv.families.shadowkv.settings import ShadowKVSettings


def context_end(length: int, settings: ShadowKVSettings) -> int:
    """Where the Context of a sequence of `length` tokens ends: after all whole chunks but the last `local_chunks`."""
    chunk_size = settings.landmark_chunk_size
    return max(0, length // chunk_size - settings.local_chunks) * chunk_size


def first_context_end(length: int, settings: ShadowKVSettings) -> int:
    """Where the Context of a first prompt of `length` tokens ends; 0 if its factors would be larger than the keys."""
    end = context_end(length, settings)
    return 0 if end < settings.most_rank else end


def chunk_budget(prompt_length: int, chunks: int, settings: ShadowKVSettings) -> int:
    """Chunks to choose per step, out of `chunks`; a share refers to the sequence at the prompt's end."""
    budget = settings.sparse_budget
    if isinstance(budget, str) or (isinstance(budget, float) and budget == 1.0):
        return chunks
    tokens = budget * prompt_length if isinstance(budget, float) else budget
    return max(1, math.ceil(tokens / settings.landmark_chunk_size))


def attended_tokens(prompt_length: int, settings: ShadowKVSettings) -> int:
    """Tokens that a step attends to after a prompt of `prompt_length` tokens, without generated ones."""
    context, chunk = first_context_end(prompt_length, settings), settings.landmark_chunk_size
    chunks = context // chunk
    outliers = min(settings.outlier_chunks, chunks)
    chosen = min(chunks - outliers, chunk_budget(prompt_length, chunks, settings))
    return prompt_length - context + chunk * (outliers + chosen)
