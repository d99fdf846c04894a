"""Representatives of blocks that enter the Context, of all layers that store alike in one computation."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.representatives import Representing
from hetero_kv.store.pool_arrays import represent_blocks

# The most blocks whose keys are in memory as float32 at a time.
_AT_ONCE = 256
# Torch shares out an operation on more numbers than this among its threads. Up to so many times as many that takes
# longer than the operation by one thread.
_SHARED_OUT, _FEW = 32768, 4
_REPRESENTED = "layers whose entering blocks are represented"


def represented_with_others(layer: RetrievalLayer, step: Step, start: int, end: int) -> bool:
    """Compute the arrays derived from the blocks [start, end), which enter the Context in this step, in all layers.

    A block that leaves the recent window was full before the step, in every layer. One computation for all layers takes
    little longer than one for each. The first layer that asks computes it, for those of its kind.

    Returns whether the layer's blocks have these arrays; False if it must compute them on its own: blocks with
    tokens of this step or in the buffer of a prompt, representatives that depend on more than the keys, or many blocks.
    """
    done: set[int] = step.computed.setdefault(_REPRESENTED, set())
    if id(layer) in done:
        return True
    represent = layer.vectors_of
    is_full = end * layer.layout.block_size <= step.group.length
    if not (is_full and isinstance(represent, Representing) and layer.writing is layer.window is None):
        return False
    pools = {id(each): each.pool for each in step.group.layers if _is_like(each, layer)}
    ids = torch.from_numpy(step.blocks(layer.layout).table[:, start:end].astype(np.int64).ravel())
    if len(pools) * len(ids) > _AT_ONCE:
        return False
    every, of_layer = list(pools.values()), len(ids) * pools[id(layer)].keys[0].numel()
    is_short = len(every) * of_layer <= _FEW * _SHARED_OUT
    several = max(1, _SHARED_OUT // of_layer) if is_short else len(every)
    for first in range(0, len(every), several):
        represent_blocks(every[first : first + several], ids, represent)
    done.update(pools)
    return True


def _is_like(other: object, layer: RetrievalLayer) -> bool:
    return (
        type(other) is type(layer)
        and isinstance(other, RetrievalLayer)
        and other.layout == layer.layout
        and other.vectors_of == layer.vectors_of
        and other.writing is other.window is None
        and other.pool is not None
        and layer.pool is not None
        and other.pool.form == layer.pool.form
    )
