"""Work on a CUDA device that is captured once and launched again as a whole, in segments with other work between."""

from __future__ import annotations

import contextlib
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
        device: a CUDA device.
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
        """Within this context work is captured, the first segment. Raises RuntimeError for what cannot be."""
        side, self._present = self._stream, torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        # Memory that the collector lets go of may be page-locked, which is no work to be captured.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(side):
                self._begin()
                try:
                    yield
                except BaseException:
                    # Whatever failed: the stream is to be one again that runs what it is given.
                    with contextlib.suppress(RuntimeError):
                        self._graphs[-1].capture_end()
                    raise
                self._graphs[-1].capture_end()
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
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with what is none of this.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def launch(self, index: int) -> None:
        """Run a segment, on the present stream."""
        self._graphs[index].replay()

    def launched(self) -> None:
        """All have been launched: the graphs' memory, when it is let go, is not used again before they are done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
