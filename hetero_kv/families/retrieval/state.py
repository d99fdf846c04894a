"""What retrieval remembers of a conversation in one layer, beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hetero_kv.families.retrieval.observation import Observation

#: Selections of the present token, by group of layers: positions in the Context, [rows, lists, blocks].
SharedSelections = dict[tuple[int, ...], np.ndarray]


@dataclass
class RetrievalState:
    """One layer's selection state.

    Attributes:
        shared: selections that layers of one cache hand to each other (`layer_step`, `token_step`).
        observation: the window of last queries of the prompt that is being prefilled; None when nobody needs it.
        candidates: positions in the Context that preselection left, [rows, lists, count]; None for all.
        preselected_end: blocks of the Context when preselection took place; later ones are candidates anyway.
        unseen: queries decoded since the attention that keys received was last added up, oldest first: each
            q [batch, heads, 1, k_dim] float32 and lse [batch, heads, 1], on the CPU.
        prompt_length: tokens stored when the last prompt ended.
        decoded: tokens decoded since.
        recall_sum, recall_steps: sum and number of the measured shares of attention mass.
    """

    shared: SharedSelections = field(default_factory=dict)
    observation: Observation | None = None
    candidates: np.ndarray | None = None
    preselected_end: int = 0
    unseen: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    prompt_length: int = 0
    decoded: int = 0
    recall_sum: float = 0.0
    recall_steps: int = 0

    @property
    def recall(self) -> float | None:
        """Mean share of the full attention mass that the attended blocks covered; None when not measured."""
        return self.recall_sum / self.recall_steps if self.recall_steps else None

    def reordered(self, beam_idx: torch.Tensor) -> RetrievalState:
        """The state when row i continues row `beam_idx[i]`."""
        order = beam_idx.cpu()
        self.shared.clear()
        return replace(
            self,
            candidates=None if self.candidates is None else self.candidates[order.numpy()],
            unseen=tuple((q[order], lse[order]) for q, lse in self.unseen),
        )

    def allowed(self, blocks: int) -> np.ndarray | None:
        """Positions that may be chosen among the Context's `blocks`, [rows, lists, count] int32; None for all."""
        if self.candidates is None:
            return None
        rows, lists, _ = self.candidates.shape
        entered = np.arange(self.preselected_end, blocks, dtype=np.int32)
        return np.concatenate([self.candidates, np.broadcast_to(entered, (rows, lists, len(entered)))], axis=2)
