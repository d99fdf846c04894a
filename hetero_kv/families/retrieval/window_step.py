"""A decoded token's round trip from the device, with attention sink and recent window, to the blocks on the CPU.

Query, key and value go to the CPU in one copy, which the host waits for. Meanwhile the device attends to its window.
The CPU's attention returns in one copy, without a wait, and is merged on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.gpu_ops.merge import merge_attention
from hetero_kv.gpu_ops.staging import Staging
from hetero_kv.gpu_ops.window_step import join_parts

Arrived = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
Merged = tuple[torch.Tensor, torch.Tensor]
#: Writes blocks that the device chooses; a contiguous int32 tensor on it.
BlockChoosing = Callable[[torch.Tensor], None]


class WindowStep(Protocol):
    """The round trip of one token in one layer.

    Attributes:
        chosen: blocks that the device has chosen, [rows, kv_heads, n] int32, after `arrived`; None for none.
    """

    chosen: np.ndarray | None

    def arrived(self) -> Arrived:
        """Wait for query, key and value; returns them as float32 arrays, and the window's log-sum-exp.

        The latter is [batch, kv_heads, group], or None unless it was requested.
        """

    def merged(self) -> Merged:
        """Attention to the window, merged with that in `Staging.back`.

        Returns (out [batch, heads, 1, v_dim] in the model's dtype, lse [batch, heads, 1] float32).
        """

    def alone(self) -> Merged:
        """Attention to the window alone, in the same form."""


class TritonWindowStep:
    """The window's attention in two Triton kernels, one before the CPU's work and one after it.

    The copy to the CPU waits for the first kernel, which takes the GPU less time than its launch takes the host. Blocks
    that the device chooses go with it (`choosing`), in a fifth of the staging's rooms.
    """

    def __init__(
        self, window: DeviceWindow, staging: Staging, call: AttentionCall, local_start: int, needs_window_lse: bool,
        choosing: BlockChoosing | None = None,
    ) -> None:  # fmt: skip
        self._staging, self._call, self._needs_window_lse = staging, call, needs_window_lse
        inputs = call.q, call.k, call.v, local_start, call.scale, call.softcap
        self._parts = window.take(*inputs, staging.rooms[:4])
        self._chooses = choosing is not None
        self.chosen: np.ndarray | None = None
        if choosing is not None:
            # Whole numbers in the places of float32.
            choosing(staging.rooms[4].view(torch.int32))
        staging.send_written()

    def arrived(self) -> Arrived:
        q, k, v, window_lse, *chosen = self._staging.arrived()
        if self._chooses:
            self.chosen = chosen[0].view(np.int32)
        return q, k, v, np.logaddexp.reduce(window_lse, axis=2) if self._needs_window_lse else None

    def merged(self) -> Merged:
        return self._joined(*self._staging.sent_back())

    def alone(self) -> Merged:
        out, lse = (torch.zeros_like(room) for room in self._staging.returned)
        return self._joined(out, lse.fill_(float("-inf")))

    def _joined(self, other: torch.Tensor, other_lse: torch.Tensor) -> Merged:
        q = self._call.q
        out = torch.empty(other.shape, dtype=q.dtype, device=q.device)
        # From here it goes to the CPU with the next token, if the CPU needs it.
        lse = self._staging.following
        join_parts(self._parts, self._staging.rooms[3], other, other_lse, out, lse)
        return out, lse.view(q.shape[:3])


class TorchWindowStep:
    """The window's attention by torch or another attention kernel.

    It runs at the same time as the CPU's, or before it if the CPU needs the window's log-sum-exp.
    """

    chosen: np.ndarray | None = None

    def __init__(
        self, window: DeviceWindow, staging: Staging, call: AttentionCall, local_start: int, needs_window_lse: bool
    ) -> None:
        self._staging, self._call, self._needs_window_lse = staging, call, needs_window_lse
        window.append(call.k, call.v, local_start)
        if needs_window_lse:
            self._in_window = window.attend(call.q, call.scale, call.softcap)
            staging.send(call.q, call.k, call.v, self._in_window[1].view(staging.back[1].shape))
        else:
            staging.send(call.q, call.k, call.v)
            self._in_window = window.attend(call.q, call.scale, call.softcap)

    def arrived(self) -> Arrived:
        q, k, v, window_lse = self._staging.arrived()
        return q, k, v, window_lse if self._needs_window_lse else None

    def merged(self) -> Merged:
        out, lse = self._staging.sent_back()
        merged, total = merge_attention(*self._in_window, out, lse.view(self._call.q.shape[:3]))
        return merged if merged.dtype is self._call.q.dtype else merged.to(self._call.q.dtype), total

    def alone(self) -> Merged:
        return self._in_window
