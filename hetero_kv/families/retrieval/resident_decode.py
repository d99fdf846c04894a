"""What a GPU chooses, reads from DRAM and attends to under `RetrievalAttention`; what only the CPU does is refused."""

from __future__ import annotations

from torch import nn

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.estimated_context import EstimatedChoice
from hetero_kv.families.retrieval.indexed_decode import IndexedDecode
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.resident_attention import ResidentAttention
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.gpu_ops.estimated_masses import LARGEST_BLOCK
from hetero_kv.settings.engine_settings import GPU, SPLIT, EngineSettings


class ResidentDecode(ResidentAttention, IndexedDecode):
    """How `RetrievalAttention` chooses blocks or single tokens with `attend_on: gpu`.

    Attributes:
        resident_choice: how blocks are chosen on the GPU; None where the CPU attends to them.
    """

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        if engine.attend_on in (GPU, SPLIT) and (part := self.gpu_obstacle) is not None:
            raise HeteroKVError(f"{path}: attend_on is {engine.attend_on}, but {part}; set attend_on to cpu")
        self.resident_choice: ResidentChoice | EstimatedChoice | None = None
        self.attend_on(engine.attend_on)

    def attend_on(self, place: str) -> None:
        super().attend_on(place)
        self.resident_choice = self._choice_of_the_gpu() if place in (GPU, SPLIT) else None

    def _choice_of_the_gpu(self) -> ResidentChoice | EstimatedChoice:
        blocks, choice = self.budget or 0, self.choice
        if choice is None:
            return self._block_choice()
        assert self.covering is not None
        by_keys = choice.rerank == 0
        sizes = self.covering, self.settings.block_size
        return EstimatedChoice(blocks, choice.candidates, by_keys, choice.target, choice.least, *sizes)

    @property
    def gpu_obstacle(self) -> str | None:
        if (part := self._choice_of_the_cpu()) is not None:
            return part
        if self.engine.measure_recall:
            return "measure_recall compares with attention to all blocks, which the CPU computes"
        return None if self.choice is None else self._estimate_of_the_cpu()

    def _estimate_of_the_cpu(self) -> str | None:
        """What only the CPU does of a choice by estimated attention masses; None for nothing."""
        settings = self.settings
        if settings.group_blocks > 1:
            return "blocks are scored in groups (group_blocks)"
        if not self.budget:
            return "top_k_blocks is 0, and the CPU estimates all of the attention to blocks"
        if settings.attend_to != "tokens":
            return "whole blocks are chosen by estimated attention masses (attend_to is blocks)"
        if settings.group_reduce != "softmax":
            return f"group_reduce is {settings.group_reduce}, and of estimated attention masses a GPU takes softmax"
        if self.shared:
            return "all kv heads choose together by estimated attention masses (head_select_mode is SHARED)"
        if settings.residual_attention != "estimate":
            return "residual_attention is drop where attention masses are estimated"
        if settings.block_size > LARGEST_BLOCK:
            return f"block_size is {settings.block_size}, and single tokens are chosen in blocks of {LARGEST_BLOCK}"
        # Keys in four bits are scored as they are stored.
        if not (settings.key_storage.is_coarse or Derived.of(settings).key_codes):
            return (
                f"keys in {settings.key_storage.name} in blocks of {settings.block_size} have no coarse copies to "
                "choose single tokens by (key_type, block_size)"
            )
        return None

    @property
    def indexes_on_gpu(self) -> bool:
        return self.scored_choice is not None or (self.resident_choice is not None and bool(self.budget))

    @property
    def has_whole_window(self) -> bool:
        """Whether the GPU has the keys and values of all tokens, because the layer attends to all of them."""
        return self.resident_choice is not None and self.budget is None

    def _layout(self) -> RetrievalLayout:
        """How the layer's sequences are divided."""
        return RetrievalLayout.of_settings(self.settings, self.accumulates, self.has_whole_window)
