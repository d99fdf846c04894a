"""Addresses at which a GPU finds memory that was page-locked after its allocation."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

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
