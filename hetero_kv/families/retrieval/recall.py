"""Recall: the share of the full attention mass that a step covers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.engine.step import StepBlocks
from hetero_kv.store.pool import BlockPool


def covered_mass(pool: BlockPool, blocks: StepBlocks, call: AttentionCall, lse: torch.Tensor, threads: int) -> float:
    """The share of the full attention mass that a step covered, the mean over rows and heads.

    lse: of the attended tokens, [batch, heads, 1] float32, or another shape with as many numbers.
    """
    by_kv_head = call.q.squeeze(2).unflatten(1, (pool.keys.shape[1], -1))
    q = by_kv_head.to("cpu", torch.float32).contiguous().numpy()
    ids = np.ascontiguousarray(blocks.table[:, None])
    counts = np.full(ids.shape[:2], ids.shape[2], dtype=np.int32)
    arrays = q, pool.key_array, pool.value_array, ids, counts, blocks.lengths
    options: dict[str, Any] = {"threads": threads, "key_offsets": pool.offset_array}
    _, full = attend_blocks(*arrays, call.scale, call.softcap or 0.0, **options)
    return float(torch.exp(lse.cpu().flatten() - torch.from_numpy(full).flatten()).mean())
