"""Block ids on a device, for kernels that read blocks in place."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.gpu_ops.host_copies import on_device


class DeviceTable:
    """The block table of a layout on a device; it is sent again only when it has changed."""

    def __init__(self) -> None:
        self._sent = np.empty((0, 0), np.int32)
        self._tensor: torch.Tensor | None = None

    def holding(self, table: np.ndarray, device: torch.device) -> torch.Tensor:
        """`table` [rows, blocks] int32 on `device`. The copy may still be in flight, ordered by the stream."""
        if self._tensor is None or self._tensor.device != device or not np.array_equal(self._sent, table):
            # A table grows in place, so the copy that was sent is kept for comparison.
            self._sent = table.copy()
            self._tensor = on_device(torch.from_numpy(self._sent), device)
        return self._tensor
