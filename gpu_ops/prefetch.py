"""What lies in DRAM on its way to a GPU, a piece ahead of what is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gpu_ops.pinned_bytes import Kind, PinnedBytes

#: Writes a piece into tensors of page-locked memory.
Fill = Callable[[Sequence[torch.Tensor]], None]


class Prefetch:
    """Pieces that are copied over the bus on a stream of their own, two in page-locked memory in turn.

    Args:
        device: on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = PinnedBytes(), PinnedBytes()
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def pieces(self, wanted: Sequence[tuple[list[Kind], Fill]]) -> Iterator[list[torch.Tensor]]:
        """Each of the pieces on the device, in order; a piece is on its way when the one before is given out.

        wanted: of each, the shapes and dtypes of its tensors, and what writes them. What is given out may be used until
        the next is asked for.
        """
        current = torch.cuda.current_stream(self._device)
        ahead = self._send(0, *wanted[0]) if wanted else None
        for turn in range(len(wanted)):
            assert ahead is not None
            (tensors, event), ahead = ahead, None
            if turn + 1 < len(wanted):
                ahead = self._send((turn + 1) % 2, *wanted[turn + 1])
            current.wait_event(event)
            for tensor in tensors:
                # Its memory comes from the other stream, which must not have it back before it has been used.
                tensor.record_stream(current)
            yield tensors

    def _send(self, slot: int, kinds: list[Kind], fill: Fill) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Have a piece written and copied: its tensors on the device, and the event that says that they are there."""
        before = self._sent[slot]
        if before is not None:
            before.synchronize()
        host = self._memory[slot].of(kinds)
        fill(host)
        event = self._sent[slot] = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            tensors = [tensor.to(self._device, non_blocking=True) for tensor in host]
            event.record(self._stream)
        return tensors, event
