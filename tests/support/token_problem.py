"""A decoded token's call of a chooser, over random keys and values in a pool of scattered blocks."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.token_retrieval import choosers
from hetero_kv.families.token_retrieval.choosers.chooser import NOTHING_LEARNED, TokenQuery, merged
from hetero_kv.store.pool import BlockPool

# As the tiny llama's pool in tests/operators, so that no kernel is compiled for this alone.
ROWS, KV_HEADS, GROUP, DIM, BLOCK, BLOCKS = 2, 2, 2, 16, 8, 14
FIRST, END = 1, BLOCKS - 2
#: Dimension and block with which tests/operators stores this type, for the same reason.
LARGER = {"BF16": {"dim": 32, "block": 32}}


class TokenProblem:
    """Two rows of 14 blocks: a sink of one, a Context of 11, and two that are the window, the last not full.

    Attributes:
        q: [rows, kv_heads, group, dim]. keys, values: [rows, kv_heads, length, dim], as the pool has them.
    """

    def __init__(self, name, seed=0, softcap=0.0, dim=DIM, block=BLOCK, low_rank=None, **settings):
        random = torch.Generator().manual_seed(seed)
        self.dim, self.block, self.softcap, length = dim, block, softcap, BLOCKS * block - 3
        self.settings = choosers.get(name).settings(**{"kv_type": "FP32", "block_size": block, **settings})
        self.chooser = choosers.get(name).implementation(self.settings, layer_idx=3)
        self.pool = BlockPool(
            ROWS * BLOCKS + 3, KV_HEADS, block, dim, dim, self.settings.key_storage, 0,
            value_storage=self.settings.value_storage, offset_keys=self.settings.offset_keys,
            auxiliary=self.chooser.arrays(KVShape(KV_HEADS, dim, dim)),
        )  # fmt: skip
        order = np.random.default_rng(seed).permutation(ROWS * BLOCKS + 3)[: ROWS * BLOCKS]
        table = order.reshape(ROWS, BLOCKS).astype(np.int32)
        lengths = np.full(ROWS * BLOCKS + 3, block, np.int32)
        lengths[table[:, -1]] = length - (BLOCKS - 1) * block
        self.q = 2 * torch.randn(ROWS, KV_HEADS, GROUP, dim, generator=random)
        # Keys have a direction in common, as models' have, and differ in as many as `low_rank` says, or in all.
        keys, values = torch.randn(2, ROWS, KV_HEADS, length, dim, generator=random)
        if low_rank is not None:
            keys[..., low_rank:] = 0
            keys = keys @ torch.linalg.qr(torch.randn(dim, dim, generator=random)).Q
        keys += torch.randn(KV_HEADS, 1, dim, generator=random)
        for ids, row_keys, row_values in zip(table, keys, values, strict=True):
            self.pool.write(ids, 0, row_keys, row_values)
        read = [self.pool.read(ids, 0, length) for ids in table]
        self.keys, self.values = (torch.stack(part).float() for part in zip(*read, strict=True))
        none, scale = torch.empty(0), dim**-0.5
        request = TokenQuery(
            self.q.numpy(), self.pool, table, FIRST, END, lengths, scale, softcap, none, NOTHING_LEARNED, 1
        )
        self.around = request.attend_blocks(request.other_blocks)
        self.request = request._replace(outside_lse=self.around[1])
        self.finalize()

    def finalize(self):
        """Have what is kept of the Context derived as blocks close: most behind a prompt, then one by one."""
        known = NOTHING_LEARNED
        for first, end in ((FIRST, END - 2), (END - 2, END - 1), (END - 1, END)):
            known = self.chooser.finalize(self.pool, self.request.table, first, end, known)
        self.request = self.request._replace(known=known)

    def answered(self):
        """What the chooser answers, and attention with the sink and the window: (answer, out, lse)."""
        answer = self.chooser.attend(self.request)
        return answer, *merged(self.around, (answer.out, answer.lse))

    @property
    def scores(self):
        """Of every token, as they go into the softmax: [rows, kv_heads, group, length]."""
        scores = self.q @ self.keys.transpose(2, 3) * self.dim**-0.5
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    @property
    def in_context(self):
        """Which tokens are in the Context: [length] bool."""
        at = torch.arange(self.keys.shape[2])
        return (at >= FIRST * self.block) & (at < END * self.block)
