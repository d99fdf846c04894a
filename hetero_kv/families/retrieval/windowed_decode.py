"""Decodes a token of a model on a device: that attends to the window, and the CPU to the blocks."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.decode import RetrievalDecode
from hetero_kv.families.retrieval.decoded_rows import GroupRows
from hetero_kv.families.retrieval.layer import RetrievalLayer, count_step
from hetero_kv.families.retrieval.window_step import WindowStep
from hetero_kv.gpu_ops.merge import apply_sink

# Pads lists of positions.
_NO_POSITION = -1


class WindowedDecode(RetrievalDecode):
    """How `RetrievalAttention` decodes a token if attention sink and recent window are on a device.

    `hetero_kv.families.retrieval.window_step` moves the token to the CPU and back. The log-sum-exp of the merged
    attention, which tells what keys have received, goes to the CPU with the next token.
    """

    def _begun(
        self, layer: RetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> tuple[WindowStep, bool]:
        """Start a token's round trip to the CPU, and tell whether the step's blocks are finalized already."""
        # To choose by attention masses, the CPU needs the window's log-sum-exp.
        local_start = blocks.finalized * layer.layout.block_size
        return layer.window_step(call, local_start, needs_window_lse=self.choice is not None), False

    def _given(self, chosen: np.ndarray | None) -> np.ndarray | None:
        """Blocks that the device has chosen [rows, kv_heads, n], as `RetrievalStep` takes their positions."""
        if chosen is None:
            return None
        lists = chosen[:, :1] if self.shared else chosen
        return np.ascontiguousarray(np.maximum(lists, _NO_POSITION))

    def _decode_with_window(
        self, layer: RetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> torch.Tensor:
        """`decode_step` of a layer with a window."""
        native = self._native_of(layer, blocks, call, torch.float32)
        window_step, is_finalized = self._begun(layer, step, blocks, call)
        q, k, v, window_lse = window_step.arrived()
        layer.store_token(step, torch.from_numpy(k), torch.from_numpy(v))
        if not is_finalized and blocks.newly_finalized[0] != blocks.newly_finalized[1]:
            self._finalize_blocks(layer, step)
        weighs = self.choice is not None and (self.targets or self.choice.tokens > 0)
        staging = layer.staging
        assert staging is not None
        out, lse = staging.back
        group = GroupRows(layer, step, blocks, is_stored=True)
        counts = self._attend_natively(
            native, [group], q, k, v, call.scale, call.softcap or 0.0, out, lse, window_lse if weighs else None,
            given=self._given(window_step.chosen),
        )  # fmt: skip
        merged, merged_lse = window_step.merged()
        attended = merged_lse
        if counts.masses is not None:
            assert window_lse is not None
            masses = counts.masses.copy()
            # NaN, where the mass of everything is not estimated, stays NaN.
            np.logaddexp(masses, window_lse, out=masses, where=~np.isnan(masses))
            attended, counts = torch.from_numpy(masses[0]), counts._replace(masses=masses)
        count_step([layer], counts)
        if self.engine.measure_recall:
            self._measure_recall(layer, blocks, call, attended)
        if call.sink is not None:
            merged, merged_lse = apply_sink(merged, merged_lse, call.sink)
        if layer.record is not None:
            self._record_token(layer, blocks, call, merged_lse, None if counts.masses is None else attended)
        if self.accumulates:
            seen = np.full(q.shape[:2], np.nan, np.float32)
            layer.remember(step.past, call.scale, call.softcap, q.squeeze(2).copy(), seen)
            staging.follow(merged_lse.view(seen.shape), seen)
        return merged if merged.dtype is call.q.dtype else merged.to(call.q.dtype)
