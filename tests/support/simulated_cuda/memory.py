"""Memory of the device with its owners, writers and readers, and page-locked memory of the host."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.streams import Clock, Host, Stream


class Allocation:
    """A storage on the device, for as long as a tensor on it lives.

    Attributes:
        index: of the device.
        stream: on which it was made, and on which the allocator hands it out again.
        written: the stream that last wrote to it, and how much work that had.
        read: likewise, all that read since.
        recorded: streams that the allocator was told of (`Tensor.record_stream`).
        is_graphs: whether it was made while a graph was captured.
    """

    def __init__(
        self, nbytes: int, index: int, stream: Stream, is_graphs: bool, freed: Callable[[Allocation], None]
    ) -> None:
        self.nbytes, self.index, self.stream, self.is_graphs, self._freed = nbytes, index, stream, is_graphs, freed
        self.written = (stream, stream.done)
        self.read: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()

    def __del__(self) -> None:
        self._freed(self)

    def use(self, stream: Stream, writes: bool, line: str) -> None:
        """Let the piece of work that `stream` has just queued read this, or write to it.

        Raises SimulatedCudaError if another stream may use it at the same time.
        """
        before = [self.written, *(self.read.items() if writes else ())]
        for other, count in before:
            if not stream.has_seen(other, count):
                raise SimulatedCudaError(
                    f"{line} {'writes' if writes else 'reads'} memory that another stream may still "
                    f"{'use' if writes else 'write'}: have the stream wait for it (wait_stream, wait_event)"
                )
        if writes:
            self.written, self.read = (stream, stream.done), {}
        else:
            self.read[stream] = stream.done

    def is_in_use(self, host: Host) -> bool:
        """Whether a stream that the allocator was not told of may still use it."""
        return any(
            not (self.stream.has_seen(stream, count) or host.has_seen(stream, count) or stream in self.recorded)
            for stream, count in (self.written, *self.read.items())
        )

    def waits_for(self) -> Clock:
        """What must be known to be done before the allocator hands it out again: all that recorded streams have."""
        return {stream: stream.done for stream in self.recorded if stream is not self.stream}


class Memory:
    """The allocations that live, and how many bytes they are, by device.

    As the allocator does, it keeps what was freed and is recorded for other streams until these are done; when that is
    is a matter of time, so that here it is as late as can be: when the host has waited for them.

    torch's allocator keeps what is freed, for whatever is made next; what graphs have had is for graphs alone, and
    these have none of the rest. It gives nothing back while it believes that a graph is captured.

    Attributes:
        live, peak: bytes.
        kept: bytes that are free, and torch's still; of_graphs: likewise, for graphs.
        faults: what was freed too early.
        underway: the pools of graphs that are captured, as far as the allocator knows.
        pools: how many graphs have each.
    """

    def __init__(self, devices: int, total: int, host: Host) -> None:
        self._host, self._total = host, total
        self.kept, self.of_graphs = [0] * devices, [0] * devices
        self.underway: list[Any] = []
        self.pools: Counter[Any] = Counter()
        # Freed while a graph was captured, and used by several streams.
        self._deferred: list[Allocation] = []
        self._by_address: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.live, self.peak = [0] * devices, [0] * devices
        # Device and bytes of what was freed, whether it is for graphs, and what it waits for.
        self._waiting: list[tuple[int, int, bool, Clock]] = []
        self.faults: list[str] = []

    def of(self, data: torch.Tensor, index: int, stream: Stream, is_graphs: bool) -> Allocation:
        """The allocation of a tensor's numbers; a new one if it has none."""
        storage = data.untyped_storage()
        found = self._by_address.get(storage.data_ptr())
        if found is not None:
            return found
        self._make_room(storage.nbytes(), index, is_graphs)
        made = Allocation(storage.nbytes(), index, stream, is_graphs, self._forget)
        if made.nbytes:
            self._by_address[storage.data_ptr()] = made
        self.live[index] += made.nbytes
        self.peak[index] = max(self.peak[index], self.live[index])
        return made

    def at(self, address: int, line: str) -> Allocation:
        """The allocation in which an address lies. Raises SimulatedCudaError where there is none."""
        found = self._by_address.get(address)
        if found is not None:
            return found
        for begin, allocation in list(self._by_address.items()):
            if begin < address < begin + allocation.nbytes:
                return allocation
        raise SimulatedCudaError(f"an illegal address: the memory has been freed since the table was written: {line}")

    def addresses(self) -> set[int]:
        """Where the storages that live begin."""
        return set(self._by_address.keys())

    def reserved(self, index: int) -> int:
        """Bytes of a device that are torch's."""
        return self.live[index] + self.kept[index] + self.of_graphs[index]

    def give_back(self) -> None:
        """As `torch.cuda.empty_cache`. What graphs have had is theirs for good."""
        self.kept = [0] * len(self.kept)

    def _make_room(self, nbytes: int, index: int, is_graphs: bool) -> None:
        free = self.of_graphs if is_graphs else self.kept
        free[index] -= min(free[index], nbytes)
        if self.reserved(index) + nbytes > self._total and not self.underway:
            # It waits for all streams before it gives up.
            self.let_go(settled=True)
            self.give_back()
        if self.reserved(index) + nbytes > self._total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")

    def begin_pool(self, pool: Any) -> None:
        """A graph is captured, whose memory is of this pool."""
        self.underway.append(pool)
        self.pools[pool] += 1

    def end_pool(self, pool: Any) -> None:
        """It is no more. Raises RuntimeError where it was not."""
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)
        while self._deferred and not self.underway:
            self._let_go(self._deferred.pop())

    def release_pool(self, pool: Any) -> None:
        """A graph is no more."""
        self.pools[pool] -= 1

    def let_go(self, *, settled: bool = False) -> None:
        """Let go of what waits for streams of which the host knows that they are done; settled: for all of them."""
        waiting, self._waiting = self._waiting, []
        for index, nbytes, is_graphs, clock in waiting:
            self._free(index, nbytes, is_graphs, {} if settled else clock)

    def _free(self, index: int, nbytes: int, is_graphs: bool, clock: Clock) -> None:
        if all(self._host.has_seen(stream, count) for stream, count in clock.items()):
            self.live[index] -= nbytes
            (self.of_graphs if is_graphs else self.kept)[index] += nbytes
        else:
            self._waiting.append((index, nbytes, is_graphs, clock))

    def _let_go(self, allocation: Allocation) -> None:
        self._free(allocation.index, allocation.nbytes, allocation.is_graphs, allocation.waits_for())

    def _forget(self, allocation: Allocation) -> None:
        if allocation.recorded and self.underway:
            self._deferred.append(allocation)
        else:
            self._let_go(allocation)
        if allocation.is_in_use(self._host):
            self.faults.append(
                f"{allocation.nbytes} bytes were freed while another stream may still use them; tell the allocator "
                "with Tensor.record_stream"
            )


class PinnedMemory:
    """Page-locked memory of the host: what was allocated so, and what was registered since."""

    def __init__(self) -> None:
        # Kept, so that no other memory comes to lie at their addresses.
        self._allocated: dict[int, torch.UntypedStorage] = {}
        self._registered: dict[int, int] = {}

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory counts as page-locked."""
        storage = tensor.untyped_storage()
        self._allocated[storage.data_ptr()] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes that were ever allocated so."""
        return sum(each.nbytes() for each in self._allocated.values())

    def register(self, start: int, size: int) -> int:
        """As cudaHostRegister: 0, or the error that some of it is registered already."""
        if any(start < begin + length and begin < start + size for begin, length in self._registered.items()):
            return 712
        self._registered[start] = size
        return 0

    def registered(self, start: int) -> int:
        """How many bytes were registered there; 0 for none."""
        return self._registered.get(start, 0)

    def unregister(self, start: int) -> int:
        """As cudaHostUnregister: 0, or the error that nothing was registered there."""
        return 713 if self._registered.pop(start, None) is None else 0

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether all of the numbers of a tensor on the CPU lie in page-locked memory."""
        if not tensor.numel() or tensor.untyped_storage().data_ptr() in self._allocated:
            return True
        last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
        for begin, size in sorted(self._registered.items()):
            # Neighbours may have been registered one by one.
            if begin <= start < begin + size:
                start = begin + size
        return start >= stop
