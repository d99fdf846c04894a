"""Copies between DRAM and the device, and kernels' reads of DRAM: both end when somebody waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.streams import Host, Stream

#: Every byte of memory that a copy has not arrived in; in every floating-point type it is NaN.
POISON = 0xFF


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor on the CPU with what nobody may read."""
    filler = torch.full((tensor.element_size(),), POISON, dtype=torch.uint8)
    number = filler.view(torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)
    tensor.copy_(number.reshape(()).expand(tensor.shape))


@dataclass
class InFlight:
    """A copy that is queued.

    Attributes:
        host: the host's side.
        number: which piece of the stream's work it is.
        arrives: what comes to lie in `host`, for a copy from the device; None for one to it.
        before: bytes of `host` while it was queued, which must still be there when it ends.
    """

    host: torch.Tensor
    stream: Stream
    number: int
    line: str
    arrives: torch.Tensor | None
    before: torch.Tensor

    def end(self) -> None:
        """Let it arrive. Raises SimulatedCudaError where the host's side was written in the meantime."""
        if not torch.equal(bytes_of(self.host), self.before):
            raise SimulatedCudaError(
                f"host memory was written while a copy {'from' if self.arrives is None else 'to'} it was in flight: "
                f"{self.line}; wait for the copy before the buffer is used again"
            )
        if self.arrives is not None:
            self.host.copy_(self.arrives)


class ReadInPlace:
    """A kernel's reads of page-locked memory over the bus: the memory must not change while the kernel may run.

    Args:
        rows: which of dimension 0 it reads; None for all.
    """

    arrives = None

    def __init__(self, host: torch.Tensor, rows: torch.Tensor | None, stream: Stream, number: int, line: str) -> None:
        self.stream, self.number, self.line = stream, number, line
        # No tensor, so that it is seen whether there still is another.
        self._storage, self._rows = host.untyped_storage(), rows
        self._place = host.dtype, host.storage_offset(), host.shape, host.stride()
        self._before = bytes_of(self._read)

    @property
    def host(self) -> torch.Tensor:
        """The memory."""
        dtype, *place = self._place
        return torch.empty(0, dtype=dtype).set_(self._storage, *place)

    @property
    def _read(self) -> torch.Tensor:
        return self.host if self._rows is None else self.host[self._rows]

    def end(self) -> None:
        """Raises SimulatedCudaError where what was read was written in the meantime, or let go."""
        if torch._C._storage_Use_Count(self._storage._cdata) == 1:
            raise SimulatedCudaError(
                f"page-locked memory was freed while a kernel may still read it: {self.line}; keep it until the kernel "
                "has been waited for"
            )
        if not torch.equal(bytes_of(self._read), self._before):
            raise SimulatedCudaError(
                f"host memory was written while a kernel may still read it: {self.line}; wait for the kernel before"
            )


class Copies:
    """The copies that are in flight, and what is read in place."""

    def __init__(self) -> None:
        self._queued: list[InFlight | ReadInPlace] = []

    def read_in_place(self, host: torch.Tensor, rows: torch.Tensor | None, stream: Stream, line: str) -> None:
        """A kernel that reads page-locked memory has been queued, the last of its stream."""
        self._queued.append(ReadInPlace(host, rows, stream, stream.done, line))

    def lines_reading(self, start: int, size: int) -> list[str]:
        """The lines that have queued what reads memory at these addresses, or copies from or to it."""
        lines = []
        for each in self._queued:
            begin = each.host.untyped_storage().data_ptr()
            if begin < start + size and start < begin + each.host.untyped_storage().nbytes():
                lines.append(each.line)
        return lines

    def send(self, host: torch.Tensor, stream: Stream, line: str) -> None:
        """A copy to the device, whose numbers are there already, has been queued."""
        self._queued.append(InFlight(host.detach(), stream, stream.done, line, None, bytes_of(host)))

    def fetch(self, host: torch.Tensor, data: torch.Tensor, stream: Stream, line: str) -> None:
        """A copy of `data` from the device has been queued: nobody may read `host` yet."""
        # One buffer of two copies holds the later one's; what the stream waits for is done before.
        overlapping = [each for each in self._queued if _overlap(each.host, host)]
        done = [each for each in overlapping if each.arrives is None and stream.has_seen(each.stream, each.number)]
        for each in done:
            each.end()
        gone = {id(each) for each in (*done, *(each for each in overlapping if each.arrives is not None))}
        self._queued = [each for each in self._queued if id(each) not in gone]
        poison(host)
        self._queued.append(InFlight(host.detach(), stream, stream.done, line, data.clone(), bytes_of(host)))

    def arrive(self, host: Host) -> None:
        """Let those end of which the host knows that they are done."""
        done = [each for each in self._queued if host.has_seen(each.stream, each.number)]
        self._queued = [each for each in self._queued if not host.has_seen(each.stream, each.number)]
        for each in done:
            each.end()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.data_ptr() == b.data_ptr()
