"""Key components in a reduced basis, stored per block component by component, and scores from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hetero_kv.cpu_ops.component_scores import component_scores
from hetero_kv.families.token_retrieval.choosers.chooser import TokenQuery, encoded, every_index
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.storage import StorageType

# Blocks decoded at once; this bounds the temporary float32 copy of their keys.
_AT_ONCE = 64


def keys_in_parts(
    pool: BlockPool, table: np.ndarray, first: int, end: int, at_once: int = _AT_ONCE
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields, in parts, ids of a row's blocks [first, end) and keys [blocks, kv_heads, block_size, k_dim] float32."""
    for start in range(first, end, at_once):
        ids = torch.from_numpy(table[start : min(start + at_once, end)].astype(np.int64))
        yield ids, pool.decoded_keys(ids).float()


def keep_components(
    pool: BlockPool, name: str, storage: StorageType, tables: np.ndarray, first: int, end: int, bases: torch.Tensor
) -> None:
    """Store the components of keys in `bases` [rows, kv_heads, k_dim, n], for blocks [first, end) of every row."""
    for table, basis in zip(tables, bases, strict=True):
        for ids, keys in keys_in_parts(pool, table, first, end):
            pool.auxiliary[name][ids] = encoded(storage, (keys @ basis).transpose(2, 3).contiguous())


def scores_by_components(query: TokenQuery, name: str, q: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Scores of the Context's tokens for q [rows, kv_heads, group, n], in the basis of the stored components.

    Returns [rows, kv_heads, group, tokens], scaled and capped for the softmax, and the bytes read per row.
    """
    rows, kv_heads, _, n = q.shape
    columns = query.pool.auxiliary_kernel_arrays[name]
    every = every_index(rows, kv_heads, n)
    products = component_scores(q.contiguous().numpy(), every, columns, query.context, query.threads)
    return query.capped(torch.from_numpy(products)), query.tokens * kv_heads * n * columns.itemsize
