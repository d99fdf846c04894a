"""Copies between DRAM and the device, those among them that end when somebody waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simulated_cuda.errors import SimulatedCudaError
from simulated_cuda.streams import Host, Stream

#: Every byte of memory that a copy has not arrived in; in every floating-point type it is NaN.
POISON = 0xFF


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
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
        if not torch.equal(_bytes_of(self.host), self.before):
            raise SimulatedCudaError(
                f"host memory was written while a copy {'from' if self.arrives is None else 'to'} it was in flight: "
                f"{self.line}; wait for the copy before the buffer is used again"
            )
        if self.arrives is not None:
            self.host.copy_(self.arrives)


class Copies:
    """The copies that are in flight."""

    def __init__(self) -> None:
        self._queued: list[InFlight] = []

    def send(self, host: torch.Tensor, stream: Stream, line: str) -> None:
        """A copy to the device, whose numbers are there already, has been queued."""
        self._queued.append(InFlight(host.detach(), stream, stream.done, line, None, _bytes_of(host)))

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
        self._queued.append(InFlight(host.detach(), stream, stream.done, line, data.clone(), _bytes_of(host)))

    def arrive(self, host: Host) -> None:
        """Let those end of which the host knows that they are done."""
        done = [each for each in self._queued if host.has_seen(each.stream, each.number)]
        self._queued = [each for each in self._queued if not host.has_seen(each.stream, each.number)]
        for each in done:
            each.end()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.data_ptr() == b.data_ptr()
