"""Attention to scattered tokens of a pool equals torch's, on every instruction set of the machine."""

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops import list_attention
from hetero_kv.cpu_ops.attention import NO_OFFSETS
from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.storage import numbers_of, storage_of
from tests.support.slow_variants import with_few

ROWS, KV_HEADS, BLOCKS, BLOCK, DIM, SCALE = 2, 2, 7, 4, 24, 0.4

KERNELS = [
    (isa, group, offset, softcap)
    for isa in available()
    for group in (2, 9)
    for offset in (False, True)
    for softcap in (0.0, 5.0)
]


# `make test` has the kernel with most to it.
# Of nine query heads some are left over by tiles of eight and of four; more tokens than are brought together at once.
@pytest.mark.parametrize(("isa", "group", "offset", "softcap"), with_few(KERNELS, KERNELS[7:8]))
def test_it_is_attention_to_the_listed_tokens(isa, group, offset, softcap):
    rng = np.random.default_rng(group)
    keys, values = rng.standard_normal((2, BLOCKS, KV_HEADS, BLOCK, DIM)).astype(np.float16)
    offsets = (3 * rng.standard_normal((BLOCKS, KV_HEADS, DIM))).astype(np.float16)
    q = rng.standard_normal((ROWS, KV_HEADS, group, DIM)).astype(np.float32)
    counts = np.array([[[3], [0]], [[70], [28]]], np.int32)
    tokens = np.stack([rng.integers(0, BLOCKS * BLOCK, 70) for _ in range(ROWS * KV_HEADS)]).reshape(ROWS, KV_HEADS, 70)
    storage = storage_of(keys.dtype)
    starts = offsets.view(np.uint16) if offset else NO_OFFSETS
    whole = (
        torch.from_numpy(keys.astype(np.float32)) + offset * torch.from_numpy(offsets.astype(np.float32))[:, :, None]
    )
    whole, all_values = (
        part.transpose(0, 1).flatten(1, 2) for part in (whole, torch.from_numpy(values.astype(np.float32)))
    )
    with forced_isa(isa):
        kernel = list_attention.kernel_for(numbers_of(storage, storage), by_token=True)
        shape = storage.name, storage.name, group, DIM, DIM, BLOCK
        region = address_of(list_attention.region(isa, *shape, softcap > 0, offset, by_token=True))
        for threads in (1, 3):
            out, lse = np.full(q.shape, 7, np.float32), np.full(q.shape[:3], 7, np.float32)
            pool = (each.view(storage.kernel_dtype) for each in (keys, values))
            lists = tokens.astype(np.int32), counts[:, :, 0].copy(), np.empty(0, np.int32), SCALE, softcap
            kernel(all_threads(), region, 0, q[:, None], *pool, starts, *lists, threads, out, lse)
            for row, head in np.ndindex(ROWS, KV_HEADS):
                own = tokens[row, head, : counts[row, head, 0]]
                scores = torch.from_numpy(q[row, head]) @ whole[head, own].T * SCALE
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                expected = scores.softmax(-1) @ all_values[head, own]
                np.testing.assert_allclose(out[row, head], expected, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(lse[row, head], scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
