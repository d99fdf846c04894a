"""Loads stored tokens to a GPU piece by piece, so that a prompt attends to a past larger than the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.gpu_ops.attention import attention_with_lse, chunk_attention, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.gpu_ops.pinned_bytes import Kind
from hetero_kv.gpu_ops.prefetch import Fill, Prefetch
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import WRITTEN

# Tokens of a piece, summed over rows: some tens of megabytes of one layer.
_TOKENS_AT_ONCE = 8192
#: Pieces in order: first position, keys [rows, kv_heads, tokens, k_dim] and values, on a GPU.
Pieces = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


def stored_pieces(
    pool: BlockPool, tables: Sequence[np.ndarray], start: int, stop: int, dtype: torch.dtype, prefetch: Prefetch
) -> Pieces:
    """Stored tokens of the positions [start, stop), in order, on the device of `prefetch`.

    They cross the bus in their storage type, and are decoded on the device.

    Args:
        tables: each row's block table.
        start: a position where a block begins.

    Yields the first position of a piece, its keys [rows, kv_heads, tokens, k_dim] and its values, in `dtype`.
    """
    size, arrays = pool.block_size, _written(pool)
    step, end = max(1, _TOKENS_AT_ONCE // (size * len(tables))), -(-stop // size)
    firsts = range(start // size, end, step)
    ids = [
        [torch.from_numpy(table[first : min(first + step, end)].astype(np.int64)) for table in tables]
        for first in firsts
    ]
    requests = [(_kinds(arrays, len(rows), len(rows[0])), _gathering(arrays, rows)) for rows in ids]
    for first, parts in zip(firsts, prefetch.pieces(requests), strict=True):
        tokens = min(stop - first * size, step * size)
        keys, values = _decoded(pool, parts, dtype)
        yield first * size, keys[:, :, :tokens], values[:, :, :tokens]


def stored_blocks(
    pool: BlockPool, ids: torch.Tensor, dtype: torch.dtype, prefetch: Prefetch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that each kv head has chosen separately, all at once, on the device of `prefetch`.

    ids: [rows, kv_heads, blocks] int64 on the CPU.

    Returns keys [rows, kv_heads, tokens, k_dim] and values, in `dtype`.
    """
    arrays = _written(pool)

    def fill(host: Sequence[torch.Tensor]) -> None:
        for array, target in zip(arrays.values(), host, strict=True):
            for heads, row in zip(ids, target, strict=True):
                for head, blocks in enumerate(heads):
                    row[:, head] = array[:, head].index_select(0, blocks)

    requests = [(_kinds(arrays, ids.shape[0], ids.shape[2]), fill)]
    # Decode inside the loop: a piece's memory is valid only until the iterator advances.
    (found,) = [_decoded(pool, parts, dtype) for parts in prefetch.pieces(requests)]
    return found


def _written(pool: BlockPool) -> dict[str, torch.Tensor]:
    return {name: each for name, each in pool.arrays.items() if name in WRITTEN}


def _kinds(arrays: dict[str, torch.Tensor], rows: int, blocks: int) -> list[Kind]:
    return [((rows, blocks, *array.shape[1:]), array.dtype) for array in arrays.values()]


def _decoded(pool: BlockPool, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode stored blocks [rows, blocks, kv_heads, ...] to keys and values [rows, kv_heads, tokens, dim].

    They are in new memory, and stay valid when the next piece arrives.
    """
    stored = dict(zip(_written(pool), parts, strict=True))
    keys, values = (
        blocks.to(dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(2, 3)
        for blocks in (pool.decoded(stored), pool.value_storage.decode(stored["values"]))
    )
    return keys, values


def _gathering(arrays: dict[str, torch.Tensor], rows: list[torch.Tensor]) -> Fill:
    def fill(host: Sequence[torch.Tensor]) -> None:
        for array, target in zip(arrays.values(), host, strict=True):
            for ids, row in zip(rows, target, strict=True):
                torch.index_select(array, 0, ids, out=row)

    return fill


def attention_after_pieces(
    pieces: Pieces, call: AttentionCall, past_k: torch.Tensor, past_v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk to `pieces`, to past_k [batch, kv_heads, past, k_dim] and past_v, and to itself.

    Returns out and lse as `chunk_attention`, including the learned sink.
    """
    out, lse = chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap)
    for _, keys, values in pieces:
        found = attention_with_lse(folded_heads(call.q, keys.shape[1]), keys, values, call.scale, call.softcap)
        out, lse = merge_attention(out, lse, *unfolded_heads(call.q, *found))
    return (out, lse) if call.sink is None else apply_sink(out, lse, call.sink)
