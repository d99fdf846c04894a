"""Decodes a token whose blocks a GPU and the CPU attend to at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.decoded_rows import GroupRows
from hetero_kv.families.retrieval.device_context import CpuTurn
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.retrieval.resident_decode import ResidentDecode
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.retrieval.split_context import SplitChoice, SplitContext
from hetero_kv.gpu_ops.staging import Staging
from hetero_kv.settings.engine_settings import SPLIT, EngineSettings


class SplitDecode(ResidentDecode):
    """How `RetrievalAttention` decodes a token with `attend_on: split`.

    A layer that chooses blocks waits once, for the queries and the list of the blocks that the CPU attends to. Layers
    that attend to everything, or to no block, are those of `attend_on: gpu`.
    """

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        if engine.attend_on == SPLIT and self.choice is not None:
            raise HeteroKVError(
                f"{path}: attend_on is split, but single tokens are chosen by estimated attention masses, of which the "
                "CPU takes no list from a GPU; set attend_on to gpu or cpu"
            )

    def attend_on(self, place: str) -> None:
        super().attend_on(place)
        if place == SPLIT and isinstance(self.resident_choice, ResidentChoice) and self.resident_choice.reads_blocks:
            # Until rates are known.
            self.resident_choice = SplitChoice(*self.resident_choice)._replace(bus_share=0.0)

    def divide_missing(self, share: float) -> None:
        """See AttentionOperator."""
        if isinstance(self.resident_choice, SplitChoice):
            self.resident_choice = self.resident_choice._replace(bus_share=share)

    def _cpu_turn(self, steps: Sequence[Step], call: AttentionCall) -> CpuTurn | None:
        return BlocksByCpu(self, steps, call) if steps[0].group.layers[self.layer_idx].needs_cpu else None

    def attend_to_listed(
        self, steps: Sequence[Step], call: AttentionCall, q: np.ndarray, listed: np.ndarray, out: np.ndarray,
        lse: np.ndarray,
    ) -> None:  # fmt: skip
        """Attend to listed blocks of the Context of each step's rows; arguments as of `_attend_natively`."""
        groups = [GroupRows(step.group.layers[self.layer_idx], step, self._blocks_of(step), True) for step in steps]
        native = self._native_of(groups[0].layer, groups[0].blocks, call, torch.float32)
        k, v = (np.zeros((*listed.shape[:2], 1, each.shape[3]), np.float32) for each in (call.k, call.v))
        given = self._given(listed)
        self._attend_natively(native, groups, q, k, v, call.scale, call.softcap or 0.0, out, lse, given=given)


class BlocksByCpu:
    """What the CPU attends to of a token in a layer; see CpuTurn."""

    def __init__(self, operator: SplitDecode, steps: Sequence[Step], call: AttentionCall) -> None:
        self._operator, self._steps, self._call = operator, steps, call
        layer: ResidentLayer = steps[0].group.layers[operator.layer_idx]
        q, kv_heads = call.q, call.k.shape[1]
        assert isinstance(layer.resident, SplitContext)
        lists = len(q), kv_heads, layer.resident.ids.shape[2]
        shapes = (q.shape, lists), ((*q.shape[:3], call.v.shape[3]), (len(q), kv_heads, q.shape[1] // kv_heads)), (0,)
        if layer.staging is None or not layer.staging.fits(q.device, *shapes):
            layer.staging = Staging(q.device, *shapes)
        self._staging = layer.staging
        # Whole numbers in the places of float32.
        self.listed = self._staging.rooms[1].view(torch.int32)

    def send(self, q: torch.Tensor) -> None:
        """See CpuTurn."""
        self._staging.rooms[0].copy_(q)
        self._staging.send_written()

    def attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See CpuTurn."""
        q, rooms = self._staging.arrived()
        listed, (out, lse) = rooms.view(np.int32), self._staging.back
        if (listed >= 0).any():
            self._operator.attend_to_listed(self._steps, self._call, q, listed, out, lse)
        else:
            out[...], lse[...] = 0.0, -np.inf
        row = 0
        for step in self._steps:
            rows = len(step.group.sequences)
            step.group.layers[self._operator.layer_idx].count_listed(listed[row : row + rows])
            row += rows
        other, other_lse = self._staging.sent_back()
        return other, other_lse
