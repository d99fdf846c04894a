"""`torch.cuda` of a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from hetero_kv.gpu_ops import host_traffic, mapped_memory
from tests.support.simulated_cuda.flash import scaled_dot_product_attention
from tests.support.simulated_cuda.graphs import CUDAGraph
from tests.support.simulated_cuda.streams import Event, Stream
from tests.support.simulated_cuda.tensor import SimulatedTensor

_tensor = torch.tensor
_ITS_NAME = __name__.partition(".")[0]
_HOST_POINTERS = 91


class _Library:
    """The library of CUDA's driver, by which ctypes calls."""

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation

    def cuDeviceGet(self, number: Any, index: int) -> int:
        number._obj.value = index
        return 0 if index < self._simulation.devices else 101

    def cuDeviceGetAttribute(self, found: Any, attribute: int, number: Any) -> int:
        found._obj.value = int(attribute == _HOST_POINTERS and self._simulation.host_pointers)
        return 0


@contextmanager
def patched(simulation: Any) -> Iterator[None]:
    """Within this context `torch.cuda` speaks of the simulated device."""
    # torch remembers the functions that a device's context affects. From here it would remember `_made_on_host` among
    # them, and never make a tensor on the context's device again.
    _device_constructors()
    with ExitStack() as stack:
        for name, value in _names(simulation).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(mapped_memory, "_driver", lambda: _Library(simulation)))
        stack.enter_context(patch.object(torch, "tensor", _made_on_host))
        stack.enter_context(patch.object(torch.Tensor, "to", _indexed(simulation, torch.Tensor.to)))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pinning(simulation)))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda self, *_: simulation.pinned.covers(self)))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _exchanging()))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention(simulation)))
        stack.enter_context(patch.object(torch._C, "_cuda_endAllocateToPool", _ending(simulation)))
        stack.enter_context(patch.object(torch._C, "_cuda_releasePool", _releasing(simulation)))
        # The simulated device stands for torch.
        stack.enter_context(patch.object(host_traffic, "PASSED_THROUGH", (*host_traffic.PASSED_THROUGH, _ITS_NAME)))
        yield


def _ending(simulation: Any) -> Any:
    return lambda device, pool: simulation.memory.end_pool(pool)


def _releasing(simulation: Any) -> Any:
    return lambda device, pool: simulation.memory.release_pool(pool)


def _names(simulation: Any) -> dict[str, Any]:
    memory, index_of = simulation.memory, simulation.index_of

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return simulation.total - memory.reserved(index_of(device)), simulation.total

    def reset_peak(device: Any = None) -> None:
        memory.peak[index_of(device)] = memory.live[index_of(device)]

    def set_sync_debug_mode(debug_mode: int | str) -> None:
        named = {"default": 0, "warn": 1, "error": 2}
        simulation.warns = named[debug_mode] if isinstance(debug_mode, str) else debug_mode

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: simulation.devices,
        "_lazy_init": lambda: None,
        "current_device": lambda: simulation.index,
        "device": simulation.on_device,
        "get_device_name": lambda device=None: f"Simulated GPU {index_of(device)}",
        "get_device_capability": lambda device=None: simulation.capability,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=f"Simulated GPU {index_of(device)}", total_memory=simulation.total
        ),
        "is_bf16_supported": lambda including_emulation=True: simulation.capability >= (8, 0),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: object(),
        "is_current_stream_capturing": lambda: simulation.capture is not None,
        "current_stream": simulation.current_stream,
        "stream": simulation.on_stream,
        "synchronize": simulation.synchronize,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda start, size, flags: simulation.pinned.register(start, size),
            cudaHostUnregister=simulation.unregister,
        ),
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: memory.live[index_of(device)],
        "memory_reserved": lambda device=None: memory.reserved(index_of(device)),
        "max_memory_allocated": lambda device=None: memory.peak[index_of(device)],
        "max_memory_reserved": lambda device=None: memory.peak[index_of(device)],
        "reset_peak_memory_stats": reset_peak,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "empty_cache": memory.give_back,
        "default_generators": (simulation.generator,) * simulation.devices,
        "get_sync_debug_mode": lambda: simulation.warns,
        "set_sync_debug_mode": set_sync_debug_mode,
    }


def _made_on_host(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    around = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    device = around[-1] if device is None and around else device
    made = _tensor(data, *args, device="cpu", **kwargs)
    return made if device is None else made.to(device)


def _indexed(simulation: Any, to: Any) -> Any:
    """`Tensor.to`, for which a device without an index is the current one: a CPU build cannot ask which that is."""

    def is_device(value: Any) -> bool:
        return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"

    def indexed(value: Any) -> Any:
        return torch.device("cuda", simulation.index_of(value)) if is_device(value) else value

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(indexed, args), **{name: indexed(value) for name, value in kwargs.items()})

    return moved


def _exchanging() -> Any:
    """`Module._apply` that puts other parameters in the place of those that move, one for all that are tied: torch lets
    a parameter be another tensor, which a subclass cannot be."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    depth = 0

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        try:
            for child in module.children() if recurse else ():
                child._apply(fn)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in moved:
                        data = fn(parameter.detach())
                        moved[id(parameter)] = parameter, torch.nn.Parameter(data, parameter.requires_grad)
                    module._parameters[name] = moved[id(parameter)][1]
            module._buffers.update({name: fn(each) for name, each in module._buffers.items() if each is not None})
        finally:
            depth -= 1
            if not depth:
                moved.clear()
        return module

    return apply


def _pinning(simulation: Any) -> Any:
    return lambda self, *_: simulation.pinned.allocated(self.clone())


def _attention(simulation: Any) -> Any:
    """torch's attention, for which it chooses a fused kernel: one launch."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(q, SimulatedTensor):
            return original(q, *args, **kwargs)
        return scaled_dot_product_attention(simulation, original, q, *args, **kwargs)

    return attention
