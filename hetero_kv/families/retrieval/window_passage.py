"""A decoded token's way between the device, which has the attention sink and the recent window, and the CPU's blocks.

Query, key and value go to the CPU in one copy, for which the host waits; the device attends to its window; what the CPU
attended to goes back in one copy, for which nobody waits, and is merged there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from gpu_ops.merge import merge_attention
from gpu_ops.staging import Staging
from gpu_ops.window_step import join_parts
from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_window import DeviceWindow

Arrived = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
Merged = tuple[torch.Tensor, torch.Tensor]


class WindowPassage(Protocol):
    """The way of one token through one layer."""

    def arrived(self) -> Arrived:
        """Query, key and value as float32 arrays, for which this waits, and the window's log-sum-exp
        [batch, kv_heads, group], where it was asked for."""

    def merged(self) -> Merged:
        """Attention to the window and to what is in `Staging.back`: (out [batch, heads, 1, v_dim] in the model's dtype,
        lse [batch, heads, 1] float32)."""

    def alone(self) -> Merged:
        """The window's, likewise."""


class TwoLaunches:
    """By Triton: one kernel before the CPU and one behind it. The CPU's copy waits for the window's attention, which
    takes a GPU less time than its own launch does."""

    def __init__(
        self, window: DeviceWindow, staging: Staging, call: AttentionCall, local_start: int, wants_window: bool
    ) -> None:
        self._staging, self._call, self._wants_window = staging, call, wants_window
        given = call.q, call.k, call.v, local_start, call.scale, call.softcap
        self._parts = window.take(*given, staging.rooms)
        staging.send_written()

    def arrived(self) -> Arrived:
        q, k, v, beside = self._staging.arrived()
        return q, k, v, np.logaddexp.reduce(beside, axis=2) if self._wants_window else None

    def merged(self) -> Merged:
        return self._joined(*self._staging.sent_back())

    def alone(self) -> Merged:
        out, lse = (torch.zeros_like(room) for room in self._staging.returned)
        return self._joined(out, lse.fill_(float("-inf")))

    def _joined(self, other: torch.Tensor, other_lse: torch.Tensor) -> Merged:
        q = self._call.q
        out = torch.empty(other.shape, dtype=q.dtype, device=q.device)
        # From where it goes down with the next token, if the CPU is to know it.
        lse = self._staging.following
        join_parts(self._parts, self._staging.rooms[3], other, other_lse, out, lse)
        return out, lse.view(q.shape[:3])


class Apart:
    """By torch, or any kernel for attention: the window is attended to beside the CPU, or before it where that is to
    know how much of the attention the window has."""

    def __init__(
        self, window: DeviceWindow, staging: Staging, call: AttentionCall, local_start: int, wants_window: bool
    ) -> None:
        self._staging, self._call, self._wants_window = staging, call, wants_window
        window.append(call.k, call.v, local_start)
        if wants_window:
            self._in_window = window.attend(call.q, call.scale, call.softcap)
            staging.send(call.q, call.k, call.v, self._in_window[1].view(staging.back[1].shape))
        else:
            staging.send(call.q, call.k, call.v)
            self._in_window = window.attend(call.q, call.scale, call.softcap)

    def arrived(self) -> Arrived:
        q, k, v, beside = self._staging.arrived()
        return q, k, v, beside if self._wants_window else None

    def merged(self) -> Merged:
        out, lse = self._staging.sent_back()
        merged, total = merge_attention(*self._in_window, out, lse.view(self._call.q.shape[:3]))
        return merged if merged.dtype is self._call.q.dtype else merged.to(self._call.q.dtype), total

    def alone(self) -> Merged:
        return self._in_window
