"""How a ShadowKV layer partitions a sequence: the Context, whose values lie in blocks, and what a step attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_kv.engine.sequence import Layout
from hetero_kv.families.shadowkv.settings import ShadowKVSettings


@dataclass(frozen=True)
class ContextLayout(Layout):
    """One block per chunk of the Context; Recent is not in blocks.

    Attributes:
        settings: the operator's.
    """

    settings: ShadowKVSettings

    def stored(self, before: int, length: int, *, is_prompt: bool, is_last: bool) -> int:
        """See Layout: the Context grows at a prompt's end and, with ShadowKV+, as tokens are generated."""
        if is_prompt and is_last:
            end = context_end(length, self.settings) if before else first_context_end(length, self.settings)
        elif not is_prompt and self.settings.project_generated and before:
            end = context_end(length, self.settings)
        else:
            end = before
        # A rollback may have left fewer local chunks.
        return max(before, end)

    def cropped(self, before: int, length: int) -> int:
        return before if length >= before else min(before, context_end(length, self.settings))


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
