"""What retrieval remembers of a cohort in one layer, beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_kv.engine.statistics import BLOCK_RECALL, NO_NUMBERS, Tally
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.statistics import ATTENDED_BLOCKS, ESTIMATED_SHARE

#: What a cohort's layers share: selections that they hand to each other.
SELECTIONS = "retrieval selections"
#: And of each: the blocks that the Context had, and the tokens decoded since the prompt, [rows, 2].
SELECTED_AT = "when retrieval selected"
#: Selections of the present token, by group of layers: positions in the Context, [rows, lists, blocks].
SharedSelections = dict[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class RetrievalState:
    """One layer's selection state; replaced, never changed.

    Attributes:
        observation: the window of last queries of the prompt that is being prefilled; None when nobody needs it.
        candidates: positions in the Context that preselection left, [rows, lists, count]; None for all.
        preselected_end: blocks of the Context when preselection took place; later ones are candidates anyway.
        open_start: position of the first token whose block, behind the attention sink, has no representatives yet.
        accumulated: attention that the keys from `open_start` on have received, [rows, kv_heads, tokens] float32, as
            far as any was received; None where nothing was.
        recall: the measured shares of the full attention mass that the attended blocks covered, a step's each.
        share: likewise, the estimated ones.
        blocks: likewise, the blocks that were chosen where their number is the step's own.
    """

    observation: Observation | None = None
    candidates: np.ndarray | None = None
    preselected_end: int = 0
    open_start: int = 0
    accumulated: torch.Tensor | None = None
    recall: Tally = NO_NUMBERS
    share: Tally = NO_NUMBERS
    blocks: Tally = NO_NUMBERS

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """What was counted, under the names of the statistics."""
        return {
            BLOCK_RECALL.name: self.recall.mean,
            ESTIMATED_SHARE.name: self.share.mean,
            ATTENDED_BLOCKS.name: self.blocks.mean,
        }

    def selected(self, rows: list[int]) -> RetrievalState:
        """The state when row i is what row `rows[i]` was."""
        return replace(
            self,
            candidates=None if self.candidates is None else self.candidates[rows],
            accumulated=None if self.accumulated is None else self.accumulated[rows],
            observation=None if self.observation is None else self.observation.selected(rows),
        )

    def allowed(self, blocks: int) -> np.ndarray | None:
        """Positions that may be chosen among the Context's `blocks`, [rows, lists, count] int32; None for all."""
        if self.candidates is None:
            return None
        return with_entered(self.candidates, self.preselected_end, blocks)


def with_entered(positions: np.ndarray, seen: int, blocks: int) -> np.ndarray:
    """Positions among the first `seen` blocks of the Context, [rows, lists, n] int32, and those of the others behind
    them, up to `blocks`."""
    entered = np.arange(seen, blocks, dtype=np.int32)
    every = [positions, np.broadcast_to(entered, (*positions.shape[:2], len(entered)))]
    return np.ascontiguousarray(np.concatenate(every, axis=2))
