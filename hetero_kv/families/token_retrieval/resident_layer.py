"""The cache layer of token retrieval on a GPU that chooses clusters and attends to their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.block_choice import NONE_DERIVED
from hetero_kv.families.retrieval.device_context import DeviceChoice
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.families.retrieval.statistics import DRAM_BYTES
from hetero_kv.families.token_retrieval.choosers.chooser import Chooser
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.families.token_retrieval.clustered_context import ClusterCounts
from hetero_kv.families.token_retrieval.layer import TokenLayout, TokenRetrievalLayer


class ResidentTokenLayer(TokenRetrievalLayer, ResidentLayer):
    """Keys, values and a chooser's arrays in a pool, of which a GPU has the arrays, chosen tokens, or all of them.

    Args:
        chooser: None where all tokens are attended to.
        choice: how the GPU chooses.
    """

    def __init__(self, settings: TokenSettings, chooser: Chooser | None, choice: DeviceChoice) -> None:
        self.chooser = chooser
        layout = TokenLayout.of_chooser(settings, chooser, has_whole_window=chooser is None)
        ResidentLayer.__init__(self, layout, settings, NONE_DERIVED, None, choice)

    def finalize(self, step: Step, queries: torch.Tensor | None = None) -> None:
        super().finalize(step, queries)
        if self.resident is not None:
            # Blocks that a crop opened again have other clusters now.
            sink = self.layout.sink_blocks
            self.resident.shorten(max(step.blocks(self.layout).newly_finalized[0], sink) - sink)

    def count_taken(self, step: Step, counts: Any) -> None:
        """See ResidentLayer. Without a choice all tokens are in the window."""
        context = self.layout.context_blocks(step.length)
        if not isinstance(counts, ClusterCounts):
            self.count(step.length, context, 0.0, 0.0)
            return
        self.count(step.length, context, counts.tokens, counts.read)
        if counts.share is not None:
            self.state = replace(self.state, share=self.state.share.plus(counts.share))

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {**super().statistics, DRAM_BYTES.name: self.from_dram.mean}
