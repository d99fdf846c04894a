"""A long tensor in DRAM that is processed on a GPU in chunks, with copies in both directions overlapping the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hetero_kv.gpu_ops.page_locked import PageLocked
from hetero_kv.gpu_ops.side_stream import stream_for

_SLOTS = 2


class ChunkStream:
    """States [batch, tokens, width] in page-locked DRAM, and the GPU buffers for chunks of them.

    Copies to and from the GPU have one stream each, so both overlap the work on another chunk.

    Args:
        batch, tokens, width, dtype: shape and dtype of the states.
        chunk: largest number of tokens of a chunk.
        device: the GPU.

    Attributes:
        states: [batch, tokens, width] on the CPU; others may read it only after `finish`.
    """

    def __init__(
        self, batch: int, tokens: int, width: int, dtype: torch.dtype, chunk: int, device: torch.device
    ) -> None:
        self.device = device
        # Tokens are the outermost dimension, so a chunk is contiguous for any batch.
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
        # The buffers are allocated on the current stream.
        self._inwards.wait_stream(torch.cuda.current_stream(device))
        self._outwards.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def device_bytes(batch: int, width: int, element: int, chunk: int) -> int:
        """GPU memory of such a stream, bytes; `element` is the size of one number."""
        return 2 * _SLOTS * chunk * batch * width * element

    def read(
        self, chunks: Sequence[slice], copy_along: Callable[[slice], Any] = lambda chunk: None
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yields each chunk [batch, tokens, width] on the GPU, valid until the next one, which is copied meanwhile.

        Args:
            chunks: slices of tokens.
            copy_along: copies further data for a chunk, on the stream of the copies; its result is yielded with the
                chunk.
        """
        current = torch.cuda.current_stream(self.device)
        coming = [self._fetch(0, chunks[0], copy_along)]
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                coming.append(self._fetch(number + 1, chunks[number + 1], copy_along))
            current.wait_event(self._ready[number % _SLOTS])
            arrived = self._arriving[number % _SLOTS][: chunk.stop - chunk.start]
            yield arrived.transpose(0, 1).contiguous(), coming.pop(0)
            self._used[number % _SLOTS].record(current)

    def _fetch(self, number: int, chunk: slice, copy_along: Callable[[slice], Any]) -> Any:
        slot = number % _SLOTS
        self._inwards.wait_event(self._used[slot])
        with torch.cuda.stream(self._inwards):
            along = copy_along(chunk)
            self._arriving[slot][: chunk.stop - chunk.start].copy_(self._host[chunk], non_blocking=True)
            self._ready[slot].record(self._inwards)
        return along

    def write(self, chunk: slice, result: torch.Tensor) -> None:
        """Copy `result` [batch, tokens, width], on the GPU, over a chunk of the states."""
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
