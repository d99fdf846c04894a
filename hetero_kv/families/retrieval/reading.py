"""How many bytes a step of retrieval reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.store.pool import BlockPool


class Taken(NamedTuple):
    """What a step takes of the Context, for each kv head, the mean.

    Attributes:
        attended: blocks that it attends to.
        candidates: blocks whose keys it looks at.
        scored: blocks whose representatives it reads.
        groups: likewise, groups of blocks.
        opened: of those, groups whose blocks are scored.
        touched: blocks of which it attends to some tokens, and
        whole: to all of them; None: as many as `attended`, which counts single tokens as parts of a block.
    """

    attended: float
    candidates: float = 0.0
    scored: float = 0.0
    groups: float = 0.0
    opened: float = 0.0
    touched: float | None = None
    whole: float | None = None


class Reading(NamedTuple):
    """What there is to read of a layer's pool, bytes of all kv heads.

    Attributes:
        block_size: tokens of a block.
        token: a token's key and value; in_window: on the compute device, where Initial and Local lie there.
        offset: what was taken off a block's keys.
        representatives: of a block.
        candidate: of a block whose keys are looked at: these keys, coarse or as stored, and what they differ from.
        value_mean: of a block.
    """

    block_size: int
    token: int
    in_window: int | None
    offset: int
    representatives: int
    candidate: int
    value_mean: int

    @classmethod
    def of(cls, pool: BlockPool, window: DeviceWindow | None) -> Reading:
        """Of this pool, with the attention sink and the recent window in `window`, if there is one."""
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

    def of_step(self, length: int, context: int, taken: Taken) -> float:
        """Bytes of a row that a step reads of a sequence of `length` tokens, whose Context has so many blocks."""
        around, inside = length - context * self.block_size, taken.attended * self.block_size
        blocks, whole = (taken.attended if each is None else each for each in (taken.touched, taken.whole))
        if self.in_window is None:
            read = float(around * self.token)
            blocks += -(-around // self.block_size)
        else:
            read = float(around * self.in_window)
        read += inside * self.token + blocks * self.offset + taken.candidates * self.candidate
        read += (taken.scored + taken.groups) * self.representatives
        # Without representatives nothing is estimated of a block either.
        estimated = max(taken.scored, taken.candidates)
        left = estimated - whole + taken.groups - taken.opened if estimated else 0
        return read + left * self.value_mean


def _of_block(array: torch.Tensor | None) -> int:
    """Bytes of a block, of an array [num_blocks, ...]; of none 0."""
    return 0 if array is None else array[0].nbytes


def _of_token(array: torch.Tensor) -> int:
    """Bytes of a token of a row, of an array [rows, kv_heads, tokens, dim]."""
    return array[0, :, 0].nbytes
