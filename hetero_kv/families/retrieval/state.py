"""The selection state of a group of equally long sequences in one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_kv.engine.statistics import BLOCK_RECALL, NO_NUMBERS, Tally
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.statistics import ATTENDED_BLOCKS, ESTIMATED_SHARE

#: Key of the selections that a group's layers share.
SELECTIONS = "retrieval selections"
#: Key of each selection's time: blocks in the Context and tokens decoded since the prompt, [rows, 2].
SELECTED_AT = "when retrieval selected"
#: Latest selections by group of layers: positions in the Context, [rows, lists, blocks].
SharedSelections = dict[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class RetrievalState:
    """One layer's selection state; immutable.

    Attributes:
        observation: the observation window of the prompt being prefilled; None if nothing needs it.
        candidates: the preselected positions in the Context, [rows, lists, count]; None for all.
        preselected_end: blocks in the Context at preselection; later ones are always candidates.
        open_start: position of the first token behind the attention sink whose block has no representatives yet.
        accumulated: attention that the keys from `open_start` on have received, [rows, kv_heads, tokens] float32; keys
            behind its end received none. None if no key received any.
        recall: per step, the measured share of the full attention mass that the attended blocks covered.
        share: per step, the estimated share.
        blocks: per step, the number of chosen blocks, if it varies from step to step.
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
        """Means of the tallies, by the names of the statistics."""
        return {
            BLOCK_RECALL.name: self.recall.mean,
            ESTIMATED_SHARE.name: self.share.mean,
            ATTENDED_BLOCKS.name: self.blocks.mean,
        }

    def selected(self, rows: list[int]) -> RetrievalState:
        """The state after a selection of rows: row i takes that of row `rows[i]`."""
        return replace(
            self,
            candidates=None if self.candidates is None else self.candidates[rows],
            accumulated=None if self.accumulated is None else self.accumulated[rows],
            observation=None if self.observation is None else self.observation.selected(rows),
        )

    def allowed(self, blocks: int) -> np.ndarray | None:
        """The candidates among the Context's `blocks`: positions [rows, lists, count] int32; None for all."""
        if self.candidates is None:
            return None
        return with_entered(self.candidates, self.preselected_end, blocks)


def with_entered(positions: np.ndarray, seen: int, blocks: int) -> np.ndarray:
    """Append to positions among the Context's first `seen` blocks, [rows, lists, n] int32, those of all later blocks.

    The Context has `blocks` blocks in all.
    """
    entered = np.arange(seen, blocks, dtype=np.int32)
    every = [positions, np.broadcast_to(entered, (*positions.shape[:2], len(entered)))]
    return np.ascontiguousarray(np.concatenate(every, axis=2))
