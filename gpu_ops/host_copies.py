"""Small copies between CPU and device through page-locked memory, so that the host waits only when it must."""

from __future__ import annotations

import torch


def on_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy tensors of one device to the CPU: all copies are queued, then the host waits once."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensor.cpu() for tensor in tensors)
    # Asynchronous copies to "cpu" go to page-locked memory.
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    torch.cuda.current_stream(device).synchronize()
    return copies


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`; on CUDA the copy may be in progress on the current stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
