"""Numbers copied between a device and the CPU at every step, in buffers allocated once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

Shape = tuple[int, ...]


class Staging:
    """Copies tensors of fixed shapes to the CPU in one copy, and arrays back in another.

    On CUDA both copies are asynchronous and use page-locked memory. A caller must wait for one `send` (`arrived`)
    before the next. As everything runs on one stream, the device has then also read what was sent back before.

    A tensor that the device computes only after the CPU's answer is copied with the next `send` (`follow`).

    Args:
        device: the tensors' device.
        down: shapes of the tensors; up: shapes of the arrays that return; following: shape of the tensor for `follow`.

    Attributes:
        back: float32 arrays of the shapes `up`, to be written before `sent_back`.
    """

    def __init__(
        self, device: torch.device, down: Sequence[Shape], up: Sequence[Shape], following: Shape = (0,)
    ) -> None:
        self.shapes = tuple(down), tuple(up), following
        self.device = device
        is_cuda = device.type == "cuda"
        # The following tensor's memory precedes all that it may be copied with.
        all_down = (following, *down)
        self._down, self._up = (_numbers(shapes, device) for shapes in (all_down, up))
        self._down_host, self._up_host = (_numbers(shapes, is_pinned=is_cuda) for shapes in (all_down, up))
        self._follows, *parts = _views(self._down, all_down)
        self._parts, self._returned = tuple(parts), _views(self._up, up)
        self._followed, *arrays = (view.numpy() for view in _views(self._down_host, all_down))
        self._arrays = tuple(arrays)
        self.back: tuple[np.ndarray, ...] = tuple(view.numpy() for view in _views(self._up_host, up))
        self._event = torch.cuda.Event() if is_cuda else None
        #: The array that receives the following tensor.
        self._room: np.ndarray | None = None

    def fits(self, device: torch.device, down: Sequence[Shape], up: Sequence[Shape], following: Shape = (0,)) -> bool:
        """Whether it was made for these."""
        return self.device == device and self.shapes == (tuple(down), tuple(up), following)

    def send(self, *tensors: torch.Tensor) -> None:
        """Start to copy tensors, of the first of the shapes `down`, to the CPU as float32."""
        for part, tensor in zip(self._parts, tensors, strict=False):
            part.copy_(tensor)
        self._copy_down(sum(tensor.numel() for tensor in tensors))

    @property
    def rooms(self) -> tuple[torch.Tensor, ...]:
        """Contiguous float32 tensors of the shapes `down`, which a kernel writes for `send_written`."""
        return self._parts

    def send_written(self) -> None:
        """Start to copy the contents of `rooms` to the CPU."""
        self._copy_down(self._down.numel() - self._follows.numel())

    def arrived(self) -> tuple[np.ndarray, ...]:
        """Wait for the last copy. Returns float32 arrays of the shapes `down`, the same memory every time."""
        if self._event is not None:
            self._event.synchronize()
        if self._room is not None:
            self._room[...] = self._followed
            self._room = None
        return self._arrays

    @property
    def following(self) -> torch.Tensor:
        """A contiguous float32 tensor of the shape `following`, which a kernel may write for `follow`."""
        return self._follows

    def follow(self, tensor: torch.Tensor, room: np.ndarray) -> None:
        """Copy a tensor of the shape `following` with the next `send`; once that has arrived, it is written to `room`.

        The last copy must have arrived.
        """
        if tensor.data_ptr() != self._follows.data_ptr():
            self._follows.copy_(tensor)
        self._room = room

    def settle(self) -> None:
        """Copy a tensor that waits to `follow`, if there is one, now, and wait for it."""
        if self._room is not None:
            self._copy_down(0)
            self.arrived()

    def _copy_down(self, size: int) -> None:
        """Copy the following tensor, if there is one, and the first `size` numbers after it."""
        first, end = 0 if self._room is not None else self._follows.numel(), self._follows.numel() + size
        self._down_host[first:end].copy_(self._down[first:end], non_blocking=self._event is not None)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.device))

    @property
    def returned(self) -> tuple[torch.Tensor, ...]:
        """The result of the last `sent_back`."""
        return self._returned

    def sent_back(self) -> tuple[torch.Tensor, ...]:
        """Copy `back` to the device. Returns tensors in the same memory every time."""
        self._up.copy_(self._up_host, non_blocking=self._event is not None)
        return self._returned


def _numbers(shapes: Sequence[Shape], device: torch.device | None = None, is_pinned: bool = False) -> torch.Tensor:
    size = sum(map(math.prod, shapes))
    return torch.empty(size, dtype=torch.float32, device=device, pin_memory=is_pinned)


def _views(numbers: torch.Tensor, shapes: Sequence[Shape]) -> tuple[torch.Tensor, ...]:
    parts = numbers.split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
