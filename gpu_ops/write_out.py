"""Copies results of a GPU to DRAM while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetero_kv.gpu_ops.pinned_bytes import PinnedBytes

#: Receives tensors on the CPU, which are overwritten once it has returned.
Arrived = Callable[[Sequence[torch.Tensor]], None]


class _Piece:
    """Page-locked memory, and the copy in progress to it."""

    def __init__(self) -> None:
        self._memory = PinnedBytes()
        self._event = torch.cuda.Event()
        self._arrived: Arrived | None = None
        # Also keeps the tensors on the device alive until they have been copied.
        self._tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())

    def send(self, tensors: Sequence[torch.Tensor], arrived: Arrived, stream: torch.cuda.Stream) -> None:
        copies = self._memory.like(tensors)
        self._tensors, self._arrived = (tensors, copies), arrived
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event.record(stream)

    def end(self, delivers: bool = True) -> None:
        """Wait for the copy, and pass it on if `delivers`."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        self._event.synchronize()
        (_, copies), self._tensors = self._tensors, ((), ())
        if delivers:
            arrived(copies)


class WriteOut:
    """Pieces copied on a separate stream, while the device continues on the current one.

    At most two copies are in progress: a third `send` waits for the first copy, and for nothing queued after that. All
    pieces are passed on, in order, before `finish` returns.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._next, self._other = _Piece(), _Piece()

    def send(self, tensors: Sequence[torch.Tensor], arrived: Arrived) -> None:
        """Copy tensors of the device, as they are now, to the CPU, and call `arrived` with the copies."""
        piece = self._next
        piece.end()
        # Copies even if they are contiguous, because the originals may be overwritten at once.
        tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            piece.send(tensors, arrived, self._stream)
        self._next, self._other = self._other, piece

    def finish(self) -> None:
        """Wait for all copies."""
        self._next.end()
        self._other.end()

    def drop(self) -> None:
        """Wait for all copies, and pass nothing on."""
        self._next.end(delivers=False)
        self._other.end(delivers=False)
