"""The bytes that a step of retrieval reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.store.pool import BlockPool

#: A number, or an array of one number per step.
Numbers = Any


class SelectionStatistics(NamedTuple):
    """Selection statistics of a step, or arrays of those of several: Context blocks per kv head, on average.

    Attributes:
        attended: blocks attended to.
        candidates: blocks whose keys are scored.
        scored: blocks whose representatives are scored.
        groups: groups of blocks whose representatives are scored.
        opened: groups, of these, whose blocks are scored.
        touched: blocks with at least one attended token; None: the same as `attended`.
        whole: blocks with all tokens attended; None: the same as `attended`, which counts single tokens as fractions of
            a block.
    """

    attended: Numbers
    candidates: Numbers = 0.0
    scored: Numbers = 0.0
    groups: Numbers = 0.0
    opened: Numbers = 0.0
    touched: Numbers | None = None
    whole: Numbers | None = None


class ReadSizes(NamedTuple):
    """The sizes of what a step can read from a layer's pool, in bytes of all kv heads.

    Attributes:
        block_size: tokens of a block.
        token: a token's key and value.
        in_window: a token's key and value on the compute device; None if Initial and Local are not there.
        offset: a block's key offset.
        representatives: a block's representatives.
        candidate: a candidate block's keys, coarse or as stored, and the vectors that they are offset from.
        value_mean: a block's mean value.
    """

    block_size: int
    token: int
    in_window: int | None
    offset: int
    representatives: int
    candidate: int
    value_mean: int

    @classmethod
    def of(cls, pool: BlockPool, window: DeviceWindow | None) -> ReadSizes:
        """The sizes for this pool, with attention sink and recent window in `window`, if any."""
        coarse = pool.keys if pool.key_codes is None else pool.key_codes
        differs_from = _of_block(pool.key_offsets)
        if pool.key_codes is not None:
            differs_from = _of_block(pool.representatives[:, :, :1])
        return cls(
            pool.block_size,
            (_of_block(pool.keys) + _of_block(pool.values)) // pool.block_size,
            None if window is None else _of_token(window.keys) + _of_token(window.values),
            _of_block(pool.key_offsets),
            _of_block(pool.representatives),
            _of_block(coarse) + differs_from,
            _of_block(pool.value_means),
        )

    def of_step(self, length: Numbers, context: Numbers, taken: SelectionStatistics) -> Numbers:
        """Bytes per row that a step reads from a sequence of `length` tokens with `context` Context blocks."""
        around, inside = length - context * self.block_size, taken.attended * self.block_size
        blocks, whole = (taken.attended if each is None else each for each in (taken.touched, taken.whole))
        if self.in_window is None:
            read = around * float(self.token)
            blocks = blocks + -(-around // self.block_size)
        else:
            read = around * float(self.in_window)
        read = read + inside * self.token + blocks * self.offset + taken.candidates * self.candidate
        read = read + (taken.scored + taken.groups) * self.representatives
        # A block that is not scored is not estimated either.
        estimated = np.maximum(taken.scored, taken.candidates)
        left = (estimated - whole + taken.groups - taken.opened) * (estimated > 0)
        return read + left * self.value_mean


def _of_block(array: torch.Tensor | None) -> int:
    """Bytes per block of an array [num_blocks, ...]; 0 for None."""
    return 0 if array is None else array[0].nbytes


def _of_token(array: torch.Tensor) -> int:
    """Bytes per token of one row of an array [rows, kv_heads, tokens, dim]."""
    return array[0, :, 0].nbytes
