"""What lies in DRAM on its way to a GPU, a piece ahead of what is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gpu_ops.pinned_bytes import Kind, PinnedBytes, bytes_of, tensors_in

#: Writes a piece into tensors of page-locked memory.
Fill = Callable[[Sequence[torch.Tensor]], None]
_SLOTS = 2


class Prefetch:
    """Pieces that are copied over the bus on a stream of their own, between two places in page-locked memory and two on
    the GPU, which they take in turn.

    Args:
        device: on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = tuple(PinnedBytes() for _ in range(_SLOTS))
        self._sent: list[torch.cuda.Event | None] = [None] * _SLOTS

    def pieces(self, wanted: Sequence[tuple[list[Kind], Fill]]) -> Iterator[list[torch.Tensor]]:
        """Each of the pieces on the device, in order; a piece is on its way when the one before is given out.

        wanted: of each, the shapes and dtypes of its tensors, and what writes them. What is given out may be used until
        the next is asked for, or the iterator is closed: another piece comes to lie there.
        """
        if not wanted:
            return
        current = torch.cuda.current_stream(self._device)
        size = max(bytes_of(kinds) for kinds, _ in wanted)
        with torch.cuda.stream(self._stream):
            rooms = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(_SLOTS, len(wanted)))]
        try:
            ahead = self._send(0, rooms, *wanted[0])
            for turn in range(len(wanted)):
                (tensors, event), following = ahead, turn + 1
                if following < len(wanted):
                    if following >= _SLOTS:
                        # What was there before is used by nothing that is still to be queued.
                        self._stream.wait_stream(current)
                    ahead = self._send(following % _SLOTS, rooms, *wanted[following])
                current.wait_event(event)
                yield tensors
        finally:
            # The rooms are that stream's, which may have them back at once.
            self._stream.wait_stream(current)

    def _send(
        self, slot: int, rooms: Sequence[torch.Tensor], kinds: list[Kind], fill: Fill
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Have a piece written and copied: its tensors on the device, and the event that says that they are there."""
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
