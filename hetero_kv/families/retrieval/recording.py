"""Records which keys of blocks a decoded token attends to (`engine.attention_record`)."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.step_contract import EVERYTHING
from hetero_kv.engine.step import StepBlocks
from hetero_kv.families.retrieval.layer import RetrievalLayer

# Blocks whose keys are decoded at once: bounds their float32 copy.
_AT_ONCE = 256


def chosen_of_context(
    ids: np.ndarray, block_size: int, which: int, positions: np.ndarray, tokens: np.ndarray
) -> torch.Tensor:
    """Which tokens of the Context the lists of a token have chosen: [lists, tokens] bool.

    Args:
        ids: [blocks] int32, the Context's blocks in the pool.
        which, positions: as of `RetrievalStep`, after the call; positions [lists, n].
        tokens: [lists, n] int32, chosen tokens as block id * block size + offset, -1 for none; empty for whole blocks.
    """
    lists = len(positions) if which != EVERYTHING else 1
    chosen = np.full((lists, len(ids), block_size), which == EVERYTHING)
    order = np.argsort(ids)
    for index in range(lists if which != EVERYTHING else 0):
        if tokens.size:
            own = tokens[index][tokens[index] >= 0]
            chosen[index, order[np.searchsorted(ids, own // block_size, sorter=order)], own % block_size] = True
        else:
            chosen[index, positions[index][positions[index] >= 0]] = True
    return torch.from_numpy(chosen).flatten(1)


def add_blocks(
    layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, attended: torch.Tensor | None = None
) -> None:
    """Add keys of blocks to the layer's record.

    Args:
        attended: [lists, length] bool, the tokens that each list of heads attends to; None for all.
    """
    pool, record, size = layer.pool, layer.record, layer.layout.block_size
    assert pool is not None
    assert record is not None
    if attended is None:
        attended = torch.ones(1, blocks.length, dtype=torch.bool)
    table, in_blocks = torch.from_numpy(blocks.table[0].astype(np.int64)), torch.arange(size)
    padded = torch.nn.functional.pad(attended, (0, len(table) * size - blocks.length))
    for used in padded.view(len(attended), -1, size).any(dim=2).any(dim=0).nonzero().flatten().split(_AT_ONCE):
        positions = (used[:, None] * size + in_blocks).flatten()
        # The last block may be filled in part.
        positions = positions[: int((positions < blocks.length).sum())]
        keys = pool.decoded_keys(table[used]).transpose(0, 1).flatten(1, 2)[:, : len(positions)]
        record.add_keys(call.q, keys, positions, call.scale, call.softcap, attended[:, positions])


def around_context(layer: RetrievalLayer, blocks: StepBlocks, of_context: torch.Tensor) -> torch.Tensor:
    """Which tokens are attended to in blocks: [lists, length] bool, from those of the Context, [lists, tokens].

    All others are, unless a window has them.
    """
    end = blocks.finalized * layer.layout.block_size
    attended = torch.full((len(of_context), blocks.length), layer.window is None)
    attended[:, end - of_context.shape[1] : end] = of_context
    return attended


def add_window(layer: RetrievalLayer, call: AttentionCall) -> None:
    """Add the keys of attention sink and recent window to the layer's record, where a device has them."""
    if layer.window is not None:
        assert layer.record is not None
        for q, keys, positions in layer.window.attended(call.q):
            layer.record.add_keys(q, keys, positions, call.scale, call.softcap)
