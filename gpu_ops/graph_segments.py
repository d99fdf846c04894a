"""Captures CUDA work as graphs, in segments with uncaptured work between them, and launches them again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_kv.gpu_ops.side_stream import stream_for


class GraphSegments:
    """CUDA graphs, launched in the order in which they were captured.

    A launch reads and writes the captured addresses. Allocations during the capture come from the graphs' own memory,
    which lives as long as this object. Captured work does not run during the capture.

    Args:
        device: a CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = stream_for("capture", device)
        self._present = torch.cuda.current_stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A context in which work is captured, beginning with the first segment.

        Raises RuntimeError for work that cannot be captured, and torch.OutOfMemoryError without
        memory for the graphs.
        """
        side, self._present = self._stream, torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        try:
            # The garbage collector may free page-locked memory, which cannot be captured.
            gc.disable()
            with torch.cuda.device(self._device), torch.cuda.stream(side):
                # torch's cached free memory is unusable for graphs, and is not released during a capture.
                torch.cuda.empty_cache()
                try:
                    self._begin()
                    yield
                    self._graphs[-1].capture_end()
                except BaseException:
                    self._abandon()
                    raise
        finally:
            if collects:
                gc.enable()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """A context of uncaptured work, on the stream that was current before; then the next segment begins."""
        self._graphs[-1].capture_end()
        with torch.cuda.stream(self._present):
            yield
        self._begin()

    def _begin(self) -> None:
        # Appended first, so that the cleanup finds it wherever an interrupt occurs.
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may continue with unrelated work.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _abandon(self) -> None:
        """After a failure, return the stream to a state in which it runs work."""
        for graph in self._graphs[-1:]:
            try:
                graph.capture_end()
            except RuntimeError:
                _forget_capture(self._device, self._pool)

    def launch(self, index: int) -> None:
        """Launch a segment on the current stream."""
        self._graphs[index].replay()

    def launched(self) -> None:
        """Declare all segments launched: the graphs' memory, once freed, is not reused before they are done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


def _forget_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell torch that CUDA has ended a capture by itself; does nothing if torch knows.

    Otherwise torch's allocator would not free memory that several streams used, nor its cache when memory runs out, and
    its generator would draw no number outside a capture.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return
    torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    # The clone has the same seed and offset, and is part of no capture.
    generator.graphsafe_set_state(generator.clone_state())
