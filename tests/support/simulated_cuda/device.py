"""The simulated device: its streams, its memory, and what the host knows about its work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.simulated_cuda.copies import Copies
from tests.support.simulated_cuda.driver import patched
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.graphs import CUDAGraph, Generator
from tests.support.simulated_cuda.kernels import interpreted
from tests.support.simulated_cuda.memory import Allocation, Memory, PinnedMemory
from tests.support.simulated_cuda.operators import Interception
from tests.support.simulated_cuda.record import Copy, Launch, Record, Wait, causing_line
from tests.support.simulated_cuda.streams import Clock, Event, Host, Stream
from tests.support.simulated_cuda.tensor import SimulatedTensor


class SimulatedDevice:
    """GPUs, all of one kind.

    Args:
        devices: how many.
        capability: compute capability.
        total: memory of each, bytes.

    Attributes:
        record: their launches, copies and waits.
        index: of the current one.
        capture: the graph that is captured; None for none.
        pools: by handle, where the memory of graphs lies.
        host_pointers: whether memory of the host that is registered has its own addresses on them.
        generator: of random numbers, for all of them.
        warns: whether it is warned of what waits (`torch.cuda.set_sync_debug_mode`): 0, 1 or 2, which is an error.
    """

    def __init__(self, devices: int, capability: tuple[int, int], total: int) -> None:
        self.devices, self.capability, self.total = devices, capability, total
        self.record = Record()
        self.index = 0
        self.capture: CUDAGraph | None = None
        self.host_pointers = True
        self.pools: dict[Any, set[int]] = {}
        self.generator, self.warns = Generator(), 0
        self._host, self._copies = Host(), Copies()
        self.memory, self.pinned = Memory(devices, total, self._host), PinnedMemory()
        self._current: dict[int, Stream] = {}
        self._streams: set[Stream] = set()

    # -- streams

    def index_of(self, device: Any) -> int:
        """The index of a device as torch takes it, None for the current one. Raises RuntimeError for one too many."""
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        if index is None:
            return self.index
        if index >= self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of {self.devices}")
        return index

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        if index not in self._current:
            self._current[index] = Stream(index)
            self._current[index].is_default = True
        return self._current[index]

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.index = self.index, self.index_of(device)
        try:
            yield
        finally:
            self.index = before

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        with self.on_device(stream.index):
            before, self._current[stream.index] = self.current_stream(stream.index), stream
            try:
                yield
            finally:
                self._current[stream.index] = before

    # -- work

    def allocation_of(self, data: torch.Tensor, index: int) -> Allocation:
        return self.memory.of(data, index, self.current_stream(index), self.capture is not None)

    def launch(self, name: str, index: int, reads: list[SimulatedTensor], writes: list[SimulatedTensor]) -> None:
        """A kernel that reads and writes tensors of GPU `index`."""
        line = causing_line()
        if self.capture is not None:
            self.capture.launch(f"{name}, {line}", reads, writes)
            return
        self.record.everything.append(Launch(name, line))
        self._queue(index, reads, writes, line)

    def computed(self, again: Callable[[], Any], out: Any) -> None:
        """The last launched kernel has computed `out` on the CPU; `again` repeats it."""
        if self.capture is not None:
            self.capture.add(again, out)

    def draw(self) -> None:
        """Random numbers are drawn. Raises RuntimeError where the generator is part of a capture that is not there."""
        if self.generator.is_capturing and self.capture is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def refuse_capturing(self, what: str) -> None:
        """Raise RuntimeError where a stream is captured; that is over then."""
        if self.capture is not None:
            self.capture.fail()
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def advanced(self, index: int) -> Stream:
        """The current stream of a GPU, with one more piece of work."""
        stream = self.current_stream(index)
        self._streams.add(stream)
        stream.done += 1
        return stream

    def _queue(self, index: int, reads: list[SimulatedTensor], writes: list[SimulatedTensor], line: str) -> Stream:
        stream = self.advanced(index)
        for tensor in reads:
            tensor.allocation.use(stream, False, line)
        for tensor in writes:
            tensor.allocation.use(stream, True, line)
        return stream

    def send(self, host: torch.Tensor, to: SimulatedTensor, is_pinned: bool, is_blocking: bool) -> None:
        """Record a copy to the device, whose numbers are there already."""
        self.refuse_capturing("a copy to the device")
        line = causing_line()
        self.record.everything.append(Copy(to.data_on_cpu.nbytes, True, is_pinned, is_blocking, line))
        stream = self._queue(to.place.index, [], [to], line)
        if is_blocking:
            self.host_waits("blocking copy to the device", stream.clock)
        elif is_pinned:
            self._copies.send(host, stream, line)

    def fetch(self, host: torch.Tensor, of: SimulatedTensor, is_pinned: bool, is_blocking: bool) -> None:
        """Copy from the device into `host`, of one dtype; what is not blocking arrives when somebody waits."""
        self.refuse_capturing("a copy from the device")
        line = causing_line()
        self.record.everything.append(Copy(host.nbytes, False, is_pinned, is_blocking, line))
        stream = self._queue(of.place.index, [of], [], line)
        if is_blocking:
            self.host_waits("blocking copy from the device", stream.clock)
            host.copy_(of.data_on_cpu)
        else:
            self._copies.fetch(host, of.data_on_cpu, stream, line)

    def read_in_place(
        self, name: str, host: dict[str, torch.Tensor], rows: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        """The kernel that was launched last, or whenever a graph launches it, reads page-locked memory.

        Args:
            host: by parameter.
            rows: which of dimension 0 it reads, by parameter; of those that are left out all.
        """
        line = f"{name}, launched by {causing_line()}"

        def read() -> None:
            read_rows = rows()
            for each, tensor in host.items():
                if not self.pinned.covers(tensor):
                    raise SimulatedCudaError(f"{name} reads DRAM that is not page-locked: an illegal address")
                self._copies.read_in_place(tensor, read_rows.get(each), self.current_stream(), line)

        if self.capture is None:
            read()
        else:
            self.capture.nodes[-1].reads_dram = read

    def use_rows(self, name: str, rows: Callable[[], dict[str, list[int]]], written: frozenset[str]) -> None:
        """The kernel that was launched last, or whenever a graph launches it, uses memory at addresses.

        Args:
            rows: the addresses, by parameter.
            written: the parameters whose memory it writes.
        """
        line = f"{name}, launched by {causing_line()}"

        def use() -> None:
            stream = self.current_stream()
            for each, addresses in rows().items():
                for address in addresses:
                    self.memory.at(address, line).use(stream, each in written, line)

        if self.capture is None:
            use()
        else:
            self.capture.nodes[-1].uses_rows = use

    def unregister(self, start: int) -> int:
        """As cudaHostUnregister. What is still read or copied is a fault, which the next wait raises."""
        for line in self._copies.lines_reading(start, self.pinned.registered(start)):
            self.memory.faults.append(f"memory was unregistered while it may still be read: {line}; wait for it before")
        return self.pinned.unregister(start)

    # -- the host

    def host_waits(self, cause: str, clock: Clock, is_told: bool = True) -> None:
        """The host waits until the work that `clock` tells of is done. Raises SimulatedCudaError for mistakes.

        is_told: whether torch warns of it in its sync debug mode.
        """
        self.refuse_capturing(cause)
        if is_told and self.warns:
            if self.warns == 2:
                raise RuntimeError("called a synchronizing CUDA operation")
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        self.record.everything.append(Wait(cause, causing_line()))
        self._host.learn(clock)
        self._copies.arrive(self._host)
        self.memory.let_go()
        if self.memory.faults:
            raise SimulatedCudaError(self.memory.faults.pop())

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams of one GPU."""
        index = self.index_of(device)
        self.host_waits("synchronize", {each: each.done for each in self._streams if each.index == index}, False)


@contextmanager
def simulated(
    devices: int = 1,
    capability: tuple[int, int] = (8, 9),
    total: int = 24 << 30,
    interpret: bool = False,
    host_pointers: bool = True,
) -> Iterator[SimulatedDevice]:
    """Within this context torch has CUDA devices, simulated ones.

    At its end all work is waited for, so that what was in flight is checked too.

    Args:
        interpret: let Triton's interpreter run Triton's kernels, and not the torch functions that define them.
        host_pointers: whether registered memory has the CPU's addresses on them.
    """
    simulation = SimulatedDevice(devices, capability, total)
    simulation.host_pointers = host_pointers
    SimulatedTensor.simulation = Stream.simulation = Event.simulation = CUDAGraph.simulation = simulation
    try:
        with patched(simulation), interpreted(simulation, interpret), Interception(simulation):
            yield simulation
            for index in range(devices):
                simulation.synchronize(index)
    finally:
        SimulatedTensor.simulation = Stream.simulation = Event.simulation = CUDAGraph.simulation = None
