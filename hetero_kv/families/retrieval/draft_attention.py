"""Attention of a guess: to the attention sink, the newest blocks, and the blocks whose mean keys fit its query best.

A block has a mean key of every 32 tokens: with one of all 128 tokens, fewer guesses are right.
"""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, NOTHING_FORBIDDEN
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.engine.draft_blocks import ChosenBlocks, DraftBlocks
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.store.pool import BlockPool

#: The newest tokens, and the tokens of chosen blocks, that a guess attends to; both in whole blocks.
NEWEST, CHOSEN = 512, 2048
#: Consecutive tokens of a mean key; a block whose size is not a multiple has one mean key.
SPAN = 32
# Blocks whose keys are converted at once.
_BLOCKS_AT_ONCE = 64


def attend_sparsely(
    layer: RetrievalLayer, step: Step, few: DraftBlocks, call: AttentionCall, threads: int
) -> torch.Tensor:
    """Store one sequence's token and attend to few blocks: [1, heads, 1, v_dim].

    Nothing but the stored token changes in the layer: no block is finalized, no query is observed, nothing is counted.
    """
    blocks = layer.store_token(step, call.k, call.v)
    pool, group = layer.pool, call.q.shape[1] // call.k.shape[1]
    assert pool is not None
    q = call.q.reshape(call.k.shape[1], group, -1).float().contiguous()
    chosen = _chosen(layer, step, few, q, call.scale)
    ids = _requested(pool, chosen.ids(blocks.table[0]))[None]
    counts = np.full((1, len(q)), ids.shape[2], np.int32)
    out, lse = attend_blocks(
        q[None].numpy(), pool.key_array, pool.value_array, ids, counts, blocks.lengths,
        call.scale, call.softcap or 0.0, threads=threads, key_offsets=pool.offset_array,
    )  # fmt: skip
    attended = torch.from_numpy(out).view(1, call.q.shape[1], 1, -1)
    if call.sink is not None:
        attended, _ = apply_sink(attended, torch.from_numpy(lse).view(1, -1, 1), call.sink)
    return attended.to(call.q.dtype)


def attend_natively(
    native: RetrievalStep, layer: RetrievalLayer, step: Step, few: DraftBlocks, arrays: DecodeBuffers, scale: float,
    softcap: float,
) -> np.ndarray:  # fmt: skip
    """As `attend_sparsely`, from `arrays.q`, `k` and `v` to `arrays.attended`, by a step that has no estimates.

    Returns the log-sum-exp [1, kv_heads, group] float32, of attention without sinks.
    """
    blocks, kv_heads = step.blocks(layer.layout), arrays.k.shape[1]
    chosen = few.chosen.get(layer.layer_idx)
    if chosen is None:
        q = torch.from_numpy(arrays.q)
        numbers = q if q.dtype is torch.float32 else q.view(torch.bfloat16)
        chosen = _chosen(layer, step, few, numbers.float().view(kv_heads, native.group, -1), scale)
    assert layer.pool is not None
    if layer.pool.read_ahead is not None:
        _requested(layer.pool, chosen.ids(blocks.table[0]))
    ranges = np.array([[step.past], [chosen.first], [chosen.end]])
    lse = np.empty((1, kv_heads, native.group), np.float32)
    with one_kernel_at_a_time:
        stored = native(
            arrays.q, arrays.k, arrays.v, ranges, blocks.table, AS_GIVEN, chosen.positions, NOTHING_FORBIDDEN, False,
            scale, softcap, arrays.attended, lse,
        )  # fmt: skip
    if stored:
        layer.require_storable(stored)
    return lse


def _requested(pool: BlockPool, ids: np.ndarray) -> np.ndarray:
    """Blocks that are read soon, also those of a file."""
    if pool.reads_ahead():
        assert pool.read_ahead is not None
        pool.read_ahead.request(np.unique(ids))
    return ids


def number_of_means(tokens: int, block_size: int) -> int:
    """How many mean keys a sequence with `tokens` before its guesses has, per layer and kv head."""
    return _blocks_with_means(tokens, block_size) * _means_of_block(block_size)


def _blocks_with_means(tokens: int, block_size: int) -> int:
    """How many blocks have mean keys: full ones before the newest."""
    return max(0, tokens // block_size - -(-NEWEST // block_size))


def _means_of_block(block_size: int) -> int:
    return 1 if block_size % SPAN else block_size // SPAN


def _chosen(layer: RetrievalLayer, step: Step, few: DraftBlocks, q: torch.Tensor, scale: float) -> ChosenBlocks:
    """What guesses attend to; if nothing is chosen yet, by this one's query q [kv_heads, group, k_dim] float32."""
    found = few.chosen.get(layer.layer_idx)
    if found is None:
        size, first = layer.layout.block_size, layer.layout.sink_blocks
        end = max(first, _blocks_with_means(step.past, size))
        budget = min(-(-CHOSEN // size), end - first)
        best = np.empty((len(q), 0), np.int32)
        if budget:
            each = _means_of_block(size)
            means = _means(layer, few, end)[:, first * each :]
            shares = torch.bmm(q, means.transpose(1, 2)).mul_(scale).softmax(dim=2).sum(dim=1)
            of_blocks = shares.unflatten(1, (-1, each)).sum(dim=2)
            best = np.sort(of_blocks.topk(budget, dim=1).indices.numpy().astype(np.int32), axis=1)
        # A short sequence has fewer blocks than the attention sink.
        blocks = -(-step.length // size)
        found = few.chosen[layer.layer_idx] = ChosenBlocks(best[None], min(first, blocks), min(end, blocks))
    return found


def _means(layer: RetrievalLayer, few: DraftBlocks, blocks: int) -> torch.Tensor:
    """The mean keys of the sequence's first `blocks` blocks, [kv_heads, means, k_dim] float32."""
    pool, known, each = layer.pool, few.means.get(layer.layer_idx), _means_of_block(layer.layout.block_size)
    assert pool is not None
    done = 0 if known is None else known.shape[1] // each
    if done < blocks:
        ids = torch.from_numpy(layer.block_ids(0)[done:blocks].astype(np.int64))
        keys = (pool.decoded_keys(part).float() for part in ids.split(_BLOCKS_AT_ONCE))
        new = [part.unflatten(2, (each, -1)).mean(dim=3).transpose(0, 1).flatten(1, 2) for part in keys]
        known = few.means[layer.layer_idx] = torch.cat(new if known is None else [known, *new], dim=1)
    assert known is not None
    return known[:, : blocks * each]
