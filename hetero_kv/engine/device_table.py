"""Block ids on a device, for kernels that read blocks where they lie."""

from __future__ import annotations

import numpy as np
import torch

from gpu_ops.host_copies import on_device


class DeviceTable:
    """The block table of a layout on a device, sent anew where it is another than the one that is there."""

    def __init__(self) -> None:
        self._sent = np.empty((0, 0), np.int32)
        self._tensor: torch.Tensor | None = None

    def holding(self, table: np.ndarray, device: torch.device) -> torch.Tensor:
        """`table` [rows, blocks] int32 on `device`; it may still be on its way, as far as the stream is concerned."""
        if self._tensor is None or self._tensor.device != device or not np.array_equal(self._sent, table):
            # A table grows in place: what was sent is remembered apart.
            self._sent = table.copy()
            self._tensor = on_device(torch.from_numpy(self._sent), device)
        return self._tensor
