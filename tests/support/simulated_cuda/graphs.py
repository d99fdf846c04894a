"""CUDA graphs: launches during a capture are recorded with their addresses, and run at replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.simulated_cuda.copies import poison
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.memory import Allocation
from tests.support.simulated_cuda.record import Launch, causing_line
from tests.support.simulated_cuda.tensor import SimulatedTensor, tensors_in


@dataclass
class Node:
    """A kernel of a graph.

    Attributes:
        uses: what memory it reads and writes, whether it writes, and whether that is of the graph's own pool.
        again: computes its results again, from the content of its addresses.
        out: where they lie, on the CPU.
        reads_dram: tells the device what of the host's memory the kernel reads.
        uses_rows: tells it what the kernel reads and writes at addresses of a table.
    """

    line: str
    uses: list[tuple[weakref.ref[Allocation], bool, bool]]
    again: Callable[[], Any] | None = None
    out: tuple[torch.Tensor, ...] = ()
    reads_dram: Callable[[], None] | None = None
    uses_rows: Callable[[], None] | None = None

    def run(self) -> None:
        assert self.again is not None
        # What is computed again is on the CPU, where nothing is to be intercepted.
        with torch._C._DisableTorchDispatch():
            for old, new in zip(self.out, tensors_in(self.again()), strict=True):
                if old is not new:
                    old.copy_(new)


class CUDAGraph:
    """As `torch.cuda.CUDAGraph`.

    While it captures nothing runs: what is written then is what it was before, or poison. Replays run the same kernels
    on the same addresses. Host waits, copies over the bus, page-locked allocations, other streams and events are
    refused meanwhile; what lies at an address that was let go since makes a replay an error.

    A capture that something refused has failed is not told to torch's allocator and generator, as in torch: their
    state is that of a capture until somebody sees to it.
    """

    simulation: Any = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Node] = []
        self.stream: Any = None
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._known: set[int] = set()
        self._pool: set[int] = set()
        self._touched: set[int] = set()
        self._held: Any = None
        self._is_whole = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        simulation = self.simulation
        self.stream = simulation.current_stream()
        if simulation.capture is not None or self.nodes:
            raise RuntimeError("CUDA error: a capture is under way already, or the graph has been captured")
        if self.stream.is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        simulation.memory.begin_pool(pool)
        simulation.generator.is_capturing = True
        self._pool = simulation.pools.setdefault(pool, set())
        self._known = simulation.memory.addresses() - self._pool
        self._held = simulation.memory, pool
        simulation.capture = self

    def capture_end(self) -> None:
        if self.simulation.capture is not self:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.simulation.capture = None
        memory, pool = self._held
        memory.end_pool(pool)
        self.simulation.generator.is_capturing = False
        self._is_whole = True
        self.require_added()
        self._pool |= self._touched
        for out in (out for node in self.nodes for out in node.out):
            if out.untyped_storage().data_ptr() not in self._known:
                poison(out)
        for data, before in self._before.values():
            data.copy_(before)
        self._before.clear()

    def fail(self) -> None:
        """The capture is no longer one."""
        self.simulation.capture = None
        for data, before in self._before.values():
            data.copy_(before)
        self.nodes.clear()

    def launch(self, line: str, reads: list[SimulatedTensor], writes: list[SimulatedTensor]) -> None:
        """A kernel that is to be captured; `add` follows."""
        self.require_added()
        if self.simulation.current_stream() is not self.stream:
            raise SimulatedCudaError(f"{line} uses another stream while one is captured; that is not simulated")
        self._touched |= {each.data_on_cpu.untyped_storage().data_ptr() for each in writes} - self._known
        for tensor in writes:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.data_on_cpu.untyped_storage())
            if whole.data_ptr() in self._known:
                self._before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        self.nodes.append(Node(line, [(weakref.ref(each.allocation), False, self._is_own(each)) for each in reads]))
        self.nodes[-1].uses += [(weakref.ref(each.allocation), True, self._is_own(each)) for each in writes]

    def add(self, again: Callable[[], Any], out: Any) -> None:
        """What the kernel that was launched last computes."""
        self.nodes[-1].again, self.nodes[-1].out = again, tuple(tensors_in(out))
        self._touched |= {each.untyped_storage().data_ptr() for each in tensors_in(out)} - self._known

    def require_added(self) -> None:
        """Raise SimulatedCudaError for a launch of which nobody has told what it computes."""
        if self.nodes and self.nodes[-1].again is None:
            raise SimulatedCudaError(f"{self.nodes[-1].line} launches what is not simulated in a capture")

    def _is_own(self, tensor: SimulatedTensor) -> bool:
        return tensor.data_on_cpu.untyped_storage().data_ptr() not in self._known

    def replay(self) -> None:
        simulation, line = self.simulation, causing_line()
        if simulation.capture is not None:
            raise SimulatedCudaError("a graph is replayed while another is captured")
        simulation.record.everything.append(Launch("graph", line))
        stream = simulation.advanced(self.stream.index)
        for node in self.nodes:
            for reference, writes, is_own in node.uses:
                allocation = reference()
                if allocation is not None:
                    allocation.use(stream, writes, line)
                elif not is_own:
                    raise SimulatedCudaError(
                        f"a graph uses memory that has been freed since it was captured: {node.line}; capture it anew"
                    )
            for look in (node.uses_rows, node.reads_dram):
                if look is not None:
                    look()
            node.run()

    def pool(self) -> Any:
        return id(self)

    def reset(self) -> None:
        self.nodes.clear()
        if self._is_whole:
            memory, pool = self._held
            memory.release_pool(pool)
        self._is_whole = False

    def __del__(self) -> None:
        self.reset()


class Generator:
    """As the `torch.Generator` of a device.

    Attributes:
        is_capturing: whether what it draws counts for a graph.
    """

    def __init__(self) -> None:
        self.is_capturing = False

    def manual_seed(self, seed: int) -> Generator:
        """A torch that was built for CUDA seeds its devices with the CPU; nothing is drawn here."""
        return self

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, other: Generator) -> None:
        self.is_capturing = other.is_capturing
