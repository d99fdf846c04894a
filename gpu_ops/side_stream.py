"""A side stream of a CUDA device, whose work runs parallel to the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_SIDE = "side"


def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The stream of a CUDA device for one purpose, always the same."""
    if (device, purpose) not in _streams:
        _streams[device, purpose] = torch.cuda.Stream(device)
    return _streams[device, purpose]


def wait_for(purpose: str, device: torch.device) -> None:
    """Have the current stream wait for what has been queued on the stream for a purpose."""
    torch.cuda.current_stream(device).wait_stream(stream_for(purpose, device))


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """A context whose work runs parallel to work queued after it, until `joined`.

    On the CPU it runs immediately.
    """
    if device.type != "cuda":
        yield
        return
    side = stream_for(_SIDE, device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


@contextmanager
def joined_on_error(device: torch.device) -> Iterator[None]:
    """A context around work on the side stream; after an error the current stream waits for it, as `joined` would.

    Otherwise memory that the side stream uses could be freed and reused.
    """
    try:
        yield
    except BaseException:
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(stream_for(_SIDE, device))
        raise


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, produced in an `on_side_stream` context, made safe for work queued from now on."""
    if tensor.device.type == "cuda":
        current = torch.cuda.current_stream(tensor.device)
        current.wait_stream(stream_for(_SIDE, tensor.device))
        # The allocator must not reuse its memory before the current stream has used it.
        tensor.record_stream(current)
    return tensor
