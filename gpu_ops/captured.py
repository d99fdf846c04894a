"""Work on a CUDA device that is captured once and launched again as a whole, in segments with other work between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_ops.side_stream import stream_for


class Segments:
    """CUDA graphs, to be launched in the order in which they were captured.

    A launch reads and writes the addresses that were captured. What is allocated meanwhile is the graphs' own memory,
    which lives as long as this object; nothing that is captured runs.

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
        """Within this context work is captured, the first segment.

        Raises RuntimeError for what cannot be, and torch.OutOfMemoryError where the graphs' memory finds no room.
        """
        side, self._present = self._stream, torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        try:
            # Memory that the collector lets go of may be page-locked, which is no work to be captured.
            gc.disable()
            with torch.cuda.device(self._device), torch.cuda.stream(side):
                # What torch keeps of memory that others let go of is of no use to graphs, and not given back meanwhile.
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
        """Within this context nothing is captured, on the stream that was the present one; the next segment begins
        behind it."""
        self._graphs[-1].capture_end()
        with torch.cuda.stream(self._present):
            yield
        self._begin()

    def _begin(self) -> None:
        # Whoever cleans up is to know of it, wherever an interrupt comes.
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may go on with what is none of this.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _abandon(self) -> None:
        """Whatever failed: the stream is to be one again that runs what it is given."""
        for graph in self._graphs[-1:]:
            try:
                graph.capture_end()
            except RuntimeError:
                _forget_capture(self._device, self._pool)

    def launch(self, index: int) -> None:
        """Run a segment, on the present stream."""
        self._graphs[index].replay()

    def launched(self) -> None:
        """All have been launched: the graphs' memory, when it is let go, is not used again before they are done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))


def _forget_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Have torch know that a capture is over which CUDA has ended by itself; nothing where it knows.

    torch does not: its allocator would give back nothing that several streams used, nor its cache where memory runs
    out, and its generator would draw no number outside a capture.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return
    torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    # Its twin has the same seed and has drawn as much, and is part of no capture.
    generator.graphsafe_set_state(generator.clone_state())
