"""A tensor that grows along one dimension at its end and may shrink at both, without being copied each time."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import torch

from gpu_ops.page_locked import PageLocked

_Extent = tuple[torch.Tensor | None, int, int]


@dataclass(eq=False)
class Checkpoint:
    """Where entries lie: a buffer, None before there was any, and [start, end) in it.

    One attribute, so that an interrupt finds it as it was or as it will be.
    """

    extent: _Extent


class GrowingTensor:
    """Entries along `dim`, in a buffer with room for some more.

    Entries are only ever written behind those that are held, so that a checkpoint stays valid for as long as nothing
    is cut off before it. Where the entries move to a larger buffer, checkpoints move with them: the smaller one is
    freed at once, whoever may yet want to come back.

    Args:
        dim: the dimension that grows.
        slack: entries that a new buffer has room for beyond what it must hold.
    """

    def __init__(self, dim: int, slack: int) -> None:
        self.dim = dim
        self.slack = slack
        self._buffer: torch.Tensor | None = None
        self._start = self._end = 0
        # A buffer that two tensors hold is written to by neither.
        self._is_shared = False
        self._checkpoints: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        # Where the entries lie that have left a GPU, and which.
        self._parked: tuple[PageLocked, torch.device] | None = None

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def entries(self) -> torch.Tensor:
        """The entries, a view. There must have been some."""
        assert self._buffer is not None
        return self._buffer.narrow(self.dim, self._start, len(self))

    @property
    def extent(self) -> _Extent:
        """The buffer, None before there was any, and where in it the entries begin and end."""
        return self._buffer, self._start, self._end

    def append(self, new: torch.Tensor) -> None:
        """Add the entries of `new`, which agrees with the others in all dimensions but `dim`."""
        count = new.shape[self.dim]
        self.reserve(new, count)
        assert self._buffer is not None
        self._buffer.narrow(self.dim, self._end, count).copy_(new)
        self._end += count

    def room(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Add `count` entries that agree with `like` in all dimensions but `dim`: a view, for the caller to write."""
        self.reserve(like, count)
        assert self._buffer is not None
        self._end += count
        return self._buffer.narrow(self.dim, self._end - count, count)

    def reserve(self, like: torch.Tensor, count: int) -> None:
        """Make room for `count` more entries, which agree with `like` in all dimensions but `dim`."""
        if self._buffer is None or self._is_shared or self._end + count > self._buffer.shape[self.dim]:
            self._move(like, room=count + self.slack)

    def replace(self, new: torch.Tensor) -> None:
        """Hold the entries of `new` and no others, in a buffer of their own."""
        self._buffer, self._start, self._end = None, 0, 0
        self.append(new)

    def drop_first(self, count: int) -> None:
        """Forget the first `count` entries."""
        self._start += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` entries."""
        self._end = self._start + length

    def select(self, index: torch.Tensor) -> None:
        """Let entry i of dimension 0 be what entry `index[i]` was."""
        if self._buffer is not None:
            self.replace(self.entries.index_select(0, index.to(self._buffer.device)))

    def fork(self) -> GrowingTensor:
        """A second tensor with the same entries; the first of the two that grows moves out of the common buffer."""
        self._is_shared = self._buffer is not None
        twin = copy.copy(self)
        twin._checkpoints = weakref.WeakSet()
        return twin

    def checkpoint(self) -> Checkpoint:
        """What `restore` needs to come back to the present entries."""
        made = Checkpoint(self.extent)
        self._checkpoints.add(made)
        return made

    def restore(self, checkpoint: Checkpoint) -> None:
        """Come back to the entries at `checkpoint`."""
        # A fork may hold a buffer that this one has moved out of.
        self._is_shared = self._is_shared or checkpoint.extent[0] is not self._buffer
        self._buffer, self._start, self._end = checkpoint.extent
        if self._parked is not None and self._buffer is self._parked[0].tensor:
            # The host waits: its copy goes.
            self._resettle(self._buffer.to(self._parked[1]))
            self._parked = None

    def park(self) -> None:
        """Take the entries off a GPU, to page-locked DRAM, where they wait for `restore`; until then nobody reads them.

        For entries that others have taken the place of, and that a checkpoint may come back to. Those that a fork holds
        too stay, and so do those on a CPU.
        """
        if self._buffer is None or not self._buffer.is_cuda or self._is_shared or not self._checkpoints:
            return
        entries = self.entries
        host = PageLocked(entries.shape, entries.dtype, entries.device)
        host.tensor.copy_(entries, non_blocking=True)
        self._parked = host, entries.device
        self._resettle(host.tensor)

    @property
    def nbytes(self) -> int:
        """Memory of the buffer, bytes."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def _move(self, like: torch.Tensor, room: int) -> None:
        """Move into a new buffer with `room` for more; shape, dtype and device are those of `like` at first."""
        source = like if self._buffer is None else self._buffer
        shape = list(source.shape)
        shape[self.dim] = len(self) + room
        buffer = source.new_empty(shape)
        if self._buffer is not None:
            buffer.narrow(self.dim, 0, len(self)).copy_(self.entries)
            self._have_checkpoints_follow(buffer)
        self._buffer, self._start, self._end, self._is_shared = buffer, 0, len(self), False

    def _resettle(self, buffer: torch.Tensor) -> None:
        """Have the entries, which `buffer` holds and nothing else, there."""
        self._have_checkpoints_follow(buffer)
        self._buffer, self._start, self._end = buffer, 0, len(self)

    def _have_checkpoints_follow(self, buffer: torch.Tensor) -> None:
        """Let those whose entries have all moved to the beginning of `buffer` be found there."""
        for each in self._checkpoints:
            held, start, end = each.extent
            if held is self._buffer and self._start <= start and end <= self._end:
                each.extent = buffer, start - self._start, end - self._start
