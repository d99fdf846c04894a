"""Decodes a token on a GPU that attends to the Context; what it attends to is the layer's (`DeviceContext`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.device_context import CpuTurn
from hetero_kv.families.retrieval.device_tokens import DeviceTokens
from hetero_kv.families.retrieval.exact_prefill import ExactPrefill
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.gpu_ops.attention_backend import takes_token
from hetero_kv.gpu_ops.merge import apply_sink


class ResidentAttention(ExactPrefill):
    """How an operator with `ResidentLayer`s decodes a token with `attend_on: gpu`; a base.

    The host's part (`_prepare_token`) waits for nothing. It ends with the layer's kernels, which read all that changes
    from token to token from memory at fixed addresses.
    """

    reads_attend_on = True

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
