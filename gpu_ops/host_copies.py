"""Small copies between the CPU and a device, through page-locked memory, so that the host waits when it has to."""

from __future__ import annotations

import torch


def on_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one device on the CPU: all copies are queued, then the host waits once."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensor.cpu() for tensor in tensors)
    # Into page-locked memory, which torch takes for copies that do not block.
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    torch.cuda.current_stream(device).synchronize()
    return copies


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on `device`; on CUDA it may still be on its way, as far as the stream is concerned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
