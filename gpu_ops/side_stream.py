"""Work beside other work on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_BESIDE = "beside"


def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The stream of a CUDA device on which work of one purpose runs, always the same."""
    if (device, purpose) not in _streams:
        _streams[device, purpose] = torch.cuda.Stream(device)
    return _streams[device, purpose]


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Work that is queued in this context runs beside what is queued after it; `joined` waits for both.

    On the CPU it is done at once.
    """
    if device.type != "cuda":
        yield
        return
    side = stream_for(_BESIDE, device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


@contextmanager
def joined_on_error(device: torch.device) -> Iterator[None]:
    """Around work that runs `beside` other work until it is `joined`; where that is not reached, it is all the same.

    What it reads and writes may be let go of then, and come to hold something else.
    """
    try:
        yield
    except BaseException:
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(stream_for(_BESIDE, device))
        raise


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, made in a `beside` context, for use by what is queued from now on."""
    if tensor.device.type == "cuda":
        current = torch.cuda.current_stream(tensor.device)
        current.wait_stream(stream_for(_BESIDE, tensor.device))
        # The allocator must not hand its memory out again before the present stream has used it.
        tensor.record_stream(current)
    return tensor
