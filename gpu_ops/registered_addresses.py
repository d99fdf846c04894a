"""Where a GPU finds memory that was page-locked after it had been allocated."""

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
    """Whether the addresses of such memory on `device` are the CPU's (cudaDevAttrCanUseHostPointerForRegisteredMem).

    Then ranges that were locked one by one lie side by side for a kernel too, as they do in DRAM. Elsewhere each range
    has an address of its own, and nothing is said of where the next one lies.
    """
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    number, found = ctypes.c_int(), ctypes.c_int(0)
    driver = _driver()
    is_known = not driver.cuDeviceGet(ctypes.byref(number), index)
    return is_known and not driver.cuDeviceGetAttribute(ctypes.byref(found), _HOST_POINTERS, number) and found.value > 0


def _driver() -> Any:
    """CUDA's driver, which torch has loaded."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
