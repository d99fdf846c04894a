"""Numbers that pass from a device to the CPU and back at every step, in memory that is made once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

Shape = tuple[int, ...]


class Staging:
    """Tensors of fixed shapes on their way to the CPU, in one copy, and arrays on their way back, in another.

    On CUDA both copies are asynchronous and page-locked. Whoever sends anew must have waited for what he sent before
    (`arrived`): then the device has read what was sent back before, too, as all of it runs on one stream.

    What the device finds out only when the CPU has its answer goes down with what is sent next (`follow`).

    Args:
        device: where the tensors are.
        down: their shapes; up: those of the arrays that come back; following: of what goes down with the next.

    Attributes:
        back: float32 arrays of the shapes `up`, to be written before `sent_back`.
    """

    def __init__(
        self, device: torch.device, down: Sequence[Shape], up: Sequence[Shape], following: Shape = (0,)
    ) -> None:
        self.shapes = tuple(down), tuple(up), following
        self.device = device
        is_cuda = device.type == "cuda"
        # What follows lies before all that may go down with it.
        all_down = (following, *down)
        self._down, self._up = (_numbers(shapes, device) for shapes in (all_down, up))
        self._down_host, self._up_host = (_numbers(shapes, is_pinned=is_cuda) for shapes in (all_down, up))
        self._follows, *parts = _views(self._down, all_down)
        self._parts, self._returned = tuple(parts), _views(self._up, up)
        self._followed, *arrays = (view.numpy() for view in _views(self._down_host, all_down))
        self._arrays = tuple(arrays)
        self.back: tuple[np.ndarray, ...] = tuple(view.numpy() for view in _views(self._up_host, up))
        self._event = torch.cuda.Event() if is_cuda else None
        #: Where what is to follow is wanted.
        self._room: np.ndarray | None = None

    def fits(self, device: torch.device, down: Sequence[Shape], up: Sequence[Shape], following: Shape = (0,)) -> bool:
        """Whether it was made for these."""
        return self.device == device and self.shapes == (tuple(down), tuple(up), following)

    def send(self, *tensors: torch.Tensor) -> None:
        """Have the tensors, of the first of the shapes `down`, copied to the CPU as float32."""
        for part, tensor in zip(self._parts, tensors, strict=False):
            part.copy_(tensor)
        self._copy_down(sum(tensor.numel() for tensor in tensors))

    @property
    def rooms(self) -> tuple[torch.Tensor, ...]:
        """Contiguous float32 tensors of the shapes `down`, for a kernel that writes what is sent by `send_written`."""
        return self._parts

    def send_written(self) -> None:
        """Have all that `rooms` hold copied to the CPU."""
        self._copy_down(self._down.numel() - self._follows.numel())

    def arrived(self) -> tuple[np.ndarray, ...]:
        """Wait for what was sent: float32 arrays of the shapes `down`, the same memory every time."""
        if self._event is not None:
            self._event.synchronize()
        if self._room is not None:
            self._room[...] = self._followed
            self._room = None
        return self._arrays

    @property
    def following(self) -> torch.Tensor:
        """A contiguous float32 tensor of the shape `following`, for a kernel that writes what is to `follow`."""
        return self._follows

    def follow(self, tensor: torch.Tensor, room: np.ndarray) -> None:
        """Have a tensor of the shape `following` go down with what is sent next, and into `room` when that has arrived.

        What was sent before must have arrived.
        """
        if tensor.data_ptr() != self._follows.data_ptr():
            self._follows.copy_(tensor)
        self._room = room

    def settle(self) -> None:
        """Have what is to follow, if anything is, come by itself, and wait for it."""
        if self._room is not None:
            self._copy_down(0)
            self.arrived()

    def _copy_down(self, size: int) -> None:
        """Copy what is to follow and the first `size` numbers behind it."""
        first, end = 0 if self._room is not None else self._follows.numel(), self._follows.numel() + size
        self._down_host[first:end].copy_(self._down[first:end], non_blocking=self._event is not None)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.device))

    @property
    def returned(self) -> tuple[torch.Tensor, ...]:
        """What `sent_back` gives, as it was sent last."""
        return self._returned

    def sent_back(self) -> tuple[torch.Tensor, ...]:
        """What has been written to `back`, on the device: the same memory every time."""
        self._up.copy_(self._up_host, non_blocking=self._event is not None)
        return self._returned


def _numbers(shapes: Sequence[Shape], device: torch.device | None = None, is_pinned: bool = False) -> torch.Tensor:
    size = sum(map(math.prod, shapes))
    return torch.empty(size, dtype=torch.float32, device=device, pin_memory=is_pinned)


def _views(numbers: torch.Tensor, shapes: Sequence[Shape]) -> tuple[torch.Tensor, ...]:
    parts = numbers.split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
