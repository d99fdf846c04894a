"""Small paged layers for tests of forks, and their contents."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer

from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.settings import RetrievalSettings

BATCH, HEADS, K_DIM, V_DIM, BLOCK = 2, 2, 3, 5, 4


def paged(accumulates=False):
    return RetrievalLayer(RetrievalLayout.of(BLOCK, 4, 8, accumulates), RetrievalSettings(kv_type="FP32"))


def watched():
    return paged(accumulates=True)


def random_tokens(count, seed=0, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, HEADS, count, K_DIM, generator=generator),
        torch.randn(batch, HEADS, count, V_DIM, generator=generator),
    )


def rows_of(layer):
    """Per row of the cache, the ids of its blocks in this layer."""
    return [layer.block_ids(row) for row in range(len(layer.group.sequences))]


def allocator_of(layer):
    return layer.group.store.allocators[layer.layout]


def contents(layer):
    if isinstance(layer, DynamicLayer):
        return layer.keys, layer.values
    rows = rows_of(layer)
    keys = torch.empty(len(rows), HEADS, layer.get_seq_length(), K_DIM)
    values = torch.empty(len(rows), HEADS, layer.get_seq_length(), V_DIM)
    for index, ids in enumerate(rows):
        if len(ids):
            layer.pool.gather(ids, layer.get_seq_length(), keys[index], values[index])
    return keys, values
