"""Copies pieces from DRAM to a GPU, one piece ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hetero_kv.gpu_ops.pinned_bytes import Kind, PinnedBytes, bytes_of, tensors_in

#: Writes a piece into tensors of page-locked memory.
Fill = Callable[[Sequence[torch.Tensor]], None]
_SLOTS = 2


class Prefetch:
    """Copies pieces on a separate stream, through two alternating slots in page-locked memory and two on the GPU.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = tuple(PinnedBytes() for _ in range(_SLOTS))
        self._sent: list[torch.cuda.Event | None] = [None] * _SLOTS

    def pieces(self, queue: Sequence[tuple[list[Kind], Fill]]) -> Iterator[list[torch.Tensor]]:
        """Yields each piece on the device, in order; the copy of a piece starts when the piece before is yielded.

        queue: for each piece, shapes and dtypes of its tensors, and the function that writes them. The tensors yielded
        are valid until the next piece is requested or the iterator is closed, because slots are reused.
        """
        if not queue:
            return
        current = torch.cuda.current_stream(self._device)
        size = max(bytes_of(kinds) for kinds, _ in queue)
        with torch.cuda.stream(self._stream):
            rooms = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(_SLOTS, len(queue)))]
        try:
            ahead = self._send(0, rooms, *queue[0])
            for turn in range(len(queue)):
                (tensors, event), following = ahead, turn + 1
                if following < len(queue):
                    if following >= _SLOTS:
                        # The slot's former piece is not used by work queued from now on.
                        self._stream.wait_stream(current)
                    ahead = self._send(following % _SLOTS, rooms, *queue[following])
                current.wait_event(event)
                yield tensors
        finally:
            # The slots' memory belongs to that stream, which may reuse it at once.
            self._stream.wait_stream(current)

    def _send(
        self, slot: int, rooms: Sequence[torch.Tensor], kinds: list[Kind], fill: Fill
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Write and copy a piece. Returns its tensors on the device, and the event that signals their arrival."""
        before = self._sent[slot]
        if before is not None:
            before.synchronize()
        host = self._memory[slot].of(kinds)
        fill(host)
        event = self._sent[slot] = torch.cuda.Event()
        tensors = tensors_in(rooms[slot], kinds)
        with torch.cuda.stream(self._stream):
            for tensor, source in zip(tensors, host, strict=True):
                tensor.copy_(source, non_blocking=True)
            event.record(self._stream)
        return tensors, event
