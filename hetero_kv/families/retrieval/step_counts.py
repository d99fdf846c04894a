"""The counts of decoded tokens, which become statistics many tokens at a time: for each one that would take long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from hetero_kv.cpu_ops.step_contract import ATTENDED, CHOSEN, SCORED, TOUCHED, WHOLE
from hetero_kv.engine.statistics import Tally
from hetero_kv.families.retrieval.read_bytes import ReadSizes, SelectionStatistics


class DecodedGroups(NamedTuple):
    """What several groups choose from, one number each.

    Attributes:
        lengths: the number of tokens of each group's rows.
        contexts: the number of blocks in each group's Context.
        chosen: whether each group's rows choose among these blocks, instead of attending to all of them.
        rows: each group's rows.
    """

    lengths: list[int]
    contexts: list[int]
    chosen: list[bool]
    rows: list[slice]


class StepCounts(NamedTuple):
    """The counts of one native call, for the rows of several groups.

    Attributes:
        groups: what the groups chose from.
        which: as of `RetrievalStep`.
        most: the most blocks that a list may choose.
        lists: the number of lists of each row.
        allowed: the number of positions to choose from; 0 for all.
        unit: tokens of a block if single tokens are counted as attended, otherwise 1.
        taken: as of `StepEstimates`; None if nothing is estimated.
        masses: as of `StepEstimates`, of all that was attended; None if nothing is estimated.
        varies: whether the number of chosen blocks varies from step to step.
    """

    groups: DecodedGroups
    which: int
    most: int
    lists: int
    allowed: int
    unit: int
    taken: np.ndarray | None
    masses: np.ndarray | None
    varies: bool


class StepTallies(NamedTuple):
    """A layer's tallies of decoded tokens.

    Attributes:
        read: bytes per step.
        share: the estimated share of the attention mass that was covered, per step with an estimate.
        blocks: the number of chosen blocks, per step where it varies.
    """

    read: Tally
    share: Tally
    blocks: Tally

    def plus(self, steps: Sequence[tuple[StepCounts, int]], reading: ReadSizes) -> StepTallies:
        """The tallies with the counts of further steps of a layer, in their order, and its number among the groups."""
        lengths = np.array([each.groups.lengths[number] for each, number in steps])
        contexts = np.array([each.groups.contexts[number] for each, number in steps])
        chooses = np.array([each.groups.chosen[number] for each, number in steps])
        attended_blocks = np.where(chooses, np.minimum([each.most for each, _ in steps], contexts), contexts)
        allowed = np.array([each.allowed for each, _ in steps])
        scores = chooses & np.array([each.which == CHOSEN for each, _ in steps])
        selections = np.zeros((len(steps), len(SelectionStatistics._fields)))
        selections[:, [ATTENDED, TOUCHED, WHOLE]] = attended_blocks[:, None]
        selections[:, SCORED] = np.where(scores, np.where(allowed, allowed, contexts), 0)
        chosen = chooses & np.array([each.taken is not None for each, _ in steps])
        if chosen.any():
            of_steps = [
                each.taken[each.groups.rows[number]]
                for each, number in steps
                if each.taken is not None and each.groups.chosen[number]
            ]
            selections[chosen] = _means(np.concatenate(of_steps), [len(each) for each in of_steps])
            selections[chosen] /= np.array([each.lists for each, _ in compress(steps, chosen)])[:, None]
            selections[chosen, ATTENDED] /= np.array([each.unit for each, _ in compress(steps, chosen)])
        read = reading.of_step(lengths, contexts, SelectionStatistics(*selections.T))
        share, blocks = self.share, self.blocks
        estimated = [each.masses is not None for each, _ in steps]
        if any(estimated):
            of_steps = [
                each.masses[:, each.groups.rows[number]].reshape(2, -1)
                for each, number in steps
                if each.masses is not None
            ]
            attended, total = np.concatenate(of_steps, axis=1)
            weights = np.exp(attended - total, dtype=np.float64)
            shares = _means(weights[:, None], [each.shape[1] for each in of_steps])
            # NaN means that nothing was estimated.
            share = share.plus(*shares[shares == shares].tolist())
            varies = np.logical_and(estimated, [each.varies for each, _ in steps])
            blocks = blocks.plus(*selections[varies, ATTENDED].tolist())
        return StepTallies(self.read.plus(*read.tolist()), share, blocks)


def _means(numbers: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The mean of each of several runs of rows, of these sizes: [runs, columns] float64 from [rows, columns]."""
    starts = np.cumsum([0, *sizes[:-1]])
    return np.add.reduceat(numbers, starts, dtype=np.float64) / np.array(sizes)[:, None]
