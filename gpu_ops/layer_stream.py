"""Streams modules' weights from DRAM to a GPU: while one module computes, the next one's weights are copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hetero_kv.gpu_ops.page_locked import PageLocked
from hetero_kv.gpu_ops.side_stream import stream_for

_SLOTS = 2
# Alignment of tensors within a module's memory, bytes.
_ALIGNMENT = 256


class _Place:
    """Where a parameter or buffer is registered in its module, and the two tensors that alternate there."""

    def __init__(self, owner: dict[str, Any], name: str, on_host: torch.Tensor, on_device: torch.Tensor) -> None:
        self._owner, self._name = owner, name
        self._tensors = on_host, on_device

    def put(self, on_device: bool) -> None:
        self._owner[self._name] = self._tensors[on_device]


class _StreamedForward:
    """Replaces a module's forward, and keeps its weights on the GPU while it runs.

    Hooks do not suffice: torch runs none of them if Ctrl-C ends a forward.
    """

    def __init__(self, stream: LayerStream, number: int, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._stream, self._number, self._forward = stream, number, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._stream.enter(self._number)
            out = self._forward(*args, **kwargs)
            self._stream.leave(self._number)
        except BaseException:
            # Repeated in case leaving itself was interrupted; a second call changes nothing.
            self._stream.leave(self._number)
            raise
        return out


class LayerStream:
    """The weights, in page-locked DRAM, of modules that compute one after the other, repeatedly.

    Each module's weights are one piece of memory; the GPU has two slots for such pieces. A module's weights are on the
    GPU while its forward runs, and in DRAM otherwise, however the forward ends.

    If construction fails, the modules compute as before.

    Args:
        modules: in execution order, with weights on the CPU.
        device: the GPU.
        laid_out: called with each module after its tensors have been replaced by page-locked ones, so that other
            references to the former tensors are dropped before the next module is copied.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, laid_out: Callable[[nn.Module], None]
    ) -> None:
        self._device = device
        self._inwards = stream_for("weights", device)
        largest = max(_size(module) for module in modules)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        self._inwards.wait_stream(torch.cuda.current_stream(device))
        for slot in self._slots:
            # A copy may be in progress when this object is freed.
            slot.record_stream(self._inwards)
        self._ready, self._used = ([torch.cuda.Event() for _ in range(_SLOTS)] for _ in range(2))
        self._locked: list[PageLocked] = []
        self._places: list[list[_Place]] = []
        #: The module whose weights each slot contains once queued copies are done; None if unknown.
        self._loaded: list[int | None] = [None] * _SLOTS
        for number, module in enumerate(modules):
            self._lay_out(number, module)
            laid_out(module)
        self._stand_in(modules)

    @staticmethod
    def streams(module: nn.Module) -> bool:
        """Whether a module's weights are streamed by its forward."""
        return isinstance(module.__dict__.get("forward"), _StreamedForward)

    @staticmethod
    def device_bytes(sizes: Sequence[int]) -> int:
        """GPU memory of a stream of modules of these sizes, bytes."""
        return _SLOTS * max(sizes)

    def _stand_in(self, modules: Sequence[nn.Module]) -> None:
        """Replace the forward of every module by a streamed one, or of none if that fails."""
        before = [module.__dict__.get("forward") for module in modules]
        try:
            for number, module in enumerate(modules):
                module.__dict__["forward"] = _StreamedForward(self, number, module.forward)
        except BaseException:
            for module, forward in zip(modules, before, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward
            raise

    def _lay_out(self, number: int, module: nn.Module) -> None:
        """Move a module's tensors to one page-locked piece, and determine their places in a slot."""
        locked, slot = PageLocked((_size(module),), torch.uint8, self._device), self._slots[number % _SLOTS]
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        places, start = [], 0
        for owner, name, tensor in _tensors(module):
            if id(tensor) not in made:
                host, there = (_view(piece, start, tensor) for piece in (locked.tensor, slot))
                host.copy_(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    host, there = (nn.Parameter(each, requires_grad=False) for each in (host, there))
                made[id(tensor)] = host, there
                start += _aligned(tensor.nbytes)
            places.append(_Place(owner, name, *made[id(tensor)]))
        for place in places:
            place.put(on_device=False)
        self._locked.append(locked)
        self._places.append(places)

    def enter(self, number: int) -> None:
        """Put the weights of module `number` on the GPU, and start to copy the next one's."""
        slot, after = number % _SLOTS, (number + 1) % len(self._places)
        self._fetch(number)
        torch.cuda.current_stream(self._device).wait_event(self._ready[slot])
        for place in self._places[number]:
            place.put(on_device=True)
        if after % _SLOTS != slot:
            self._fetch(after)

    def leave(self, number: int) -> None:
        """Point module `number` at its weights in DRAM again."""
        slot, after = number % _SLOTS, (number + 1) % len(self._places)
        for place in self._places[number]:
            place.put(on_device=False)
        self._used[slot].record(torch.cuda.current_stream(self._device))
        if after % _SLOTS == slot:
            self._fetch(after)

    def _fetch(self, number: int) -> None:
        slot = number % _SLOTS
        if self._loaded[slot] == number:
            return
        # None until the copy is queued: an interrupted copy leaves neither module's weights.
        self._loaded[slot] = None
        self._inwards.wait_event(self._used[slot])
        with torch.cuda.stream(self._inwards):
            host = self._locked[number].tensor
            self._slots[slot][: len(host)].copy_(host, non_blocking=True)
            self._ready[slot].record(self._inwards)
        self._loaded[slot] = number


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yields every parameter and buffer with its registration, once per registration."""
    for part in module.modules():
        for owner in (part._parameters, part._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield owner, name, tensor


def _size(module: nn.Module) -> int:
    """Total size of a module's aligned tensors, bytes."""
    return sum({id(tensor): _aligned(tensor.nbytes) for _, _, tensor in _tensors(module)}.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(piece: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A view with the shape and dtype of `like` of a piece of memory, from byte `start` on."""
    return piece[start : start + like.nbytes].view(like.dtype).view(like.shape)
