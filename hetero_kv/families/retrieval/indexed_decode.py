"""Decodes a token of a model on a GPU that chooses blocks, which the CPU attends to."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.indexed_layer import ScoredLayer
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.retrieval.window_step import WindowStep
from hetero_kv.families.retrieval.windowed_decode import WindowedDecode
from hetero_kv.gpu_ops.attention_backend import takes_token
from hetero_kv.gpu_ops.block_choice import best_blocks, block_scores
from hetero_kv.settings.engine_settings import GPU, SPLIT, EngineSettings


class IndexedDecode(WindowedDecode):
    """How `RetrievalAttention` decodes a token with `index_device: gpu`.

    Representatives of all blocks lie on the GPU, which scores and chooses. The list goes to the CPU in the copy that
    the token goes in, so that a layer waits once, as without.

    Attributes:
        scored_choice: how the GPU chooses blocks for the CPU; None where it does not.
    """

    #: What a subclass computes that only the CPU does; empty for nothing.
    cpu_part = ""

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.scored_choice: ResidentChoice | None = None
        # Under `auto` the CPU may come to attend.
        if engine.index_device == GPU and engine.attend_on not in (GPU, SPLIT):
            part = self._choice_of_the_cpu()
            if part is None and self.choice is not None:
                part = (
                    "blocks are chosen by estimated attention masses, which the CPU computes (attend_on: gpu has both)"
                )
            if part is not None:
                raise HeteroKVError(f"{path}: index_device is gpu, but {part}; set index_device to auto")
            if self.budget:
                self.scored_choice = self._block_choice()

    def _block_choice(self) -> ResidentChoice:
        """How a GPU chooses blocks by representatives."""
        heads = self._own_config.num_attention_heads if self.accumulates else 0
        is_bound = self.representative_type.score == "quest"
        return ResidentChoice(self.budget or 0, is_bound, self._takes_largest, self.shared, heads)

    def _choice_of_the_cpu(self) -> str | None:
        """Which part of a choice with these settings only the CPU computes; None for none."""
        settings = self.settings
        if self.cpu_part:
            return self.cpu_part
        if self.preselected is not None:
            return "preselect_block restricts the choice to blocks that the CPU keeps"
        if settings.layer_step > 1 or settings.token_step > 1:
            return "a choice is used again by other layers or tokens (layer_step, token_step)"
        return None

    def _begun(
        self, layer: RetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> tuple[WindowStep, bool]:
        if not isinstance(layer, ScoredLayer):
            return super()._begun(layer, step, blocks, call)
        if not takes_token(call.q, call.k, call.v):
            raise self._no_index("Triton's kernels do not run here, or attention_backend names others")
        local_start = blocks.finalized * layer.layout.block_size
        # All tokens of these blocks are in the pool: at least one follows them.
        if blocks.newly_finalized[0] != blocks.newly_finalized[1]:
            self._finalize_blocks(layer, step)
        context = layer.context_of(blocks.table, step.length)
        assert layer.pool is not None
        assert layer.resident is not None
        layer.resident.take_in(layer.pool, context)
        choosing = partial(self._write_best, layer, call, context.shape[1]) if self._chooses(context.shape[1]) else None
        return layer.chosen_step(call, local_start, choosing), True

    def _write_best(self, layer: ScoredLayer, call: AttentionCall, count: int, room: torch.Tensor) -> None:
        """Choose among the first `count` blocks of the Context by kernels, which write them to `room`."""
        choice, index = self.scored_choice, layer.resident
        assert choice is not None
        assert index is not None
        # As on the CPU the representatives' products count as they are.
        (vectors,) = index.arrays(("representatives",))
        scores = block_scores(call.q, vectors, count, choice.bounds, 1.0)
        room.copy_(best_blocks(scores, count, choice.blocks, choice.largest, is_shared=choice.is_shared))

    def _require_device(self, layer: RetrievalLayer) -> None:
        """Raise HeteroKVError for a layer that a GPU is to choose for, of a model on a CPU."""
        if isinstance(layer, ScoredLayer) and layer.window is None:
            raise self._no_index("the model computes on the CPU")

    def _no_index(self, reason: str) -> HeteroKVError:
        return HeteroKVError(f"{self.path}: index_device is gpu, but {reason}; set index_device to auto")
