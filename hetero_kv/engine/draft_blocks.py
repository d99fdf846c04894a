"""The few blocks that the guesses of a model at its own next tokens attend to."""

from __future__ import annotations

import numpy as np
import torch


class DraftBlocks:
    """Which blocks one sequence's guesses attend to, by layer: a draft's first token chooses, the others reuse it.

    TriForce (Sun et al. 2024, arXiv:2404.11912, section 4.1) and MagicDec (Chen et al. 2024, arXiv:2408.11049) draft
    with a model's own weights and a part of its keys and values.

    Attributes:
        means: layer -> the mean keys of the sequence's first full blocks, [kv_heads, blocks, k_dim] float32. A block's
            tokens must not change once it has a mean.
        chosen: layer -> the places of the chosen blocks in the block table, [kv_heads, count]; of the present draft.
    """

    def __init__(self) -> None:
        self.means: dict[int, torch.Tensor] = {}
        self.chosen: dict[int, np.ndarray] = {}

    def begin_draft(self) -> None:
        """Let the next token choose."""
        self.chosen = {}

    @property
    def dram_bytes(self) -> int:
        """Bytes of the means. Any thread may read it."""
        return sum(means.nbytes for means in list(self.means.values()))
