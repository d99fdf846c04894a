"""DRAM that a GPU reads directly over the bus."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import warnings
import weakref
from typing import Any

import torch

# Page-locking granularity in bytes, because each call costs milliseconds.
_STEP = 16 << 20
# cudaHostRegisterPortable | cudaHostRegisterMapped
_FLAGS = 3


class MappedMemory:
    """A tensor in DRAM whose first bytes are page-locked and mapped for CUDA, as far as they are in use.

    A pool reserves more than is ever written, and page-locking backs all that it covers with memory, so it follows what
    is written. The pages are unlocked when this object, which keeps the tensor alive, is freed.

    Args:
        tensor: contiguous, on the CPU.
        device: the GPU that reads it.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.tensor = tensor
        self._device = device
        self._begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        self._end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        self._locked = self._begin
        self._failed = False
        # Beginnings of locked ranges; after an interrupt the last one may not be locked.
        self._ranges: list[int] = []
        # At exit CUDA releases everything itself.
        weakref.finalize(self, _unlock, self._ranges, device).atexit = False

    def reach(self, size: int) -> bool:
        """Page-lock at least the first `size` bytes of the tensor; returns whether they are locked.

        Warns once, and then always returns False, if CUDA refuses (a limit on locked memory, for example), or if the
        GPU would not find a second range after the first.
        """
        end = min(self.tensor.data_ptr() + size, self._end)
        if self._failed or end <= self._locked:
            return not self._failed
        stop = max(end, min(self._locked + _STEP, self._end))
        stop = -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._locked > self._begin and not are_the_hosts(self._device):
            self._failed = True
            self._warn(stop, "this GPU reads page-locked memory at other addresses than the CPU", "")
            return False
        error = self._lock(stop)
        if error:
            self._failed = True
            advice = ". Raise the limit on locked memory (ulimit -l) if there is one"
            self._warn(stop, f"cudaHostRegister: error {error}", advice)
            return False
        self._locked = stop
        return True

    def _lock(self, stop: int) -> int:
        """Page-lock the memory up to the address `stop`; returns CUDA's error, 0 for none."""
        if self._ranges[-1:] == [self._locked]:
            # An interrupt came during the call that was to lock this range, before or after it did.
            _unlock_range(self._locked, self._device)
        else:
            # Recorded before locking, because Ctrl-C is raised right after the call returns.
            self._ranges.append(self._locked)
        error = int(torch.cuda.cudart().cudaHostRegister(self._locked, stop - self._locked, _FLAGS))
        if error:
            self._ranges.pop()
            _take_pending_error(self._device)
        return error

    def _warn(self, stop: int, reason: str, advice: str) -> None:
        warnings.warn(
            f"CUDA could not page-lock {(stop - self._locked) / 1e6:.0f} MB of DRAM ({reason}); values are copied "
            f"through a buffer instead, which is slower{advice}",
            RuntimeWarning,
            stacklevel=3,
        )


def _take_pending_error(device: torch.device) -> None:
    # CUDA reports a pending error to the next launch on that device.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unlock_range(start: int, device: torch.device) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(start)):
        _take_pending_error(device)


def _unlock(ranges: list[int], device: torch.device) -> None:
    if ranges and device.type == "cuda":
        # A kernel may still read this memory.
        torch.cuda.synchronize(device)
    for start in ranges:
        _unlock_range(start, device)


# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HOST_POINTERS = 91


@functools.cache
def are_the_hosts(device: torch.device) -> bool:
    """Whether `device` uses the CPU's addresses for such memory (cudaDevAttrCanUseHostPointerForRegisteredMem).

    Then ranges locked one by one are adjacent for a kernel, as they are in DRAM. Otherwise each range has a separate
    address on the device, and nothing is known about where the next one is.
    """
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    number, found = ctypes.c_int(), ctypes.c_int(0)
    driver = _driver()
    is_known = not driver.cuDeviceGet(ctypes.byref(number), index)
    return is_known and not driver.cuDeviceGetAttribute(ctypes.byref(found), _HOST_POINTERS, number) and found.value > 0


def _driver() -> Any:
    """The CUDA driver library, which torch has loaded."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
