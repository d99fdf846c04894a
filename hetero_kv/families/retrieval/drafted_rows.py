"""Attention of a draft, several tokens of one sequence, to everything before them, which is read once for all."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.cpu_ops.causal_attention import attend_blocks_causal
from hetero_kv.cpu_ops.token_store import store_token
from hetero_kv.families.retrieval.decoded_rows import DecodedRows, GroupRows


def attend_draft(
    groups: list[GroupRows], arrays: DecodeBuffers, scale: float, softcap: float, threads: int
) -> np.ndarray:
    """Store a draft's tokens, unless they are, then let each attend to all tokens before it and to itself.

    Writes `arrays.attended`.

    Args:
        groups: consecutive steps of one sequence, with places in its blocks.

    Returns the log-sum-exps, [rows, kv_heads, group] float32.
    """
    layer, blocks = groups[-1].layer, groups[-1].blocks
    pool, rows = layer.pool, len(groups)
    assert pool is not None
    queries, keys, values = (tensor.float() for tensor in arrays.inputs)
    kv_heads = keys.shape[1]
    if not groups[-1].is_stored:
        decoded = DecodedRows.of(groups, (False,) * rows)
        new = keys.squeeze(2).numpy(), values.squeeze(2).numpy()
        layer.require_storable(store_token(*new, pool.key_array, pool.value_array, decoded.table, decoded.ranges[0]))
    ids = blocks.table[None]
    out, lse = attend_blocks_causal(
        queries.view(1, rows, kv_heads, -1, queries.shape[3]).numpy(), pool.key_array, pool.value_array, ids,
        np.full((1, 1), ids.shape[2], np.int32), blocks.lengths, scale, softcap, threads=threads,
    )  # fmt: skip
    arrays.put(torch.from_numpy(out).view(rows, queries.shape[1], 1, -1))
    return lse[0]
