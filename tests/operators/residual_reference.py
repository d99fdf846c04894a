"""Residual attention of a decoded token by its definition."""

from __future__ import annotations

import math

import numpy as np
import torch


def assert_reference(pool, lengths, q, table, first, end, positions, scale, softcap, out, lse):
    """Attended blocks by their keys and values; another as a token, of mean key and value, with a block's weight."""
    keys, values = pool.key_storage.decode(pool.keys).float(), pool.value_storage.decode(pool.values).float()
    if pool.key_offsets is not None:
        keys = keys + pool.key_offsets
    (kv_heads, size), kind = keys.shape[1:3], pool.representative_storage
    queries, outs = (part.reshape(len(q), kv_heads, -1, part.shape[3]) for part in (q, out))
    cap = (lambda x: softcap * torch.tanh(x / softcap)) if softcap else (lambda x: x)
    for row, ids in enumerate(table):
        for head in range(kv_heads):
            query = torch.from_numpy(queries[row, head])
            own = positions[row, min(head, positions.shape[1] - 1)]
            taken = [*range(first), *(first + own[own >= 0]), *range(end, len(ids))]
            others = [block for block in range(first, end) if block not in taken]
            is_there = (np.arange(size) < lengths[ids[taken].astype(int)][:, None]).ravel()
            k, v = (part[ids[taken].astype(int), head].flatten(0, 1)[is_there] for part in (keys, values))
            scores = cap(query @ k.T * scale)
            means = [part[ids[others].astype(int), head].mean(1) for part in (keys, values)]
            stored = pool.representatives[:, :, 0], pool.value_means[:, :, 0]
            mean_k, mean_v = (kind.decode(part[ids[others].astype(int), head]).float() for part in stored)
            for found, mean in zip((mean_k, mean_v), means, strict=True):
                np.testing.assert_allclose(found, mean, rtol=1e-2, atol=float(mean.abs().max()) / 127)
            scores = torch.cat([scores, cap(query @ mean_k.T * scale) + math.log(size)], dim=1)
            expected = scores.softmax(-1) @ torch.cat([v, mean_v])
            np.testing.assert_allclose(outs[row, head], expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(lse[row, head], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
