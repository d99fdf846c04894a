"""What a GPU has made on its way to DRAM, beside what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpu_ops.pinned_bytes import PinnedBytes

#: Takes tensors on the CPU, which are overwritten once it has returned.
Arrived = Callable[[Sequence[torch.Tensor]], None]


class _Piece:
    """Page-locked memory, and what is on its way there."""

    def __init__(self) -> None:
        self._memory = PinnedBytes()
        self._event = torch.cuda.Event()
        self._arrived: Arrived | None = None
        # Those on the device too, until they have been copied.
        self._tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())

    def send(self, tensors: Sequence[torch.Tensor], arrived: Arrived, stream: torch.cuda.Stream) -> None:
        copies = self._memory.like(tensors)
        self._tensors, self._arrived = (tensors, copies), arrived
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event.record(stream)

    def end(self, is_wanted: bool = True) -> None:
        """Wait for it, and hand it on if it `is_wanted`."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        self._event.synchronize()
        (_, copies), self._tensors = self._tensors, ((), ())
        if is_wanted:
            arrived(copies)


class WriteOut:
    """Pieces that are copied on a stream of their own, while the device goes on with the present one.

    Two are under way at most: who sends a third waits for the first, and for nothing that was queued behind that.
    Whatever is sent is handed on, in order, before `finish` returns.

    Args:
        device: on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._next, self._other = _Piece(), _Piece()

    def send(self, tensors: Sequence[torch.Tensor], arrived: Arrived) -> None:
        """Have tensors of the device, as they are now, copied to the CPU, and `arrived` called with the copies."""
        piece = self._next
        piece.end()
        # Copies even where they are contiguous: what they lie in may be written to at once.
        tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            piece.send(tensors, arrived, self._stream)
        self._next, self._other = self._other, piece

    def finish(self) -> None:
        """Wait for all that was sent."""
        self._next.end()
        self._other.end()

    def drop(self) -> None:
        """Wait for all that was sent, and hand nothing on."""
        self._next.end(is_wanted=False)
        self._other.end(is_wanted=False)
