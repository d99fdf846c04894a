"""Tensors that say `cuda` and store their numbers on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from hetero_kv.adapter.foreign import PLAIN_TENSORS

aten = torch.ops.aten


class SimulatedTensor(torch.Tensor):
    """A tensor of a simulated device.

    Attributes:
        data_on_cpu: its numbers.
        place: its device.
        allocation: the memory on the device that they lie in.
    """

    data_on_cpu: torch.Tensor
    place: torch.device
    allocation: Any
    simulation: Any = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: torch.Tensor, index: int) -> SimulatedTensor:
        with torch._C._DisableTorchDispatch():
            shape = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
        place = _place(index)
        self = torch.Tensor._make_subclass(cls, shape, False, dispatch_device=True, device_for_backend_keys=place)
        self.data_on_cpu, self.place = data, place
        self.allocation = cls.simulation.allocation_of(data, index)
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._run(function, args, kwargs or {})

    @classmethod
    def _run(cls, function: Any, args: Any, kwargs: Any) -> Any:
        from tests.support.simulated_cuda.operators import run

        return run(cls.simulation, function, args, kwargs)

    # torch would ask the dispatcher, and does so for little else as often.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    # What torch's own methods do in C++ with a guard of the device, which a CPU build lacks.

    def data_ptr(self) -> int:
        return self.data_on_cpu.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.data_on_cpu.untyped_storage()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return aten.copy_.default(self, source, non_blocking)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        if self.data_on_cpu.is_contiguous(memory_format=memory_format):
            return self
        return torch.clone(self, memory_format=memory_format)

    def __invert__(self) -> torch.Tensor:
        return torch.bitwise_not(self)

    def is_pinned(self, *_: Any) -> bool:
        return False

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def item(self) -> Any:
        return self._run(aten._local_scalar_dense.default, (self,), {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def nonzero(self) -> torch.Tensor:
        return self._run(aten.nonzero.default, (self,), {})

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({self.data_on_cpu}, device='{self.place}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def record_stream(self, stream: Any) -> None:
        self.allocation.recorded.add(stream)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        clone = torch.clone(self)
        memo[id(self)] = clone = torch.nn.Parameter(clone, requires_grad=False) if _is_parameter(self) else clone
        return clone

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _makes_a_view(index):
            return SimulatedTensor(self.data_on_cpu[index], self.place.index)
        self._queue_indexing("index", index, [])
        data, places = self.data_on_cpu, on_cpu(index)
        out = data[places]
        self.simulation.computed(lambda: data[places], out)
        return SimulatedTensor(out, self.place.index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if not _makes_a_view(index):
            if _is_foreign(value):
                raise RuntimeError("Expected all tensors to be on the same device, but index_put_ got values on cpu")
            self._queue_indexing("index_put_", index, [self])
            data, places, new = self.data_on_cpu, on_cpu(index), on_cpu(value)
            data.__setitem__(places, new)
            self.simulation.computed(lambda: data.__setitem__(places, new), ())
            return
        part = SimulatedTensor(self.data_on_cpu[index], self.place.index)
        if isinstance(value, SimulatedTensor) or _is_foreign(value):
            if value.dim() > part.dim():
                value = value.reshape(value.shape[value.dim() - part.dim() :])
            part.copy_(value)
        else:
            part.fill_(value.item() if isinstance(value, torch.Tensor) else value)

    def _queue_indexing(self, name: str, index: Any, written: list[SimulatedTensor]) -> None:
        """The launch of indexing with tensors or lists, and the copies and waits before it."""
        simulation, parts = self.simulation, index if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, list) or _is_foreign(part):
                host = torch.as_tensor(part)
                simulation.send(host, SimulatedTensor(host.clone(), self.place.index), False, True)
            if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
                simulation.host_waits("nonzero", simulation.current_stream(self.place.index).clock)
        reads = [part for part in parts if isinstance(part, SimulatedTensor)]
        simulation.launch(name, self.place.index, reads if written else [*reads, self], written)


PLAIN_TENSORS.add(SimulatedTensor)


@cache
def _place(index: int) -> torch.device:
    return torch.device("cuda", index)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _is_foreign(value: Any) -> bool:
    """Whether a value is a tensor of the CPU with a dimension: one without is a number to CUDA."""
    return isinstance(value, torch.Tensor) and not isinstance(value, SimulatedTensor) and value.dim() > 0


def _makes_a_view(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, slice) or type(part) is int for part in parts)


def on_cpu(tree: Any) -> Any:
    """A tree of arguments with the numbers of the simulated tensors in it."""
    # By hand: torch's own trees take longer than the operators of tiny models.
    if isinstance(tree, SimulatedTensor):
        return tree.data_on_cpu
    if isinstance(tree, dict):
        return {name: on_cpu(each) for name, each in tree.items()}
    return type(tree)([on_cpu(each) for each in tree]) if type(tree) in (tuple, list) else tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of arguments."""
    found: list[torch.Tensor] = []
    _gather_tensors((tree,), found)
    return found


def _gather_tensors(trees: Iterable[Any], found: list[torch.Tensor]) -> None:
    for each in trees:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            _gather_tensors(each, found)
        elif isinstance(each, dict):
            _gather_tensors(each.values(), found)
