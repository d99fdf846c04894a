"""A long tensor in DRAM that passes a GPU a chunk at a time, copied ahead of the work on it and behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu_ops.page_locked import PageLocked
from gpu_ops.side_stream import stream_for

_SLOTS = 2


class ChunkStream:
    """States [batch, tokens, width] in page-locked DRAM, and the room on a GPU that chunks of them pass through.

    Copies inwards and outwards have a stream each, so that both run beside the work on another chunk.

    Args:
        batch, tokens, width, dtype: of the states.
        chunk: most tokens of a chunk.
        device: the GPU.

    Attributes:
        states: [batch, tokens, width] on the CPU; only after `finish` for others to read.
    """

    def __init__(
        self, batch: int, tokens: int, width: int, dtype: torch.dtype, chunk: int, device: torch.device
    ) -> None:
        self.device = device
        # Tokens outermost: a chunk is one piece of memory, whatever the batch.
        self._locked = PageLocked((tokens, batch, width), dtype, device)
        self._host = self._locked.tensor
        self.states = self._host.transpose(0, 1)
        room = min(chunk, tokens), batch, width
        self._arriving, self._leaving = (
            [torch.empty(room, dtype=dtype, device=device) for _ in range(_SLOTS)] for _ in range(2)
        )
        self._inwards, self._outwards = (stream_for(purpose, device) for purpose in ("inwards", "outwards"))
        self._ready, self._used, self._left = ([torch.cuda.Event() for _ in range(_SLOTS)] for _ in range(3))
        self._written = 0
        # Their room is made on the present stream.
        self._inwards.wait_stream(torch.cuda.current_stream(device))
        self._outwards.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def device_bytes(batch: int, width: int, element: int, chunk: int) -> int:
        """What such a stream takes on the GPU, bytes; `element` is of one number."""
        return 2 * _SLOTS * chunk * batch * width * element

    def read(
        self, chunks: Sequence[slice], beside: Callable[[slice], Any] = lambda chunk: None
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each chunk [batch, tokens, width] on the GPU, good until the next one is asked for, the next on its way.

        Args:
            chunks: of tokens.
            beside: what else is copied for a chunk; called on the stream of the copies. Comes along with the chunk.
        """
        current = torch.cuda.current_stream(self.device)
        coming = [self._fetch(0, chunks[0], beside)]
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                coming.append(self._fetch(number + 1, chunks[number + 1], beside))
            current.wait_event(self._ready[number % _SLOTS])
            arrived = self._arriving[number % _SLOTS][: chunk.stop - chunk.start]
            yield arrived.transpose(0, 1).contiguous(), coming.pop(0)
            self._used[number % _SLOTS].record(current)

    def _fetch(self, number: int, chunk: slice, beside: Callable[[slice], Any]) -> Any:
        slot = number % _SLOTS
        self._inwards.wait_event(self._used[slot])
        with torch.cuda.stream(self._inwards):
            along = beside(chunk)
            self._arriving[slot][: chunk.stop - chunk.start].copy_(self._host[chunk], non_blocking=True)
            self._ready[slot].record(self._inwards)
        return along

    def write(self, chunk: slice, result: torch.Tensor) -> None:
        """Have `result` [batch, tokens, width], on the GPU, copied over a chunk of the states."""
        slot, self._written = self._written % _SLOTS, self._written + 1
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._left[slot])
        leaving = self._leaving[slot][: chunk.stop - chunk.start]
        leaving.copy_(result.transpose(0, 1))
        self._outwards.wait_stream(current)
        with torch.cuda.stream(self._outwards):
            self._host[chunk].copy_(leaving, non_blocking=True)
            self._left[slot].record(self._outwards)

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._inwards.synchronize()
        self._outwards.synchronize()
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._inwards)
        current.wait_stream(self._outwards)
