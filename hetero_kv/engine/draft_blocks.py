"""The few blocks that the guesses of a model at its own next tokens attend to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class ChosenBlocks(NamedTuple):
    """What guesses attend to in a layer, besides all blocks before `first` and from `end` on.

    Attributes:
        positions: chosen ones of the blocks [first, end), counted from `first`: [1, kv_heads, count] int32, ascending.
        first, end: places in the block table.
    """

    positions: np.ndarray
    first: int
    end: int

    def ids(self, table: np.ndarray) -> np.ndarray:
        """The ids of all of them, [kv_heads, n], in a block table [blocks]."""
        heads = self.positions.shape[1]
        around = [np.broadcast_to(each, (heads, len(each))) for each in (table[: self.first], table[self.end :])]
        chosen = table[self.first + self.positions[0]]
        return np.ascontiguousarray(np.concatenate((around[0], chosen, around[1]), axis=1))


class DraftBlocks:
    """Which blocks one sequence's guesses attend to, by layer: one token chooses, the following ones reuse it.

    TriForce (Sun et al. 2024, arXiv:2404.11912, section 4.1) and MagicDec (Chen et al. 2024, arXiv:2408.11049) draft
    with a model's own weights and a part of its keys and values.

    Attributes:
        means: layer -> the mean keys of the sequence's first full blocks, [kv_heads, means, k_dim] float32. A block's
            tokens must not change once it has them.
        chosen: layer -> the chosen blocks.
    """

    def __init__(self) -> None:
        self.means: dict[int, torch.Tensor] = {}
        self.chosen: dict[int, ChosenBlocks] = {}

    def choose_anew(self) -> None:
        """Let the next token choose."""
        self.chosen = {}

    @property
    def dram_bytes(self) -> int:
        """Bytes of the means. Any thread may read it."""
        return sum(means.nbytes for means in list(self.means.values()))
