"""Decodes a token on a GPU: that chooses blocks, reads those that it lacks from DRAM, and attends to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.device_context import CpuTurn
from hetero_kv.families.retrieval.device_tokens import DeviceTokens
from hetero_kv.families.retrieval.estimated_context import EstimatedChoice
from hetero_kv.families.retrieval.indexed_decode import IndexedDecode
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.gpu_ops.attention_backend import takes_token
from hetero_kv.gpu_ops.estimated_masses import LARGEST_BLOCK
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.settings.engine_settings import GPU, SPLIT, EngineSettings


class ResidentDecode(IndexedDecode):
    """How `RetrievalAttention` decodes a token with `attend_on: gpu`.

    The host's part (`_prepare_token`) waits for nothing. It ends with the layer's kernels, which read all that changes
    from token to token from memory at fixed addresses.

    Attributes:
        resident_choice: how blocks are chosen on the GPU; None where the CPU attends to them.
    """

    reads_attend_on = True

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

    def _attends_on_gpu(self, layer: RetrievalLayer, call: AttentionCall) -> TypeGuard[ResidentLayer]:
        """Whether this token's blocks are attended to on the GPU; the CPU does it where they are recorded.

        Raises HeteroKVError where the settings request it and the GPU cannot.
        """
        if not isinstance(layer, ResidentLayer) or layer.record is not None:
            return False
        if layer.window is None:
            raise self._cannot("the model computes on the CPU")
        if not takes_token(call.q, call.k, call.v):
            raise self._cannot("Triton's kernels do not run here, or attention_backend names others")
        return True

    def _cannot(self, reason: str) -> HeteroKVError:
        return HeteroKVError(f"{self.path}: attend_on is {self.engine.attend_on}, but {reason}; set attend_on to cpu")

    def attend(self, cache: HeteroCache, call: AttentionCall) -> torch.Tensor:
        """See AttentionOperator. Rows of several lengths are attended to together, those of each store."""
        steps = cache.required_batch.steps
        if len(steps) == 1 or not all(self._is_resident(step) for step in steps):
            return super().attend(cache, call)
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        runs = [list(run) for _, run in itertools.groupby(steps, key=lambda step: id(step.group.store))]
        rows = [slice(run[0].rows.start, run[-1].rows.stop) for run in runs]
        each = zip(runs, rows, strict=True)
        return torch.cat(
            [self._attended_together(run, call.of_rows(own), number) for number, (run, own) in enumerate(each)]
        )

    def _is_resident(self, step: Step) -> bool:
        """Whether a step's token is attended to on the GPU, if its call can be."""
        layer = step.group.layers[self.layer_idx]
        is_token = step.is_decode and not step.is_draft and step.draft_blocks is None
        return is_token and isinstance(layer, ResidentLayer) and layer.resident is not None and layer.record is None

    def _attended_together(self, steps: Sequence[Step], call: AttentionCall, number: int = 0) -> torch.Tensor:
        """The attention of a token of each row of these steps, whose sequences are in one store.

        number: of these steps among those of the forward that are attended to by themselves.
        """
        layer = steps[0].group.layers[self.layer_idx]
        if not self._attends_on_gpu(layer, call):
            raise self._cannot("a layer's attention is recorded while other rows are decoded")
        for step in steps:
            self._prepare_token(step.group.layers[self.layer_idx], step)
        tokens = DeviceTokens.of(layer, steps, call.k.device, number)
        tokens.begin(steps)
        return self._attended_on_gpu(layer, tokens, call, self._cpu_turn(steps, call))

    def _cpu_turn(self, steps: Sequence[Step], call: AttentionCall) -> CpuTurn | None:
        """What the CPU does of the attention of a token of each row of these steps; None for nothing."""
        return None

    def _prepare_token(self, layer: ResidentLayer, step: Step) -> None:
        """The host's part of a token, before its kernels. Raises HeteroKVError where DRAM cannot be page-locked."""
        blocks = self._blocks_of(step)
        pool, resident, window = layer.pool, layer.resident, layer.window
        assert pool is not None
        assert resident is not None
        assert window is not None
        device = window.keys.device
        if not layer.blocks_are_mapped(device):
            raise self._cannot("CUDA does not page-lock the DRAM of the blocks")
        if blocks.newly_finalized[0] != blocks.newly_finalized[1]:
            # All tokens of these blocks are in the pool: at least one follows them.
            self._finalize_blocks(layer, step)
        resident.take_in(pool, layer.context_of(blocks.table, step.length))
        window.advance(blocks.finalized * layer.layout.block_size)

    def _blocks_of(self, step: Step) -> StepBlocks:
        layout = step.group.layers[self.layer_idx].layout
        return step.made.get(id(layout)) or step.blocks(layout)

    def _attended_on_gpu(
        self, layer: ResidentLayer, tokens: DeviceTokens, call: AttentionCall, cpu: CpuTurn | None = None
    ) -> torch.Tensor:
        """The attention of a token that `_prepare_token` has prepared; kernels alone but for `cpu`.

        layer: of any of the rows.
        """
        pool, resident = layer.pool, layer.resident
        assert pool is not None
        assert resident is not None
        memory, numbers, table, sent = tokens.of_layer(layer, len(call.q))
        out, lse = resident.attended(call, memory, pool, numbers, table, sent, cpu)
        if call.sink is not None:
            with_sink, lse = apply_sink(out, lse, call.sink)
            out = with_sink.to(out.dtype)
        if sent.query is not None and sent.lse is not None:
            if sent.query.shape[1] != call.q.shape[1]:
                raise self._cannot("its query heads are not as many as those of the model's configuration")
            tokens.scaled[layer.layer_idx] = call.scale, call.softcap
            sent.query.copy_(call.q.squeeze(2))
            sent.lse.copy_(lse.squeeze(2))
        return out

    # -- in a captured token (`adapter.graph_recording.CapturableAttention`)

    def prepare_captured(self, cache: HeteroCache) -> None:
        """See CapturableAttention."""
        steps = cache.required_batch.steps
        for step in steps:
            self._prepare_token(step.group.layers[self.layer_idx], step)
        self._tokens_of(steps).begin(steps)

    def attend_captured(self, cache: HeteroCache, call: AttentionCall) -> torch.Tensor:
        """See CapturableAttention."""
        steps = cache.required_batch.steps
        return self._attended_on_gpu(steps[0].group.layers[self.layer_idx], self._tokens_of(steps), call)

    def _tokens_of(self, steps: Sequence[Step]) -> DeviceTokens:
        layer = steps[0].group.layers[self.layer_idx]
        assert layer.window is not None
        return DeviceTokens.of(layer, steps, layer.window.keys.device)
