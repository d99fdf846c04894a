"""Attention of a guess: to the attention sink, the newest blocks, and the blocks whose mean keys fit its query best."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.gpu_ops.merge import apply_sink

#: The newest tokens, and the tokens of chosen blocks, that a guess attends to; both in whole blocks.
NEWEST, CHOSEN = 512, 2048
# Blocks whose keys are converted at once.
_BLOCKS_AT_ONCE = 64


def attend_sparsely(
    layer: RetrievalLayer, step: Step, few: DraftBlocks, call: AttentionCall, threads: int
) -> torch.Tensor:
    """Store one sequence's token and attend to few blocks: [1, heads, 1, v_dim].

    Nothing but the stored token changes in the layer: no block is finalized, no query is observed, nothing is counted.
    """
    blocks = layer.store_token(step, call.k, call.v)
    pool, table, group = layer.pool, blocks.table[0], call.q.shape[1] // call.k.shape[1]
    assert pool is not None
    q = call.q.reshape(call.k.shape[1], group, -1).float().contiguous()
    chosen = few.chosen.get(layer.layer_idx)
    if chosen is None:
        chosen = few.chosen[layer.layer_idx] = _chosen(layer, step, few, q, call.scale)
    if pool.reads_ahead():
        assert pool.read_ahead is not None
        pool.read_ahead.request(np.unique(table[chosen]))
    # Blocks that the draft has begun follow the chosen ones, which end with the newest block of the first guess.
    begun = np.arange(chosen.max() + 1, len(table))
    ids = np.concatenate((table[chosen], np.broadcast_to(table[begun], (len(chosen), len(begun)))), axis=1)
    counts = np.full((1, len(ids)), ids.shape[1], np.int32)
    out, lse = attend_blocks(
        q[None].numpy(), pool.key_array, pool.value_array, ids[None].astype(np.int32), counts, blocks.lengths,
        call.scale, call.softcap or 0.0, threads=threads, key_offsets=pool.offset_array,
    )  # fmt: skip
    attended = torch.from_numpy(out).view(1, call.q.shape[1], 1, -1)
    if call.sink is not None:
        attended, _ = apply_sink(attended, torch.from_numpy(lse).view(1, -1, 1), call.sink)
    return attended.to(call.q.dtype)


def blocks_with_means(tokens: int, block_size: int) -> int:
    """How many blocks have mean keys, of a sequence with `tokens` before its guesses: full ones before the newest."""
    return max(0, tokens // block_size - -(-NEWEST // block_size))


def _chosen(layer: RetrievalLayer, step: Step, few: DraftBlocks, q: torch.Tensor, scale: float) -> np.ndarray:
    """The blocks that a draft attends to, as places in the block table, ascending: [kv_heads, count].

    q: [kv_heads, group, k_dim] float32, of the draft's first token.
    """
    size, sink = layer.layout.block_size, layer.layout.sink_blocks
    count = -(-step.length // size)
    newest = blocks_with_means(step.past, size)
    around = np.concatenate((np.arange(min(sink, newest)), np.arange(newest, count)))
    budget = min(-(-CHOSEN // size), max(0, newest - sink))
    best = np.empty((len(q), 0), np.int64)
    if budget:
        means = _means(layer, few, newest)[:, sink:newest]
        shares = torch.bmm(q, means.transpose(1, 2)).mul_(scale).softmax(dim=2).sum(dim=1)
        best = sink + shares.topk(budget, dim=1).indices.numpy()
    return np.sort(np.concatenate((best, np.broadcast_to(around, (len(q), len(around)))), axis=1), axis=1)


def _means(layer: RetrievalLayer, few: DraftBlocks, blocks: int) -> torch.Tensor:
    """The mean keys of the sequence's first blocks, [kv_heads, blocks or more, k_dim] float32."""
    pool, known = layer.pool, few.means.get(layer.layer_idx)
    assert pool is not None
    done = 0 if known is None else known.shape[1]
    if done < blocks:
        ids = torch.from_numpy(layer.block_ids(0)[done:blocks].astype(np.int64))
        new = [pool.decoded_keys(part).float().mean(dim=2).transpose(0, 1) for part in ids.split(_BLOCKS_AT_ONCE)]
        known = few.means[layer.layer_idx] = torch.cat(new if known is None else [known, *new], dim=1)
    assert known is not None
    return known
